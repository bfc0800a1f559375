// The steps of linear_cross_entropy_training between its products. training.cu says in which order
// they come; each enqueues one or two kernels. Where nothing else is said, rows are padded with skipped
// ones to a multiple of kTrainingRows.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_TRAINING_STEPS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_TRAINING_STEPS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/linear/shards.cuh"
#include "kernels/cuda/linear/training.cuh"
#include "kernels/shards.h"
#include "kernels/types.h"

namespace logitd::cuda {

constexpr int kTrainingRows = 64;

// ---- pass 1: training_sums.cu -------------------------------------------------------------------

// Fills in `count` rows; rows from `rows` on are skipped. The head has `tokens` tokens from
// `first_token` on.
void BeginRows(Steps& steps, const CrossEntropyRow* params, int64_t rows, int64_t count,
               int32_t first_token, int32_t tokens, RowState* to);

// Makes E of a chunk, their maxima and sums, from the f32 logits of the rows from `first` on.
void MakeExponentials(Steps& steps, const TensorView& logits, const RowState* rows, int64_t first,
                      const Chunk& chunk);

// Adds the sums of a chunk's tiles to those of its rows.
void AddToRows(Steps& steps, RowState* rows, int64_t count, const Chunk& chunk);

// ---- shards: training_shards.cu -----------------------------------------------------------------

// What a shard tells the others of a tile, and of a row.
struct TileSums {
  float max;
  float sum;
  float total;
};
struct TrainingBlock {
  TileSums* tiles;  // [rows, most_tiles]
  int32_t* nan;     // [rows]: the first token of the shard that is NaN; -1: none
  float* target;    // [rows]: the target's logit, where the shard has the target
  int64_t most_tiles;
  size_t bytes;

  TrainingBlock(std::byte* block, const VocabShards& shards, int64_t rows)
      : most_tiles(shards.most_cells() * (kCell / kTrainingTile)) {
    const int64_t tiles_bytes = rows * most_tiles * static_cast<int64_t>(sizeof(TileSums));
    tiles = reinterpret_cast<TileSums*>(block);
    nan = reinterpret_cast<int32_t*>(block + tiles_bytes);
    target = reinterpret_cast<float*>(nan + rows);
    bytes = static_cast<size_t>(RoundUp(tiles_bytes + 8 * rows, 16));
  }
};

// Writes the block of a shard whose tokens are `all`.
void TellShards(Steps& steps, const RowState* rows, int64_t count, const Chunk& all,
                int32_t first_token, const TrainingBlock& to);

// Makes the rows' sums those of all shards, and their targets' logits known. The order is that of
// AddToRows with one chunk. first: the block of the first shard; the others come after it.
void AddShards(Steps& steps, RowState* rows, int64_t count, const CrossEntropyRow* params,
               const TrainingBlock& first, const VocabShards& shards, float* target_logits);

// ---- between the passes, and the end: training_gradients.cu -------------------------------------

// Writes the rows' answers and makes their factors. The maxima of rows that have no factor for all
// tiles become those of their tiles.
void ConcludeRows(Steps& steps, const CrossEntropyArgs& args, const float* upstream, RowState* rows,
                  int64_t count, const Chunk& all);

// Makes G of the E that have no factor of their row, and brings the factors of the others into their
// packed hidden states, bf16.
void ScaleRows(Steps& steps, const RowState* rows, const MutableTensorView& states,
               const Chunk& all);

// Writes d_hidden, or scales it in place: the rows' sums, f32, times their factors. Zeros where a row
// is ignored, nothing where it is skipped.
void StoreHidden(Steps& steps, const TensorView& sums, const RowState* rows,
                 const MutableTensorView& to);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_TRAINING_STEPS_H_
