// The CPU form of cross_entropy; the contract is kernels/cross_entropy.h.
#ifndef LOGITD_KERNELS_CPU_LOSS_CROSS_ENTROPY_H_
#define LOGITD_KERNELS_CPU_LOSS_CROSS_ENTROPY_H_

#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cross_entropy.h"
#include "kernels/shards.h"

namespace logitd::cpu {

// Cells read at once, and handed to a thread at once: few enough to balance and to stay in L2,
// enough to hide the cost of taking them.
inline constexpr int64_t kItemCells = kMostItemCells;

// The smoothing of the contract's formula.
inline double EffectiveSmoothing(const CrossEntropyRow& ask, int64_t vocab) {
  const double e = ask.label_smoothing;
  if (ask.smoothing == Smoothing::kTorch) return e;
  return vocab == 1 ? 0 : e * static_cast<double>(vocab) / static_cast<double>(vocab - 1);
}

// Memory for what a read leaves of each row.
struct LossScratch {
  SketchScratch x, order;
  Buffer<float> total, moment;
};

// Block until done. The bits of the results depend on neither the pool nor what else runs on it.
// `scratch` belongs to the caller's stream, and stays for its next call.
void CrossEntropy(const CrossEntropyArgs& args, ThreadPool& pool, LossScratch& scratch);
void CrossEntropyBackward(const CrossEntropyBackwardArgs& args, ThreadPool& pool);

// The two halves of linear_cross_entropy on a sharded head; the contract is kernels/shards.h. The
// logits of `args` are those of the shard's tokens, for rows from `first_row` of the shape on. Also
// where the shard has no tokens.
struct LossShard {
  int index = 0;
  LossPartialShape shape;
  int64_t first_row = 0;
  const float* targets = nullptr;  // [shards, shape.rows]
  LossPartials to;
};
void CrossEntropyPartial(const CrossEntropyArgs& args, const LossShard& shard, ThreadPool& pool,
                         LossScratch& scratch);
void CrossEntropyMerge(const LinearCrossEntropyMergeArgs& args, ThreadPool& pool);

// Columns of a wider row's logits, as one block of a head's vocabulary gives them.
struct TokenBlock {
  int64_t first_token = 0;
  int64_t vocab = 0;
  float softcap = 0;  // the head's
};

// CrossEntropyBackward where args.logits and args.d_logits are such columns of the rows. Targets
// count from token 0.
void CrossEntropyBackwardOfTokens(const CrossEntropyBackwardArgs& args, const TokenBlock& block,
                                  ThreadPool& pool);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LOSS_CROSS_ENTROPY_H_
