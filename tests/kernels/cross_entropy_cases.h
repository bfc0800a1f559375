// What cross_entropy and its backward must do on every backend: answers by hand, parity with double
// precision, and bits that do not depend on company. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CASES_H_
#define LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CASES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/cross_entropy_reference.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// A counted row with everything off.
inline CrossEntropyRow PlainLoss(int32_t target) {
  return {.active = 1, .target = target, .temperature = 1};
}

// ---- Answers by hand

struct LossClaim {
  const char* name;
  std::vector<float> logits;
  CrossEntropyRow row;
  std::vector<int32_t> extra_ids;
  float loss;
  float logsumexp;
  float target_logprob;
  int32_t rank;
  float entropy;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> extra_logprobs;
  RowStatus status = {};
};

inline CrossEntropyRow Asking(
    int32_t target, void (*change)(CrossEntropyRow&) = [](CrossEntropyRow&) {}) {
  CrossEntropyRow row = PlainLoss(target);
  row.want = kWantRank | kWantEntropy;
  change(row);
  return row;
}

inline const std::vector<LossClaim>& LossClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static constexpr float kThreeToOne = 0.56233514f;  // the entropy of (1/4, 3/4)
  static constexpr RowStatus kEmpty = {RowCode::kEmptySupport, -1};
  static const auto& claims = *new std::vector<LossClaim>{
      {"one_token_is_certain", {-3}, Asking(0), {}, 0, -3, 0, 1, 0, {}, {}, {}},
      {"halves", {0, 0}, Asking(0), {}, ln2, ln2, -ln2, 1, ln2, {}, {}, {}},
      {"equals_rank_by_index", {0, 0}, Asking(1), {}, ln2, ln2, -ln2, 2, ln2, {}, {}, {}},
      {"minus_zero_is_zero", {-0.0f, 0.0f}, Asking(1), {}, ln2, ln2, -ln2, 2, ln2, {}, {}, {}},
      {"a_quarter", {0, ln3}, Asking(0), {}, ln4, ln4, -ln4, 2, kThreeToOne, {}, {}, {}},
      {"temperature_divides",
       {0, 2 * ln3},
       Asking(0, [](CrossEntropyRow& row) { row.temperature = 2; }),
       {},
       ln4,
       ln4,
       -ln4,
       2,
       kThreeToOne,
       {},
       {},
       {}},
      // 0.8 ln 4/3 + 0.2 (ln 4 - ln 3 / 2)
      {"torch_smoothing_counts_the_target_in",
       {0, ln3},
       Asking(1, [](CrossEntropyRow& row) { row.label_smoothing = 0.2f; }),
       {},
       0.39754330f,
       ln4,
       ln3 - ln4,
       1,
       kThreeToOne,
       {},
       {},
       {}},
      // 0.8 ln 4/3 + 0.2 ln 4
      {"megatron_smoothing_leaves_the_target_out",
       {0, ln3},
       Asking(1,
              [](CrossEntropyRow& row) {
                row.label_smoothing = 0.2f;
                row.smoothing = Smoothing::kMegatron;
              }),
       {},
       0.50740453f,
       ln4,
       ln3 - ln4,
       1,
       kThreeToOne,
       {},
       {},
       {}},
      {"megatron_smoothing_of_one_token_is_none",
       {3},
       Asking(0,
              [](CrossEntropyRow& row) {
                row.label_smoothing = 0.5f;
                row.smoothing = Smoothing::kMegatron;
              }),
       {},
       0,
       3,
       0,
       1,
       0,
       {},
       {},
       {}},
      // ln 2 + (ln 2)^2 / 2
      {"z_loss_adds_the_square",
       {0, 0},
       Asking(0, [](CrossEntropyRow& row) { row.z_loss = 0.5f; }),
       {},
       0.93337369f,
       ln2,
       -ln2,
       1,
       ln2,
       {},
       {},
       {}},
      // x = {0, 2}
      {"softcap_bounds",
       {0, 1e9f},
       Asking(1,
              [](CrossEntropyRow& row) {
                row.softcap = 2;
                row.want = kWantRank;
              }),
       {0},
       0.12692801f,
       2.12692801f,
       -0.12692801f,
       1,
       0,
       {},
       {},
       {-2.12692801f}},
      {"softcap_hides_no_order",
       {1e9f, 2e9f},
       Asking(0,
              [](CrossEntropyRow& row) {
                row.softcap = 2;
                row.top_logprobs = 2;
              }),
       {},
       ln2,
       2 + ln2,
       -ln2,
       2,
       ln2,
       {1, 0},
       {-ln2, -ln2},
       {}},
      // x = {0, 1}
      {"softcap_comes_before_the_temperature",
       {0, kInf},
       Asking(0,
              [](CrossEntropyRow& row) {
                row.softcap = 2;
                row.temperature = 2;
                row.want = kWantRank;
              }),
       {1},
       1.31326169f,
       1.31326169f,
       -1.31326169f,
       2,
       0,
       {},
       {},
       {-0.31326169f}},
      {"softcap_makes_minus_inf_finite",
       {-kInf, -kInf},
       Asking(1, [](CrossEntropyRow& row) { row.softcap = 3; }),
       {},
       ln2,
       -3 + ln2,
       -ln2,
       2,
       ln2,
       {},
       {},
       {}},
      {"minus_inf_as_target", {0, -kInf}, Asking(1), {}, kInf, 0, -kInf, 2, 0, {}, {}, {}},
      {"minus_inf_ranks_by_index",
       {-kInf, -kInf, 0, -kInf},
       Asking(1),
       {},
       kInf,
       0,
       -kInf,
       3,
       0,
       {},
       {},
       {}},
      {"minus_inf_elsewhere", {0, -kInf}, Asking(0), {}, 0, 0, 0, 1, 0, {}, {}, {}},
      {"minus_inf_elsewhere_with_smoothing",
       {0, -kInf},
       Asking(0, [](CrossEntropyRow& row) { row.label_smoothing = 0.1f; }),
       {},
       kInf,
       0,
       0,
       1,
       0,
       {},
       {},
       {}},
      {"minus_inf_as_target_with_smoothing_above_one",
       {0, -kInf},
       Asking(1,
              [](CrossEntropyRow& row) {
                row.label_smoothing = 0.9f;
                row.smoothing = Smoothing::kMegatron;
              }),
       {},
       kInf,
       0,
       -kInf,
       2,
       0,
       {},
       {},
       {}},
      {"several_plus_inf_share",
       {kInf, 5, kInf},
       Asking(2, [](CrossEntropyRow& row) { row.top_logprobs = 3; }),
       {1, 2},
       ln2,
       kInf,
       -ln2,
       2,
       ln2,
       {0, 2, 1},
       {-ln2, -ln2, -kInf},
       {-kInf, -ln2}},
      {"plus_inf_elsewhere", {kInf, 5}, Asking(1), {}, kInf, kInf, -kInf, 2, 0, {}, {}, {}},
      {"plus_inf_with_smoothing",
       {kInf, 5},
       Asking(0, [](CrossEntropyRow& row) { row.label_smoothing = 0.1f; }),
       {},
       kInf,
       kInf,
       0,
       1,
       0,
       {},
       {},
       {}},
      {"plus_inf_with_z_loss",
       {kInf, -kInf},
       Asking(0, [](CrossEntropyRow& row) { row.z_loss = 0.1f; }),
       {},
       kInf,
       kInf,
       0,
       1,
       0,
       {},
       {},
       {}},
      {"nothing_left",
       {-kInf, -kInf},
       Asking(1, [](CrossEntropyRow& row) { row.top_logprobs = 2; }),
       {0},
       kNan,
       -kInf,
       -kInf,
       2,
       kNan,
       {0, 1},
       {-kInf, -kInf},
       {-kInf},
       kEmpty},
      {"nothing_left_and_ignored",
       {-kInf, -kInf},
       Asking(kIgnoredTarget),
       {},
       0,
       -kInf,
       0,
       0,
       kNan,
       {},
       {},
       {},
       kEmpty},
      {"nan_takes_everything",
       {1, kNan, kNan},
       Asking(0, [](CrossEntropyRow& row) { row.top_logprobs = 2; }),
       {0},
       kNan,
       kNan,
       kNan,
       0,
       kNan,
       {-1, -1},
       {kNan, kNan},
       {kNan},
       {RowCode::kNanLogit, 1}},
      {"nan_shows_where_ignored",
       {kNan, 1},
       Asking(kIgnoredTarget, [](CrossEntropyRow& row) { row.softcap = 5; }),
       {},
       kNan,
       kNan,
       kNan,
       0,
       kNan,
       {},
       {},
       {},
       {RowCode::kNanLogit, 0}},
      {"ignored_but_described",
       {0, ln3},
       Asking(kIgnoredTarget,
              [](CrossEntropyRow& row) {
                row.top_logprobs = 1;
                row.label_smoothing = 0.5f;
                row.z_loss = 1;
              }),
       {0},
       0,
       ln4,
       0,
       0,
       kThreeToOne,
       {1},
       {ln3 - ln4},
       {-ln4}},
      {"ids_in_the_order_asked_and_twice",
       {0, ln3},
       Asking(0),
       {1, 0, 1},
       ln4,
       ln4,
       -ln4,
       2,
       kThreeToOne,
       {},
       {},
       {ln3 - ln4, -ln4, ln3 - ln4}},
      {"far_apart_is_not_nan", {-3e38f, 3e38f}, Asking(1), {0}, 0, 3e38f, 0, 1, 0, {}, {}, {-kInf}},
      {"the_mean_of_huge_logits_is_finite",
       {3e38f, 3e38f, 3e38f, 3e38f},
       Asking(3, [](CrossEntropyRow& row) { row.label_smoothing = 0.5f; }),
       {},
       ln4,
       3e38f,
       -ln4,
       4,
       ln4,
       {},
       {},
       {}},
      {"not_wanted_is_zero",
       {0, 0},
       Asking(1, [](CrossEntropyRow& row) { row.want = 0; }),
       {},
       ln2,
       ln2,
       -ln2,
       0,
       0,
       {},
       {},
       {}},
      {"skipped",
       {0, 0},
       {},
       {},
       -77.5f,
       -77.5f,
       -77.5f,
       -77,
       -77.5f,
       {},
       {},
       {},
       {RowCode::kOk, -77}},
  };
  return claims;
}

