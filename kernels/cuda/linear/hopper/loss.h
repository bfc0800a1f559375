// linear_cross_entropy on Hopper, without logits in memory.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/linear.h"

namespace logitd::cuda::hopper {

constexpr int kLossGroupRows = 256;  // rows that the product takes or skips together

// LinearCrossEntropy for rows that want neither rank, entropy nor top tokens; they may want extras.
// `hidden` is the states after the head's norm; the head is 16-bit, without bias and softcap.
//
// groups: null, or in device memory one value for every kLossGroupRows rows; where it is 0 all of
// these rows are skipped, and no product is computed for them. A row's bits depend only on its
// hidden state, its parameters and the head. An extra that is the target has the target's bits;
// other extras are summed in another order than the losses' logits.
cudaError_t Losses(const LinearCrossEntropyArgs& args, const int32_t* groups,
                   const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_H_
