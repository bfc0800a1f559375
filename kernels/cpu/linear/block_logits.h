// The logits of a block of rows on the CPU: what the linear ops that take logits start with.
#ifndef LOGITD_KERNELS_CPU_LINEAR_BLOCK_LOGITS_H_
#define LOGITD_KERNELS_CPU_LINEAR_BLOCK_LOGITS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/cpu/linear/linear.h"
#include "kernels/cpu/linear/product.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/head.h"
#include "kernels/types.h"

namespace logitd::cpu {

// Rows whose logits are in memory at once: as many as fit, and no more than help.
inline constexpr int64_t kMostRows = 64;
inline constexpr int64_t kMostLogits = int64_t{1} << 24;
inline int64_t RowsAtOnce(int64_t vocab) {
  return std::clamp(kMostLogits / vocab / kTileRows * kTileRows, kTileRows, kMostRows);
}

// Tokens handed to a thread at once, out of all tokens and out of a block: few enough to balance.
inline constexpr int64_t kItemTokens = 96;
inline constexpr int64_t kBlockItemTokens = 24;

inline RowNorm NormOf(const HeadView& head) {
  return {.weight = head.norm, .epsilon = head.norm_epsilon};
}

// Packs rows [begin, begin + rows.rows) of the hidden states.
inline void Pack(const TensorView& hidden, const HeadView& head, int64_t begin,
                 const PackedRows& rows, ThreadPool& pool) {
  const TensorView from = RowsOf(hidden, begin, rows.rows);
  pool.ParallelFor(rows.padded_rows(), [&](int64_t r) { PackRow(from, NormOf(head), r, rows); });
}

inline bool IsAbandoned(const std::atomic<bool>* abandoned) {
  return abandoned != nullptr && abandoned->load(std::memory_order_relaxed);
}

// The logits of tokens [begin, end), `per_item` tokens at a time; a row of `to` starts every
// `to_stride` elements. Incomplete if the work was abandoned.
inline void ComputeLogits(const PackedRows& rows, const TensorView& weight, int64_t begin,
                          int64_t end, const LogitsEpilogue& epilogue, float* to, int64_t to_stride,
                          int64_t per_item, ThreadPool& pool,
                          const std::atomic<bool>* abandoned = nullptr) {
  pool.ParallelFor((end - begin + per_item - 1) / per_item, [&](int64_t item) {
    if (IsAbandoned(abandoned)) return;
    const int64_t first = begin + item * per_item;
    Logits(rows, weight, first, std::min(end, first + per_item), epilogue, to + first - begin,
           to_stride);
  });
}

inline LogitsEpilogue EpilogueOf(const HeadView& head) {
  return {.scale = head.scale, .bias = head.bias, .softcap = head.softcap};
}

// Packs the rows [begin, begin + count) and computes their logits of all of the head's tokens.
inline void ComputeRows(const TensorView& hidden, const HeadView& head, int64_t begin,
                        int64_t count, float* to, int64_t to_stride, ThreadPool& pool,
                        LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  PackedRows rows = {.rows = count, .cols = head.hidden()};
  rows.data = scratch.packed.Get(rows.size());
  Pack(hidden, head, begin, rows, pool);
  ComputeLogits(rows, head.weight, 0, head.vocab(), EpilogueOf(head), to, to_stride, kItemTokens,
                pool, abandoned);
}

// Calls body(first row, logits) for one block of rows after another, until the work is abandoned.
// For a shard without tokens, once for all rows.
template <class Body>
void ForEachBlock(const TensorView& hidden, const HeadView& head, ThreadPool& pool,
                  LinearScratch& scratch, const std::atomic<bool>* abandoned, const Body& body) {
  const int64_t vocab = head.vocab();
  if (vocab == 0) return body(int64_t{0}, TensorView{.rows = hidden.rows});
  const int64_t at_once = RowsAtOnce(vocab);
  for (int64_t begin = 0; begin < hidden.rows; begin += at_once) {
    const int64_t rows = std::min(at_once, hidden.rows - begin);
    float* logits = scratch.logits.Get(rows * vocab);
    ComputeRows(hidden, head, begin, rows, logits, vocab, pool, scratch, abandoned);
    if (IsAbandoned(abandoned)) return;
    body(begin, TensorView{logits, DType::kF32, rows, vocab, vocab});
  }
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LINEAR_BLOCK_LOGITS_H_