// "" where the claim holds in every type, else what does not.
inline std::string BrokenClaim(OpRunner& runner, const LossClaim& claim) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const auto n = static_cast<int64_t>(claim.logits.size());
    HostTensor tensor(dtype, 1, n, n, 0);
    bool exact = true;
    for (int64_t i = 0; i < n; ++i) {
      tensor.Set(0, i, claim.logits[i]);
      exact &= std::isnan(claim.logits[i]) || tensor.At(0, i) == claim.logits[i];
    }
    if (!exact) continue;
    LossBatch batch = {.rows = {claim.row}, .extra_ids = claim.extra_ids, .says_all_wanted = true};
    if (claim.row.active != 0) {
      batch.rows[0].extra_count = static_cast<int32_t>(claim.extra_ids.size());
    }
    batch.top_entries = claim.row.top_logprobs;
    batch.extra_entries = static_cast<int64_t>(claim.extra_ids.size());
    auto got = runner.CrossEntropy(tensor, batch);
    if (!got.ok()) return got.status().ToString();
    const auto same = [](float a, float b) {
      return std::isnan(b) ? std::isnan(a)
                           : a == b || std::fabs(a - b) <= 4e-6f * std::max(1.0f, std::fabs(b));
    };
    const auto differ = [&](std::string_view field, float a, float b) {
      return absl::StrFormat("%s: %s: got %.9g, want %.9g", Name(dtype), field, a, b);
    };
    if (got->status[0].code != claim.status.code ||
        got->status[0].position != claim.status.position) {
      return absl::StrFormat("%s: status: got code %d position %d", Name(dtype),
                             static_cast<int>(got->status[0].code), got->status[0].position);
    }
    if (!same(got->loss[0], claim.loss)) return differ("loss", got->loss[0], claim.loss);
    if (!same(got->logsumexp[0], claim.logsumexp)) {
      return differ("logsumexp", got->logsumexp[0], claim.logsumexp);
    }
    if (!same(got->target_logprob[0], claim.target_logprob)) {
      return differ("target_logprob", got->target_logprob[0], claim.target_logprob);
    }
    if (got->rank[0] != claim.rank) return absl::StrFormat("rank: got %d", got->rank[0]);
    if (!same(got->entropy[0], claim.entropy)) {
      return differ("entropy", got->entropy[0], claim.entropy);
    }
    if (got->top_ids != claim.top_ids) return absl::StrFormat("%s: other top ids", Name(dtype));
    for (size_t i = 0; i < claim.top_ids.size(); ++i) {
      if (!same(got->top_logprobs[i], claim.top_logprobs[i])) {
        return differ("top", got->top_logprobs[i], claim.top_logprobs[i]);
      }
    }
    for (size_t i = 0; i < claim.extra_ids.size(); ++i) {
      if (!same(got->extra_logprobs[i], claim.extra_logprobs[i])) {
        return differ("extra", got->extra_logprobs[i], claim.extra_logprobs[i]);
      }
    }
  }
  return "";
}

