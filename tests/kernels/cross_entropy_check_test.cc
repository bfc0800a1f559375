// What CheckCrossEntropy, CheckHead and CheckHidden let through, and what they say about the rest.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cross_entropy.h"
#include "kernels/head.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

void ExpectVerdict(const absl::Status& got, const std::string& want, const char* name) {
  EXPECT_EQ(std::string(got.message()), want) << name;
  EXPECT_EQ(got.code(), want.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
      << name;
}

// A request of 2 rows x 100, both with everything off, changed by the case.
struct Asked {
  CrossEntropyRequest request = {.vocab = 100};
  std::vector<CrossEntropyRow> params = {{.active = 1, .temperature = 1},
                                         {.active = 1, .temperature = 1}};
  std::vector<int32_t> extra_ids = {0, 99};
  std::vector<int32_t> support_ids = {7, 99, 0};
};

struct AskedCase {
  const char* name;
  std::function<void(Asked&, CrossEntropyRow&)> change;  // the second row
  std::string want;                                      // "" = allowed
};

void ExpectVerdicts(const std::vector<AskedCase>& cases) {
  for (const AskedCase& c : cases) {
    Asked asked;
    c.change(asked, asked.params[1]);
    asked.request.params = asked.params;
    asked.request.extra_ids = asked.extra_ids;
    asked.request.support_ids = asked.support_ids;
    ExpectVerdict(CheckCrossEntropy(asked.request), c.want, c.name);
  }
}

TEST(CheckCrossEntropyTest, SaysFieldRowValueAndAllowedRange) {
  ExpectVerdicts({
      {"all off", [](Asked&, CrossEntropyRow&) {}, ""},
      {"everything at its border",
       [](Asked&, CrossEntropyRow& row) {
         row.target = 99;
         row.temperature = 1e-45f;
         row.softcap = 3e38f;
         row.label_smoothing = 0.99999994f;
         row.smoothing = Smoothing::kMegatron;
         row.z_loss = 3e38f;
         row.extra_count = 2;
         row.top_logprobs = 100;
         row.want = kWantRank | kWantEntropy;
       },
       ""},
      {"ignored", [](Asked&, CrossEntropyRow& row) { row.target = kIgnoredTarget; }, ""},
      {"an empty slice may start anywhere",
       [](Asked&, CrossEntropyRow& row) { row.first_extra = 999; }, ""},
      {"where answers go is not checked",
       [](Asked&, CrossEntropyRow& row) { row.first_top_entry = row.first_extra_entry = -9; }, ""},
      {"no vocabulary", [](Asked& asked, CrossEntropyRow&) { asked.request.vocab = 0; },
       "vocab: got 0, allowed 1..1048576"},
      {"vocabulary above the most",
       [](Asked& asked, CrossEntropyRow&) { asked.request.vocab = 1048577; },
       "vocab: got 1048577, allowed 1..1048576"},
      {"inactive row", [](Asked&, CrossEntropyRow& row) { row = {}; },
       "active: got 0 at row 1, allowed 1..1"},
      {"target below ignored", [](Asked&, CrossEntropyRow& row) { row.target = -2; },
       "target: got -2 at row 1, allowed 0..99, or -1 for a row not counted"},
      {"target at vocab", [](Asked&, CrossEntropyRow& row) { row.target = 100; },
       "target: got 100 at row 1, allowed 0..99, or -1 for a row not counted"},
      {"temperature zero", [](Asked&, CrossEntropyRow& row) { row.temperature = 0; },
       "temperature: got 0 at row 1, allowed finite and > 0"},
      {"temperature inf", [](Asked&, CrossEntropyRow& row) { row.temperature = kInf; },
       "temperature: got inf at row 1, allowed finite and > 0"},
      {"temperature nan", [](Asked&, CrossEntropyRow& row) { row.temperature = kNan; },
       "temperature: got nan at row 1, allowed finite and > 0"},
      {"softcap negative", [](Asked&, CrossEntropyRow& row) { row.softcap = -30; },
       "softcap: got -30 at row 1, allowed finite and >= 0"},
      {"softcap inf", [](Asked&, CrossEntropyRow& row) { row.softcap = kInf; },
       "softcap: got inf at row 1, allowed finite and >= 0"},
      {"smoothing negative", [](Asked&, CrossEntropyRow& row) { row.label_smoothing = -0.1f; },
       "label_smoothing: got -0.1 at row 1, allowed >= 0 and < 1"},
      {"smoothing one", [](Asked&, CrossEntropyRow& row) { row.label_smoothing = 1; },
       "label_smoothing: got 1 at row 1, allowed >= 0 and < 1"},
      {"smoothing nan", [](Asked&, CrossEntropyRow& row) { row.label_smoothing = kNan; },
       "label_smoothing: got nan at row 1, allowed >= 0 and < 1"},
      {"smoothing of an unknown kind",
       [](Asked&, CrossEntropyRow& row) { row.smoothing = static_cast<Smoothing>(2); },
       "smoothing: got 2 at row 1, allowed torch, megatron"},
      {"z_loss negative", [](Asked&, CrossEntropyRow& row) { row.z_loss = -1; },
       "z_loss: got -1 at row 1, allowed finite and >= 0"},
      {"z_loss of NaN", [](Asked&, CrossEntropyRow& row) { row.z_loss = kNan; },
       "z_loss: got nan at row 1, allowed finite and >= 0"},
      {"want unknown", [](Asked&, CrossEntropyRow& row) { row.want = 4; },
       "want: got 4 at row 1, allowed 0..3"},
      {"top_logprobs above vocab", [](Asked&, CrossEntropyRow& row) { row.top_logprobs = 101; },
       "top_logprobs: got 101 at row 1, allowed 0..100"},
      {"top_logprobs above its limit",
       [](Asked& asked, CrossEntropyRow& row) {
         asked.request.vocab = 200;
         row.top_logprobs = 129;
       },
       "top_logprobs: got 129 at row 1, allowed 0..128"},
      {"too many extra", [](Asked&, CrossEntropyRow& row) { row.extra_count = 1025; },
       "extra_ids count: got 1025 at row 1, allowed 0..1024"},
      {"extra beyond what was sent",
       [](Asked&, CrossEntropyRow& row) {
         row.first_extra = 1;
         row.extra_count = 2;
       },
       "extra_ids: got entries [1, 1 + 2) at row 1, allowed inside the 2 sent"},
      {"extra at an offset that overflows",
       [](Asked&, CrossEntropyRow& row) {
         row.first_extra = kMost;
         row.extra_count = 1;
       },
       "extra_ids: got entries [9223372036854775807, 9223372036854775807 + 1) at row 1, allowed "
       "inside the 2 sent"},
      {"extra outside the vocabulary",
       [](Asked& asked, CrossEntropyRow& row) {
         asked.extra_ids[1] = 100;
         row.extra_count = 2;
       },
       "extra_ids: got token 100 at row 1, entry 1, allowed 0..99"},
  });
}

TEST(CheckCrossEntropyTest, SaysWhatIsWrongWithASupport) {
  ExpectVerdicts({
      {"a support with all that it allows",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.target = 99;
         row.temperature = 2;
         row.softcap = 30;
         row.want = kWantEntropy;
       },
       ""},
      {"a support of an ignored row",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 1;
         row.target = kIgnoredTarget;
       },
       ""},
      {"a support without the target",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.target = 8;
       },
       "target: got 8 at row 1, allowed one of its 3 support_ids"},
      {"a support with a token twice",
       [](Asked& asked, CrossEntropyRow& row) {
         asked.support_ids = {0, 7, 0};
         row.support_count = 3;
       },
       "support_ids: got token 0 twice at row 1, allowed each once"},
      {"a support outside the vocabulary",
       [](Asked& asked, CrossEntropyRow& row) {
         asked.support_ids[1] = 100;
         row.support_count = 3;
       },
       "support_ids: got token 100 at row 1, entry 1, allowed 0..99"},
      {"a support beyond what was sent",
       [](Asked&, CrossEntropyRow& row) {
         row.first_support = 1;
         row.support_count = 3;
       },
       "support_ids: got entries [1, 1 + 3) at row 1, allowed inside the 3 sent"},
      {"a support above its limit",
       [](Asked& asked, CrossEntropyRow& row) {
         asked.request.vocab = 5000;
         row.support_count = 1025;
       },
       "support_ids count: got 1025 at row 1, allowed 0..1024"},
      {"a support with label smoothing",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.label_smoothing = 0.5f;
       },
       "support_ids: got some at row 1, allowed none with label_smoothing, which is 0.5"},
      {"a support with z-loss",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.z_loss = 0.25f;
       },
       "support_ids: got some at row 1, allowed none with z_loss, which is 0.25"},
      {"a support with a rank",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.want = kWantRank;
       },
       "support_ids: got some at row 1, allowed none with want_rank, which is 1"},
      {"a support with top tokens",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.top_logprobs = 2;
       },
       "support_ids: got some at row 1, allowed none with top_logprobs, which is 2"},
      {"a support with extra ids",
       [](Asked&, CrossEntropyRow& row) {
         row.support_count = 3;
         row.extra_count = 2;
       },
       "support_ids: got some at row 1, allowed none with extra_ids, of which there are 2"},
  });
}

