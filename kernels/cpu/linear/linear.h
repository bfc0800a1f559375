// The CPU forms of the linear ops; the contract is kernels/linear.h.
#ifndef LOGITD_KERNELS_CPU_LINEAR_LINEAR_H_
#define LOGITD_KERNELS_CPU_LINEAR_LINEAR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/linear/product.h"
#include "kernels/cpu/loss/cross_entropy.h"
#include "kernels/cpu/loss/divergence.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/sampling/sample_row.h"
#include "kernels/cpu/sampling/verify.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/divergence_training.h"
#include "kernels/linear.h"
#include "kernels/shard_gradients.h"
#include "kernels/shards.h"

namespace logitd::cpu {

// Memory of linear_divergence_training besides that of the backward: 64 MiB of logits.
struct DivergenceTrainingScratch {
  AlignedBuffer reference_logits;
  Buffer<float> measured;  // answers of divergence that are not asked for
  Buffer<DivergenceNorms> norms;
};

// Memory for rows that are not left out (CrossEntropyArgs::counted_rows), and for their answers.
struct CountedScratch {
  Buffer<int64_t> places;
  Buffer<std::byte> hidden;
  Buffer<CrossEntropyRow> rows;
  Buffer<float> values;
  Buffer<int32_t> rank;
  Buffer<RowStatus> status;
};

// Memory of one stream's linear ops. linear_topk, linear_sample, linear_verify and
// linear_divergence take up to 64 MiB of logits. linear_cross_entropy takes the hidden states of up
// to 256 rows in f32 and their partials, about 8 bytes for each row and cell; gradients take three
// blocks of 256 tokens by `hidden`, and f32 sums for d_hidden, [rows, hidden].
struct LinearScratch {
  AlignedBuffer packed, logits;
  DivergenceScratch divergence;
  AlignedBuffer hidden, weight, d_weight, d_hidden;
  SketchScratch topk;
  SampleCallScratch sample;
  VerifyScratch verify;
  CountedScratch counted;
  Buffer<std::byte> block;
  Buffer<float> targets;
  Buffer<LossStretch> stretches;
  Buffer<uint64_t> stretch_keys;
  DivergenceTrainingScratch divergence_training;
};

// Block until done. The bits of the results depend on neither the pool nor what else runs on it.
// `scratch` belongs to the caller's stream, and stays for its next call. `abandoned`: see
// Stream::Watch; one pass over a large head can take a good part of a second, so it is read for
// every 96 tokens, in linear_cross_entropy for every 1024.
void LinearTopK(const LinearTopKArgs& args, ThreadPool& pool, LinearScratch& scratch,
                const std::atomic<bool>* abandoned = nullptr);
void LinearSample(const LinearSampleArgs& args, ThreadPool& pool, LinearScratch& scratch,
                  const std::atomic<bool>* abandoned = nullptr);
void LinearVerify(const LinearVerifyArgs& args, ThreadPool& pool, LinearScratch& scratch,
                  const std::atomic<bool>* abandoned = nullptr);
void LinearCrossEntropy(const LinearCrossEntropyArgs& args, ThreadPool& pool,
                        LinearScratch& scratch, const std::atomic<bool>* abandoned = nullptr);
void LinearDivergence(const LinearDivergenceArgs& args, ThreadPool& pool, LinearScratch& scratch,
                      const std::atomic<bool>* abandoned = nullptr);
void LinearDivergenceTraining(const LinearDivergenceTrainingArgs& args, ThreadPool& pool,
                              LinearScratch& scratch, const std::atomic<bool>* abandoned = nullptr);
void LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args, ThreadPool& pool,
                                LinearScratch& scratch);
void LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args, ThreadPool& pool,
                                LinearScratch& scratch,
                                const std::atomic<bool>* abandoned = nullptr);

// The halves of these ops on a sharded head; the contract is kernels/shards.h. Otherwise as above.
void LinearTopKPartial(const LinearTopKPartialArgs& args, ThreadPool& pool, LinearScratch& scratch,
                       const std::atomic<bool>* abandoned = nullptr);
void LinearSamplePartial(const LinearSamplePartialArgs& args, ThreadPool& pool,
                         LinearScratch& scratch, const std::atomic<bool>* abandoned = nullptr);
void LinearSampleMerge(const LinearSampleMergeArgs& args, ThreadPool& pool, LinearScratch& scratch);
void LinearVerifyMerge(const LinearVerifyMergeArgs& args, ThreadPool& pool, LinearScratch& scratch);
void LinearDivergenceMerge(const LinearDivergenceMergeArgs& args, ThreadPool& pool,
                           LinearScratch& scratch);
void LinearSupportMerge(const LinearSupportMergeArgs& args, ThreadPool& pool,
                        LinearScratch& scratch);
void LinearCrossEntropyTargets(const LinearCrossEntropyTargetsArgs& args, ThreadPool& pool);
void LinearCrossEntropyPartial(const LinearCrossEntropyPartialArgs& args, ThreadPool& pool,
                               LinearScratch& scratch,
                               const std::atomic<bool>* abandoned = nullptr);
void LinearCrossEntropyBackwardPartial(const LinearCrossEntropyBackwardPartialArgs& args,
                                       ThreadPool& pool, LinearScratch& scratch);
void LinearCrossEntropyBackwardMerge(const LinearCrossEntropyBackwardMergeArgs& args,
                                     ThreadPool& pool, LinearScratch& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LINEAR_LINEAR_H_