struct LossGradientClaim {
  const char* name;
  std::vector<float> logits;
  CrossEntropyRow row;
  float logsumexp;
  float upstream;
  std::vector<float> d_logits;
};

inline const std::vector<LossGradientClaim>& LossGradientClaims() {
  static const float ln2 = std::log(2.0f);
  static constexpr float kUnwritten = 9;
  static const auto& claims = *new std::vector<LossGradientClaim>{
      {"halves", {0, 0}, PlainLoss(0), ln2, 1, {-0.5f, 0.5f}},
      {"the_last_token", {0, 0}, PlainLoss(1), ln2, 1, {0.5f, -0.5f}},
      {"upstream_multiplies_and_temperature_divides",
       {0, 0},
       Asking(0, [](CrossEntropyRow& row) { row.temperature = 2; }),
       ln2,
       -3,
       {0.75f, -0.75f}},
      {"torch_smoothing",
       {0, 0},
       Asking(0, [](CrossEntropyRow& row) { row.label_smoothing = 0.2f; }),
       ln2,
       1,
       {-0.4f, 0.4f}},
      {"megatron_smoothing",
       {0, 0},
       Asking(0,
              [](CrossEntropyRow& row) {
                row.label_smoothing = 0.2f;
                row.smoothing = Smoothing::kMegatron;
              }),
       ln2,
       1,
       {-0.3f, 0.3f}},
      // (1 + ln 2) / 2
      {"z_loss",
       {0, 0},
       Asking(0, [](CrossEntropyRow& row) { row.z_loss = 0.5f; }),
       ln2,
       1,
       {-0.15342641f, 0.84657359f}},
      // x = {0, 1}, bent by 1 and by 3/4
      {"softcap_bends",
       {0, 1.0986123f},
       Asking(0, [](CrossEntropyRow& row) { row.softcap = 2; }),
       1.31326169f,
       1,
       {-0.73105858f, 0.54829393f}},
      {"softcap_is_flat_at_infinity",
       {kInf, -kInf},
       Asking(0, [](CrossEntropyRow& row) { row.softcap = 2; }),
       2.01814993f,
       1,
       {0, 0}},
      {"minus_inf_has_no_probability", {0, -kInf}, PlainLoss(1), 0, 1, {1, -1}},
      {"a_small_temperature_divides_zero_to_zero",
       {0, -kInf},
       Asking(0, [](CrossEntropyRow& row) { row.temperature = 1e-40f; }),
       0,
       1,
       {0, 0}},
      {"a_small_temperature_leaves_equals_equal",
       {0, 0},
       Asking(0, [](CrossEntropyRow& row) { row.temperature = 0x1p-130f; }),
       ln2,
       0x1p-128f,
       {-2, 2}},
      {"ignored_is_zeros", {1, kNan}, PlainLoss(kIgnoredTarget), kNan, kNan, {0, 0}},
      {"certain_is_nan", {kInf, 0}, PlainLoss(0), kInf, 1, {kNan, kNan}},
      {"nothing_left_is_nan", {-kInf, -kInf}, PlainLoss(0), -kInf, 1, {kNan, kNan}},
      {"nan_is_nan", {0, kNan}, PlainLoss(0), kNan, 1, {kNan, kNan}},
      {"skipped_is_not_written", {0, 0}, {}, ln2, 1, {kUnwritten, kUnwritten}},
  };
  return claims;
}