HeadView Head() { return {.weight = {.dtype = DType::kBF16, .rows = 100, .cols = 64}}; }

TEST(CheckHeadTest, SaysFieldValueAndAllowedRange) {
  struct Case {
    const char* name;
    std::function<void(HeadView&)> change;
    std::string want;  // "" = allowed
  };
  const std::vector<Case> cases = {
      {"plain", [](HeadView&) {}, ""},
      {"everything at its border",
       [](HeadView& head) {
         head.weight.rows = kMaxVocab;
         head.weight.cols = kMaxHidden;
         head.scale = -3e38f;
         head.softcap = 3e38f;
         head.norm_epsilon = 0;
       },
       ""},
      {"unknown dtype", [](HeadView& head) { head.weight.dtype = static_cast<DType>(3); },
       "weight dtype: got 3, allowed f32, f16, bf16"},
      {"no vocabulary", [](HeadView& head) { head.weight.rows = 0; },
       "vocab: got 0, allowed 1..1048576"},
      {"no hidden", [](HeadView& head) { head.weight.cols = 0; },
       "hidden: got 0, allowed 1..65536"},
      {"hidden above the most", [](HeadView& head) { head.weight.cols = 65537; },
       "hidden: got 65537, allowed 1..65536"},
      {"scale inf", [](HeadView& head) { head.scale = kInf; }, "scale: got inf, allowed finite"},
      {"scale nan", [](HeadView& head) { head.scale = kNan; }, "scale: got nan, allowed finite"},
      {"softcap negative", [](HeadView& head) { head.softcap = -1; },
       "softcap: got -1, allowed finite and >= 0"},
      {"softcap nan", [](HeadView& head) { head.softcap = kNan; },
       "softcap: got nan, allowed finite and >= 0"},
      {"norm epsilon negative", [](HeadView& head) { head.norm_epsilon = -1e-6f; },
       "norm_epsilon: got -1e-06, allowed finite and >= 0"},
      {"norm epsilon inf", [](HeadView& head) { head.norm_epsilon = kInf; },
       "norm_epsilon: got inf, allowed finite and >= 0"},
  };
  for (const Case& c : cases) {
    HeadView head = Head();
    c.change(head);
    ExpectVerdict(CheckHead(head), c.want, c.name);
  }
}

