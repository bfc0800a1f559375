// A row's loss: its softcap, what its sums come to, its gradient.
#ifndef LOGITD_KERNELS_CUDA_LOSS_LOSS_ROW_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_LOSS_ROW_CUH_

#include <limits>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {

// What is summed: a logit itself; under a softcap its tanh, which Rate() makes up for.
struct Cap {
  float inverse;  // 1 / softcap; 0: none

  __device__ static Cap Of(float softcap) { return {softcap > 0 ? 1.0f / Clamped(softcap) : 0.0f}; }
  __device__ bool on() const { return inverse != 0; }
  __device__ float operator()(float logit) const { return on() ? Tanh(logit) : logit; }
  __device__ float Tanh(float logit) const { return tanhf(__fmul_rn(logit, inverse)); }
  // What makes a value an x, the logit after softcap and temperature.
  __device__ static double Rate(float softcap, float temperature) {
    return (softcap > 0 ? Clamped(softcap) : 1.0) / temperature;
  }
  // Beyond these the softcap changes no logit that matters, or leaves none apart.
  __device__ static float Clamped(float softcap) {
    return fminf(fmaxf(softcap, 0x1p-100f), 0x1p100f);
  }
};

constexpr double kLog2EInDouble = 1.4426950408889634074;

// Rate() in powers of two, for Exponential: finite, so that 0 times it is 0, and not 0, so that
// -inf times it is -inf. The least of them: more would show in logits as large as the temperature.
__device__ inline float PowerOf(double rate) {
  return static_cast<float>(fmin(fmax(rate * kLog2EInDouble, 0x1p-149), 0x1.fffffep127));
}

constexpr double kNanInDouble = std::numeric_limits<double>::quiet_NaN();
constexpr double kLn2InDouble = 0.69314718055994530942;

// A row whose sums are known. The logarithm of its sum is kept apart from its maximum, beside which
// it may vanish. Aligned so that what follows one in shared memory may be read 16 bytes at a time.
struct alignas(16) Outcome {
  double log_sum;  // ln of the sum of exp(x - the largest x)
  double max_x;    // the largest x
  double rate;     // Cap::Rate
  float sum;       // of Stats
  float max;
  Cap cap;

  __device__ bool Nan() const { return isnan(sum); }
  __device__ bool Empty() const { return max == -kInfinity; }
  __device__ bool Certain() const { return max == kInfinity; }
  __device__ double LogSumExp() const {
    return Nan() ? sum : Empty() || Certain() ? max : max_x + log_sum;
  }
  // Rounded where it is written, so that the same logit has the same bits wherever this is inlined.
  __device__ double AboveMax(double value) const { return __dmul_rn(value, rate) - max_x; }
  __device__ double Logprob(float logit) const {
    if (Nan()) return sum;
    if (Empty()) return -kInfinity;
    if (Certain()) return logit == max ? -log_sum : -kInfinity;
    return fmin(AboveMax(cap(logit)) - log_sum, 0.0);
  }
};

// A row's sums, of its values: relative to their maximum as Stats are.
struct RowSums {
  Stats stats;
  float weighted;  // sum of e log2(e), for the e of stats.sum; where the entropy is wanted
  double total;    // sum of the values, times kTotalUnit; where there is smoothing
  int32_t before;  // tokens before the target; where the rank is wanted
};
constexpr float kTotalUnit = 0x1p-10f;  // keeps sums of the largest logits finite