// "" where the claim holds.
inline std::string BrokenClaim(OpRunner& runner, const LossGradientClaim& claim) {
  const auto n = static_cast<int64_t>(claim.logits.size());
  LossBackwardCall call{.logits = HostTensor(DType::kF32, 1, n, n, 0),
                        .rows = {claim.row},
                        .logsumexp = {claim.logsumexp},
                        .upstream = {claim.upstream},
                        .d_logits = HostTensor(DType::kF32, 1, n, n, 0)};
  for (int64_t i = 0; i < n; ++i) {
    call.logits.Set(0, i, claim.logits[i]);
    call.d_logits.Set(0, i, 9);
  }
  auto got = runner.CrossEntropyBackward(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t i = 0; i < n; ++i) {
    const float want = claim.d_logits[i];
    if (std::isnan(want) ? std::isnan(got->At(0, i)) : std::fabs(got->At(0, i) - want) <= 2e-6f) {
      continue;
    }
    return absl::StrFormat("element %d: got %.9g, want %.9g", i, got->At(0, i), want);
  }
  return "";
}

// "" where a NaN that comes from above is a NaN in every element of the gradient: of any type, and
// whatever its bits, which rounding could carry over.
inline std::string FirstLostNan(OpRunner& runner) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const uint32_t bits : {0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
      LossBackwardCall call{.logits = HostTensor(dtype, 1, 3, 3, 0),
                            .rows = {PlainLoss(1)},
                            .logsumexp = {std::log(3.0f)},
                            .upstream = {0},
                            .d_logits = HostTensor(dtype, 1, 3, 3, 0)};
      std::memcpy(call.upstream.data(), &bits, sizeof(bits));
      for (int64_t i = 0; i < 3; ++i) call.logits.Set(0, i, 0);
      auto got = runner.CrossEntropyBackward(call);
      if (!got.ok()) return got.status().ToString();
      for (int64_t i = 0; i < 3; ++i) {
        if (!std::isnan(got->At(0, i))) {
          return absl::StrFormat("%s, upstream %#x, element %d: got %g", Name(dtype), bits, i,
                                 got->At(0, i));
        }
      }
    }
  }
  return "";
}

