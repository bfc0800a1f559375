// A logit from the sum of its product (kernels/head.h).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_LOGIT_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_LOGIT_CUH_

namespace logitd::cuda {

__device__ inline float ApplySoftcap(float x, float softcap) {
  return softcap * tanhf(x / softcap);
}

// softcap 0: off.
__device__ inline float LogitOf(float sum, float scale, float bias, float softcap) {
  const float x = fmaf(scale, sum, bias);
  return softcap > 0 ? ApplySoftcap(x, softcap) : x;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_LOGIT_CUH_
