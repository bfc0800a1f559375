// The rows of the epilogues of hopper/loss.cu, and what they leave: a row's sums over tiles
// and cells.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_PARTS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_PARTS_CUH_

#include <cstdint>

#include "kernels/cuda/linear/hopper/loss_tile.cuh"
#include "kernels/cuda/linear/hopper/schedule.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda::hopper {

__device__ inline LossPart EmptyPart() { return {{-kInfinity, 0.0f}, 0.0f}; }

// A part with the next tile merged into it.
__device__ inline LossPart Merge(const LossPart& part, const LossPart& tile,
                                 float log2e_over_temperature) {
  const Stats& a = part.stats;
  const Stats& b = tile.stats;
  const float max = fmaxf(a.max, b.max);
  const Exponential exponential(max, log2e_over_temperature);
  const float sum =
      fmaf(a.sum, exponential.Factor(a.max), __fmul_rn(b.sum, exponential.Factor(b.max)));
  return {{max, sum}, part.total + tile.total};
}

// The sums that units leave: of cells, and of tiles where the unit is split; or all of tiles.
struct LossParts {
  LossPart* cells;  // [rows, row_cells]
  LossPart* tiles;  // [split units, kGroupRows, kClusterGroups, kSpanTiles]
  int32_t row_cells;
  LossPart* all_tiles;  // [rows, row_tiles], or null; where it is not, the other two are
  int32_t row_tiles;

  __device__ LossPart& Cell(int64_t r, int cell) const { return cells[r * row_cells + cell]; }
  // split: as in SumsPlace.
  __device__ LossPart& Tile(int split, int64_t r, int tile) const {
    const int64_t row = int64_t{split / kClusterGroups} * kGroupRows + r % kGroupRows;
    return tiles[(row * kClusterGroups + split % kClusterGroups) * kSpanTiles + tile % kSpanTiles];
  }
};

struct LossParams {
  const CrossEntropyRow* rows;  // [rows]
  LossParts parts;
  float* target_logits;  // [rows]
  float scale;
  int32_t first_token;  // of the shard; 0: the head is whole

  __device__ void Read(LossRow& to) const {
    const CrossEntropyRow& row = rows[to.r];
    if (row.active == 0) return;
    to.target = row.target - first_token;  // it may be on another shard
    to.smooth = row.label_smoothing > 0 ? 1 : 0;
    to.log2e_over_temperature = Log2EOverTemperature(0.0f, row.temperature);
  }
};

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_PARTS_CUH_
