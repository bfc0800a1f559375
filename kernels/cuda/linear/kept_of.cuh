// KeptTokens (kernels/kept_tokens.h) in kernels.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_KEPT_OF_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_KEPT_OF_CUH_

#include <cstdint>

#include "kernels/sample.h"

namespace logitd::cuda {

// For an active row whose KeptTokens is not 0, in a vocabulary with more tokens than that.
__device__ inline int KeptOf(const SampleRow& row) {
  return max(max(1, row.top_logprobs), row.temperature == 0 ? 0 : row.top_k);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_KEPT_OF_CUH_
