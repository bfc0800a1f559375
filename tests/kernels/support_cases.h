// cross_entropy and linear_cross_entropy of rows with supports, on every backend: answers by hand,
// parity with double precision, and the bits of sample's log-probabilities.
#ifndef LOGITD_TESTS_KERNELS_SUPPORT_CASES_H_
#define LOGITD_TESTS_KERNELS_SUPPORT_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_cases.h"

namespace logitd::testing {

// ---- Answers by hand

struct SupportClaim {
  const char* name;
  std::vector<int32_t> support;
  LossClaim loss;  // its extra ids and top tokens are none
};

inline const std::vector<SupportClaim>& SupportClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static constexpr LossAsk kPlain = {.want = kWantEntropy};
  static const auto& claims = *new std::vector<SupportClaim>{
      // clang-format off
      {"a support of all tokens has the loss of the row", {1, 0},
       {.logits = {0, ln3}, .ask = {.target = 1, .want = kWantEntropy}, .loss = ln4 - ln3,
        .logsumexp = ln4, .target_logprob = ln3 - ln4, .entropy = 0.56233514f}},
      {"tokens outside the support do not count", {2, 1},
       {.logits = {5, 0, 0}, .ask = {.target = 2, .want = kWantEntropy}, .loss = ln2,
        .logsumexp = ln2, .target_logprob = -ln2, .entropy = ln2}},
      {"NaN and plus inf outside the support do not count", {1, 3},
       {.logits = {kNan, 0, kInf, 0}, .ask = {.target = 1, .want = kWantEntropy}, .loss = ln2,
        .logsumexp = ln2, .target_logprob = -ln2, .entropy = ln2}},
      {"the status names the lowest NaN of the support", {4, 0, 2},
       {.logits = {0, kNan, kNan, 0, kNan}, .ask = kPlain, .loss = kNan, .logsumexp = kNan,
        .target_logprob = kNan, .entropy = kNan, .status = {RowCode::kNanLogit, 2}}},
      {"one token is certain", {1},
       {.logits = {9, 3}, .ask = {.target = 1, .want = kWantEntropy}, .loss = 0, .logsumexp = 3,
        .target_logprob = 0, .entropy = 0}},
      {"several plus inf share the probability", {0, 1, 2},
       {.logits = {kInf, 5, kInf}, .ask = kPlain, .loss = ln2, .logsumexp = kInf,
        .target_logprob = -ln2, .entropy = ln2}},
      {"beside plus inf a target has probability 0", {0, 1},
       {.logits = {5, kInf}, .ask = kPlain, .loss = kInf, .logsumexp = kInf,
        .target_logprob = -kInf, .entropy = 0}},
      {"minus inf has probability 0", {0, 1},
       {.logits = {-kInf, 0}, .ask = kPlain, .loss = kInf, .logsumexp = 0, .target_logprob = -kInf,
        .entropy = 0}},
      {"a support of minus inf is empty", {0, 1},
       {.logits = {-kInf, -kInf, 3}, .ask = kPlain, .loss = kNan, .logsumexp = -kInf,
        .target_logprob = -kInf, .entropy = kNan, .status = {RowCode::kEmptySupport, -1}}},
      {"the temperature divides", {0, 1},
       {.logits = {0, 2 * ln3, 9}, .ask = {.temperature = 2, .want = kWantEntropy}, .loss = ln4,
        .logsumexp = ln4, .target_logprob = -ln4, .entropy = 0.56233514f}},
      // x = {0, 1}
      {"the softcap comes first", {0, 1},
       {.logits = {0, 1.0986123f, 7}, .ask = {.softcap = 2, .want = kWantEntropy},
        .loss = 1.31326169f, .logsumexp = 1.31326169f, .target_logprob = -1.31326169f,
        .entropy = 0.58220314f}},
      {"an ignored row has no loss", {0, 1},
       {.logits = {0, ln3, 7}, .ask = {.target = kIgnoredTarget, .want = kWantEntropy}, .loss = 0,
        .logsumexp = ln4, .target_logprob = 0, .entropy = 0.56233514f}},
      {"an entropy that is not wanted is 0", {0, 1},
       {.logits = {0, 0}, .ask = {.want = 0}, .loss = ln2, .logsumexp = ln2,
        .target_logprob = -ln2, .entropy = 0}},
      {"logits far apart do not make NaN", {0, 1},
       {.logits = {-3e38f, 3e38f}, .ask = {.target = 1, .want = kWantEntropy}, .loss = 0,
        .logsumexp = 3e38f, .target_logprob = 0, .entropy = 0}},
      // clang-format on
  };
  return claims;
}

