// What the ways to the exponentials of linear_cross_entropy_training leave, and where.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_TRAINING_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_TRAINING_CUH_

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/head.h"

namespace logitd::cuda {

using Bf16 = __nv_bfloat16;
constexpr int kTrainingTile = 256;  // tokens, from the vocabulary's start

// A row between the passes.
struct RowState {
  RowUse use;
  int32_t target;  // -1: none
  float power;     // Log2EOverTemperature()
  int32_t smooth;  // whether the sum of its logits is wanted
  // Of the chunks so far.
  Stats stats;
  double total;       // sum of the logits, times kTotalUnit
  int32_t first_nan;  // token; -1: none
  // G = (E * rate of the tile - flat) * more, of the target `hit`.
  float flat;
  float more;
  float hit;
};

// Sums of a tile of a row.
struct TilePart {
  float sum;    // of the exponentials, before they are rounded, relative to the tile's maximum
  float total;  // of the logits, times kTotalUnit; where the row is smooth
};

// The exponential of a tile; where all is -inf the sum is 0 whatever it is relative to.
__device__ inline Exponential TileExponential(float max, float power) {
  return Exponential(max == -kInfinity ? 0.0f : max, power);
}

// Where a row's exponentials lie: chunk by chunk, each [rows, chunk], the first in scratch, the
// others where d_weight of the chunk before them will be.
struct ExponentialMemory {
  Bf16* first;
  std::byte* others;
  int64_t chunk;        // tokens, a multiple of kTrainingTile; also the stride between rows
  int64_t chunk_bytes;  // of d_weight of a chunk

  __host__ __device__ Bf16* At(int64_t row, int64_t token) const {
    const int64_t index = token / chunk;
    Bf16* at = index == 0 ? first : reinterpret_cast<Bf16*>(others + (index - 1) * chunk_bytes);
    return at + row * chunk + (token - index * chunk);
  }
};

// What pass 1 makes of tokens [first, first + tokens) of all rows: TileExponential of every logit,
// and the tiles' maxima and sums. A row that is skipped may be left out. The last tile may end
// beyond the tokens, with exponentials of 0.
struct Chunk {
  int64_t first;
  int64_t tokens;
  ExponentialMemory e;
  float* maxima;  // [rows, maxima_stride], the chunk's own of a row's; -inf where all are NaN
  int64_t maxima_stride;
  TilePart* parts;  // [rows, parts_stride]
  int64_t parts_stride;
  float* target_logits;  // [rows], where the target is among the tokens

  __host__ __device__ int Tiles() const {
    return static_cast<int>((tokens + kTrainingTile - 1) / kTrainingTile);
  }

  // Up to `count` tokens of it from the `offset`-th on, which begins a tile.
  Chunk Part(int64_t offset, int64_t count) const {
    Chunk part = *this;
    part.first += offset;
    part.tokens = std::min(tokens - offset, count);
    part.maxima += offset / kTrainingTile;
    part.parts += offset / kTrainingTile;
    return part;
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_TRAINING_CUH_
