// What the kernels of this folder do for the linear ops (linear/routes.cc says when).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_KERNELS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/linear.h"
#include "kernels/shards.h"

namespace logitd::cuda {
struct Chunk;     // linear/training.cuh
struct RowState;  // linear/training.cuh
}  // namespace logitd::cuda

namespace logitd::cuda::hopper {

// Whether the kernels run on this device: sm_90a. The answer stays the same.
bool KernelsRun(const Scratch& scratch);

// Writes the logits of `hidden` [rows, head.hidden()], after the head's norm, to `logits` [rows,
// vocab] of stride `logits_stride`, and nothing between rows: a shard writes into rows of the whole
// vocabulary. 16-bit heads. A row's bits depend only on the row and the head.
cudaError_t Logits(const TensorView& hidden, const HeadView& head, float* logits,
                   int64_t logits_stride, const Scratch& scratch, cudaStream_t stream);

constexpr int kLossGroupRows = 256;  // rows that the product takes or skips together

// LinearCrossEntropy for rows that want neither rank, entropy nor top tokens; they may want extras.
// No logits in memory. `hidden` is the states after the head's norm. 16-bit heads without bias and
// softcap.
//
// groups: null, or in device memory one value for every kLossGroupRows rows; where it is 0 all of
// these rows are skipped, and no product is computed for them. A row's bits depend only on its
// hidden state, its parameters and the head. An extra that is the target has the target's bits;
// other extras are summed in another order than the losses' logits.
cudaError_t Losses(const LinearCrossEntropyArgs& args, const int32_t* groups,
                   const Scratch& scratch, cudaStream_t stream);

// Such rows on a shard of the head (kernels/shards.h): their part of the shard's block, where an
// extra that is the target has the target's bits too. The shard has tokens.
struct ShardLossArgs {
  TensorView hidden;            // after the head's norm
  HeadView head;                // the shard's
  const CrossEntropyRow* rows;  // [rows]; targets and extra ids are of the whole vocabulary
  const int32_t* extra_ids;
  int32_t first_token;  // of the shard
  int32_t max_extra;
  int64_t row_cells;  // from a row of cells in `to` to the next
  LossPartials to;    // moment, before and keys are not written
};
cudaError_t ShardLosses(const ShardLossArgs& args, const int32_t* groups, const Scratch& scratch,
                        cudaStream_t stream);

// LinearDivergence where both inputs are hidden states, after their heads' norms. 16-bit heads of
// one dtype without bias and softcap, and of scale > 0. A row's bits depend only on its two hidden
// states, what it asks for and the heads.
cudaError_t Divergences(const LinearDivergenceArgs& args, const Scratch& scratch,
                        cudaStream_t stream);
// True where half of scratch is enough for Divergences. The answer stays the same.
bool HaveRoomForDivergences(int64_t vocab, const Scratch& scratch);

// Pass 1 of linear_cross_entropy_training: fills `all`, which covers the whole vocabulary, from the
// logits of `hidden` [rows, head.hidden()]. rows: [rows]. 16-bit heads without bias and softcap.
cudaError_t Exponentials(const TensorView& hidden, const HeadView& head, const RowState* rows,
                         const Chunk& all, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_KERNELS_H_
