// linear_cross_entropy_training on a head that is cut over several devices, in two calls with an
// exchange in between, so that the logits are made once.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_SHARD_TRAINING_H_
#define LOGITD_KERNELS_CUDA_LINEAR_SHARD_TRAINING_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/cross_entropy.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/scratch.h"
#include "kernels/linear.h"
#include "kernels/shards.h"
#include "kernels/types.h"

namespace logitd::cuda {

// Both calls of a shard get the same. All is memory of the shard's device, except `blocks`.
struct ShardTrainingArgs {
  // The head, d_weight and d_bias of the shard. d_hidden is ignored. Answers are written on every
  // device whose shard has tokens, and have the same bits on all of them. The first always has.
  LinearCrossEntropyTrainingArgs training;
  VocabShards shards;
  int shard = 0;                // its index
  std::byte* blocks = nullptr;  // of all shards, ShardTrainingBytes each; may be a peer's memory
};

// Bytes of a block: about 12 for each row and 256 tokens.
size_t ShardTrainingBytes(const VocabShards& shards, int64_t rows);

// Whether the two calls below serve the shard. Where they do not serve all shards, none is to be
// called: the forward and the backward are calls of their own then.
bool ShardTrainingFits(const ShardTrainingArgs& args, const Products& products,
                       const Scratch& scratch);

// Pass 1 of training.cu, and the shard's block. Leaves what pass 2 needs in `scratch`, which is all
// of the stream's, and in d_weight: no other op runs on the stream before the second call.
cudaError_t BeginShardTraining(const ShardTrainingArgs& args, Products& products, Scratch scratch,
                               cudaStream_t stream);

// Pass 2, when the blocks of all shards are there. The answers have the bits of one device. When
// the shard's part of d_hidden is enqueued it calls hidden_done(part), and enqueues the last
// product of d_weight after that. part: f32 [rows, hidden] in `scratch`, row stride a multiple of
// 64; skipped rows are zeros.
cudaError_t EndShardTraining(const ShardTrainingArgs& args,
                             absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done,
                             Products& products, Scratch scratch, cudaStream_t stream);

// Adds parts of d_hidden in the order of the shards, and writes the sum as
// LinearCrossEntropyBackward writes d_hidden. In backward.cu.
struct AddPartsArgs {
  const float* first = nullptr;   // [rows, hidden] of row stride `stride`
  const float* others = nullptr;  // [shards - 1, rows, hidden], of the same stride
  int shards = 1;
  int64_t stride = 0;
  const CrossEntropyRow* rows = nullptr;  // [rows]
  MutableTensorView d_hidden;
};
cudaError_t AddParts(const AddPartsArgs& args, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_SHARD_TRAINING_H_
