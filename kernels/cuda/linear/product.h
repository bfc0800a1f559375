// Matrix products by cuBLASLt: a fixed algorithm for each shape.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_PRODUCT_H_
#define LOGITD_KERNELS_CUDA_LINEAR_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <list>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace logitd::cuda {

// out = alpha * op(a) op(b) + beta * out, in cuBLASLt's terms: column-major, op(a) is [m, k], op(b)
// is [k, n], out is [m, n]; strides are between columns. Inputs, output and strides are aligned to
// 16 bytes.
struct ProductShape {
  DType inputs = DType::kF32;
  DType output = DType::kF32;
  bool transpose_a = false;
  bool transpose_b = false;
  bool bias = false;  // adds a value to every row of out
  bool tf32 = false;  // f32 inputs are TF32 numbers: their products may take the tensor cores
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int64_t out_stride = 0;

  friend bool operator==(const ProductShape&, const ProductShape&) = default;
};

struct ProductOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  const float* bias = nullptr;  // [m], where the shape has one
  float alpha = 1.0f;
  float beta = 0.0f;
  void* workspace = nullptr;
};

// The products of one stream. Used by one thread at a time.
//
// Sums are fp32, and so are products of f32 inputs, unless the shape says tf32. The algorithm is
// chosen when a shape is first seen: the first that serves the shape with its strides, in the order
// of the algorithms for the shape without its inputs' strides. It never splits a sum: an element's
// bits depend on its own row and column, and on the shape. The first call with a shape costs a few
// hundred microseconds of host time; later calls only enqueue.
//
// The library is loaded at run time, once a process: a machine without it still runs every op that
// needs no product, and the CPU backend. It is looked for where the loader looks, then in
// /usr/local/cuda/lib64.
class Products {
 public:
  Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;
  ~Products();

  // UNAVAILABLE: no library, or it gives no handle. workspace_bytes: of every operand's workspace.
  absl::Status Init(size_t workspace_bytes);
  size_t workspace_bytes() const { return workspace_bytes_; }

  cudaError_t Enqueue(const ProductShape& shape, const ProductOperands& operands,
                      cudaStream_t stream);

 private:
  struct Plan;
  cudaError_t PlanOf(const ProductShape& shape, const float* bias, Plan*& plan);

  void* handle_ = nullptr;  // cublasLtHandle_t
  size_t workspace_bytes_ = 0;
  std::list<Plan> plans_;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_PRODUCT_H_
