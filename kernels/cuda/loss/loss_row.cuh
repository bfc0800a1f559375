// The loss of a row: its softcap, the answers from its sums, its gradient.
#ifndef LOGITD_KERNELS_CUDA_LOSS_LOSS_ROW_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_LOSS_ROW_CUH_

#include <limits>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {

// x / y. Where y is 1, as most temperatures are, without the time of a division.
__device__ inline double Over(double x, double y) { return y == 1.0 ? x : x / y; }

// The value of a logit, which is what sums are of: the logit itself; under a softcap
// tanh(logit / softcap). OverTemperature() brings the softcap back.
struct Cap {
  float inverse;  // 1 / softcap; 0: none

  __device__ static Cap Of(float softcap) { return {softcap > 0 ? 1.0f / Clamped(softcap) : 0.0f}; }
  __device__ bool on() const { return inverse != 0; }
  __device__ float operator()(float logit) const { return on() ? Tanh(logit) : logit; }
  __device__ float Tanh(float logit) const { return tanhf(__fmul_rn(logit, inverse)); }
  // The factor from a value to x, the logit after softcap and temperature.
  __device__ static double OverTemperature(float softcap, float temperature) {
    return Over(softcap > 0 ? Clamped(softcap) : 1.0, temperature);
  }
  // Larger softcaps change no logit that matters. Smaller ones make all logits equal.
  __device__ static float Clamped(float softcap) {
    return fminf(fmaxf(softcap, 0x1p-100f), 0x1p100f);
  }
};

constexpr double kLog2EInDouble = 1.4426950408889634074;

// log2(e) `over_temperature`, for Exponential. Finite, so that 0 times it is 0. Not 0, so that -inf
// times it is -inf; it is then the smallest number, because a larger one would show in logits as
// large as the temperature.
__device__ inline float Log2EOf(double over_temperature) {
  return static_cast<float>(
      fmin(fmax(over_temperature * kLog2EInDouble, 0x1p-149), 0x1.fffffep127));
}
__device__ inline float Log2EOverTemperature(float softcap, float temperature) {
  return Log2EOf(Cap::OverTemperature(softcap, temperature));
}

constexpr double kNanInDouble = std::numeric_limits<double>::quiet_NaN();
constexpr double kLn2InDouble = 0.69314718055994530942;

// A row whose sums are known. The logarithm of its sum is kept apart from its maximum: added to it,
// it may vanish. Aligned so that what follows one in shared memory may be read 16 bytes at a time.
struct alignas(16) Outcome {
  double log_sum;           // ln of the sum of exp(x - the largest x)
  double max_x;             // the largest x
  double over_temperature;  // Cap::OverTemperature()
  float sum;                // of Stats
  float max;
  Cap cap;

  __device__ bool Nan() const { return isnan(sum); }
  __device__ bool Empty() const { return max == -kInfinity; }
  __device__ bool Certain() const { return max == kInfinity; }
  __device__ double LogSumExp() const {
    return Nan() ? sum : Empty() || Certain() ? max : max_x + log_sum;
  }
  // The product is rounded here, so that a logit has the same bits wherever this is inlined.
  __device__ double AboveMax(double value) const {
    return __dmul_rn(value, over_temperature) - max_x;
  }
  __device__ double Logprob(float logit) const {
    if (Nan()) return sum;
    if (Empty()) return -kInfinity;
    if (Certain()) return logit == max ? -log_sum : -kInfinity;
    return fmin(AboveMax(cap(logit)) - log_sum, 0.0);
  }
};

// The sums of a row's values, relative to their maximum as Stats are.
struct RowSums {
  Stats stats;
  float weighted;  // sum of e log2(e), for the e of stats.sum; where the entropy is wanted
  double total;    // sum of the values, times kTotalUnit; where there is smoothing
  int32_t before;  // tokens before the target; where the rank is wanted
};
constexpr float kTotalUnit = 0x1p-10f;  // keeps sums of the largest logits finite

