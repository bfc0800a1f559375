// What the linear ops take from a stream's scratch before they hand the rest on.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_SCRATCH_H_
#define LOGITD_KERNELS_CUDA_LINEAR_SCRATCH_H_

#include <cstddef>

#include "kernels/cuda/ops.h"

namespace logitd::cuda {

constexpr int kMaxProductRows = 256;  // of a block of 16-bit rows; f32 takes as many as decoding

// Takes a piece from the end of `scratch`, aligned for any use here: what is left is scratch for
// the op inside. There must be room.
template <class U>
U* TakeFromEnd(Scratch& scratch, size_t count) {
  scratch.bytes = (scratch.bytes - count * sizeof(U)) / 256 * 256;
  return reinterpret_cast<U*>(scratch.data + scratch.bytes);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_SCRATCH_H_