// ---- Parity with double precision

struct LossCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t stride_extra = 0;
  int64_t offset = 0;
  Fill fill = Fill::kNormal;
  uint64_t seed = 1;
};

inline std::string Describe(const LossCase& c) {
  return absl::StrFormat("cross_entropy %dx%d %s stride +%d, offset %d, %s, seed %d", c.rows,
                         c.vocab, Name(c.dtype), c.stride_extra, c.offset, Name(c.fill), c.seed);
}

inline std::string Describe(const CrossEntropyRow& row) {
  return absl::StrFormat(
      "target %d, temperature %g, softcap %g, smoothing %g %s, z_loss %g, want %d, top %d, extra "
      "%d",
      row.target, row.temperature, row.softcap, row.label_smoothing,
      row.smoothing == Smoothing::kTorch ? "torch" : "megatron", row.z_loss, row.want,
      row.top_logprobs, row.extra_count);
}

// Any mix of what a row may ask for; one in ten is skipped, one in six ignored.
inline void AddRandomLoss(LossBatch& batch, int64_t vocab, bool with_softcap,
                          std::mt19937_64& random) {
  const auto pick = [&random](std::initializer_list<float> values) {
    return *(values.begin() + random() % values.size());
  };
  if (random() % 10 == 0) {
    batch.rows.push_back({});
    return;
  }
  CrossEntropyRow row = PlainLoss(static_cast<int32_t>(random() % vocab));
  if (random() % 6 == 0) row.target = kIgnoredTarget;
  row.temperature = pick({1, 1, 0.7f, 2.5f, 0.1f});
  const float softcap = pick({0, 0, 30, 5, 1e4f});
  if (with_softcap) row.softcap = softcap;
  row.label_smoothing = pick({0, 0, 0.1f, 0.5f, 0.99f});
  row.smoothing = random() % 2 == 0 ? Smoothing::kTorch : Smoothing::kMegatron;
  row.z_loss = pick({0, 0, 1e-4f, 0.5f});
  row.want = static_cast<int32_t>(random() % 4);
  row.top_logprobs =
      std::min(static_cast<int32_t>(pick({0, 1, 5, 128})), static_cast<int32_t>(vocab));
  row.extra_count = static_cast<int32_t>(random() % 4);
  row.first_extra = static_cast<int64_t>(batch.extra_ids.size());
  for (int32_t i = 0; i < row.extra_count; ++i) {
    batch.extra_ids.push_back(static_cast<int32_t>(random() % vocab));
  }
  row.first_top_entry = batch.top_entries;
  row.first_extra_entry = batch.extra_entries;
  // One more than asked for, to show what is written behind them.
  batch.top_entries += row.top_logprobs + 1;
  batch.extra_entries += row.extra_count + 1;
  batch.rows.push_back(row);
}

