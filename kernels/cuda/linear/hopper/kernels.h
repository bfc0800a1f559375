// What the kernels of this folder do for the linear ops (linear/routes.cu says when).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_KERNELS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/linear.h"

namespace logitd::cuda {
struct Chunk;     // linear/training.cuh
struct RowState;  // linear/training.cuh
}  // namespace logitd::cuda

namespace logitd::cuda::hopper {

// Whether the kernels run on this device: sm_90a. The answer stays the same.
bool KernelsRun(const Scratch& scratch);

// Writes the logits of `hidden` [rows, head.hidden()], after the head's norm, to `logits` [rows,
// vocab], aligned to 8 bytes, of stride `logits_stride`, which is even. Memory between a row's last
// logit and the next row may be written too. 16-bit heads. A row's bits depend only on the row and
// the head.
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

// Pass 1 of linear_cross_entropy_training: fills `all`, which covers the whole vocabulary, from the
// logits of `hidden` [rows, head.hidden()]. rows: [rows]. bf16 heads without bias and softcap.
cudaError_t Exponentials(const TensorView& hidden, const HeadView& head, const RowState* rows,
                         const Chunk& all, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_KERNELS_H_
