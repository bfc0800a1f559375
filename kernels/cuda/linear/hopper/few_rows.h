// Logits of few hidden states on Hopper, at the rate at which memory is read.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_FEW_ROWS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_FEW_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/types.h"

namespace logitd::cuda::hopper {

constexpr int64_t kFewRows = 128;  // the most rows of one call

// What becomes of the sums of a product.
struct LogitsParams {
  const float* bias;  // [vocab], or null
  float* logits;
  int64_t stride;
  float scale;
  float softcap;
};

// Writes the logits of `hidden` [rows <= kFewRows, size] by `weight` [vocab, size], as
// hopper::Logits does, with the same bits. The next kernel of the stream may begin before this one
// has ended, where it is launched early (launch.cuh).
cudaError_t FewRowsLogits(const TensorView& hidden, const TensorView& weight, const LogitsParams& p,
                          const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_FEW_ROWS_H_