inline absl::Span<const int32_t> ExtrasOf(const LossBatch& batch, const CrossEntropyRow& row) {
  return absl::MakeConstSpan(batch.extra_ids).subspan(row.first_extra, row.extra_count);
}

// "" where row r of a batch made by AddRandomLoss has the answers of its logits, and no other.
inline std::string RowDifference(const std::vector<double>& logits, const LossBatch& batch,
                                 const LossAnswer& got, int64_t r, LossSlack slack = {}) {
  const CrossEntropyRow& ask = batch.rows[r];
  if (ask.active == 0) {
    const bool untouched = got.loss[r] == kUnwrittenFloat && got.logsumexp[r] == kUnwrittenFloat &&
                           got.status[r].position == kUnwrittenIndex;
    return untouched ? "" : "wrote for a skipped row";
  }
  if (got.top_ids[ask.first_top_entry + ask.top_logprobs] != kUnwrittenIndex ||
      got.extra_logprobs[ask.first_extra_entry + ask.extra_count] != kUnwrittenFloat) {
    return "wrote behind its entries";
  }
  return DescribeDifference(ReferenceCrossEntropy(logits, ask, ExtrasOf(batch, ask)), ask, got, r,
                            slack);
}

inline std::string FirstDifference(OpRunner& runner, const LossCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  LossBatch batch;
  batch.says_all_wanted = c.seed % 2 == 0;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed);
    AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, random);
  }
  auto got = runner.CrossEntropy(tensor, batch);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    const std::string difference = RowDifference(LogitsOf(tensor, r), batch, *got, r);
    if (difference.empty()) continue;
    return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(batch.rows[r]),
                           difference);
  }
  return "";
}

inline std::vector<LossCase> LossCases() {
  struct Shape {
    int64_t vocab, rows;
  };
  static constexpr Shape kShapes[] = {{1, 40},    {2, 60},    {7, 257},  {33, 60},
                                      {1000, 40}, {1023, 3},  {1024, 3}, {1025, 9},
                                      {4097, 20}, {50257, 1}, {50257, 3}};
  static constexpr int64_t kStrides[] = {0, 1, 3, 17, 64};
  static constexpr int64_t kOffsets[] = {0, 1, 3, 6, 9, 13, 32};
  std::vector<LossCase> cases;
  uint64_t n = 0;
  for (const Shape& shape : kShapes) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      ++n;
      cases.push_back(
          {dtype, shape.rows, shape.vocab, kStrides[n % 5], kOffsets[n % 7], Fill::kNormal, n});
    }
  }
  for (Fill fill : kAllFills) {
    for (int64_t vocab : {33, 1025, 5000}) {
      ++n;
      const DType dtype = n % 3 == 0 ? DType::kBF16 : n % 3 == 1 ? DType::kF32 : DType::kF16;
      cases.push_back(
          {dtype, vocab > 2000 ? 12 : 40, vocab, kStrides[n % 5], kOffsets[n % 7], fill, n});
    }
  }
  cases.push_back({DType::kF32, 1, int64_t{1} << 20, 0, 1, Fill::kUniform, ++n});
  cases.push_back({DType::kBF16, 2, 131072, 1, 1, Fill::kNormal, ++n});
  return cases;
}

// ---- Parity of the gradient