inline std::string BrokenSupportClaim(OpRunner& runner, const SupportClaim& claim) {
  LossBatch batch = {.rows = {claim.loss.ask.Row()}, .support_ids = claim.support};
  batch.rows[0].support_count = static_cast<int32_t>(claim.support.size());
  for (const bool all : {false, true}) {
    batch.says_all_wanted = all;
    auto got = runner.CrossEntropy(TensorOf(DType::kF32, 1, claim.loss.logits), batch);
    if (!got.ok()) return got.status().ToString();
    if (!all) {  // the arrays that no row wants are not written
      got->rank[0] = 0;
      if (claim.loss.ask.want == 0) got->entropy[0] = 0;
    }
    const std::string difference = DescribeDifference(claim.loss, *got);
    if (!difference.empty()) return difference;
  }
  return "";
}

// ---- Parity with double precision

// "" where a row of random ids, temperature and softcap has the answers of a softmax over the ids.
inline std::string FirstSupportDifference(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  std::mt19937_64 random(c.seed);
  LossBatch batch;
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed);
    static constexpr float kTemperatures[] = {1, 0.5f, 3, 1e-3f};
    CrossEntropyRow row = PlainLoss(kIgnoredTarget);
    row.temperature = kTemperatures[random() % 4];
    row.softcap = random() % 3 == 0 ? 20.0f : 0.0f;
    row.want = kWantEntropy;
    std::set<int32_t> ids;
    const int64_t most = std::min<int64_t>(c.vocab, random() % 2 == 0 ? kMaxSupport : 40);
    const auto size = random() % static_cast<uint64_t>(most) + 1;
    while (ids.size() < size) ids.insert(static_cast<int32_t>(random() % c.vocab));
    row.first_support = static_cast<int64_t>(batch.support_ids.size());
    row.support_count = static_cast<int32_t>(size);
    batch.support_ids.insert(batch.support_ids.end(), ids.begin(), ids.end());
    std::shuffle(batch.support_ids.begin() + row.first_support, batch.support_ids.end(), random);
    row.target = batch.support_ids[row.first_support + random() % size];
    batch.rows.push_back(row);
  }
  const auto got = runner.CrossEntropy(tensor, batch);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& row = batch.rows[r];
    const auto x_of = [&](int32_t id) {
      const double x = tensor.At(r, id);
      return row.softcap > 0 ? row.softcap * std::tanh(x / row.softcap) : x;
    };
    const absl::Span<const int32_t> ids(batch.support_ids.data() + row.first_support,
                                        row.support_count);
    double max = -kInf, sum = 0, moment = 0;
    for (int32_t id : ids) max = std::max(max, x_of(id));
    for (int32_t id : ids) {
      const double below = (max - x_of(id)) / row.temperature;
      sum += std::exp(-below);
      moment += std::exp(-below) * below;
    }
    const double lse = max / row.temperature + std::log(sum);
    const double logprob = (x_of(row.target) - max) / row.temperature - std::log(sum);
    const double m = std::max({1.0, std::fabs(lse), std::fabs(x_of(row.target) / row.temperature)});
    const auto differs = [&](float a, double b) { return !(std::fabs(a - b) <= 4e-6 * m); };
    if (got->status[r].code != RowCode::kOk || differs(got->logsumexp[r], lse) ||
        differs(got->target_logprob[r], logprob) || got->loss[r] != 0 - got->target_logprob[r] ||
        differs(got->entropy[r], std::log(sum) + moment / sum)) {
      return absl::StrFormat("%s row %d, %d ids: got %.9g %.9g %.9g, want %.12g %.12g %.12g",
                             Describe(c), r, row.support_count, got->logsumexp[r],
                             got->target_logprob[r], got->entropy[r], lse, logprob,
                             std::log(sum) + moment / sum);
    }
  }
  return "";
}

