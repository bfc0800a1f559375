// Logits of a few hidden states, by a kernel that reads the head's weight once.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_DECODE_H_
#define LOGITD_KERNELS_CUDA_LINEAR_DECODE_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/scratch.h"
#include "kernels/head.h"

namespace logitd::cuda {

constexpr int kDecodeRows = 64;  // the most rows of one call

// Writes the logits of `hidden` [rows <= kDecodeRows, head.hidden()], after the head's norm, to
// `logits` [rows, vocab] of stride `logits_stride`. hidden: of the weight's dtype, 16-bit, 16-byte
// aligned rows. A row's bits depend only on the row and the head.
cudaError_t DecodeLogits(const TensorView& hidden, const HeadView& head, float* logits,
                         int64_t logits_stride, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_DECODE_H_
