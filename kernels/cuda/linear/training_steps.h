// The steps of linear_cross_entropy_training between its products. training.cu says in which order
// they come; each enqueues one or two kernels. Where nothing else is said, rows are padded with
// skipped ones to a multiple of kTrainingRows.
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

// ---- pass 1: training_sums.cu -------------------------------------------------------------------

// Fills in `count` rows of the call's `rows`. Rows after them are skipped. counted_only: rows that
// are skipped or ignored are left out. The head has `tokens` tokens from `first_token` on.
void BeginRows(Steps& steps, const CrossEntropyRow* params, int64_t rows, bool counted_only,
               int64_t count, int32_t first_token, int32_t tokens, RowState* to);

// Adds up the sums of the rows' tiles. E is of type `dtype`.
void AddToRows(Steps& steps, DType dtype, RowState* rows, int64_t count, const Chunk& all);

// ---- shards: training_shards.cu -----------------------------------------------------------------

// What a shard tells the others of its tiles and of a row.
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
// AddToRows. first: the block of the first shard; the others come after it.
void AddShards(Steps& steps, RowState* rows, int64_t count, const CrossEntropyRow* params,
               const TrainingBlock& first, const VocabShards& shards, float* target_logits);

// ---- between the passes, and the end: training_gradients.cu -------------------------------------

// Writes the rows' answers and makes their factors. The maxima of rows that have no factor for all
// tiles become those of their tiles. E is of type `dtype`.
void ConcludeRows(Steps& steps, DType dtype, const CrossEntropyArgs& args, const float* upstream,
                  RowState* rows, int64_t count, const Chunk& all, HalfScale* scale);

// Makes G of the E that have no factor of their row, and brings the factors of the others into
// their packed hidden states. product_factor: of product 3.
void ScaleRows(Steps& steps, const RowState* rows, const MutableTensorView& states,
               const Chunk& all, float product_factor, HalfScale* scale);

// Writes what ignored rows get where they were left out: answers of 0 with status kOk, and zeros to
// d_hidden, unless its data is null.
void WriteIgnored(Steps& steps, const CrossEntropyRow* params, int64_t rows,
                  const CrossEntropyAnswers& answers, const MutableTensorView& d_hidden);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_TRAINING_STEPS_H_
