// The CPU form of softmax_topk; the contract is kernels/softmax_topk.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_SOFTMAX_TOPK_H_
#define LOGITD_KERNELS_CPU_SAMPLING_SOFTMAX_TOPK_H_

#include <cstdint>

#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/shards.h"
#include "kernels/softmax_topk.h"

namespace logitd::cpu {

// Name of the instruction set the op was dispatched to, e.g. "AVX3".
const char* SimdTarget();

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
// Only the caller may use `scratch` during the call; it is used where rows are few and split over
// threads.
void SoftmaxTopK(const SoftmaxTopKArgs& args, ThreadPool& pool, SketchScratch& scratch);

// The two halves of linear_topk on a sharded head; the contract is kernels/shards.h. The logits of
// `args` are those of the shard's tokens, for rows from `first_row` of the shape on. Also where the
// shard has no tokens.
struct TopKShard {
  int index = 0;
  TopKPartialShape shape;
  int64_t first_row = 0;
  TopKPartials to;
};
void TopKPartial(const SoftmaxTopKArgs& args, const TopKShard& shard, ThreadPool& pool,
                 SketchScratch& scratch);
void TopKMerge(const LinearTopKMergeArgs& args, ThreadPool& pool);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_SOFTMAX_TOPK_H_
