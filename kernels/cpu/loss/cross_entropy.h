// The CPU form of cross_entropy; the contract is kernels/cross_entropy.h.
#ifndef LOGITD_KERNELS_CPU_LOSS_CROSS_ENTROPY_H_
#define LOGITD_KERNELS_CPU_LOSS_CROSS_ENTROPY_H_

#include <algorithm>

#include "kernels/cpu/rows/row_threads.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cross_entropy.h"
#include "kernels/cross_entropy_training.h"
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

// The softcap of the contract's formula; 0 stays 0.
inline float EffectiveSoftcap(float softcap) {
  return softcap == 0 ? 0 : std::clamp(softcap, 0x1p-100f, 0x1p100f);
}

// Memory for what a read leaves of each row.
struct LossScratch {
  SketchScratch x, order;
  Buffer<int32_t> before;
  Buffer<float> total, moment;
};

// Block until done. The bits of the results depend on neither the pool nor what else runs on it.
// `scratch` belongs to the caller's stream, and stays for its next call.
void CrossEntropy(const CrossEntropyArgs& args, ThreadPool& pool, LossScratch& scratch);
void CrossEntropyBackward(const CrossEntropyBackwardArgs& args, ThreadPool& pool);
void CrossEntropyTraining(const CrossEntropyTrainingArgs& args, ThreadPool& pool,
                          LossScratch& scratch);

// The same of one row, on the calling thread.
void CrossEntropyOfRow(const CrossEntropyArgs& args, int64_t r);
// Writes the answers of row r, which has a support. `logits` is the row: args.logits.cols of them,
// in the type of args.logits.
void CrossEntropyOfSupport(const CrossEntropyArgs& args, int64_t r, const void* logits);
void CrossEntropyBackwardOfRow(const CrossEntropyBackwardArgs& args, int64_t r);

// The two halves of linear_cross_entropy on a shard; the contract is kernels/shards.h. A whole head
// is its only shard.
//
// The first half gets the logits of one cell at a time, for some rows, while they are in a cache.
// The shard is cut into stretches. One thread reads a stretch of a row, cell after cell; then the
// row's stretches are joined.

// What a stretch leaves of a row besides the sums of its cells.
struct LossStretch {
  int32_t nan;     // as in LossPartials
  int32_t before;  // the same
  int64_t keys;    // of the row's top tokens: how many there are
};

struct LossShard {
  int index = 0;
  LossPartialShape shape;
  const CrossEntropyRow* rows = nullptr;  // [shape.rows]
  const int32_t* extra_ids = nullptr;
  const float* targets = nullptr;  // [shards, shape.rows]
  LossPartials to;
  // Memory for rows [first_row, ...) of the shape. A row's stretches are next to each other.
  VocabShards stretches;  // of the shard's tokens
  int64_t first_row = 0;
  LossStretch* parts = nullptr;  // [rows, stretches]
  uint64_t* keys = nullptr;      // [rows, stretches, shape.max_top]

  int64_t PartOf(int64_t r, int stretch) const {
    return (r - first_row) * stretches.count + stretch;
  }
};

// The logits of a cell of the shard.
struct LossCell {
  int stretch = 0;
  int64_t first = 0;   // its first token, of the shard's
  int64_t tokens = 0;  // 1..kVocabCell
  int64_t first_row = 0;
  int64_t rows = 0;
  const float* logits = nullptr;  // [rows, tokens]
  int64_t row_stride = 0;
};

// Thread-safe for different rows or stretches. The cells of a stretch come in their order.
void StartStretch(const LossShard& of, int stretch, int64_t first_row, int64_t rows);
void ReadLossCell(const LossShard& of, const LossCell& cell);
// Thread-safe for different rows. All stretches of the row have been read.
void JoinStretches(const LossShard& of, int64_t r);

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