inline std::vector<SampleCase> SupportCases() {
  return {{.rows = 40, .vocab = 1},
          {.dtype = DType::kF16, .rows = 40, .vocab = 33, .stride_extra = 3, .offset = 1},
          {.dtype = DType::kBF16, .rows = 60, .vocab = 1025, .stride_extra = 1, .offset = 7},
          {.rows = 9, .vocab = 50257, .stride_extra = 5, .offset = 3},
          {.rows = 2, .vocab = 131072, .fill = Fill::kUniform}};
}

// ---- The bits of sample

// Runs sample and a loss of the same logits.
struct SameLogits {
  std::function<absl::StatusOr<SampleAnswer>(const SampleBatch&)> sample;
  std::function<absl::StatusOr<LossAnswer>(const LossBatch&)> loss;
};

// Rows of sample without edits that are filtered or greedy, with all of their support.
inline SampleBatch SupportedSamples(int64_t rows, int64_t vocab, uint64_t seed) {
  SampleBatch batch;
  std::mt19937_64 random(seed);
  while (static_cast<int64_t>(batch.rows.size()) < rows) {
    AddRandomRow(batch, vocab, random);
    SampleRow& row = batch.rows.back();
    row.active = 1;
    row.temperature = std::max(0.0f, row.temperature);
    row.bias_count = row.history_count = 0;
    row.first_mask_word = -1;
    row.typical_p = 1;  // typical_p and xtc may leave a support without the row's highest logit
    row.xtc_probability = 0;
    const bool may_be_long = vocab > kMaxSupport && random() % 4 > 0;
    if (!IsFiltered(row, vocab) || may_be_long)
      row.top_k = static_cast<int32_t>(1 + random() % 900);
    row.logprob_mode = LogprobMode::kProcessed;
    row.want_support = static_cast<int32_t>(std::min<int64_t>(kMaxSupport, vocab));
    row.first_support_entry = batch.support_entries;
    batch.support_entries += row.want_support;
  }
  batch.says_edited = false;
  batch.history.clear();
  batch.bias.clear();
  batch.mask_words.clear();
  return batch;
}

// "" where each row whose support came whole has the log-probability, bit by bit, that sample
// reports: of its token, and of the last token of its support. Every fifth row has no support, and
// must have the bits that it has without supports in the call.
inline std::string OtherBits(const SameLogits& same, const SampleBatch& samples, int64_t vocab,
                             bool mixed, bool skips) {
  const auto drawn = same.sample(samples);
  if (!drawn.ok()) return drawn.status().ToString();
  const auto bits = [](float x) { return BitsOf(x); };
  for (const bool last : {false, true}) {
    LossBatch batch;
    int64_t counted = 0, supported = 0;
    for (size_t r = 0; r < samples.rows.size(); ++r) {
      const SampleRow& from = samples.rows[r];
      const int32_t size = drawn->support_size[r];
      const auto ids = drawn->support_ids.begin() + from.first_support_entry;
      const bool whole = size == 0 || size > from.want_support || (mixed && r % 5 == 4);
      CrossEntropyRow row = PlainLoss(whole ? 0 : last ? ids[size - 1] : drawn->tokens[r]);
      if (from.temperature > 0) row.temperature = from.temperature;
      if (!mixed && whole) row = {};
      if (skips && r % 3 == 2) row.target = kIgnoredTarget;
      if (!whole) {
        row.first_support = static_cast<int64_t>(batch.support_ids.size());
        row.support_count = size;
        batch.support_ids.insert(batch.support_ids.end(), ids, ids + size);
        ++supported;
      }
      counted += row.active != 0 && !AsksForNothing(row);
      batch.rows.push_back(row);
    }
    if (skips) batch.counted_rows = counted;
    const auto got = same.loss(batch);
    LossBatch without = batch;
    for (CrossEntropyRow& row : without.rows) row.support_count = 0;
    const auto plain = same.loss(without);
    if (!got.ok() || !plain.ok()) return got.status().ToString() + plain.status().ToString();
    if (2 * supported < static_cast<int64_t>(samples.rows.size())) return "too few supports";
    for (size_t r = 0; r < samples.rows.size(); ++r) {
      const CrossEntropyRow& row = batch.rows[r];
      if (row.active == 0) continue;
      const int64_t first = samples.rows[r].first_support_entry;
      float want = last ? drawn->support_logprobs[first + std::max(row.support_count, 1) - 1]
                        : drawn->logprobs[r];
      float want_loss = 0 - want;
      if (row.support_count == 0) {
        want = plain->target_logprob[r];
        want_loss = plain->loss[r];
      } else if (row.target == kIgnoredTarget) {
        want = want_loss = 0;
      }
      if (bits(got->target_logprob[r]) == bits(want) && bits(got->loss[r]) == bits(want_loss) &&
          (row.support_count > 0 || bits(got->logsumexp[r]) == bits(plain->logsumexp[r]))) {
        continue;
      }
      return absl::StrFormat("row %d of %d tokens, support %d, %s: got %.9g, want %.9g", r, vocab,
                             row.support_count, Describe(samples.rows[r]), got->target_logprob[r],
                             want);
    }
  }
  return "";
}

