// cross_entropy, answer: from the sums of a row's cells, or from those that the shards of its
// vocabulary sent, in double precision.
#if defined(LOGITD_KERNELS_CPU_LOSS_ANSWER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_LOSS_ANSWER_INL_H_
#undef LOGITD_KERNELS_CPU_LOSS_ANSWER_INL_H_
#else
#define LOGITD_KERNELS_CPU_LOSS_ANSWER_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "hwy/highway.h"
#include "kernels/cpu/loss/loss_row.h"
#include "kernels/cpu/loss/read_cells-inl.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/token_list-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A row's distribution.
struct Distribution {
  double max;  // of x, before the temperature divides it; not NaN
  double temperature;
  double log_sum;  // ln sum exp((x - max) / temperature); where max is +inf, ln of their number

  double Logprob(float x) const {
    constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
    if (x == -kInf) return kMinusInf;
    if (max == kInf) return x == kInf ? -log_sum : kMinusInf;
    return (double{x} - max) / temperature - log_sum;
  }
  double LogSumExp() const { return std::isfinite(max) ? max / temperature + log_sum : max; }
};

// -sum p ln p. max is not -inf.
inline double Entropy(const LossRow& row, const Distribution& of) {
  if (of.max == kInf) return of.log_sum;
  const double inverse = 1 / std::max(of.temperature, double{kLeastTemperature});
  const double moment_to_x = inverse / MomentShrink(row.x.temperature);
  double sum = 0, moment = 0;
  for (int64_t c = 0; c < CellCount(row.x.vocab); ++c) {
    const double below = (double{row.x.sketch.max[c]} - of.max) * inverse;
    const double share = std::exp(below);
    if (share == 0) continue;
    sum += share * row.x.sketch.sum[c];
    moment += share * (row.moment[c] * moment_to_x + below * row.x.sketch.sum[c]);
  }
  return std::max(0.0, std::log(sum) - moment / sum);
}

// The mean of x, before the temperature divides it.
inline double MeanOf(const LossRow& row) {
  double total = 0;
  for (int64_t c = 0; c < CellCount(row.x.vocab); ++c) total += row.total[c];
  return total / kTotalShrink / static_cast<double>(row.x.vocab);
}

// The loss of a counted row. max is not -inf.
inline double LossOf(const LossRow& row, const CrossEntropyRow& ask, const Distribution& of,
                     float x) {
  constexpr double kPlusInf = std::numeric_limits<double>::infinity();
  const double e = EffectiveSmoothing(ask, row.vocab);
  const double plain = -of.Logprob(x);
  if (of.max == kInf) return e == 0 && ask.z_loss == 0 ? plain : kPlusInf;
  if (x == -kInf) return kPlusInf;
  double loss = plain;
  // A mean of -inf makes it +inf.
  if (e > 0) loss = (1 - e) * plain + e * (of.log_sum - (MeanOf(row) - of.max) / of.temperature);
  if (ask.z_loss > 0) loss += double{ask.z_loss} * of.LogSumExp() * of.LogSumExp();
  return loss;
}

// All answers of a row whose lowest NaN is `nan`.
inline void AnswerNan(const CrossEntropyArgs& args, int64_t r, int32_t nan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const CrossEntropyRow& ask = args.rows[r];
  const CrossEntropyAnswers& out = args.answers;
  if (IsLeftOut(args, ask)) return AnswerLeftOut(out, r);
  out.status[r] = {RowCode::kNanLogit, nan};
  out.loss[r] = out.logsumexp[r] = out.target_logprob[r] = kNan;
  if (out.rank != nullptr) out.rank[r] = 0;
  if (out.entropy != nullptr) out.entropy[r] = (ask.want & kWantEntropy) != 0 ? kNan : 0;
  if (ask.top_logprobs > 0) {
    std::fill_n(out.top_ids + ask.first_top_entry, ask.top_logprobs, -1);
    std::fill_n(out.top_logprobs + ask.first_top_entry, ask.top_logprobs, kNan);
  }
  if (ask.extra_count > 0) {
    std::fill_n(out.extra_logprobs + ask.first_extra_entry, ask.extra_count, kNan);
  }
}

