// cross_entropy, supports: the answers of a row over the few tokens of its support. Sums are of
// integers, by the weights of sample: so log-probabilities have its bits.
#if defined(LOGITD_KERNELS_CPU_LOSS_SUPPORT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_LOSS_SUPPORT_INL_H_
#undef LOGITD_KERNELS_CPU_LOSS_SUPPORT_INL_H_
#else
#define LOGITD_KERNELS_CPU_LOSS_SUPPORT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/loss/answer-inl.h"
#include "kernels/cpu/loss/loss_row.h"
#include "kernels/cpu/loss/read_cells-inl.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/token_list-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {

// Writes the answers of row r, which has a support and these logits.
inline void AnswerSupported(const CrossEntropyArgs& args, int64_t r, const Row& row,
                            LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = args.rows[r];
  const CrossEntropyAnswers& out = args.answers;
  if (IsLeftOut(args, ask)) return AnswerLeftOut(out, r);
  const int32_t* const ids = args.support_ids + ask.first_support;
  const int32_t count = ask.support_count;
  float* const x = scratch.extra.Get(count);
  float* const weights = scratch.capped.Get(count + kMaxLanes);
  float max = -kInf;
  int64_t nan = row.vocab;
  for (int32_t i = 0; i < count; ++i) {
    x[i] = weights[i] = CapOne(Element(row, ids[i]), ask.softcap);
    if (std::isnan(x[i])) nan = std::min<int64_t>(nan, ids[i]);
    max = std::max(max, x[i]);
  }
  if (nan < row.vocab) return AnswerNan(args, r, static_cast<int32_t>(nan));

  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const bool is_empty = max == -kInf;
  const double temperature = std::max(ask.temperature, kLeastTemperature);
  double log_sum = 0, entropy = kNan;
  if (!is_empty) {
    MassOfWeights{.max = max, .e = MakeExponent(ask.temperature)}.WeighValues(weights, count);
    uint64_t total = 0;
    double moment = 0;  // sum of weight * (max - x)
    for (int32_t i = 0; i < count; ++i) {
      const uint64_t weight = FixedWeight(weights[i]);
      total += weight;
      if (weight > 0 && max < kInf) moment += static_cast<double>(weight) * (double{max} - x[i]);
    }
    log_sum = std::log(static_cast<double>(total) / kWeightOne);
    entropy = log_sum + moment / temperature / static_cast<double>(total);
  }
  double logprob = 0, loss = 0;
  if (ask.target != kIgnoredTarget) {
    const int64_t at = std::find(ids, ids + count, ask.target) - ids;
    logprob = is_empty ? -kInf : LogprobOf(x[at], max, temperature, log_sum);
    loss = is_empty ? kNan : 0 - logprob;  // no -0
  }
  out.status[r] = {is_empty ? RowCode::kEmptySupport : RowCode::kOk, -1};
  out.loss[r] = static_cast<float>(loss);
  out.logsumexp[r] = static_cast<float>(std::isinf(max) ? max : max / temperature + log_sum);
  out.target_logprob[r] = static_cast<float>(logprob);
  if (out.rank != nullptr) out.rank[r] = 0;
  if (out.entropy != nullptr) {
    const bool wanted = (ask.want & kWantEntropy) != 0;
    out.entropy[r] = wanted ? static_cast<float>(entropy) : 0;
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
