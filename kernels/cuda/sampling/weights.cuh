// The weights of a row's tokens, and the distribution they are drawn from (kernels/draw.h).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_WEIGHTS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_WEIGHTS_CUH_

#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/select.cuh"
#include "kernels/sampling_rules.h"

namespace logitd::cuda {

constexpr Key kLowestKey = 0;
// Less than every key with a logit above -inf, and more than every key of -inf.
__device__ inline Key AboveMinusInfinity() {
  return (static_cast<Key>(OrderedBits(-kInfinity)) + 1) << 32;
}

// Integer weights of logits.
struct Weigher {
  float max;
  float inv_temperature;

  __device__ Weigher(float row_max, const SampleRow& ask)
      : Weigher(row_max, ActingTemperature(ask)) {}
  __device__ Weigher(float row_max, float temperature)
      : max(row_max), inv_temperature(1.0f / temperature) {}
  __device__ uint64_t operator()(float x) const {
    if (max == kInfinity) return x == max ? uint64_t{1} << kWeightBits : 0;
    return __float2ull_rn(BeforeRounding(x));
  }
  // For a finite maximum.
  __device__ float BeforeRounding(float x) const {
    // By halves, for the difference may be twice the largest float; they are exact.
    const float exponent = __fmul_rn(__fsub_rn(0.5f * x, 0.5f * max), 2 * inv_temperature);
    return expf(exponent) * static_cast<float>(kWeightOne);  // the product is exact
  }
};

// Adds up to kLaneElements weights as Weigher rounds them, without conversions, which are slow: in
// two parts, each rounded by adding a float whose last place is one.
class WeightSum {
 public:
  __device__ void Add(float before_rounding) {
    const float high = __fmaf_rn(before_rounding, 0x1p-22f, kRound);
    high_ += __float_as_uint(high) - __float_as_uint(kRound);
    const float low = __fmaf_rn(__fsub_rn(high, kRound), -0x1p22f, before_rounding);  // exact
    low_ += static_cast<int32_t>(__float_as_uint(__fadd_rn(low, kRound)) - __float_as_uint(kRound));
  }
  __device__ uint64_t total() const {
    return (static_cast<uint64_t>(high_) << 22) + static_cast<uint64_t>(int64_t{low_});
  }

 private:
  static constexpr float kRound = 0x1.8p23f;
  uint32_t high_ = 0;
  int32_t low_ = 0;
};

// The tokens that typical_p and xtc choose of a row.
struct ChosenTokens {
  Choice choice;
  float max;
  double temperature;

  __device__ __noinline__ bool Has(Key key) const {
    return choice.Has(key, KeyLogit(key), max, temperature,
                      [=](float value) { return MakeKey(value, KeyIndex(key)); });
  }
};

// The tokens that may be drawn: chosen ones whose keys are `last` or more. -inf is not among them;
// where there is +inf, only +inf is.
struct Support {
  Key last;
  float max;
  double temperature;
  double log_sum;  // of exp((x - max) / temperature); where max is +inf, of the number of +inf
  const ChosenTokens* chosen = nullptr;  // null: all

  __device__ bool Has(float x, int i) const {
    const Key key = MakeKey(x, i);
    return x > -kInfinity && (max < kInfinity || x == kInfinity) && key >= last &&
           (chosen == nullptr || chosen->Has(key));
  }
  __device__ float Logprob(float x, int i) const {
    if (!Has(x, i)) return -kInfinity;
    return static_cast<float>(LogprobOf(x, max, temperature, log_sum));
  }
};

// The support of the row as sent, at temperature 1.
__device__ inline Support RawSupport(Stats raw) {
  Support support{kLowestKey, raw.max, 1.0, 0.0};
  if (raw.max == -kInfinity) return support;
  support.log_sum = log(static_cast<double>(raw.sum));
  const Exponential exponential(raw.max, kLog2E);
  if (exponential.plain) {  // relative to 2^-shift, which is not exactly the maximum
    support.log_sum -=
        (static_cast<double>(raw.max) * kLog2E + exponential.shift) * 0.6931471805599453;
  }
  return support;
}

// The lowest key that a filtered row keeps, whose largest logit is `peak`.
__device__ inline Key LowestKept(const SampleRow& ask, float peak) {
  return max(static_cast<Key>(OrderedBits(LeastKept(ask, peak))) << 32, AboveMinusInfinity());
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_WEIGHTS_CUH_
