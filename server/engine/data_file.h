// Files of heads: opened below a root, read piece by piece.
#ifndef LOGITD_SERVER_ENGINE_DATA_FILE_H_
#define LOGITD_SERVER_ENGINE_DATA_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"

namespace logitd::engine {

// `root`, in all functions: a directory with its links resolved that no path may leave; empty: any
// path is allowed.

// INVALID_ARGUMENT with the path and a text, as absl::StrFormat.
template <typename... Args>
absl::Status FileError(std::string_view path, const absl::FormatSpec<Args...>& format,
                       const Args&... args) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s", path, absl::StrFormat(format, args...)));
}

// PERMISSION_DENIED if the text of `path` leads out of `root`, whether or not there is a file. Its
// links are checked when it is opened.
absl::Status CheckInRoot(const std::string& root, const std::string& path);

// False also where Open says why `path` cannot be opened.
bool IsFolder(const std::string& root, const std::string& path);

// A regular file. Thread-safe.
//
// Not mapped: if another process cuts the file, touching a mapped page ends this process with
// SIGBUS. A failed read only fails that load.
class DataFile {
 public:
  // Links are followed while they stay in `root`. A link that is changed meanwhile does not lead
  // out of it either.
  //
  // NOT_FOUND; PERMISSION_DENIED; INVALID_ARGUMENT: not a regular file, a pointer of Git LFS, or
  // not a path; UNAVAILABLE: any other error.
  static absl::StatusOr<std::shared_ptr<const DataFile>> Open(const std::string& root,
                                                              const std::string& path);
  ~DataFile();
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  const std::string& path() const { return path_; }  // as given to Open
  int64_t bytes() const { return bytes_; }           // when it was opened

  // Reads all of [offset, offset + bytes), or UNAVAILABLE.
  absl::Status Read(int64_t offset, size_t bytes, void* to) const;

 private:
  DataFile(std::string path, int fd, int64_t bytes);

  const std::string path_;
  const int fd_;
  const int64_t bytes_;
};

// The whole file. INVALID_ARGUMENT if it has more than `max_bytes`, else as Open and Read.
absl::StatusOr<std::string> ReadFile(const std::string& root, const std::string& path,
                                     int64_t max_bytes);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_DATA_FILE_H_
