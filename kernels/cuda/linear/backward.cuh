// Code of both ways to the gradients of a head, gradient_chunks.cuh and training.cu.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_BACKWARD_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_BACKWARD_CUH_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/scratch.h"
#include "kernels/types.h"

namespace logitd::cuda {

constexpr int kCopyThreads = 256;

enum class RowUse : int32_t { kSkipped = 0, kIgnored = 1, kCounted = 2 };

// ---- gradients in f16 ---------------------------------------------------------------------------
//
// f16 does not have the range of gradients. So G of a row is kept GradientFactor(exponent) times as
// large, where the row's exponent is that of the largest that an element may be: others may be off
// by 2^-37 of it. d_hidden of the row is brought back at the end. In product 3, which adds rows,
// hidden states have the factor from their row's exponent to the largest of all rows, and the
// product takes that one out.

constexpr int kGradientExponent = 13;
__device__ inline float GradientFactor(int exponent) {
  return ldexpf(1.0f, kGradientExponent - exponent);
}
__device__ inline float HiddenFactor(int exponent) {
  return ldexpf(1.0f, exponent - kGradientExponent);
}

// The scale that all rows share, in device memory.
struct HalfScale {
  int32_t exponent;  // the largest
  float product[2];  // the factors of product 3: MatrixProduct::device_factors

  // Before the first row.
  static cudaError_t Clear(HalfScale* scale, cudaStream_t stream) {
    return cudaMemsetAsync(scale, 0x80, sizeof(HalfScale), stream);  // less than any exponent
  }
  __device__ float StateFactor(int of_row) const { return ldexpf(1.0f, of_row - exponent); }
  __device__ void SetProduct(float factor, float beta) {
    product[0] = ldexpf(factor, exponent - kGradientExponent);
    product[1] = beta;
  }
};

// The exponent of a row whose elements are at most `most` * `more`; the rows' largest becomes
// known.
__device__ inline int TakeExponent(float most, float more, HalfScale* scale) {
  constexpr int kMost = 100;
  int exponent = kMost;  // also of NaN
  if (most < 0x1p100f) exponent = most < 0x1p-100f ? -kMost : ilogbf(most);
  if (more != 1.0f) exponent += ilogbf(more);
  atomicMax(&scale->exponent, exponent);
  return exponent;
}
__device__ inline int TakeExponent(const Gradient& g, HalfScale* scale) {
  const float most = fabsf(g.scale) * (fabsf(g.weight) + fabsf(g.flat) + fabsf(g.hit));
  return TakeExponent(most, g.more, scale);
}

// ---- kernels of both ---------------------------------------------------------------------------

// The `Row` of the kernels below is any struct with a `use` and an `at`; of StoreKernel also with
// OfHidden(), the factor from its sums to its d_hidden.

// Block i copies the hidden state of rows[i], which is row rows[i].at; zeros where its use is less
// than `least`. Rows are aligned to 16 bytes.
template <class T, class Row>
__global__ void __launch_bounds__(kCopyThreads)
    PackKernel(const T* hidden, int64_t hidden_stride, int size, const Row* rows, RowUse least,
               T* to, int64_t to_stride) {
  constexpr int kOfVector = 16 / sizeof(T);
  const int64_t r = blockIdx.x;
  const bool taken = rows[r].use >= least;
  hidden += rows[r].at * hidden_stride;
  to += r * to_stride;
  const int vectors = size / kOfVector;
  for (int i = threadIdx.x; i < vectors; i += kCopyThreads)
    reinterpret_cast<uint4*>(to)[i] = taken ? reinterpret_cast<const uint4*>(hidden)[i] : uint4{};
  const int i = vectors * kOfVector + static_cast<int>(threadIdx.x);
  if (i < size) to[i] = taken ? hidden[i] : FromFloat<T>(0.0f);
}

// Block i writes row i of sums, times its factor, to row rows[i].at; zeros where the row is not
// counted, nothing where it is skipped. rows null: row i as it is.
template <class T, class Row>
__global__ void __launch_bounds__(kCopyThreads)
    StoreKernel(const float* sums, int64_t sums_stride, int size, const Row* rows, T* to,
                int64_t to_stride) {
  const int64_t r = blockIdx.x;
  const RowUse use = rows == nullptr ? RowUse::kCounted : rows[r].use;
  if (use == RowUse::kSkipped) return;
  const float factor = rows == nullptr ? 1.0f : rows[r].OfHidden();
  to += (rows == nullptr ? r : rows[r].at) * to_stride;
  for (int i = threadIdx.x; i < size; i += kCopyThreads)
    to[i] = FromFloat<T>(use == RowUse::kCounted ? sums[r * sums_stride + i] * factor : 0.0f);
}

// The kernels and products of a call, which are enqueued one after the other. After the first error
// nothing more is enqueued.
class Steps {
 public:
  // Takes the workspace of the products from `scratch`.
  Steps(Products& products, Scratch& scratch, cudaStream_t stream)
      : products_(products),
        stream_(stream),
        workspace_(scratch.Take<std::byte>(products.workspace_bytes())) {}

  cudaError_t error() const { return error_; }
  cudaStream_t stream() const { return stream_; }

  // Calls enqueue(), which returns a cudaError_t.
  template <class Enqueue>
  void Do(const Enqueue& enqueue) {
    if (error_ == cudaSuccess) error_ = enqueue();
  }

  template <class... Params, class... Args>
  void Launch(void (*kernel)(Params...), dim3 grid, int threads, Args&&... args) {
    Do([&] {
      return LaunchKernel(kernel, {.grid = grid, .threads = threads}, stream_,
                          std::forward<Args>(args)...);
    });
  }

  void Multiply(MatrixProduct product) {
    product.workspace = workspace_;
    Do([&] { return products_.Enqueue(product, stream_); });
  }

  // Writes the rows of `sums`, f32, that `to` has, as StoreKernel.
  template <class Row>
  void Store(const TensorView& sums, const Row* rows, const MutableTensorView& to) {
    VisitDType(to.dtype, [&]<class T>() {
      Launch(&StoreKernel<T, Row>, GridFor(std::min(sums.rows, to.rows)), kCopyThreads,
             static_cast<const float*>(sums.data), sums.row_stride, static_cast<int>(sums.cols),
             rows, static_cast<T*>(to.data), to.row_stride);
    });
  }

 private:
  Products& products_;
  const cudaStream_t stream_;
  std::byte* const workspace_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_BACKWARD_CUH_
