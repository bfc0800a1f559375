// Logits of hidden states on Hopper, by one kernel.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOGITS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOGITS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/ops.h"
#include "kernels/head.h"

namespace logitd::cuda {

// Whether HopperLogits can take this head on this device: 16-bit weights, sm_90a. The same for all
// calls of a head.
bool HopperLogitsServes(const HeadView& head, const Scratch& scratch);

// Writes the logits of `hidden` [rows, head.hidden()], whose norm has been taken, to `logits`
// [rows, vocab], aligned to 8 bytes, of stride `logits_stride`, which is even; what lies behind a
// row's last logit may be written. A row's bits depend on the row and the head alone.
cudaError_t HopperLogits(const TensorView& hidden, const HeadView& head, float* logits,
                         int64_t logits_stride, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOGITS_H_