// Writes what row r is asked beside tops and extras, by one warp. `first_nan` is looked at where
// the sums are NaN.
__device__ inline Outcome Conclude(const CrossEntropyArgs& args, int64_t r, const RowSums& sums,
                                   float target_logit, int32_t first_nan, int lane) {
  const CrossEntropyRow& ask = args.rows[r];
  const int64_t vocab = args.logits.cols;
  const Stats stats = sums.stats;
  const double rate = Cap::Rate(ask.softcap, ask.temperature);
  const float c = PowerOf(rate);
  const Exponential exponential(stats.max, c);
  const double log_of_sum = log(static_cast<double>(stats.sum));
  // A sum by plain exponentials is relative to 2^-shift, not quite to the maximum.
  const double off = exponential.plain ? kLn2InDouble * fmaf(stats.max, c, exponential.shift) : 0.0;
  const Outcome outcome{.log_sum = log_of_sum - off,
                        .max_x = __dmul_rn(stats.max, rate),
                        .rate = rate,
                        .sum = stats.sum,
                        .max = stats.max,
                        .cap = Cap::Of(ask.softcap)};
  RowStatus status{RowCode::kOk, -1};
  if (outcome.Nan()) {
    status = {RowCode::kNanLogit, first_nan};
  } else if (outcome.Empty()) {
    status.code = RowCode::kEmptySupport;
  }
  double entropy = log_of_sum - kLn2InDouble * sums.weighted / stats.sum;

  const bool counted = ask.target >= 0;
  double logprob = 0.0;
  double loss = 0.0;
  if (counted) {
    logprob = outcome.Logprob(target_logit);
    double smoothing = ask.label_smoothing;
    if (ask.smoothing == Smoothing::kMegatron)
      smoothing = vocab == 1
                      ? 0.0
                      : smoothing * static_cast<double>(vocab) / static_cast<double>(vocab - 1);
    const double z_loss = ask.z_loss;
    if (outcome.Empty()) {
      loss = kNanInDouble;
    } else if (outcome.Certain()) {
      loss = smoothing == 0 && z_loss == 0 ? 0 - logprob : kInfinity;
    } else {
      loss = 0 - logprob;  // no -0
      if (smoothing != 0) {
        const double mean = sums.total / kTotalUnit / static_cast<double>(vocab);
        // The weights may have either sign: no sum of infinities.
        loss = mean == -kInfinity ? kInfinity
                                  : (1 - smoothing) * loss +
                                        smoothing * (outcome.log_sum - outcome.AboveMax(mean));
      }
      if (z_loss != 0) loss += z_loss * outcome.LogSumExp() * outcome.LogSumExp();
    }
  }
  if (outcome.Nan()) loss = logprob = stats.sum;
  if (outcome.Empty()) entropy = kNanInDouble;
  if (lane == 0) {
    const CrossEntropyAnswers& to = args.answers;
    to.loss[r] = static_cast<float>(loss);
    to.logsumexp[r] = static_cast<float>(outcome.LogSumExp());
    to.target_logprob[r] = static_cast<float>(logprob);
    to.status[r] = status;
    const bool ranked = counted && (ask.want & kWantRank) != 0 && !outcome.Nan();
    if (to.rank != nullptr) to.rank[r] = ranked ? 1 + sums.before : 0;
    // A sum of terms of one sign: below 0 by rounding alone.
    if (to.entropy != nullptr)
      to.entropy[r] = (ask.want & kWantEntropy) == 0 ? 0.0f
                      : entropy < 0                  ? 0.0f
                                                     : static_cast<float>(entropy);
  }
  return outcome;
}

// What every element of a row's gradient takes: with the value v of a logit,
// ((2^(v power - shift) * weight - flat - [target] hit) * scale) * more.
struct Gradient {
  float power;      // PowerOf
  float power_low;  // what rounding took from it
  float shift;      // log2(e) * logsumexp
  float shift_low;
  float weight;  // 1 + 2 z_loss logsumexp
  float flat;
  float hit;
  float scale;  // upstream / temperature, in two factors: it may be more than a float holds where
  float more;   // what it multiplies is small
  Cap cap;

  __device__ static Gradient Of(const CrossEntropyRow& ask, float logsumexp, float upstream,
                                int64_t vocab) {
    const double exact_power = Cap::Rate(ask.softcap, ask.temperature) * kLog2EInDouble;
    const double exact_shift = logsumexp * kLog2EInDouble;
    double smoothing = ask.label_smoothing;
    if (ask.smoothing == Smoothing::kMegatron)
      smoothing = vocab == 1
                      ? 0.0
                      : smoothing * static_cast<double>(vocab) / static_cast<double>(vocab - 1);
    const double scale = static_cast<double>(upstream) / ask.temperature;
    Gradient g;
    g.power = PowerOf(Cap::Rate(ask.softcap, ask.temperature));
    const double power_low = exact_power - g.power;
    g.power_low = fabs(power_low) < g.power ? static_cast<float>(power_low) : 0.0f;
    g.shift = static_cast<float>(exact_shift);
    g.shift_low = static_cast<float>(exact_shift - g.shift);
    g.weight = static_cast<float>(1 + 2.0 * ask.z_loss * logsumexp);
    g.flat = static_cast<float>(smoothing / static_cast<double>(vocab));
    g.hit = static_cast<float>(1 - smoothing);
    g.more = fabs(scale) > 1e30 ? 0x1p64f : 1.0f;
    g.scale = static_cast<float>(scale / g.more);
    g.cap = Cap::Of(ask.softcap);
    if (!isfinite(logsumexp)) g.weight = std::numeric_limits<float>::quiet_NaN();
    return g;
  }

  template <bool kCapped>
  __device__ float At(float logit, bool is_target) const {
    const float value = kCapped ? cap.Tanh(logit) : logit;
    // The low parts by a factor of their own: added, they would cost a rounding of the large power.
    const float low = fmaf(value, power_low, -shift_low);
    const float p = Exp2(fmaf(value, power, -shift)) * Exp2(fminf(fmaxf(low, -64.0f), 64.0f));
    float gradient = fmaf(p, weight, -flat);
    if (is_target) gradient -= hit;
    gradient = __fmul_rn(__fmul_rn(gradient, scale), more);
    return kCapped ? gradient * fmaf(-value, value, 1.0f) : gradient;
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_LOSS_ROW_CUH_
