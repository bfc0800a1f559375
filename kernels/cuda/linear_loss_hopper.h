// linear_cross_entropy in one kernel on Hopper.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_LOSS_HOPPER_H_
#define LOGITD_KERNELS_CUDA_LINEAR_LOSS_HOPPER_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/ops.h"
#include "kernels/linear.h"

namespace logitd::cuda {

// Whether HopperLoss can take this head on this device: 16-bit weights, neither bias nor softcap,
// sm_90a. The same for all calls of a head.
bool HopperLossServes(const HeadView& head, const Scratch& scratch);

// As LinearCrossEntropy, of rows that want neither rank, entropy, tops nor extras; hidden states
// are those after the head's norm. A row's bits depend on its hidden state, its parameters and the
// head.
cudaError_t HopperLoss(const LinearCrossEntropyArgs& args, const Scratch& scratch,
                       cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_LOSS_HOPPER_H_
