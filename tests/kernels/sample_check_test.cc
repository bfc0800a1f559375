// What CheckSample lets through, and what it says about the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/sample.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_cases.h"

namespace logitd::testing {
namespace {

constexpr int32_t kMost = std::numeric_limits<int32_t>::max();

// A request of 2 rows x 100, both with everything off, changed by the case.
struct Asked {
  SampleRequest request;
  std::vector<SampleRow> params;
  std::vector<int32_t> history = {1, 99, 1};
  std::vector<SampleBias> bias = {{7, 1.0f}, {3, -kInf}};
  std::vector<int32_t> extra_ids = {0, 99};
  std::vector<uint32_t> mask_words = {1, 2, 3, 4};
};

SampleRow Plain() {
  SampleRow row{};
  row.first_mask_word = -1;
  row.active = 1;
  row.temperature = 1;
  row.top_p = 1;
  row.typical_p = 1;
  row.repetition = 1;
  return row;
}

struct CheckCase {
  const char* name;
  std::function<void(Asked&, SampleRow&)> change;  // the second row
  std::string want;                                // "" = allowed
};

absl::Status Check(const CheckCase& c) {
  Asked asked;
  asked.request = {.vocab = 100};
  asked.params = {Plain(), Plain()};
  c.change(asked, asked.params[1]);
  asked.request.params = asked.params;
  asked.request.history = asked.history;
  asked.request.bias = asked.bias;
  asked.request.extra_ids = asked.extra_ids;
  asked.request.mask_words = asked.mask_words;
  return CheckSample(asked.request);
}

const CheckCase kCases[] = {
    {"all off", [](Asked&, SampleRow&) {}, ""},
    {"everything at its border",
     [](Asked&, SampleRow& row) {
       row.temperature = 0;
       row.top_k = 100;
       row.top_p = 1e-45f;
       row.min_p = 1;
       row.repetition = 1e-38f;
       row.presence = -2;
       row.frequency = 2;
       row.history_count = 3;
       row.bias_count = 2;
       row.extra_count = 2;
       row.first_mask_word = 0;
       row.top_logprobs = 100;
       row.logprob_mode = LogprobMode::kProcessed;
     },
     ""},
    {"seed and position take every value",
     [](Asked&, SampleRow& row) { row.seed = row.position = ~uint64_t{0}; }, ""},
    {"an empty slice may start anywhere",
     [](Asked&, SampleRow& row) { row.first_history = row.first_bias = row.first_extra = 999; },
     ""},
    {"no vocabulary", [](Asked& asked, SampleRow&) { asked.request.vocab = 0; },
     "vocab: got 0, allowed 1..1048576"},
    {"inactive row", [](Asked&, SampleRow& row) { row = {}; },
     "active: got 0 at row 1, allowed 1..1"},
    {"temperature negative", [](Asked&, SampleRow& row) { row.temperature = -1; },
     "temperature: got -1 at row 1, allowed finite and >= 0"},
    {"temperature inf", [](Asked&, SampleRow& row) { row.temperature = kInf; },
     "temperature: got inf at row 1, allowed finite and >= 0"},
    {"temperature nan", [](Asked&, SampleRow& row) { row.temperature = kNan; },
     "temperature: got nan at row 1, allowed finite and >= 0"},
    {"top_k of -1 is off", [](Asked&, SampleRow& row) { row.top_k = -1; }, ""},
    {"top_k above vocab is off", [](Asked&, SampleRow& row) { row.top_k = 101; }, ""},
    {"top_k of the largest number is off", [](Asked&, SampleRow& row) { row.top_k = kMost; }, ""},
    {"top_k below -1", [](Asked&, SampleRow& row) { row.top_k = -2; },
     "top_k: got -2 at row 1, allowed -1 or more"},
    {"top_k of the least number", [](Asked&, SampleRow& row) { row.top_k = -kMost - 1; },
     "top_k: got -2147483648 at row 1, allowed -1 or more"},
    {"top_p of zero", [](Asked&, SampleRow& row) { row.top_p = 0; },
     "top_p: got 0 at row 1, allowed > 0 and <= 1"},
    {"typical_p of zero", [](Asked&, SampleRow& row) { row.typical_p = 0; },
     "typical_p: got 0 at row 1, allowed > 0 and <= 1"},
    {"typical_p above one", [](Asked&, SampleRow& row) { row.typical_p = 1.5f; },
     "typical_p: got 1.5 at row 1, allowed > 0 and <= 1"},
    {"xtc_threshold below zero", [](Asked&, SampleRow& row) { row.xtc_threshold = -0.1f; },
     "xtc_threshold: got -0.1 at row 1, allowed >= 0 and <= 1"},
    {"xtc_probability above one", [](Asked&, SampleRow& row) { row.xtc_probability = 2; },
     "xtc_probability: got 2 at row 1, allowed >= 0 and <= 1"},
    {"top_p above one", [](Asked&, SampleRow& row) { row.top_p = 1.5f; },
     "top_p: got 1.5 at row 1, allowed > 0 and <= 1"},
    {"top_p of NaN", [](Asked&, SampleRow& row) { row.top_p = kNan; },
     "top_p: got nan at row 1, allowed > 0 and <= 1"},
    {"min_p negative", [](Asked&, SampleRow& row) { row.min_p = -0.1f; },
     "min_p: got -0.1 at row 1, allowed >= 0 and <= 1"},
    {"min_p above one", [](Asked&, SampleRow& row) { row.min_p = 1.1f; },
     "min_p: got 1.1 at row 1, allowed >= 0 and <= 1"},
    {"repetition zero", [](Asked&, SampleRow& row) { row.repetition = 0; },
     "repetition_penalty: got 0 at row 1, allowed finite and > 0"},
    {"repetition inf", [](Asked&, SampleRow& row) { row.repetition = kInf; },
     "repetition_penalty: got inf at row 1, allowed finite and > 0"},
    {"presence nan", [](Asked&, SampleRow& row) { row.presence = kNan; },
     "presence_penalty: got nan at row 1, allowed finite"},
    {"frequency inf", [](Asked&, SampleRow& row) { row.frequency = -kInf; },
     "frequency_penalty: got -inf at row 1, allowed finite"},
    {"top_logprobs above vocab", [](Asked&, SampleRow& row) { row.top_logprobs = 101; },
     "top_logprobs: got 101 at row 1, allowed 0..100"},
    {"top_logprobs above its limit",
     [](Asked& asked, SampleRow& row) {
       asked.request.vocab = 2000;
       row.top_logprobs = 1025;
     },
     "top_logprobs: got 1025 at row 1, allowed 0..1024"},
    {"draws beyond the vocabulary", [](Asked&, SampleRow& row) { row.draws = 1024; }, ""},
    {"draws above their limit", [](Asked&, SampleRow& row) { row.draws = 1025; },
     "draws: got 1025 at row 1, allowed 0..1024"},
    {"draws of less than nothing", [](Asked&, SampleRow& row) { row.draws = -1; },
     "draws: got -1 at row 1, allowed 0..1024"},
    {"one draw with a watermark",
     [](Asked&, SampleRow& row) { row.draws = 1, row.watermark_width = 16; }, ""},
    {"draws with a watermark",
     [](Asked&, SampleRow& row) { row.draws = 2, row.watermark_width = 4; },
     "draws: got 2 at row 1, allowed 0..1 with a watermark: all would be the same token"},
    {"a watermark of more tokens than allowed",
     [](Asked&, SampleRow& row) { row.watermark_width = 17; },
     "watermark_width: got 17 at row 1, allowed 0..16"},
    {"every key of a watermark",
     [](Asked&, SampleRow& row) { row.watermark_key = ~uint64_t{0}, row.watermark_width = 1; }, ""},
    {"tempered mode", [](Asked&, SampleRow& row) { row.logprob_mode = LogprobMode::kTempered; },
     ""},
    {"unknown mode", [](Asked&, SampleRow& row) { row.logprob_mode = static_cast<LogprobMode>(3); },
     "logprob_mode: got 3 at row 1, allowed raw, processed, tempered"},
    {"history longer than sent", [](Asked&, SampleRow& row) { row.history_count = 4; },
     "history: got entries [0, 0 + 4) at row 1, allowed inside the 3 sent"},
    {"history before what was sent",
     [](Asked&, SampleRow& row) {
       row.first_history = -1;
       row.history_count = 1;
     },
     "history: got entries [-1, -1 + 1) at row 1, allowed inside the 3 sent"},
    {"offset that overflows",
     [](Asked&, SampleRow& row) {
       row.first_history = std::numeric_limits<int64_t>::max();
       row.history_count = 1;
     },
     "history: got entries [9223372036854775807, 9223372036854775807 + 1) at row 1, allowed "
     "inside the 3 sent"},
    {"history negative", [](Asked&, SampleRow& row) { row.history_count = -1; },
     "history count: got -1 at row 1, allowed 0..1048576"},
    {"history outside the vocabulary",
     [](Asked& asked, SampleRow& row) {
       asked.history[2] = 100;
       row.history_count = 3;
     },
     "history: got token 100 at row 1, entry 2, allowed 0..99"},
    {"a prompt of all of the history",
     [](Asked&, SampleRow& row) { row.history_count = row.prompt_tokens = 3; }, ""},
    {"a prompt longer than the history",
     [](Asked&, SampleRow& row) {
       row.history_count = 2;
       row.prompt_tokens = 3;
     },
     "prompt_tokens: got 3 at row 1, allowed 0..2"},
    {"a prompt without a history", [](Asked&, SampleRow& row) { row.prompt_tokens = 1; },
     "prompt_tokens: got 1 at row 1, allowed 0..0"},
    {"a prompt of less than nothing", [](Asked&, SampleRow& row) { row.prompt_tokens = -1; },
     "prompt_tokens: got -1 at row 1, allowed 0..1048576"},
    {"bias nan",
     [](Asked& asked, SampleRow& row) {
       asked.bias[1].value = kNan;
       row.bias_count = 2;
     },
     "logit_bias: got nan at row 1, allowed numbers and infinities"},
    {"bias outside the vocabulary",
     [](Asked& asked, SampleRow& row) {
       asked.bias[0].id = -1;
       row.bias_count = 2;
     },
     "logit_bias: got token -1 at row 1, entry 0, allowed 0..99"},
    {"bias twice",
     [](Asked& asked, SampleRow& row) {
       asked.bias = {{7, 1}, {3, 1}, {7, 2}};
       row.bias_count = 3;
     },
     "logit_bias: got token 7 twice at row 1, allowed one bias for a token"},
    {"extra outside the vocabulary",
     [](Asked& asked, SampleRow& row) {
       asked.extra_ids[1] = 100;
       row.extra_count = 2;
     },
     "extra_ids: got token 100 at row 1, entry 1, allowed 0..99"},
    {"too many extra", [](Asked&, SampleRow& row) { row.extra_count = 1025; },
     "extra_ids count: got 1025 at row 1, allowed 0..1024"},
    {"mask too short", [](Asked&, SampleRow& row) { row.first_mask_word = 1; },
     "allowed_tokens: got entries [1, 1 + 4) at row 1, allowed inside the 4 sent"},
    {"mask before what was sent", [](Asked&, SampleRow& row) { row.first_mask_word = -2; },
     "allowed_tokens: got entries [-2, -2 + 4) at row 1, allowed inside the 4 sent"},
};

TEST(CheckSampleTest, SaysFieldRowValueAndAllowedRange) {
  for (const CheckCase& c : kCases) {
    const absl::Status got = Check(c);
    EXPECT_EQ(std::string(got.message()), c.want) << c.name;
    EXPECT_EQ(got.code(),
              c.want.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
        << c.name;
  }
}

// The values that are no number, infinite, or next to an end of the range on its wrong side.
TEST(CheckSampleTest, EveryFractionIsRefusedOutsideItsRange) {
  for (const RowParam<SampleRow>& param : kSampleParams) {
    const auto* const member = std::get_if<float SampleRow::*>(&param.member);
    if (member == nullptr) continue;
    const auto low = static_cast<float>(param.allowed.low);
    const auto high = static_cast<float>(param.allowed.high);
    const float below = param.allowed.above_low ? low : std::nextafter(low, -kInf);
    const float above = param.allowed.below_high ? high : std::nextafter(high, kInf);
    for (const float value : {kNan, kInf, -kInf, below, above}) {
      SampleRow row = PlainRow();
      row.*(*member) = value;
      const absl::Status got = CheckSample({.vocab = 100, .params = {&row, 1}});
      EXPECT_EQ(got.code(), absl::StatusCode::kInvalidArgument) << param.name << " " << value;
      const std::string begin = absl::StrFormat("%s: got ", param.name);
      const std::string text(got.message());
      ASSERT_THAT(text, ::testing::AllOf(::testing::StartsWith(begin),
                                         ::testing::HasSubstr(" at row 0, allowed ")));
      char* end = nullptr;
      const float shown = std::strtof(text.c_str() + begin.size(), &end);
      EXPECT_TRUE(shown == value || (std::isnan(shown) && std::isnan(value))) << text;
      EXPECT_THAT(end, ::testing::StartsWith(" at row 0"));
    }
    EXPECT_FALSE(std::isfinite(param.default_value) &&
                 (param.default_value < low || param.default_value > high))
        << param.name;
  }
}

}  // namespace
}  // namespace logitd::testing
