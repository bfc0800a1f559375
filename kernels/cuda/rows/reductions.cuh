// Sums, maxima, prefixes and sorts over the lanes of a warp. Every call is made by the whole warp.
#ifndef LOGITD_KERNELS_CUDA_ROWS_REDUCTIONS_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_REDUCTIONS_CUH_

#include <cstdint>

namespace logitd::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Every lane gets the same bits: the butterfly adds the same pairs everywhere.
template <class V>
__device__ inline V WarpSum(V v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}

__device__ inline float WarpMax(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}
__device__ inline uint64_t WarpMax(uint64_t v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v = max(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}
__device__ inline uint64_t WarpMin(uint64_t v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v = min(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}
__device__ inline uint32_t WarpMax(uint32_t v) { return __reduce_max_sync(kFullWarp, v); }
__device__ inline uint32_t WarpMin(uint32_t v) { return __reduce_min_sync(kFullWarp, v); }

// n / d of small integers, exact. A division of integers is 20 instructions, which a block that
// runs them once waits for.
__device__ inline int SmallQuotient(int n, int d) {
  return static_cast<int>(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d)));
}

// The sum of the values of the lanes up to this one, its own included.
template <class V>
__device__ inline V WarpPrefix(V v, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const V other = __shfl_up_sync(kFullWarp, v, offset);
    if (lane >= offset) v += other;
  }
  return v;
}

// Reserves places for `mine` items of every lane by raising `counter` in shared memory. Returns the
// lane's first place. One atomic a warp.
__device__ inline int WarpReserve(int* counter, int mine, int lane) {
  const int inclusive = WarpPrefix(mine, lane);
  int base = 0;
  if (lane == 31 && inclusive > 0) base = atomicAdd(counter, inclusive);
  return __shfl_sync(kFullWarp, base, 31) + inclusive - mine;
}

// The warp's values in descending order over its lanes.
__device__ inline float WarpSortDescending(float v, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const float other = __shfl_xor_sync(kFullWarp, v, stride);
      v = ((lane & size) == 0) == ((lane & stride) == 0) ? fmaxf(v, other) : fminf(v, other);
    }
  }
  return v;
}

// Where the running sum of a list of integers first reaches a mass: the item's index, -1 where it
// does not, and the sum up to it (then of all).
struct PrefixEnd {
  int index;
  uint64_t through;
};

// Adds value_of(begin), .., value_of(end - 1) to `before` until the sum is at least `need`. The
// same result in every lane.
template <class ValueOf>
__device__ __forceinline__ PrefixEnd FindPrefixEnd(int begin, int end, uint64_t before,
                                                   uint64_t need, ValueOf value_of) {
  const int lane = threadIdx.x % 32;
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane;
    const uint64_t own = i < end ? value_of(i) : 0;
    const uint64_t through = before + WarpPrefix(own, lane);
    const unsigned reached = __ballot_sync(kFullWarp, through >= need);
    if (reached != 0) {
      const int first = __ffs(reached) - 1;
      return {base + first, __shfl_sync(kFullWarp, through, first)};
    }
    before = __shfl_sync(kFullWarp, through, 31);
  }
  return {-1, before};
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_REDUCTIONS_CUH_
