// linear_cross_entropy of the rows that are not left out (CrossEntropyArgs::counted_rows).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_COUNTED_ROWS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_COUNTED_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/linear.h"

namespace logitd::cuda {

// The rows of a call that are not left out, one after the other, and their answers, in pieces of
// scratch. Rows that there are not are skipped rows.
class CountedRows {
 public:
  // The most rows of a part of a call that scratch has room for.
  static int64_t MostRows(const LinearCrossEntropyArgs& args, const Scratch& scratch);

  // Fills args() from rows of `whole`, and writes the answers of those that are left out.
  cudaError_t Gather(const LinearCrossEntropyArgs& whole, Scratch& scratch, cudaStream_t stream);
  const LinearCrossEntropyArgs& args() const { return args_; }
  // Writes the answers of args() to those of `whole`. Top and extra tokens are there already.
  cudaError_t Scatter(const LinearCrossEntropyArgs& whole, cudaStream_t stream) const;

 private:
  LinearCrossEntropyArgs args_;
  int32_t* places_ = nullptr;  // [rows of the call]: a row's in args(); -1: none
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_COUNTED_ROWS_H_
