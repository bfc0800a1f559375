// Pass 1 of linear_cross_entropy_training on Hopper, by one kernel.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_TRAINING_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_TRAINING_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/scratch.h"
#include "kernels/head.h"

namespace logitd::cuda::hopper {

// Fills `all`, which covers the whole vocabulary, from the logits of `hidden` [rows, head.hidden()].
// rows: [rows]. The head is bf16, without bias and softcap.
cudaError_t Exponentials(const TensorView& hidden, const HeadView& head, const RowState* rows,
                         const Chunk& all, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_TRAINING_H_
