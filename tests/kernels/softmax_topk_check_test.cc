// What CheckLogits and CheckSoftmaxTopK let through, and what they say about the rest.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/checks.h"
#include "kernels/softmax_topk.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {
namespace {

void ExpectVerdict(const absl::Status& got, const std::string& want, const char* name) {
  EXPECT_EQ(std::string(got.message()), want) << name;
  EXPECT_EQ(got.code(), want.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
      << name;
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(CheckLogitsTest, SaysFieldValueAndAllowedRange) {
  struct Case {
    const char* name;
    std::function<void(LogitsShape&)> change;  // of 4 rows x 50257 f32
    std::string want;                          // "" = allowed
  };
  const std::vector<Case> cases = {
      {"as it is", [](LogitsShape&) {}, ""},
      {"half the bytes for f16",
       [](LogitsShape& s) {
         s.dtype = DType::kF16;
         s.payload_bytes /= 2;
       },
       ""},
      {"largest vocab",
       [](LogitsShape& s) {
         s.vocab = 1 << 20;
         s.payload_bytes = int64_t{4} << 22;
       },
       ""},
      {"unknown dtype", [](LogitsShape& s) { s.dtype = static_cast<DType>(7); },
       "dtype: got 7, allowed f32, f16, bf16"},
      {"no rows", [](LogitsShape& s) { s.rows = 0; }, "rows: got 0, allowed 1..45881031681431"},
      {"negative rows", [](LogitsShape& s) { s.rows = -1; },
       "rows: got -1, allowed 1..45881031681431"},
      {"rows whose bytes overflow", [](LogitsShape& s) { s.rows = kMost / 2; },
       "rows: got 4611686018427387903, allowed 1..45881031681431"},
      {"no vocab", [](LogitsShape& s) { s.vocab = 0; }, "vocab: got 0, allowed 1..1048576"},
      {"negative vocab", [](LogitsShape& s) { s.vocab = -5; }, "vocab: got -5, allowed 1..1048576"},
      {"vocab too large", [](LogitsShape& s) { s.vocab = 1048577; },
       "vocab: got 1048577, allowed 1..1048576"},
      {"one byte short", [](LogitsShape& s) { --s.payload_bytes; },
       "logits: got 804111 bytes, but rows 4 x vocab 50257 x f32 is 804112 bytes"},
      {"negative bytes", [](LogitsShape& s) { s.payload_bytes = -1; },
       "logits: got -1 bytes, but rows 4 x vocab 50257 x f32 is 804112 bytes"},
      {"bytes of another dtype", [](LogitsShape& s) { s.dtype = DType::kBF16; },
       "logits: got 804112 bytes, but rows 4 x vocab 50257 x bf16 is 402056 bytes"},
  };
  for (const Case& c : cases) {
    LogitsShape shape = {
        .dtype = DType::kF32, .rows = 4, .vocab = 50257, .payload_bytes = 4 * 50257 * 4};
    c.change(shape);
    ExpectVerdict(CheckLogits(shape), c.want, c.name);
  }
}

TEST(CheckSoftmaxTopKTest, SaysFieldRowValueAndAllowedRange) {
  struct Case {
    const char* name;
    SoftmaxTopKRow row;  // the last of 4
    std::string want;    // "" = allowed
  };
  const Case cases[] = {
      {"smallest", {.temperature = 1e-4f, .k = 1}, ""},
      {"largest", {.temperature = 3e38f, .k = 50257}, ""},
      {"k zero", {.temperature = 1, .k = 0}, "k: got 0 at row 3, allowed 1..50257"},
      {"k negative", {.temperature = 1, .k = -2}, "k: got -2 at row 3, allowed 1..50257"},
      {"k above vocab", {.temperature = 1, .k = 50258}, "k: got 50258 at row 3, allowed 1..50257"},
      {"temperature zero",
       {.temperature = 0, .k = 1},
       "temperature: got 0 at row 3, allowed finite and > 0"},
      {"temperature negative",
       {.temperature = -0.5f, .k = 1},
       "temperature: got -0.5 at row 3, allowed finite and > 0"},
      {"temperature nan",
       {.temperature = kNan, .k = 1},
       "temperature: got nan at row 3, allowed finite and > 0"},
      {"temperature inf",
       {.temperature = kInf, .k = 1},
       "temperature: got inf at row 3, allowed finite and > 0"},
  };
  for (const Case& c : cases) {
    std::vector<SoftmaxTopKRow> rows(4, {.temperature = 1, .k = 10});
    rows.back() = c.row;
    ExpectVerdict(CheckSoftmaxTopK({.vocab = 50257, .params = rows}), c.want, c.name);
  }
  const SoftmaxTopKRow row = {.temperature = 1, .k = 1};
  ExpectVerdict(CheckSoftmaxTopK({.vocab = 0, .params = {&row, 1}}),
                "vocab: got 0, allowed 1..1048576", "no_vocabulary");
}

}  // namespace
}  // namespace logitd::testing
