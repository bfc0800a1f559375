// linear_cross_entropy in one kernel on Hopper.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/ops.h"
#include "kernels/linear.h"

namespace logitd::cuda {

// Whether HopperLoss can take this head on this device: 16-bit weights, neither bias nor softcap,
// sm_90a. The same for all calls of a head.
bool HopperLossServes(const HeadView& head, const Scratch& scratch);

constexpr int kLossGroupRows = 256;  // that the product takes or skips together

// As LinearCrossEntropy, of rows that want neither rank, entropy nor tops, but may want extras;
// hidden states are those after the head's norm. groups: null, or for every kLossGroupRows rows, in
// device memory, 0 where all of them are to be skipped: they cost no product then. A row's bits
// depend on its hidden state, its parameters and the head. An extra that is the target has the
// target's bits; others are sums in another order than the losses'.
cudaError_t HopperLoss(const LinearCrossEntropyArgs& args, const int32_t* groups,
                       const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_H_