// What the answers of a row need besides the sums of its cells.
struct LossTokens {
  float target = 0;                // the target's logit as sent
  int64_t before = 0;              // tokens before the target, if its rank is wanted
  const uint64_t* keys = nullptr;  // of the top tokens
  const float* extra = nullptr;    // logits as sent of the extra ids
};

// Writes the answers of row r, whose cells are read, and which has no NaN.
inline void AnswerWhole(const CrossEntropyArgs& args, int64_t r, const LossRow& row, float max,
                        const LossTokens& tokens) {
  const CrossEntropyRow& ask = args.rows[r];
  const CrossEntropyAnswers& out = args.answers;
  if (IsLeftOut(args, ask)) return AnswerLeftOut(out, r);
  const bool is_empty = max == -kInf;
  out.status[r] = {is_empty ? RowCode::kEmptySupport : RowCode::kOk, -1};
  Distribution of = {.max = max, .temperature = ask.temperature, .log_sum = 0};
  if (!is_empty) {
    of.log_sum = std::log(double{TotalSum(row.x, max, MakeExponent(ask.temperature))});
  }
  out.logsumexp[r] = static_cast<float>(of.LogSumExp());

  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  double loss = 0, logprob = 0;
  if (ask.target != kIgnoredTarget) {
    const float x = CapOne(tokens.target, ask.softcap);
    logprob = of.Logprob(x);
    loss = is_empty ? kNan : LossOf(row, ask, of, x);
  }
  out.loss[r] = static_cast<float>(loss);
  out.target_logprob[r] = static_cast<float>(logprob);
  if (out.rank != nullptr) {
    out.rank[r] = RankIsWanted(ask) ? static_cast<int32_t>(1 + tokens.before) : 0;
  }
  if (out.entropy != nullptr) {
    const bool wanted = (ask.want & kWantEntropy) != 0;
    out.entropy[r] = static_cast<float>(!wanted ? 0 : is_empty ? kNan : Entropy(row, of));
  }
  for (int32_t i = 0; i < ask.top_logprobs; ++i) {
    out.top_ids[ask.first_top_entry + i] = KeyIndex(tokens.keys[i]);
    out.top_logprobs[ask.first_top_entry + i] =
        static_cast<float>(of.Logprob(CapOne(KeyLogit(tokens.keys[i]), ask.softcap)));
  }
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    out.extra_logprobs[ask.first_extra_entry + i] =
        static_cast<float>(of.Logprob(CapOne(tokens.extra[i], ask.softcap)));
  }
}

// The first `count` tokens, whose maximum is `max`, in the memory of the thread.
inline const uint64_t* TopOf(const Row& order, int64_t count, float max,
                             LossThreadScratch& scratch) {
  if (count == 0) return nullptr;
  return TopKeys(order, count, max, -kInf, RowThreads(), scratch.list).keys;
}

// Writes the answers of row r, which has been read.
inline void Answer(const CrossEntropyArgs& args, int64_t r, const LossRow& row,
                   LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = args.rows[r];
  const Peak peak = FindPeak(row.x);
  if (HWY_UNLIKELY(peak.nan_cell >= 0)) {
    return AnswerNan(args, r, FirstNan(row.sent, peak.nan_cell));
  }
  const Row& order = row.has_order ? row.sent : row.x;
  LossTokens tokens;
  if (ask.target != kIgnoredTarget) tokens.target = Element(row.sent, ask.target);
  if (RankIsCounted(ask)) {
    const int32_t* const before = row.counted.before;
    tokens.before = std::accumulate(before, before + CellCount(row.vocab), int64_t{0});
  } else if (RankIsWanted(ask)) {
    tokens.before = CountBefore(order, tokens.target, ask.target);
  }
  const bool has_own_max = row.has_order && ask.top_logprobs > 0;
  tokens.keys =
      TopOf(order, ask.top_logprobs, has_own_max ? FindPeak(order).max : peak.max, scratch);
  float* const extra = scratch.extra.Get(ask.extra_count);
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    extra[i] = Element(row.sent, args.extra_ids[ask.first_extra + i]);
  }
  tokens.extra = extra;
  AnswerWhole(args, r, row, peak.max, tokens);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
