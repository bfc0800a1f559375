// Between the two calls of a shard of linear_cross_entropy_training: what a shard tells the others,
// and the sums of all.
//
// Cost: writes and reads 12 bytes for each row and 256 tokens; noise beside the products.
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/linear/training_steps.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = kTrainingTile;

// Writes a shard's block, a row by each warp.
__global__ void __launch_bounds__(kThreads)
    TellShardsKernel(const RowState* rows, int64_t count, Chunk all, int32_t first_token,
                     const __grid_constant__ TrainingBlock to) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= count || rows[r].use == RowUse::kSkipped) return;
  for (int i = lane; i < all.Tiles(); i += 32) to.tiles[r * to.most_tiles + i] = all.SumsOf(r, i);
  if (lane != 0) return;
  to.nan[r] = rows[r].first_nan < 0 ? -1 : first_token + rows[r].first_nan;
  if (rows[r].target >= 0) to.target[r] = all.target_logits[r];
}

// Makes the rows' sums those of all shards, and their target's logit known, a row by each warp. The
// order is that of AddKernel. `first`: the block of the first shard.
__global__ void __launch_bounds__(kThreads)
    AddShardsKernel(RowState* rows, int64_t count, const CrossEntropyRow* params,
                    const __grid_constant__ TrainingBlock first,
                    const __grid_constant__ Shards shards, int tiles, float* target_logits) {
  constexpr int kCellTiles = kCell / kTile;
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= count) return;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const auto tile = [&](int i) -> const TileSums& {
    const int shard = shards.OwnerOfCell(i / kCellTiles);
    return shards.Of(first.tiles,
                     shard)[r * first.most_tiles + i - shards.FirstCell(shard) * kCellTiles];
  };
  SumTiles(row, tiles, lane, tile);
  int32_t first_nan = -1;  // of the first shard that has one
  for (int s = shards.count - 1; s >= 0; --s) {
    const int32_t nan = shards.Of(first.nan, s)[r];
    if (nan >= 0) first_nan = nan;
  }
  if (lane != 0) return;
  row.first_nan = first_nan;
  const int32_t target = params[row.at].target;
  if (target >= 0) target_logits[r] = shards.Of(first.target, shards.OwnerOf(target))[r];
}

}  // namespace

void TellShards(Steps& steps, const RowState* rows, int64_t count, const Chunk& all,
                int32_t first_token, const TrainingBlock& to) {
  steps.Launch(&TellShardsKernel, GridFor(count, kWarps), kThreads, rows, count, all, first_token,
               to);
}

void AddShards(Steps& steps, RowState* rows, int64_t count, const CrossEntropyRow* params,
               const TrainingBlock& first, const VocabShards& shards, float* target_logits) {
  steps.Launch(&AddShardsKernel, GridFor(count, kWarps), kThreads, rows, count, params, first,
               Shards(shards, first.bytes), static_cast<int>(CeilDiv(shards.vocab, kTile)),
               target_logits);
}

}  // namespace logitd::cuda
