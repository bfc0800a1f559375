// A row's loss as a function of its logits: the softcap, and the gradient.
#ifndef LOGITD_KERNELS_CUDA_LOSS_ROW_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_ROW_CUH_

#include <limits>
#include <type_traits>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/cell.cuh"

namespace logitd::cuda {

// What is summed: a logit itself; under a softcap its tanh, which Rate() makes up for.
struct Cap {
  float inverse;  // 1 / softcap; 0: none

  __device__ static Cap Of(float softcap) { return {softcap > 0 ? 1.0f / Clamped(softcap) : 0.0f}; }
  __device__ bool on() const { return inverse != 0; }
  __device__ float operator()(float logit) const { return on() ? Tanh(logit) : logit; }
  __device__ float Tanh(float logit) const { return tanhf(logit * inverse); }
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

// What every element of a row's gradient takes: with the value v of a logit,
// 2^(v power - shift) * weight + flat.
struct Gradient {
  float power;      // log2(e) * Cap::Rate
  float power_low;  // what rounding took from it
  float shift;      // log2(e) * logsumexp
  float shift_low;
  float weight;
  float flat;
  float at_target;  // added there
  Cap cap;

  __device__ static Gradient Of(const CrossEntropyRow& ask, float logsumexp, float upstream,
                                int64_t vocab) {
    const double exact_power = Cap::Rate(ask.softcap, ask.temperature) * kLog2EInDouble;
    const double exact_shift = logsumexp * kLog2EInDouble;
    double smoothing = ask.label_smoothing;
    if (ask.smoothing == Smoothing::kMegatron)
      smoothing = vocab == 1 ? 0.0 : smoothing * vocab / (vocab - 1.0);
    const double rate = static_cast<double>(upstream) / ask.temperature;
    Gradient g;
    g.power = static_cast<float>(exact_power);
    g.power_low = static_cast<float>(exact_power - g.power);
    g.shift = static_cast<float>(exact_shift);
    g.shift_low = static_cast<float>(exact_shift - g.shift);
    g.weight = static_cast<float>(rate * (1 + 2.0 * ask.z_loss * logsumexp));
    g.flat = static_cast<float>(-rate * smoothing / static_cast<double>(vocab));
    g.at_target = static_cast<float>(-rate * (1 - smoothing));
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
    float gradient = fmaf(p, weight, flat);
    if (is_target) gradient += at_target;
    return kCapped ? gradient * fmaf(-value, value, 1.0f) : gradient;
  }
};

template <class T>
__device__ inline T FromFloat(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two elements in a word, the first in its lower half.
template <class T>
__device__ inline uint32_t PackPair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_ROW_CUH_
