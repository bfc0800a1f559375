// From a DType to code for its element type. All of kernels/cuda chooses types here.
//
//   return VisitDType(args.logits.dtype, [&]<class T>() { return LaunchRows<T>(args, stream); });
//
// For two dtypes, visit one inside the other; `if constexpr` keeps out pairs that no caller sends.
// A new dtype fails to compile here and in kernels/types.h first.
#ifndef LOGITD_KERNELS_CUDA_DISPATCH_CUH_
#define LOGITD_KERNELS_CUDA_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/types.h"

namespace logitd::cuda {

// Calls visit.operator()<T>() with the element type of `dtype`, and returns what it returns. On the
// host and in kernels.
template <class Visit>
constexpr auto VisitDType(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kF32:
      return visit.template operator()<float>();
    case DType::kF16:
      return visit.template operator()<__half>();
    case DType::kBF16:
      return visit.template operator()<__nv_bfloat16>();
  }
  __builtin_unreachable();
}

// The same where Is16Bit(dtype): `visit` is not compiled for wider types.
template <class Visit>
constexpr auto Visit16Bit(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kF16:
      return visit.template operator()<__half>();
    case DType::kBF16:
      return visit.template operator()<__nv_bfloat16>();
    case DType::kF32:
      break;
  }
  __builtin_unreachable();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_DISPATCH_CUH_
