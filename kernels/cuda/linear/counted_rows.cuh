// Rows that are taken of a call, in their order.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_COUNTED_ROWS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_COUNTED_ROWS_CUH_

#include <cstdint>

#include "kernels/cuda/rows/reductions.cuh"

namespace logitd::cuda {

constexpr int kOrderThreads = 1024;

// Calls put(r, place) for all rows r below `rows` for which take(r), with their place among these,
// by a block of kOrderThreads. Returns how many there are.
template <class Take, class Put>
__device__ inline int64_t ForEachTaken(int64_t rows, const Take& take, const Put& put) {
  __shared__ int counts[kOrderThreads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int64_t before = 0;
  for (int64_t begin = 0; begin < rows; begin += kOrderThreads) {
    const int64_t r = begin + threadIdx.x;
    const bool taken = r < rows && take(r);
    const unsigned votes = __ballot_sync(kFullWarp, taken);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int64_t place = before + __popc(votes & ((1u << lane) - 1));
    for (int i = 0; i < kOrderThreads / 32; ++i) {
      if (i < warp) place += counts[i];
      before += counts[i];
    }
    if (taken) put(r, place);
    __syncthreads();
  }
  return before;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_COUNTED_ROWS_CUH_
