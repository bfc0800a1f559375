// Logits of hidden states on Hopper: up to 128 rows by hopper/few_rows.cu, more by the product of
// hopper/product.cuh with an epilogue that applies scale, bias and softcap and writes fp32.
//
// Cost of more than 128 rows: reads vocab * hidden * 2 bytes, writes rows * vocab * 4. Limited by the
// tensor cores. Measured on an H200 (bench/results/h200/kernels.json), bf16, 128256 x 4096, with
// sample after it: 256 rows 0.537 ms; on an H100 (bench/results/h100/few_rows.json) 0.577 ms.
// Tried and dropped: stores of 16 bytes, by an exchange of pairs between threads (64 rows 10 us
// more).
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/hopper/few_rows.h"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/linear/logit.cuh"

namespace logitd::cuda::hopper {

// Only the last tile of a vocabulary may be short, so a shard that others follow writes only its own
// logits.
static_assert(kVocabCell % kTile == 0);

struct LogitsEpilogue {
  using Params = LogitsParams;
  const Params& p;
  const int vocab;
  const bool has_upper;
  const bool has_lower;
  float* upper;

  __device__ LogitsEpilogue(const Params& params, const ProductParams& product,
                            const SumsPlace& place)
      : p(params),
        vocab(product.vocab),
        has_upper(place.row < product.rows),
        has_lower(place.row + 8 < product.rows),
        upper(params.logits + int64_t{place.row} * params.stride) {}

  __device__ void Take(float (&acc)[kThreadSums], int first, int lane) {
    float* lower = upper + 8 * p.stride;
#pragma unroll
    for (int i = 0; i < kRowSums; i += 2) {
      const int token = first + TokenOf(lane, i);
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

  // The i-th logit of a row, and the next.
  template <int half>
  __device__ void Write(const float (&acc)[kThreadSums], int i, const float (&bias)[2],
                        float* to) const {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      x[j] = LogitOf(acc[SumOf(half, i + j)], p.scale, bias[j], p.softcap);
    *reinterpret_cast<float2*>(to) = {x[0], x[1]};
  }
};

bool KernelsRun(const Scratch& scratch) {
  return CanRun<&ProductKernel<__nv_bfloat16, Rows::kMany, LogitsEpilogue>>(scratch);
}

cudaError_t Logits(const TensorView& hidden, const HeadView& head, float* logits,
                   int64_t logits_stride, const Scratch& scratch, cudaStream_t stream) {
  const LogitsParams p{.bias = head.bias,
                       .logits = logits,
                       .stride = logits_stride,
                       .scale = head.scale,
                       .softcap = head.softcap};
  if (hidden.rows <= kFewRows) return FewRowsLogits(hidden, head.weight, p, scratch, stream);
  return Visit16Bit(head.weight.dtype, [&]<class T>() {
    return LaunchRows<T, Rows::kMany, LogitsEpilogue>(hidden, head.weight, nullptr, p, scratch,
                                                      stream);
  });
}

}  // namespace logitd::cuda::hopper
