// Heads whose weights are known, written by write_heads.py, and a device for them.
#ifndef LOGITD_TESTS_ENGINE_HEADS_FIXTURE_H_
#define LOGITD_TESTS_ENGINE_HEADS_FIXTURE_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "spdlog/spdlog.h"
#include "tests/fake_backend.h"
#include "tests/tree.h"

namespace logitd::engine {

inline float Pattern(int64_t row, int64_t column) {
  return static_cast<float>((row * 31 + column * 7) % 64 - 32) / 8;
}

// Encodes values that are exact in all three types: f32, its upper half (bf16), and f16 from sign,
// exponent and the upper ten bits of the mantissa.
inline std::string Encoded(DType dtype, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (dtype == DType::kF32) return std::string(reinterpret_cast<const char*>(&bits), 4);
  uint32_t half = bits >> 16;
  if (dtype == DType::kF16) {
    half = bits >> 16 & 0x8000;
    if (value != 0) half |= ((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff);
  }
  return std::string(reinterpret_cast<const char*>(&half), 2);
}

inline bool Always(const HeadProgress&) { return true; }

class HeadsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (std::system("python3 -c '' 2>/dev/null") != 0) return;
    std::string name = (std::filesystem::temp_directory_path() / "logitd-heads-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    files_ = name;
    const std::string command =
        absl::StrFormat("python3 '%s' '%s'",
                        logitd::testing::InTree("tests/engine/write_heads.py").string(), files_);
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(files_); }
  // Only the test of the log logs: the lines that heads may write in a second would not do for all.
  void SetUp() override {
    spdlog::set_level(spdlog::level::off);
    if (files_.empty()) GTEST_SKIP() << "no python3, which writes the files";
  }
  void TearDown() override {
    spdlog::set_level(spdlog::level::info);
    EXPECT_EQ(backend_.live_slabs(), 0);
  }

  HeadRequest Request(const std::string& path, bool norm = false, int64_t vocab = 0) {
    return {
        .name = "h", .path = absl::StrCat(files_, "/", path), .final_norm = norm, .vocab = vocab};
  }
  HeadRequest Named(const std::string& name, const std::string& path, bool norm = false) {
    return {.name = name, .path = absl::StrCat(files_, "/", path), .final_norm = norm};
  }
  absl::StatusOr<std::shared_ptr<const Head>> Load(const HeadRequest& request) {
    return heads_.Load(request, Always);
  }

  // The code and the text of a load's error.
  std::string ErrorOf(const HeadRequest& request) { return Load(request).status().ToString(); }

  // The first wrong number of a head; "" if all are right.
  static std::string Wrong(const HeadView& view) {
    const auto* data = static_cast<const char*>(view.weight.data);
    const size_t element = SizeOf(view.weight.dtype);
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || view.weight.row_stride * element % 16 != 0) {
      return "rows are not aligned";
    }
    for (int64_t r = 0; r < view.vocab(); ++r) {
      for (int64_t c = 0; c < view.hidden(); ++c) {
        const char* at = data + (r * view.weight.row_stride + c) * element;
        if (std::string(at, element) != Encoded(view.weight.dtype, Pattern(r, c))) {
          return absl::StrFormat("row %d, column %d", r, c);
        }
      }
      for (size_t at = view.hidden() * element; at < view.weight.row_stride * element; ++at) {
        if (data[r * view.weight.row_stride * element + at] != 0) {
          return absl::StrFormat("row %d, byte %d after its end", r, at);
        }
      }
    }
    return "";
  }

  static inline std::string files_;
  FakeBackend backend_;
  Metrics metrics_;
  Heads heads_{&backend_, &metrics_};
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_HEADS_FIXTURE_H_
