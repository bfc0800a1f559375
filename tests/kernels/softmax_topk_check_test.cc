// What CheckSoftmaxTopK lets through, and what it says about the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/softmax_topk.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {
namespace {

// A request of 4 rows x 50257 f32 with one k and temperature for all, changed by the case.
struct Asked {
  SoftmaxTopKRequest request;
  std::vector<int32_t> k = {10};
  std::vector<float> temperature = {1.0f};
};

struct CheckCase {
  const char* name;
  std::function<void(Asked&)> change;
  std::string want;  // "" = allowed
};

absl::Status Check(const CheckCase& c) {
  Asked asked;
  asked.request = {.dtype = DType::kF32, .rows = 4, .vocab = 50257, .payload_bytes = 4 * 50257 * 4};
  c.change(asked);
  asked.request.k = asked.k;
  asked.request.temperature = asked.temperature;
  return CheckSoftmaxTopK(asked.request);
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(CheckSoftmaxTopKTest, SaysFieldValueAndAllowedRange) {
  const std::vector<CheckCase> cases = {
      {"one_for_all", [](Asked&) {}, ""},
      {"one_per_row",
       [](Asked& a) {
         a.k = {1, 2, 3, 50257};
         a.temperature = {1, 2, 3, 1e-4f};
       },
       ""},
      {"no_temperature_means_one", [](Asked& a) { a.temperature = {}; }, ""},
      {"half_the_bytes_for_f16",
       [](Asked& a) {
         a.request.dtype = DType::kF16;
         a.request.payload_bytes /= 2;
       },
       ""},
      {"largest_vocab",
       [](Asked& a) {
         a.request.vocab = 1 << 20;
         a.request.payload_bytes = int64_t{4} << 22;
       },
       ""},
      {"unknown_dtype", [](Asked& a) { a.request.dtype = static_cast<DType>(7); },
       "dtype: got 7, allowed f32, f16, bf16"},
      {"no_rows", [](Asked& a) { a.request.rows = 0; }, "rows: got 0, allowed 1..45881031681431"},
      {"negative_rows", [](Asked& a) { a.request.rows = -1; },
       "rows: got -1, allowed 1..45881031681431"},
      {"rows_whose_bytes_overflow", [](Asked& a) { a.request.rows = kMost / 2; },
       "rows: got 4611686018427387903, allowed 1..45881031681431"},
      {"no_vocab", [](Asked& a) { a.request.vocab = 0; }, "vocab: got 0, allowed 1..1048576"},
      {"negative_vocab", [](Asked& a) { a.request.vocab = -5; },
       "vocab: got -5, allowed 1..1048576"},
      {"vocab_too_large", [](Asked& a) { a.request.vocab = 1048577; },
       "vocab: got 1048577, allowed 1..1048576"},
      {"one_byte_short", [](Asked& a) { --a.request.payload_bytes; },
       "logits: got 804111 bytes, but rows 4 x vocab 50257 x f32 is 804112 bytes"},
      {"negative_bytes", [](Asked& a) { a.request.payload_bytes = -1; },
       "logits: got -1 bytes, but rows 4 x vocab 50257 x f32 is 804112 bytes"},
      {"bytes_of_another_dtype", [](Asked& a) { a.request.dtype = DType::kBF16; },
       "logits: got 804112 bytes, but rows 4 x vocab 50257 x bf16 is 402056 bytes"},
      {"no_k", [](Asked& a) { a.k = {}; }, "k: got 0 values, allowed 1 or 4 (rows)"},
      {"k_for_some_rows",
       [](Asked& a) {
         a.k = {1, 2, 3};
       },
       "k: got 3 values, allowed 1 or 4 (rows)"},
      {"k_zero", [](Asked& a) { a.k = {0}; }, "k: got 0, allowed 1..50257"},
      {"k_zero_in_a_row",
       [](Asked& a) {
         a.k = {1, 1, 1, 0};
       },
       "k: got 0 at row 3, allowed 1..50257"},
      {"k_negative",
       [](Asked& a) {
         a.k = {1, -2, 1, 1};
       },
       "k: got -2 at row 1, allowed 1..50257"},
      {"k_above_vocab", [](Asked& a) { a.k = {50258}; }, "k: got 50258, allowed 1..50257"},
      {"temperature_for_some_rows",
       [](Asked& a) {
         a.temperature = {1, 1};
       },
       "temperature: got 2 values, allowed 0, 1 or 4 (rows)"},
      {"temperature_zero", [](Asked& a) { a.temperature = {0}; },
       "temperature: got 0, allowed finite and > 0"},
      {"temperature_negative",
       [](Asked& a) {
         a.temperature = {1, 1, -0.5f, 1};
       },
       "temperature: got -0.5 at row 2, allowed finite and > 0"},
      {"temperature_nan", [](Asked& a) { a.temperature = {kNan}; },
       "temperature: got nan, allowed finite and > 0"},
      {"temperature_inf",
       [](Asked& a) {
         a.temperature = {1, kInf, 1, 1};
       },
       "temperature: got inf at row 1, allowed finite and > 0"},
  };
  for (const CheckCase& c : cases) {
    const absl::Status got = Check(c);
    EXPECT_EQ(std::string(got.message()), c.want) << c.name;
    EXPECT_EQ(got.code(),
              c.want.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
        << c.name;
  }
}

TEST(CheckSoftmaxTopKTest, OneRowTakesOneValueWithoutNamingTheRow) {
  const int32_t k = 9;
  SoftmaxTopKRequest request{.rows = 1, .vocab = 8, .payload_bytes = 32, .k = {&k, 1}};
  EXPECT_EQ(CheckSoftmaxTopK(request).message(), "k: got 9, allowed 1..8");
}

}  // namespace
}  // namespace logitd::testing