inline bool IsFinite(const std::vector<double>& x, double logsumexp) {
  return std::isfinite(static_cast<float>(logsumexp)) &&
         std::none_of(x.begin(), x.end(), [](double v) { return std::isnan(v); });
}

// A call over random rows, with the logsumexps of the reference.
inline LossBackwardCall MakeBackwardCall(const LossCase& c) {
  LossBackwardCall call{
      .logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset),
      .d_logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.offset, c.stride_extra),
      .in_place = c.seed % 3 == 0};
  LossBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(call.logits, r, c.fill, c.seed);
    AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, random);
    CrossEntropyRow ask = batch.rows.back();
    ask.top_logprobs = ask.extra_count = ask.want = 0;
    call.rows.push_back(ask);
    ask.target = kIgnoredTarget;
    call.logsumexp.push_back(
        ask.active == 0 ? 0.0f
                        : static_cast<float>(
                              ReferenceCrossEntropy(LogitsOf(call.logits, r), ask, {}).logsumexp));
    call.upstream.push_back(static_cast<float>(random() % 1000) / 250 - 2);
  }
  return call;
}

inline std::string FirstLossGradientDifference(OpRunner& runner, const LossCase& c) {
  const LossBackwardCall call = MakeBackwardCall(c);
  auto got = runner.CrossEntropyBackward(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  const HostTensor& before = call.in_place ? call.logits : call.d_logits;
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& ask = call.rows[r];
    const std::vector<double> x = LogitsOf(call.logits, r);
    const bool finite = ask.active != 0 && IsFinite(x, call.logsumexp[r]);
    LossGradient want;
    if (finite) want = ReferenceGradient(x, ask, call.logsumexp[r], call.upstream[r]);
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float is = got->At(r, i);
      const bool good = ask.active == 0                ? BitsOf(is) == BitsOf(before.At(r, i))
                        : ask.target == kIgnoredTarget ? is == 0
                        : !finite                      ? std::isnan(is)
                                  : Agrees(c.dtype, is, want.d_logits[i], want.slack[i]);
      if (good) continue;
      return absl::StrFormat(
          "%s: row %d (%s, logsumexp %.9g, upstream %g): element %d (logit %.9g): got %.9g, want "
          "%.12g within %.3g",
          Describe(c), r, Describe(ask), call.logsumexp[r], call.upstream[r], i, x[i], is,
          finite ? want.d_logits[i] : 0, finite ? want.slack[i] : 0);
    }
  }
  return "";
}

// The same without the fills whose logsumexp, rounded to a float, says little about its row.
inline std::vector<LossCase> LossGradientCases() {
  std::vector<LossCase> cases;
  for (const LossCase& c : LossCases()) {
    if (c.fill != Fill::kHuge) cases.push_back(c);
  }
  return cases;
}

// "" where the gradient of a short row is that of the reference's loss by central differences.
inline std::string FirstFiniteDifference(OpRunner& runner, uint64_t seed) {
  LossCase c{.rows = 24, .vocab = 7, .fill = Fill::kNormal, .seed = seed};
  const LossBackwardCall call = MakeBackwardCall(c);
  auto got = runner.CrossEntropyBackward(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& ask = call.rows[r];
    if (call.in_place || ask.active == 0) continue;
    for (int64_t i = 0; i < c.vocab; ++i) {
      const double h = 1e-4;
      double loss[2];
      for (int side = 0; side < 2; ++side) {
        std::vector<double> x = LogitsOf(call.logits, r);
        x[i] += side == 0 ? -h : h;
        loss[side] = ReferenceCrossEntropy(x, ask, {}).loss;
      }
      const double want = call.upstream[r] * (loss[1] - loss[0]) / (2 * h);
      const double size = std::fabs(call.upstream[r]) / ask.temperature * (1 + 20 * ask.z_loss);
      if (std::fabs(got->At(r, i) - want) <= 2e-5 * size / ask.temperature) continue;
      return absl::StrFormat("seed %d, row %d (%s): element %d: got %.9g, want %.9g", seed, r,
                             Describe(ask), i, got->At(r, i), want);
    }
  }
  return "";
}

// ---- Bits that depend on the row alone

