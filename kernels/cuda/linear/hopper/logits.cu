// Logits of hidden states on Hopper: up to 128 rows by hopper/few_rows.cu, more by the product of
// hopper/middle_rows.cuh with an epilogue that applies scale, bias and softcap and writes fp32.
//
// Cost of more than 128 rows: reads vocab * hidden * 2 bytes, writes rows * vocab * 4. Limited by
// HBM up to about 250 rows, then by the tensor cores. Measured: middle_rows.cuh.
// Tried and dropped: stores of 16 bytes, by an exchange of pairs between threads (64 rows 10 us
// more).
#include <cstddef>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/hopper/few_rows.h"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/hopper/middle_rows.cuh"
#include "kernels/cuda/linear/hopper/write_tokens.cuh"

namespace logitd::cuda::hopper {

template <int kRows>
struct MiddleLogits {
  using Params = LogitsParams;
  static constexpr int kSharedBytes = 0;
  const Params& p;
  const int vocab;

  __device__ MiddleLogits(const Params& params, int tokens, std::byte*)
      : p(params), vocab(tokens) {}
  __device__ void Begin(const MiddleUnit&) {}
  __device__ void Take(MiddleSums<kRows>& sums, const MiddleUnit& unit, int token, int lane) const {
#pragma unroll
    for (int i = 0; i < kGroupUnits; ++i) {
      WriteTokens<kRows>(p, sums[i], unit.row, unit.rows,
                         unit.tile * kTile + token + i * kUnitTokens, vocab, lane);
    }
  }
};

bool KernelsRun(const Scratch& scratch) {
  return CanRun<&MiddleRowsKernel<MiddleShape<__nv_bfloat16, kMostMiddleBlockRows, MiddleLogits>>>(
      scratch);
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
    return LaunchMiddleRows<T, MiddleLogits>(hidden, head.weight, p, scratch, stream);
  });
}

}  // namespace logitd::cuda::hopper
