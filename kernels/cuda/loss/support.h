// cross_entropy of the rows with supports.
#ifndef LOGITD_KERNELS_CUDA_LOSS_SUPPORT_H_
#define LOGITD_KERNELS_CUDA_LOSS_SUPPORT_H_

#include <cuda_runtime_api.h>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// Writes the answers of the rows of `args` that have supports or are left out. Uses no scratch.
cudaError_t SupportedCrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch,
                                  cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_SUPPORT_H_
