// exp((x - max) / temperature) by powers of two: what every softmax statistic is made of.
#ifndef LOGITD_KERNELS_CUDA_ROWS_EXPONENTIAL_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_EXPONENTIAL_CUH_

#include "kernels/cuda/element.cuh"

namespace logitd::cuda {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;

// 2^v, relative error under 2^-22; results below 2^-126 are 0.
__device__ inline float Exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// exp((x - max) / temperature), for any max, also huge and infinite ones.
struct Exponential {
  float max;
  float log2e_over_temperature;
  // -max * log2e_over_temperature, rounded. Plain sums are relative to 2^-shift, which is not
  // exactly the maximum: AtMax() is what an element at the maximum adds to them.
  float shift;
  bool plain;  // one multiply-add per element is exact enough, and 2^-shift is near the maximum

  Exponential() = default;
  __device__ Exponential(float row_max, float log2e_over_row_temperature) {
    max = row_max;
    log2e_over_temperature = log2e_over_row_temperature;
    shift = -__fmul_rn(row_max, log2e_over_row_temperature);
    plain = fabsf(shift) < 0x1p24f;  // rounded by at most a half
  }

  __device__ float Plain(float x) const { return Exp2(fmaf(x, log2e_over_temperature, shift)); }
  __device__ float Careful(float x) const {
    if (x == max) return max == -kInfinity ? 0.0f : 1.0f;
    return Exp2((x - max) * log2e_over_temperature);
  }
  __device__ float operator()(float x) const { return plain ? Plain(x) : Careful(x); }
  __device__ float AtMax() const {
    return plain ? exp2f(fmaf(max, log2e_over_temperature, shift)) : 1.0f;
  }

  // The factor that turns a sum relative to another maximum, <= this one, into a sum relative to
  // this one.
  __device__ float Factor(float other_max) const {
    if (plain) return Exp2(__fmul_rn(other_max, log2e_over_temperature) + shift);
    const Exponential other(other_max, log2e_over_temperature);
    const float at_other =
        other.plain ? Exp2(-fmaf(other_max, log2e_over_temperature, other.shift)) : 1.0f;
    return Careful(other_max) * at_other;
  }
  // Natural logarithm of a sum relative to this maximum.
  __device__ float LogSum(float sum, float temperature) const {
    return plain ? (log2f(sum) - shift) * kLn2 : max / temperature + logf(sum);
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_EXPONENTIAL_CUH_
