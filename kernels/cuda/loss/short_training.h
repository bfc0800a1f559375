// cross_entropy_training of many short rows.
#ifndef LOGITD_KERNELS_CUDA_LOSS_SHORT_TRAINING_H_
#define LOGITD_KERNELS_CUDA_LOSS_SHORT_TRAINING_H_

#include <cuda_runtime_api.h>

#include "kernels/cross_entropy_training.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// Takes the calls of TrainingKernels::kShortRows.
cudaError_t ShortTraining(const CrossEntropyTrainingArgs& args, const Scratch& device,
                          cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_SHORT_TRAINING_H_
