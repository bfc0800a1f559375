// Logits of a few hidden states, by a kernel that streams the head's weight once.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_DECODE_H_
#define LOGITD_KERNELS_CUDA_LINEAR_DECODE_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/ops.h"
#include "kernels/head.h"

namespace logitd::cuda {

constexpr int kDecodeRows = 64;  // of one call, at most

// Writes the logits of `rows` <= kDecodeRows hidden states, whose norm has been taken, to `logits`
// [rows, vocab] of stride `logits_stride`. hidden: [rows, head.hidden()] of the weight's dtype, f16
// or bf16, 16-byte aligned rows. A row's bits depend on the row and the head alone.
cudaError_t DecodeLogits(const void* hidden, int64_t hidden_stride, int rows, const HeadView& head,
                         float* logits, int64_t logits_stride, const Scratch& scratch,
                         cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_DECODE_H_
