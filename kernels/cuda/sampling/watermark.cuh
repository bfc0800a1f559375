// sample, the watermark: the token with the largest score of the row's key (kernels/watermark.h).
// Only rows with a watermark come here, after their filters.
//
// Cost: a block of Philox for each token of the support; logarithms only for those that may win. It
// reads the row once more, unless its sorted list holds what the filters leave.
// Rows of 131072 f32, floor one read: 64 rows by their list 38 us (floor 7.4, 19%), unfiltered 229;
// 512 rows unfiltered 734 (floor 59, 8%; without a watermark 71).
// Measured: bench/results/h200/sample_b5435172.json.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_WATERMARK_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_WATERMARK_CUH_

#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"
#include "kernels/watermark.h"

namespace logitd::cuda {

// The marked token of the support, which is of the row. The row's first `listed` tokens are in
// s.sorted. Called by all threads; uses the memory of bins.
template <class Row>
__device__ __noinline__ int DrawMarked(const SampleArgs& args, const SampleRow& ask, Row row,
                                       Support support, int listed) {
  DrawShared& s = Finish().draw;
  const uint64_t state = StateOfMark(ask, args.history);
  MarkedToken best{-static_cast<double>(kInfinity), row.vocab};
  const auto race = [&](float x, int i) {
    if (!support.Has(x, i)) return;
    const double above = -Surprise(x, support.max, support.temperature);
    const uint64_t bits = WatermarkBits(state, i);
    if (MarkBound(above, bits) < best.score) return;
    const MarkedToken token{MarkScore(above, bits), i};
    if (token.ComesBefore(best)) best = token;
  };
  if (AreListed(row.vocab, listed, support.last, s)) {
    for (int i = threadIdx.x; i < listed; i += blockDim.x)
      race(KeyLogit(s.sorted[i]), KeyIndex(s.sorted[i]));
  } else {
    row.EachCell([&](const auto& x, int first) { EachOfCell(x, first, race); });
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const MarkedToken other{__shfl_xor_sync(kFullWarp, best.score, half),
                            __shfl_xor_sync(kFullWarp, best.token, half)};
    if (other.ComesBefore(best)) best = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    s.value_of_warp[threadIdx.x / 32] = best.score;
    s.index_of_warp[threadIdx.x / 32] = best.token;
  }
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) {
    const MarkedToken other{s.value_of_warp[warp], s.index_of_warp[warp]};
    if (other.ComesBefore(best)) best = other;
  }
  __syncthreads();  // before the memory is used for something else
  return best.token;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_WATERMARK_CUH_
