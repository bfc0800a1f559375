// verify in steps, for logits that come a block of rows at a time.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_VERIFY_H_
#define LOGITD_KERNELS_CUDA_SAMPLING_VERIFY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/types.h"
#include "kernels/verify.h"

namespace logitd::cuda {

struct BlockRow;

// One call: Begin; then in each pass, from 0 on, Rows for one block after another, in any order,
// and End. Blocks may end inside a sequence. Only enqueues.
class VerifySteps {
 public:
  // Takes pieces of `scratch`, 2 bytes for each of `rows`, with block verification 50. The logits
  // of `args` are ignored.
  VerifySteps(const VerifyArgs& args, int64_t rows, Scratch& scratch, cudaStream_t stream);

  // Block verification looks at all rows three times: for s, for the choice, for the tokens.
  int passes() const { return args_.blocks ? 3 : 1; }

  cudaError_t Begin() const;
  // The rows from `first` on, whose logits these are. `scratch` is what the constructor left.
  cudaError_t Rows(int pass, const TensorView& logits, int64_t first, const Scratch& scratch) const;
  cudaError_t End(int pass) const;

 private:
  const VerifyArgs args_;
  const cudaStream_t stream_;
  uint8_t* has_draft_;          // [rows]
  uint8_t* accepted_;           // [rows]
  BlockRow* blocks_ = nullptr;  // [rows]
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_VERIFY_H_
