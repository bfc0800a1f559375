// What the ways to the gradients of linear_cross_entropy share.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_BACKWARD_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_BACKWARD_CUH_

#include <cstdint>

#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/types.h"

namespace logitd::cuda {

constexpr int kCopyThreads = 256;

enum class RowUse : int32_t { kSkipped = 0, kIgnored = 1, kCounted = 2 };

// Rows of the kernels below have a `use`.

// Block i copies the hidden state of row i; zeros where its use is less than `least`. Rows are
// aligned to 16 bytes.
template <class T, class Row>
__global__ void __launch_bounds__(kCopyThreads)
    PackKernel(const T* hidden, int64_t hidden_stride, int size, const Row* rows, RowUse least,
               T* to, int64_t to_stride) {
  constexpr int kOfVector = 16 / sizeof(T);
  const int64_t r = blockIdx.x;
  const bool taken = rows[r].use >= least;
  hidden += r * hidden_stride;
  to += r * to_stride;
  const int vectors = size / kOfVector;
  for (int i = threadIdx.x; i < vectors; i += kCopyThreads)
    reinterpret_cast<uint4*>(to)[i] = taken ? reinterpret_cast<const uint4*>(hidden)[i] : uint4{};
  const int i = vectors * kOfVector + static_cast<int>(threadIdx.x);
  if (i < size) to[i] = taken ? hidden[i] : FromFloat<T>(0.0f);
}

// Block i writes row i of sums; rows null: all are counted.
template <class T, class Row>
__global__ void __launch_bounds__(kCopyThreads)
    StoreKernel(const float* sums, int64_t sums_stride, int size, const Row* rows, T* to,
                int64_t to_stride) {
  const int64_t r = blockIdx.x;
  const RowUse use = rows == nullptr ? RowUse::kCounted : rows[r].use;
  if (use == RowUse::kSkipped) return;
  for (int i = threadIdx.x; i < size; i += kCopyThreads)
    to[r * to_stride + i] =
        FromFloat<T>(use == RowUse::kCounted ? sums[r * sums_stride + i] : 0.0f);
}

// Calls f with a null pointer to the dtype's element type.
template <class F>
void AsType(DType dtype, F f) {
  if (dtype == DType::kF32) f(static_cast<float*>(nullptr));
  if (dtype == DType::kF16) f(static_cast<__half*>(nullptr));
  if (dtype == DType::kBF16) f(static_cast<__nv_bfloat16*>(nullptr));
}

inline int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_BACKWARD_CUH_
