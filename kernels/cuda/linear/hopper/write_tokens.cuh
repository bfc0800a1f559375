// Logits from sums that have tokens on wgmma's side of 64.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_WRITE_TOKENS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_WRITE_TOKENS_CUH_

#include "kernels/cuda/linear/hopper/few_rows.h"
#include "kernels/cuda/linear/logit.cuh"

namespace logitd::cuda::hopper {

template <bool kCapped, int kRows>
__device__ inline void WriteSums(const LogitsParams& p, const float (&sums)[kRows / 2],
                                 int64_t first_row, int rows, int token, int last, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half, token += 8) {
    if (token >= last) return;
    const float bias = p.bias == nullptr ? 0.0f : p.bias[token];
    float* to = p.logits + (first_row + lane % 4 * 2) * p.stride + token;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j, to += 8 * p.stride) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * j + lane % 4 * 2 + i >= rows) break;
        to[i * p.stride] =
            LogitOf(sums[4 * j + 2 * half + i], p.scale, bias, kCapped ? p.softcap : 0.0f);
      }
    }
  }
}

// Writes the logits of 64 tokens by `rows` rows from `first_row` on. The thread has token lane / 4
// of its warp's 16, which is `token`, and the one 8 after it, by rows 8 j + lane % 4 * 2 and the
// next, at [4 j + 2 * (second token) + (next row)]. Tokens from `last` on are not written.
template <int kRows>
__device__ inline void WriteTokens(const LogitsParams& p, const float (&sums)[kRows / 2],
                                   int64_t first_row, int rows, int token, int last, int lane) {
  if (p.softcap > 0) {
    WriteSums<true, kRows>(p, sums, first_row, rows, token, last, lane);
  } else {
    WriteSums<false, kRows>(p, sums, first_row, rows, token, last, lane);
  }
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_WRITE_TOKENS_CUH_