// All bits of row r's answer.
inline std::string LossBits(const LossAnswer& got, const CrossEntropyRow& ask, int64_t r) {
  std::string bits = absl::StrFormat("%08x %08x %08x %d %d", BitsOf(got.loss[r]),
                                     BitsOf(got.logsumexp[r]), BitsOf(got.target_logprob[r]),
                                     static_cast<int>(got.status[r].code), got.status[r].position);
  if ((ask.want & kWantRank) != 0) absl::StrAppendFormat(&bits, " %d", got.rank[r]);
  if ((ask.want & kWantEntropy) != 0) absl::StrAppendFormat(&bits, " %08x", BitsOf(got.entropy[r]));
  for (int64_t i = 0; i < ask.top_logprobs; ++i) {
    absl::StrAppendFormat(&bits, " %d %08x", got.top_ids[ask.first_top_entry + i],
                          BitsOf(got.top_logprobs[ask.first_top_entry + i]));
  }
  for (int64_t i = 0; i < ask.extra_count; ++i) {
    absl::StrAppendFormat(&bits, " %08x", BitsOf(got.extra_logprobs[ask.first_extra_entry + i]));
  }
  return bits;
}

inline std::vector<LossCase> LossInvarianceCases() {
  return {{DType::kF32, 700, 7, 1, 1, Fill::kNormal, 1},
          {DType::kF32, 40, 1000, 3, 7, Fill::kNormal, 2},
          {DType::kBF16, 9, 33333, 5, 3, Fill::kNormal, 3},
          {DType::kF16, 9, 4097, 0, 1, Fill::kManyTies, 4},
          {DType::kF32, 5, 131072, 1, 1, Fill::kUniform, 5}};
}

// "" where the bits of a row and of its gradient are the same alone and as the last of every batch.
inline std::string BrokenLossInvariance(OpRunner& runner, const LossCase& c) {
  const uint64_t seeds = c.vocab > 10000 ? 4 : 10;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    std::string want, want_gradient;
    for (const int64_t rows : {int64_t{1}, int64_t{2}, c.rows}) {
      const int64_t extra = rows > 1 ? c.stride_extra : 0, offset = rows > 1 ? c.offset : 0;
      HostTensor tensor(c.dtype, rows, c.vocab, c.vocab + extra, offset);
      LossBatch batch;
      std::mt19937_64 others(seed * 100 + rows), own(seed);
      HostTensor row(c.dtype, 1, c.vocab, c.vocab, 0);
      FillRow(row, 0, c.fill, c.seed + seed);
      for (int64_t r = 0; r + 1 < rows; ++r) {
        FillRow(tensor, r, r % 5 == 4 ? Fill::kWithNan : Fill::kUniform, seed);
        AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, others);
      }
      for (int64_t i = 0; i < c.vocab; ++i) tensor.Set(rows - 1, i, row.At(0, i));
      do AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, own);
      while (batch.rows.back().active == 0 && (batch.rows.pop_back(), true));
      batch.says_all_wanted = rows == 2;
      auto got = runner.CrossEntropy(tensor, batch);
      if (!got.ok()) return got.status().ToString();
      const std::string bits = LossBits(*got, batch.rows.back(), rows - 1);

      LossBackwardCall call{.logits = tensor,
                            .rows = batch.rows,
                            .logsumexp = std::vector<float>(rows, 3.5f),
                            .upstream = std::vector<float>(rows, -1.25f),
                            .d_logits = tensor,
                            .in_place = rows == 2};
      auto gradient = runner.CrossEntropyBackward(call);
      if (!gradient.ok()) return gradient.status().ToString();
      std::string gradient_bits(c.vocab * sizeof(float), 0);
      for (int64_t i = 0; i < c.vocab; ++i) {
        const float value = gradient->At(rows - 1, i);
        std::memcpy(&gradient_bits[i * sizeof(float)], &value, sizeof(float));
      }
      if (rows == 1) {
        want = bits;
        want_gradient = gradient_bits;
      }
      if (bits == want && gradient_bits == want_gradient) continue;
      return absl::StrFormat("%s: other bits of the %s as the last of %d rows (%s)", Describe(c),
                             bits == want ? "gradient" : "answer", rows,
                             Describe(batch.rows.back()));
    }
  }
  return "";
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CASES_H_
