// What pass 1 of linear_cross_entropy_training leaves in memory, whichever kernel does it.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_TRAINING_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_TRAINING_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/kept_chunks.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/head.h"

namespace logitd::cuda {

// A row between the passes.
struct RowState {
  RowUse use;
  int32_t at;      // its number in the call; rows that count for nothing may be left out
  int32_t target;  // -1: none
  float log2e_over_temperature;
  int32_t smooth;  // whether the sum of its logits is wanted
  // Sums over all tokens.
  Stats stats;
  double total;       // sum of the logits, times kTotalUnit
  int32_t first_nan;  // token; -1: none
  // From the end of pass 1 on: G = E * factor. 0: E is not that of `IsPlain`, and becomes G itself:
  // (E * the tile's factor - flat) * more; the target's is `hit`.
  float factor;
  float flat;
  float more;
  float hit;
  // G's in f16 (backward.cuh); kGradientExponent in bf16.
  int32_t exponent;

  // Whether the row's factor, in place of G, goes into its hidden state and its d_hidden.
  __device__ bool IsPlain() const { return factor != 0.0f; }
  // From its sums of E, or of G, to its d_hidden.
  __device__ float OfHidden() const { return IsPlain() ? factor : HiddenFactor(exponent); }
};

// Makes the sums of a row those of its tiles, by one warp. tile(i): its TileSums. Returns
// the row's maximum and sum.
template <class Tile>
__device__ inline Stats SumTiles(RowState& row, int tiles, int lane, const Tile& tile) {
  const Stats stats = MergeCells(tiles, row.log2e_over_temperature, lane, [&](int i) {
    return Stats{tile(i).max, tile(i).sum};
  });
  double total = 0.0;
  if (row.smooth != 0) {
    for (int i = lane; i < tiles; i += 32) total += tile(i).total;
    total = WarpSum(total);
  }
  if (lane == 0) {
    row.stats = stats;
    row.total = total;
  }
  return stats;
}

// Sums of a tile of a row, as pass 1 leaves them.
struct TilePart {
  float sum;    // of the exponentials, before they are rounded, relative to the tile's maximum
  float total;  // of the logits, times kTotalUnit; only where the row is smooth
};
// Sums of a tile, and its largest logit.
struct TileSums {
  float max;
  float sum;
  float total;
};

// E of a tile. In bf16, exp(logit / temperature) where the tile's largest one is moderate, so that
// all tiles of most rows have one factor; else exp((logit - that of the largest) / temperature). In
// f16 always the latter, times kHalfUnit.
constexpr float kLeastTilePower = -40.0f;
constexpr float kMostTilePower = 60.0f;
constexpr float kHalfUnit = 0x1p15f;
template <class T>
constexpr bool kHasRange = std::is_same_v<T, __nv_bfloat16>;
template <class T>
__device__ inline bool IsModerateTile(float max, float log2e_over_temperature) {
  const float power = __fmul_rn(max, log2e_over_temperature);
  return kHasRange<T> && power >= kLeastTilePower && power <= kMostTilePower;
}
// The factor from exp((logit - the tile's largest) / temperature) to E.
template <class T>
__device__ inline float FactorOfTile(float max, float log2e_over_temperature) {
  if constexpr (!kHasRange<T>) return kHalfUnit;
  return IsModerateTile<T>(max, log2e_over_temperature)
             ? Exp2(__fmul_rn(max, log2e_over_temperature))
             : 1.0f;
}

// The result of pass 1 for tokens [first, first + tokens) of all rows: E of every logit, and the
// tiles' maxima and sums. A skipped row may be left out. The last tile may end after the tokens,
// with exponentials of 0.
struct Chunk {
  int64_t first;
  int64_t tokens;
  KeptMemory e;
  float* maxima;  // [rows, maxima_stride], from the chunk's first on; -inf where all are NaN
  int64_t maxima_stride;
  TilePart* parts;  // [rows, parts_stride]
  int64_t parts_stride;
  float* target_logits;  // [rows], where the target is among the tokens

  __host__ __device__ int Tiles() const {
    return static_cast<int>((tokens + kTrainingTile - 1) / kTrainingTile);
  }
  __device__ TileSums SumsOf(int64_t row, int tile) const {
    const TilePart part = parts[row * parts_stride + tile];
    return {maxima[row * maxima_stride + tile], part.sum, part.total};
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_TRAINING_CUH_