// The share of a row's label smoothing that goes to all tokens alike.
__device__ inline double SmoothingOf(const CrossEntropyRow& ask, int64_t vocab) {
  const double smoothing = ask.label_smoothing;
  if (smoothing == 0 || ask.smoothing != Smoothing::kMegatron) return smoothing;
  return vocab == 1 ? 0.0 : smoothing * static_cast<double>(vocab) / static_cast<double>(vocab - 1);
}

// The loss of a row that is counted and has no NaN.
__device__ inline double LossOf(const CrossEntropyRow& ask, int64_t vocab, const Outcome& outcome,
                                double total, double logprob) {
  const double smoothing = SmoothingOf(ask, vocab);
  const double z_loss = ask.z_loss;
  if (outcome.Empty()) return kNanInDouble;
  double loss = 0 - logprob;  // no -0
  if (outcome.Certain()) return smoothing == 0 && z_loss == 0 ? loss : kInfinity;
  if (smoothing != 0) {
    const double mean = total / kTotalUnit / static_cast<double>(vocab);
    // The weights may have either sign: no sum of infinities.
    loss = mean == -kInfinity
               ? kInfinity
               : (1 - smoothing) * loss + smoothing * (outcome.log_sum - outcome.AboveMax(mean));
  }
  if (z_loss != 0) loss += z_loss * outcome.LogSumExp() * outcome.LogSumExp();
  return loss;
}

// What a row's statistics say of it; `log_of_sum` is the logarithm of their sum.
__device__ inline Outcome OutcomeOf(const CrossEntropyRow& ask, Stats stats, double log_of_sum) {
  const double over_temperature = Cap::OverTemperature(ask.softcap, ask.temperature);
  const float log2e_over_temperature = Log2EOf(over_temperature);
  const Exponential exponential(stats.max, log2e_over_temperature);
  // A sum by plain exponentials is relative to 2^-shift, which is not exactly the maximum.
  const double off = exponential.plain
                         ? kLn2InDouble * fmaf(stats.max, log2e_over_temperature, exponential.shift)
                         : 0.0;
  return {.log_sum = log_of_sum - off,
          .max_x = __dmul_rn(stats.max, over_temperature),
          .over_temperature = over_temperature,
          .sum = stats.sum,
          .max = stats.max,
          .cap = Cap::Of(ask.softcap)};
}

// Writes the answers of row r except tops and extras, by one lane. `first_nan` is used where the
// sums are NaN.
__device__ inline void WriteAnswers(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                    int64_t r, const RowSums& sums, double log_of_sum,
                                    const Outcome& outcome, float target_logit, int32_t first_nan) {
  if (IsLeftOut(args, ask)) return AnswerLeftOut(args.answers, r);
  const float sum = sums.stats.sum;
  RowStatus status{RowCode::kOk, -1};
  if (outcome.Nan()) {
    status = {RowCode::kNanLogit, first_nan};
  } else if (outcome.Empty()) {
    status.code = RowCode::kEmptySupport;
  }
  const bool counted = ask.target >= 0;
  double logprob = 0.0;
  double loss = 0.0;
  if (counted) {
    logprob = outcome.Logprob(target_logit);
    loss = LossOf(ask, args.logits.cols, outcome, sums.total, logprob);
  }
  if (outcome.Nan()) loss = logprob = sum;
  const CrossEntropyAnswers& to = args.answers;
  to.loss[r] = static_cast<float>(loss);
  to.logsumexp[r] = static_cast<float>(outcome.LogSumExp());
  to.target_logprob[r] = static_cast<float>(logprob);
  to.status[r] = status;
  const bool ranked = counted && (ask.want & kWantRank) != 0 && !outcome.Nan();
  if (to.rank != nullptr) to.rank[r] = ranked ? 1 + sums.before : 0;
  if (to.entropy == nullptr) return;
  float entropy = 0.0f;
  if ((ask.want & kWantEntropy) != 0) {
    const double exact =
        outcome.Empty() ? kNanInDouble : log_of_sum - kLn2InDouble * sums.weighted / sum;
    // All terms have one sign: an entropy below 0 comes from rounding.
    entropy = exact < 0 ? 0.0f : static_cast<float>(exact);
  }
  to.entropy[r] = entropy;
}

