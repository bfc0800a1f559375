// Matrix products by cuBLASLt: a fixed algorithm for each shape.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_PRODUCT_H_
#define LOGITD_KERNELS_CUDA_LINEAR_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <list>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace logitd::cuda {

// out = alpha * a b + beta * out + bias, with a or b transposed where it says so. a and b have one
// dtype; all data and row strides are aligned to 16 bytes.
struct MatrixProduct {
  TensorView a;  // [rows, k]; transposed: [k, rows]
  bool transpose_a = false;
  TensorView b;  // [k, cols]; transposed: [cols, k]
  bool transpose_b = false;
  MutableTensorView out;  // [rows, cols]; its own rows and cols are not looked at
  // The algorithm is that of a product with so many columns, at least cols: columns that are
  // computed in several products have the bits of one. b is transposed then. 0: cols.
  int64_t asked_cols = 0;
  const float* bias = nullptr;  // [cols], added to every row; null: none
  float alpha = 1.0f;
  float beta = 0.0f;
  // Not null: alpha and beta in device memory, in place of the two above.
  const float* device_factors = nullptr;
  void* workspace = nullptr;
};

// The products of one stream. Used by one thread at a time.
//
// Sums are fp32, and so are products of f32 inputs. The algorithm is chosen
// when a shape is first seen: the first that serves the shape with its strides, in the order of the
// algorithms for the shape without its strides. It never splits a sum: an element's bits
// depend on its own row and column, and on the shape. The first call with a shape costs a few
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
  // The device hangs: the library's handle is left, because its end would wait for the device.
  void Abandon() { handle_ = nullptr; }

  // UNAVAILABLE: no library, or it gives no handle. workspace_bytes: of every product's workspace.
  absl::Status Init(size_t workspace_bytes);
  size_t workspace_bytes() const { return workspace_bytes_; }

  cudaError_t Enqueue(const MatrixProduct& product, cudaStream_t stream);

 private:
  struct Plan;
  cudaError_t PlanOf(const MatrixProduct& product, Plan*& plan);

  void* handle_ = nullptr;  // cublasLtHandle_t
  size_t workspace_bytes_ = 0;
  std::list<Plan> plans_;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_PRODUCT_H_