TEST(CheckHiddenTest, SaysWhatDoesNotFitTheHead) {
  struct Case {
    const char* name;
    HiddenShape shape;
    std::string want;  // "" = allowed
  };
  const std::vector<Case> cases = {
      {"fits", {DType::kBF16, 3, 64, 384}, ""},
      {"unknown dtype",
       {static_cast<DType>(7), 3, 64, 384},
       "dtype: got 7, allowed f32, f16, bf16"},
      {"other dtype", {DType::kF16, 3, 64, 384}, "dtype: got f16, allowed bf16 (the head's)"},
      {"other length", {DType::kBF16, 3, 63, 378}, "hidden: got 63, allowed 64 (the head's)"},
      {"no rows", {DType::kBF16, 0, 64, 0}, "rows: got 0, allowed 1..72057594037927935"},
      {"rows that overflow",
       {DType::kBF16, kMost, 64, -128},
       "rows: got 9223372036854775807, allowed 1..72057594037927935"},
      {"other bytes",
       {DType::kBF16, 3, 64, 383},
       "hidden states: got 383 bytes, but rows 3 x hidden 64 x bf16 is 384 bytes"},
  };
  for (const Case& c : cases) ExpectVerdict(CheckHidden(c.shape, Head()), c.want, c.name);
}

}  // namespace
}  // namespace logitd::testing
