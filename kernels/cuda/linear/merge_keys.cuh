// What merges lists of tokens, and NaNs, of the blocks of all shards (kernels/shards.h).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_MERGE_KEYS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_MERGE_KEYS_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear/shards.cuh"
#include "kernels/cuda/rows/select.cuh"

namespace logitd::cuda {

// The place in the whole order of key `i` of a shard, whose list and all others are in order and
// have min(k, tokens of the shard) keys.
__device__ inline int RankOfKey(const Shards& shards, const uint64_t* keys, int64_t at, int k,
                                int shard, int i) {
  const Key mine = shards.Of(keys, shard)[at + i];
  int rank = i;
  for (int s = 0; s < shards.count; ++s) {
    if (s == shard) continue;
    const uint64_t* list = shards.Of(keys, s) + at;
    int low = 0;  // keys before it are larger than mine
    int high = min(k, shards.Tokens(s));
    while (low < high) {
      const int middle = (low + high) / 2;
      if (list[middle] > mine) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    rank += low;
  }
  return rank;
}

// Calls emit(place, key) for the first k tokens of all shards, by `threads` threads.
template <class Emit>
__device__ inline void MergeKeys(const Shards& shards, const uint64_t* keys, int64_t at, int k,
                                 int thread, int threads, Emit emit) {
  for (int s = 0; s < shards.count; ++s) {
    const int count = min(k, shards.Tokens(s));
    for (int i = thread; i < count; i += threads) {
      const int rank = RankOfKey(shards, keys, at, k, s, i);
      if (rank < k) emit(rank, Key{shards.Of(keys, s)[at + i]});
    }
  }
}

// The lowest NaN of a row, by one warp; `vocab` where no shard has one.
__device__ inline int FirstNan(const Shards& shards, const int32_t* nan, int64_t r, int lane) {
  int first = shards.vocab;
  for (int s = lane; s < shards.count; s += 32) {
    const int of_shard = shards.Of(nan, s)[r];
    if (of_shard >= 0) first = min(first, of_shard);
  }
  return __reduce_min_sync(kFullWarp, first);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_MERGE_KEYS_CUH_
