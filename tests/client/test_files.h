// Files of the tests, written into a directory that goes away with its owner.
#ifndef LOGITD_TESTS_CLIENT_TEST_FILES_H_
#define LOGITD_TESTS_CLIENT_TEST_FILES_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace logitd::testing {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "logitd-client-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string path(const std::string& name) const { return path_ + "/" + name; }
  std::string Write(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

 private:
  std::string path_;
};

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// `size` little-endian bytes of `value`.
inline std::string LittleEndian(uint64_t value, int size) {
  std::string out;
  for (int i = 0; i < size; ++i) out.push_back(static_cast<char>(value >> 8 * i));
  return out;
}

inline std::string Npy(const std::string& header, const std::string& data, int major = 1) {
  return std::string("\x93NUMPY") + static_cast<char>(major) + '\0' +
         LittleEndian(header.size(), major == 1 ? 2 : 4) + header + data;
}

inline std::string NpyF32(int rows, int cols, const std::vector<float>& values) {
  return Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows) + ", " +
                 std::to_string(cols) + "), }\n",
             BytesOf(values));
}

inline std::string Safetensors(const std::string& header, const std::string& data) {
  return LittleEndian(header.size(), 8) + header + data;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_TEST_FILES_H_
