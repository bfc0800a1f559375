// What the kernels of sharded heads share: where a shard's tokens and cells are.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_SHARDS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_SHARDS_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/rows/cell.cuh"
#include "kernels/shards.h"

namespace logitd::cuda {

static_assert(kCell == kVocabCell);

// VocabShards in kernels.
struct Shards {
  int32_t vocab;
  int32_t count;
  int32_t cells;
  int32_t each;        // cells of a shard that has fewer
  int32_t larger;      // shards with one cell more, the first ones
  int32_t most_cells;  // of a shard: from a row of cells in a block to the next
  size_t block_bytes;

  Shards(const VocabShards& shards, size_t bytes)
      : vocab(static_cast<int32_t>(shards.vocab)),
        count(shards.count),
        cells(static_cast<int32_t>(shards.cells())),
        each(cells / count),
        larger(cells % count),
        most_cells(static_cast<int32_t>(shards.most_cells())),
        block_bytes(bytes) {}

  __device__ int FirstCell(int shard) const { return each * shard + min(shard, larger); }
  __device__ int FirstToken(int shard) const { return min(vocab, FirstCell(shard) * kCell); }
  __device__ int Tokens(int shard) const { return FirstToken(shard + 1) - FirstToken(shard); }
  __device__ int OwnerOfCell(int cell) const {
    const int in_larger = larger * (each + 1);
    return cell < in_larger ? cell / (each + 1) : larger + (cell - in_larger) / each;
  }
  __device__ int OwnerOf(int token) const { return OwnerOfCell(token / kCell); }

  // The array of a shard's block that in the first block is at `first`.
  template <class V>
  __device__ const V* Of(const V* first, int shard) const {
    return reinterpret_cast<const V*>(reinterpret_cast<const char*>(first) + shard * block_bytes);
  }
  // The value of cell `cell` of row r, from such an array.
  __device__ float CellOf(const float* first, int64_t r, int cell) const {
    const int shard = OwnerOfCell(cell);
    return Of(first, shard)[r * most_cells + cell - FirstCell(shard)];
  }
};

inline int32_t ToInt(int64_t value) { return static_cast<int32_t>(value); }

template <class V>
V* From(V* array, int64_t offset) {
  return array == nullptr ? nullptr : array + offset;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_SHARDS_CUH_