// Both, by one warp.
__device__ inline Outcome Conclude(const CrossEntropyArgs& args, int64_t r, const RowSums& sums,
                                   float target_logit, int32_t first_nan, int lane) {
  const double log_of_sum = log(static_cast<double>(sums.stats.sum));
  const CrossEntropyRow& ask = args.rows[r];
  const Outcome outcome = OutcomeOf(ask, sums.stats, log_of_sum);
  if (lane == 0) WriteAnswers(args, ask, r, sums, log_of_sum, outcome, target_logit, first_nan);
  return outcome;
}

// The gradient of a row's logits, from what all its elements share. With the value v of a logit it
// is ((2^(v log2e_over_temperature - shift) * weight - flat - [target] hit) * scale) * more.
struct Gradient {
  float log2e_over_temperature;      // Log2EOverTemperature()
  float log2e_over_temperature_low;  // what rounding took from it
  float shift;                       // log2(e) * logsumexp
  float shift_low;
  float weight;  // 1 + 2 z_loss logsumexp
  float flat;
  float hit;
  float scale;  // upstream / temperature is scale * more: it may be more than a float holds where
  float more;   // the other factor is small
  float z_loss;
  Cap cap;

  __device__ static Gradient Of(const CrossEntropyRow& ask, float logsumexp, float upstream,
                                int64_t vocab) {
    Gradient g = WithoutSum(ask, upstream, vocab);
    g.SetLogSumExp(logsumexp);
    return g;
  }
  // What does not depend on logsumexp; SetLogSumExp makes the rest.
  __device__ static Gradient WithoutSum(const CrossEntropyRow& ask, float upstream, int64_t vocab) {
    const double exact_over_temperature =
        Cap::OverTemperature(ask.softcap, ask.temperature) * kLog2EInDouble;
    const double smoothing = SmoothingOf(ask, vocab);
    const double scale = Over(upstream, ask.temperature);
    Gradient g;
    g.log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature);
    const double low = exact_over_temperature - g.log2e_over_temperature;
    g.log2e_over_temperature_low =
        fabs(low) < g.log2e_over_temperature ? static_cast<float>(low) : 0.0f;
    g.flat = smoothing == 0 ? 0.0f : static_cast<float>(smoothing / static_cast<double>(vocab));
    g.hit = static_cast<float>(1 - smoothing);
    g.more = fabs(scale) > 1e30 ? 0x1p64f : 1.0f;
    g.scale = static_cast<float>(Over(scale, g.more));
    g.z_loss = ask.z_loss;
    g.cap = Cap::Of(ask.softcap);
    return g;
  }
  __device__ void SetLogSumExp(float logsumexp) {
    const double exact_shift = logsumexp * kLog2EInDouble;
    shift = static_cast<float>(exact_shift);
    shift_low = static_cast<float>(exact_shift - shift);
    weight = isfinite(logsumexp) ? static_cast<float>(1 + 2.0 * z_loss * logsumexp)
                                 : std::numeric_limits<float>::quiet_NaN();
  }

  template <bool kCapped>
  __device__ float At(float logit, bool is_target) const {
    const float value = kCapped ? cap.Tanh(logit) : logit;
    // The low parts are a factor of their own: added, they would be rounded with the large
    // exponent.
    const float low = fmaf(value, log2e_over_temperature_low, -shift_low);
    const float p =
        Exp2(fmaf(value, log2e_over_temperature, -shift)) * Exp2(fminf(fmaxf(low, -64.0f), 64.0f));
    float gradient = fmaf(p, weight, -flat);
    if (is_target) gradient -= hit;
    gradient = __fmul_rn(__fmul_rn(gradient, scale), more);
    return kCapped ? gradient * fmaf(-value, value, 1.0f) : gradient;
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_LOSS_ROW_CUH_
