// The launcher of cross_entropy_training; as those of kernels/cuda/ops.h.
#ifndef LOGITD_KERNELS_CUDA_LOSS_CROSS_ENTROPY_TRAINING_H_
#define LOGITD_KERNELS_CUDA_LOSS_CROSS_ENTROPY_TRAINING_H_

#include <cuda_runtime_api.h>

#include "kernels/cross_entropy_training.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

cudaError_t CrossEntropyTraining(const CrossEntropyTrainingArgs& args, const Scratch& scratch,
                                 cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_CROSS_ENTROPY_TRAINING_H_
