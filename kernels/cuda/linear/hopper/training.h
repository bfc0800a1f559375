// Pass 1 of linear_cross_entropy_training on Hopper, by one kernel.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_TRAINING_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_TRAINING_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/head.h"

namespace logitd::cuda {

// Whether HopperExponentials can take this head on this device: bf16, neither bias nor softcap,
// sm_90a.
bool HopperExponentialsServes(const HeadView& head, const Scratch& scratch);

// Makes `all`, the whole vocabulary, of the logits of `hidden` [rows, head.hidden()]. rows: as
// many.
cudaError_t HopperExponentials(const TensorView& hidden, const HeadView& head, const RowState* rows,
                               const Chunk& all, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_TRAINING_H_
