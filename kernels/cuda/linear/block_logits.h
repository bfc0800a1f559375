// The logits of a block of rows, in scratch: what every linear op that takes logits starts with.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_BLOCK_LOGITS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_BLOCK_LOGITS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/scratch.h"
#include "kernels/head.h"
#include "kernels/types.h"

namespace logitd::cuda {

// The row stride of hidden states that Prepare writes.
int64_t PreparedStride(const HeadView& head);

// Writes the hidden states after the head's norm to `to`, padded with zeros to `padded_rows` rows,
// and makes `states` a view of them.
cudaError_t Prepare(const HeadView& head, int64_t padded_rows, std::byte* to, TensorView& states,
                    cudaStream_t stream);

// Makes the logits of blocks of rows, in pieces of `scratch`. Keeps references to what it is given.
class BlockLogits {
 public:
  // scratch_share: logits take at most 1 / scratch_share of scratch.
  // whole_vocab: the vocabulary of which the head's is a part. A logit has the bits that it has in
  // a block of the whole.
  BlockLogits(const HeadView& head, int64_t whole_vocab, const LinearRoute& route,
              int scratch_share, Products& products, Scratch& scratch, cudaStream_t stream);

  // Rows of a block. They do not depend on the call.
  int64_t rows() const { return rows_; }

  TensorView View(int64_t rows) const {
    return {logits_, DType::kF32, rows, head_.vocab(), stride_};
  }

  // Writes View(states.rows). `scratch` is what the constructor left.
  cudaError_t Make(TensorView states, const Scratch& scratch) const {
    return Make(states, head_, logits_, stride_, scratch);
  }

  // Writes the logits of tokens of another head, which differs only in its weight and its bias and
  // has no more tokens, to `logits` of row stride `stride`, and no byte between rows.
  cudaError_t Make(TensorView states, const HeadView& head, float* logits, int64_t stride,
                   const Scratch& scratch) const;

 private:
  cudaError_t Multiply(const TensorView& states, const HeadView& head, float* logits,
                       int64_t stride) const;

  const HeadView& head_;
  const int64_t whole_vocab_;
  const LinearRoute route_;
  Products& products_;
  const cudaStream_t stream_;
  const int64_t stride_;
  int64_t rows_;
  std::byte* workspace_ = nullptr;
  float* logits_;
  std::byte* prepared_;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_BLOCK_LOGITS_H_
