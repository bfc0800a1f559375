// Launchers of the two halves of linear ops on a sharded head (kernels/shards.h).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_SHARDS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_SHARDS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/scratch.h"
#include "kernels/shard_gradients.h"
#include "kernels/shards.h"

namespace logitd::cuda {

// They enqueue and return. Pointers in the arguments are device memory; what is written may be in
// the memory of a peer. `scratch` is all of the stream's: how many rows a product has depends on
// it, and must be as on one device.
cudaError_t LinearTopKPartial(const LinearTopKPartialArgs& args, Products& products,
                              Scratch scratch, cudaStream_t stream);
cudaError_t LinearTopKMerge(const LinearTopKMergeArgs& args, cudaStream_t stream);
// The logits of a shard's tokens where they are in a matrix of the whole vocabulary, which may be
// in the memory of a peer: what a few rows exchange.
struct ShardLogitsArgs {
  TensorView hidden;  // [rows, hidden], as in LinearTopKArgs
  HeadView head;      // the shard's
  int shard = 0;      // its index
  VocabShards shards;
  float* logits = nullptr;  // [rows, vocab], aligned to 256 bytes
  int64_t stride = 0;       // between rows, a multiple of 32; nothing is written between rows
};
cudaError_t ShardLogits(const ShardLogitsArgs& args, Products& products, Scratch scratch,
                        cudaStream_t stream);
cudaError_t LinearSamplePartial(const LinearSamplePartialArgs& args, Products& products,
                                Scratch scratch, cudaStream_t stream);
cudaError_t LinearSampleMerge(const LinearSampleMergeArgs& args, Scratch scratch,
                              cudaStream_t stream);
cudaError_t LinearVerifyMerge(const LinearVerifyMergeArgs& args, Scratch scratch,
                              cudaStream_t stream);
cudaError_t LinearDivergenceMerge(const LinearDivergenceMergeArgs& args, Scratch scratch,
                                  cudaStream_t stream);
cudaError_t LinearSupportMerge(const LinearSupportMergeArgs& args, Scratch scratch,
                               cudaStream_t stream);
// The two halves of linear_sample where every row needs only a few of its first tokens
// (kernels/sampling_rules.h): what is exchanged is the block of linear_topk at temperature 1.
struct KeptSamplePartialArgs {
  TensorView hidden;       // [shape.rows, hidden], as in LinearSampleArgs
  HeadView head;           // the shard's
  int shard = 0;           // its index
  TopKPartialShape shape;  // max_k: >= every row's KeptTokens, and less than the vocabulary
  const SampleRow* rows = nullptr;  // [rows]
  std::byte* block = nullptr;       // [shape.bytes()], 16-byte aligned
};
struct KeptSampleMergeArgs {
  TopKPartialShape shape;
  const std::byte* blocks = nullptr;  // [shards, shape.bytes()], 16-byte aligned
  SampleArgs sample;                  // its logits are ignored
};
cudaError_t KeptSamplePartial(const KeptSamplePartialArgs& args, Products& products,
                              Scratch scratch, cudaStream_t stream);
// In kept_sample.cu.
cudaError_t KeptSampleMerge(const KeptSampleMergeArgs& args, cudaStream_t stream);
cudaError_t LinearCrossEntropyTargets(const LinearCrossEntropyTargetsArgs& args, Products& products,
                                      Scratch scratch, cudaStream_t stream);
cudaError_t LinearCrossEntropyPartial(const LinearCrossEntropyPartialArgs& args, Products& products,
                                      Scratch scratch, cudaStream_t stream);
cudaError_t LinearCrossEntropyMerge(const LinearCrossEntropyMergeArgs& args, cudaStream_t stream);
// In backward.cu.
cudaError_t LinearCrossEntropyBackwardPartial(const LinearCrossEntropyBackwardPartialArgs& args,
                                              Products& products, const Scratch& scratch,
                                              cudaStream_t stream);
cudaError_t LinearCrossEntropyBackwardMerge(const LinearCrossEntropyBackwardMergeArgs& args,
                                            cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_SHARDS_H_
