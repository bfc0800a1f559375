// The gradients of many logits of one row, in fewer steps than Gradient::At: the row's factors are
// multiplied before. Rows whose factors are extreme are left to Gradient.
#ifndef LOGITD_KERNELS_CUDA_LOSS_QUICK_GRADIENT_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_QUICK_GRADIENT_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/softcap.cuh"

namespace logitd::cuda {

// A factor that is 0, or far inside the range of fp32 also when multiplied with another.
__device__ inline bool IsModerate(float factor) {
  return factor == 0.0f || (fabsf(factor) >= 0x1p-50f && fabsf(factor) <= 0x1p50f);
}
__device__ inline bool IsModerate(const Gradient& row) {
  return fabsf(row.shift) <= 0x1p12f && IsModerate(row.weight) && IsModerate(row.scale) &&
         row.more == 1.0f;
}

// The gradient of a row without a softcap whose factors are moderate. What rounding took from log2(e)
// times logsumexp is in the factors. So is what it took from log2e_over_temperature, for a
// probability of 2^-kMiddle; how far this is off at others decides whether it serves.
struct PlainGradient {
  bool serves;
  float log2e_over_temperature;
  float shift;
  float weight;  // times upstream / temperature
  float flat;    // likewise

  __device__ static PlainGradient Of(const Gradient& row) {
    constexpr float kMiddle = 63.0f;   // smaller probabilities than 2^-126 may count as 0
    constexpr float kMostOff = 6e-7f;  // relative; with the rounding of the power below 4e-6
    const float scaled = __fmul_rn(row.weight, row.scale);
    const float low = row.log2e_over_temperature_low / row.log2e_over_temperature;
    const float off = fmaf(row.shift - kMiddle, low, -row.shift_low);  // a power of two
    return {.serves = !row.cap.on() && IsModerate(row) && kMiddle * kLn2 * fabsf(low) <= kMostOff,
            .log2e_over_temperature = row.log2e_over_temperature,
            .shift = row.shift,
            .weight = fmaf(scaled, off * kLn2, scaled),
            .flat = __fmul_rn(row.flat, row.scale)};
  }

  // The gradient of a logit that is not the target's.
  __device__ float At(float logit) const {
    return fmaf(Exp2(fmaf(logit, log2e_over_temperature, -shift)), weight, -flat);
  }
};

// The gradient of a row whose softcap is mild and whose factors are moderate. What rounding took from
// log2(e) times logsumexp is in the factors. What it took from log2e_over_temperature is left out: at
// most 4e-8 of it.
struct CappedGradient {
  bool serves;
  float log2e_over_temperature;
  float shift;
  float weight;  // times upstream / temperature
  float flat;    // likewise

  __device__ static CappedGradient Of(const Gradient& row, float softcap) {
    constexpr float kMostPower = 80.0f;  // with more the rounding is more than the header allows
    const float scaled = __fmul_rn(row.weight, row.scale);
    return {.serves = row.cap.on() && IsMildSoftcap(softcap, row.log2e_over_temperature) &&
                      row.log2e_over_temperature <= kMostPower && IsModerate(row),
            .log2e_over_temperature = row.log2e_over_temperature,
            .shift = row.shift,
            .weight = fmaf(scaled, -row.shift_low * kLn2, scaled),
            .flat = __fmul_rn(row.flat, row.scale)};
  }

  // The gradient of a logit that is not the target's. `value`: tanh(logit / softcap).
  __device__ float At(float value) const {
    const float p = Exp2(fmaf(value, log2e_over_temperature, -shift));
    return __fmul_rn(fmaf(p, weight, -flat), fmaf(-value, value, 1.0f));
  }
};

// The gradients of 16 bytes of logits: at(logit, is_target) of each. The target is element `place`
// of them, if any.
template <class T, class At>
__device__ inline uint4 GradientsOf(const uint32_t (&words)[4], int place, At at) {
  uint32_t out[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (std::is_same_v<T, float>) {
      out[w] = __float_as_uint(at(WordElement<T>(words, w), w == place));
    } else {
      out[w] = PackPair<T>(at(WordElement<T>(words, 2 * w), 2 * w == place),
                           at(WordElement<T>(words, 2 * w + 1), 2 * w + 1 == place));
    }
  }
  return {out[0], out[1], out[2], out[3]};
}

// A word that holds an element, the first where there is room for two.
template <class T>
__device__ inline uint32_t WordOf(T element) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(element);
  } else {
    return reinterpret_cast<const uint16_t&>(element);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_QUICK_GRADIENT_CUH_