inline std::string OtherBitsThanSample(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  for (int64_t r = 0; r < c.rows; ++r) FillRow(tensor, r, c.fill, c.seed);
  const SameLogits same = {
      [&](const SampleBatch& batch) { return runner.Sample(tensor, batch); },
      [&](const LossBatch& batch) { return runner.CrossEntropy(tensor, batch); }};
  for (const bool mixed : {false, true}) {
    for (const bool skips : {false, true}) {
      const std::string difference =
          OtherBits(same, SupportedSamples(c.rows, c.vocab, c.seed), c.vocab, mixed, skips);
      if (!difference.empty()) return absl::StrFormat("%s: %s", Describe(c), difference);
    }
  }
  return "";
}

inline std::vector<SampleCase> SupportBitsCases() {
  std::vector<SampleCase> cases;
  for (DType dtype : kAllDTypes) {
    cases.push_back({.dtype = dtype, .rows = 40, .vocab = 33, .stride_extra = 1, .offset = 1});
    cases.push_back({.dtype = dtype, .rows = 40, .vocab = 5003, .seed = 3});
  }
  cases.push_back({.rows = 30, .vocab = 1000, .fill = Fill::kManyTies});
  cases.push_back({.rows = 8, .vocab = 50257, .fill = Fill::kUniform, .seed = 5});
  cases.push_back({.rows = 6, .vocab = 131072, .seed = 6});
  return cases;
}

inline std::string OtherBitsThanLinearSample(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = RandomTensors(c);
  const SameLogits same = {[&](const SampleBatch& batch) {
                             return runner.LinearSample(input.hidden, input.head, batch);
                           },
                           [&](const LossBatch& batch) {
                             return runner.LinearCrossEntropy(input.hidden, input.head, batch);
                           }};
  for (const bool mixed : {false, true}) {
    for (const bool skips : {false, true}) {
      const std::string difference =
          OtherBits(same, SupportedSamples(c.rows, c.vocab, c.seed), c.vocab, mixed, skips);
      if (!difference.empty()) return absl::StrFormat("%s: %s", Describe(c), difference);
    }
  }
  return "";
}

inline std::vector<LinearCase> LinearSupportCases() {
  return {{DType::kF32, 70, 1000, 100, true, true, 0, 1, 1},
          {DType::kF32, 9, 5003, 64, false, false, 30, 0, 2},
          {DType::kBF16, 33, 5003, 128, false, false, 0, 0, 3},
          {DType::kBF16, 300, 1000, 256, true, true, 20, 2, 4},
          {DType::kF16, 20, 777, 300, true, false, 0, 0, 5},
          {DType::kBF16, 3, 20011, 64, false, true, 0, 0, 6}};
}

inline std::vector<OpCheck> SupportChecks() {
  return {
      ForAll("KeepsEveryClaim", SupportClaims, BrokenSupportClaim),
      ForAll("RandomSupportsAgreeWithDoublePrecision", SupportCases, FirstSupportDifference),
      ForAll("LogprobsHaveTheBitsOfSample", SupportBitsCases, OtherBitsThanSample),
      ForAll("LogprobsHaveTheBitsOfLinearSample", LinearSupportCases, OtherBitsThanLinearSample),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SUPPORT_CASES_H_
