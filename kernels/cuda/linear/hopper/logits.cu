// Logits of hidden states on Hopper: the product of hopper/product.cuh, its epilogue scale, bias
// and softcap, and a write of fp32.
//
// Cost: reads vocab * hidden * 2 bytes once, writes rows * vocab * 4; to 128 rows limited by HBM
// (floor at 128256 x 4096: 0.226 ms at 4.66 TB/s), beyond them by the tensor cores. Of hidden
// states, which come from L2 for every 1024 tokens (512 above 64 rows), a cluster's blocks bring
// half each.
// Measured (bench/results/h200/kernels.json), bf16, 128256 x 4096, with sample behind it: 1 row
// 0.284 ms, 64 rows 0.317, 256 rows 0.530. Tried and dropped: stores of 16 bytes, by an exchange of
// pairs between threads (64 rows 10 us more).
#include "kernels/cuda/linear/hopper/logits.h"

#include "kernels/cuda/linear/hopper/product.cuh"

namespace logitd::cuda {
namespace {

struct LogitsParams {
  const float* bias;  // [vocab], or null
  float* logits;
  int64_t stride;  // even
  float scale;
  float softcap;
};

struct LogitsEpilogue {
  using Params = LogitsParams;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Params& p;
  const int vocab;
  const bool has_upper;
  const bool has_lower;
  float* upper;

  __device__ LogitsEpilogue(const Params& params, const hopper::ProductParams& product, int64_t row,
                            int /*lane*/)
      : p(params),
        vocab(product.vocab),
        has_upper(row < product.rows),
        has_lower(row + 8 < product.rows),
        upper(params.logits + row * params.stride) {}

  __device__ void Take(float (&acc)[hopper::kSums], int first, int lane) {
    float* lower = upper + 8 * p.stride;
#pragma unroll
    for (int i = 0; i < hopper::kRowSums; i += 2) {
      const int token = first + hopper::TokenOf(lane, i);
      if (token >= vocab) break;
      float bias[2] = {};
      if (p.bias != nullptr) {
        bias[0] = p.bias[token];
        if (token + 1 < vocab) bias[1] = p.bias[token + 1];
      }
      if (has_upper) Write<0>(acc, i, bias, upper + token);
      if (has_lower) Write<1>(acc, i, bias, lower + token);
    }
  }

  __device__ void Leave(int /*lane*/) {}

  // The i-th logit of a row, and the next.
  template <int half>
  __device__ void Write(const float (&acc)[hopper::kSums], int i, const float (&bias)[2],
                        float* to) const {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[j] = fmaf(p.scale, acc[hopper::SumOf(half, i + j)], bias[j]);
      if (p.softcap > 0) x[j] = p.softcap * tanhf(x[j] / p.softcap);
    }
    *reinterpret_cast<float2*>(to) = {x[0], x[1]};
  }
#endif
};

template <class T>
cudaError_t Launch(const TensorView& hidden, const HeadView& head, const LogitsParams& p,
                   const Scratch& scratch, cudaStream_t stream) {
  const auto launch = hidden.rows <= hopper::Rows64::kClusterRows
                          ? &hopper::LaunchProduct<T, hopper::Rows64, LogitsEpilogue>
                      : hidden.rows <= hopper::Rows128::kClusterRows
                          ? &hopper::LaunchProduct<T, hopper::Rows128, LogitsEpilogue>
                          : &hopper::LaunchProduct<T, hopper::ManyRows, LogitsEpilogue>;
  return launch(hidden, head.weight, nullptr, p, scratch, stream);
}

}  // namespace

bool HopperLogitsServes(const HeadView& head, const Scratch& scratch) {
  return head.weight.dtype != DType::kF32 &&
         hopper::CanRun<&hopper::ProductKernel<__nv_bfloat16, hopper::ManyRows, LogitsEpilogue>>(
             scratch);
}

cudaError_t HopperLogits(const TensorView& hidden, const HeadView& head, float* logits,
                         int64_t logits_stride, const Scratch& scratch, cudaStream_t stream) {
  const LogitsParams p{.bias = head.bias,
                       .logits = logits,
                       .stride = logits_stride,
                       .scale = head.scale,
                       .softcap = head.softcap};
  return head.weight.dtype == DType::kF16 ? Launch<__half>(hidden, head, p, scratch, stream)
                                          : Launch<__nv_bfloat16>(hidden, head, p, scratch, stream);
}

}  // namespace logitd::cuda
