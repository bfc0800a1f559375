// Logits of hidden states on Hopper, by one kernel.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOGITS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOGITS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/scratch.h"
#include "kernels/head.h"

namespace logitd::cuda::hopper {

// Whether the kernels of this folder run on this device: sm_90a. The answer stays the same.
bool KernelsRun(const Scratch& scratch);

// Writes the logits of `hidden` [rows, head.hidden()], after the head's norm, to `logits` [rows,
// vocab], aligned to 8 bytes, of stride `logits_stride`, which is even. Memory between a row's last
// logit and the next row may be written too. A row's bits depend only on the row and the head.
cudaError_t Logits(const TensorView& hidden, const HeadView& head, float* logits,
                   int64_t logits_stride, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOGITS_H_
