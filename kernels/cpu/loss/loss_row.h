// What reading and answering a row of cross_entropy need on the CPU. The per-target code is in
// read_cells-inl.h, answer-inl.h and shard-inl.h.
#ifndef LOGITD_KERNELS_CPU_LOSS_LOSS_ROW_H_
#define LOGITD_KERNELS_CPU_LOSS_LOSS_ROW_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/loss/cross_entropy.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/rows/token_list.h"

namespace logitd::cpu {

// Scratch of one thread.
struct LossThreadScratch {
  LossScratch row;
  Buffer<float> capped;
  Buffer<float> extra;
  Buffer<uint64_t> keys;
  ListScratch list;
};

// A row on its way to its answers, or a shard's part of one.
struct LossRow {
  Row sent;  // as sent; sketched, at temperature 1, only where has_order is
  Row x;     // after softcap, at the row's temperature; with a softcap there are no logits of it
  bool has_order;      // the order of the tokens is that of `sent`, which has a sketch of its own
  int64_t vocab;       // of the whole row
  RankTarget counted;  // has a logit where the rank is counted while the row is read
  float* total;        // [cells], sum of x * kTotalShrink
  float* moment;       // [cells], sum of exp((x - max) / temperature) * (x - max) * MomentShrink()
};

// Keeps the sum of a cell finite.
inline constexpr float kTotalShrink = 1.0f / 4096;

// Keeps the moment of a cell finite. Logits as far apart as f32 allows have weights above 0 only at
// a large temperature. It is a power of two, so it costs a moment no digits.
inline float MomentShrink(float temperature) { return temperature < 1 ? kShrink : kShrink / 16; }

inline bool RankIsWanted(const CrossEntropyRow& ask) {
  return ask.target != kIgnoredTarget && (ask.want & kWantRank) != 0;
}

// Where top tokens are wanted, a rank comes from the maxima of groups that they need anyway.
inline bool RankIsCounted(const CrossEntropyRow& ask) {
  return RankIsWanted(ask) && ask.top_logprobs == 0;
}

// Row r, with sketches in slot `slot` of `slots` of the scratch.
inline LossRow LossRowAt(const CrossEntropyArgs& args, int64_t r, LossScratch& scratch,
                         int64_t slots, int64_t slot) {
  const TensorView& logits = args.logits;
  const CrossEntropyRow& ask = args.rows[r];
  const int64_t cells = CellCount(logits.cols);
  LossRow row;
  row.vocab = logits.cols;
  row.sent = {.logits = RowData(logits, r),
              .dtype = logits.dtype,
              .vocab = logits.cols,
              .temperature = 1,
              .sketch = {}};
  row.x = row.sent;
  row.x.temperature = ask.temperature;
  row.x.sketch = SketchAt(scratch.x, slots, slot, logits.cols);
  row.has_order = ask.softcap > 0 && ask.top_logprobs > 0;
  if (row.has_order) row.sent.sketch = SketchAt(scratch.order, slots, slot, logits.cols);
  if (RankIsCounted(ask)) {
    const size_t target = static_cast<size_t>(ask.target) * SizeOf(logits.dtype);
    row.counted = {.logit = static_cast<const std::byte*>(row.sent.logits) + target,
                   .index = ask.target,
                   .before = scratch.before.Get(slots * cells) + slot * cells};
  }
  row.total = scratch.total.Get(slots * cells) + slot * cells;
  row.moment = scratch.moment.Get(slots * cells) + slot * cells;
  return row;
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LOSS_LOSS_ROW_H_
