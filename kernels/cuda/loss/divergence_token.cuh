// A token of two rows, beside each other: ln p, ln q, and how far they are above their mixture.
#ifndef LOGITD_KERNELS_CUDA_LOSS_DIVERGENCE_TOKEN_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_DIVERGENCE_TOKEN_CUH_

#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/exponential.cuh"
#include "kernels/divergence_mixture.h"
#include "kernels/divergence_sums.h"

namespace logitd::cuda {

// ln p in units of ln 2: high + low. -inf where the row has no such token.
struct Logprob {
  float high, low;

  // 0 below 2^-126.
  __device__ float P() const { return Exp2(high) * fmaf(low, kLn2, 1.0f); }
  // ln p - ln q; neither or one of them is -inf.
  __device__ float Above(const Logprob& q) const {
    return ((high - q.high) + (low - q.low)) * kLn2;
  }
};

// Makes the Logprob of each of a row's logits.
struct RowLogprobs {
  float max;
  float scale, scale_low;  // log2(e) / temperature
  float log, log_low;      // log2 of the sum

  __device__ static RowLogprobs Of(float max, float temperature, double log_sum) {
    const double scale = kLog2EInDouble / ActingTemperature(temperature);
    const double log = kLog2EInDouble * log_sum;
    RowLogprobs row{.max = max, .scale = static_cast<float>(scale), .log = static_cast<float>(log)};
    row.scale_low = static_cast<float>(scale - row.scale);
    row.log_low = static_cast<float>(log - row.log);
    return row;
  }

  __device__ Logprob At(float x) const {
    constexpr float kLeastExact = -0x1p100f;
    constexpr float kLeast = -0x1.fffffep127f;
    if (x == -kInfinity) return {-kInfinity, 0.0f};
    const float below = x == max ? 0.0f : x - max;
    const float high = fmaf(below, scale, -log);
    if (!(high >= kLeastExact))  // beside a certain token all others have nothing
      return {max == kInfinity ? -kInfinity : fmaxf(high, kLeast), 0.0f};
    const float back = below - x;  // what rounding took from `below` is found as in a two-sum
    const float rest = below == 0.0f ? 0.0f : (x - (below - back)) + (-max - back);
    return {high, fmaf(below, scale_low, fmaf(rest, scale, -log_low))};
  }
};

// ln p - ln m and ln q - ln m of a token that one of the two has.
struct AboveMixture {
  float p, q;
};
struct Mixture {
  float beta, less;  // less: 1 - beta

  __device__ AboveMixture At(const Logprob& p, const Logprob& q) const {
    const auto token = MixtureToken<float>::Of(p.Above(q), beta, less);
    const float above = token.IsNear() ? -log1pf(token.share * expm1f(token.below))
                                       : -logf(fmaf(token.share, expf(token.below), token.rest));
    return {token.OfP(above), token.OfQ(above)};
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_DIVERGENCE_TOKEN_CUH_
