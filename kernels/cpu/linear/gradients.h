// The gradients of a head on the CPU, from those of its logits, whichever loss they are of.
//
// A block of 256 tokens at a time, and inside it 256 rows at a time: their logits again, the
// gradient in place of the logits, and its products with the weights and the hidden states. For a
// loss of one head these are three products of the forward's size. Sums for d_hidden stay in f32
// for all rows until the last token.
#ifndef LOGITD_KERNELS_CPU_LINEAR_GRADIENTS_H_
#define LOGITD_KERNELS_CPU_LINEAR_GRADIENTS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/linear/block_logits.h"
#include "kernels/cpu/linear/linear.h"
#include "kernels/cpu/linear/product.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/head.h"
#include "kernels/types.h"

namespace logitd::cpu {

// kIgnored: d_hidden becomes zeros. Only counted rows add anything, whatever others hold.
enum class RowUse : int32_t { kSkipped, kIgnored, kCounted };

// The inputs of a gradient, and the places of its results.
struct HeadGradients {
  TensorView hidden;
  const HeadView& head;
  MutableTensorView d_hidden;  // data null: not wanted; likewise below
  MutableTensorView d_weight;
  float* d_bias;
};

inline constexpr int64_t kBlockTokens = 256;
inline constexpr int64_t kBlockRows = 256;

// Rows [first, first + rows) and tokens [begin, end), at most kBlockRows and kBlockTokens.
struct GradientBlock {
  int64_t first, rows;
  int64_t begin, end;
  float* to;  // [rows, tokens]

  int64_t tokens() const { return end - begin; }
};

// Writes the block's logits to `to`, [rows, tokens]; zeros for 64 rows none of which is `wanted`.
template <class Wanted>
void ComputeBlock(const TensorView& hidden, const HeadView& head, const LogitsEpilogue& epilogue,
                  const GradientBlock& of, float* to, const Wanted& wanted, ThreadPool& pool,
                  LinearScratch& scratch) {
  const int64_t tokens = of.tokens();
  for (int64_t r = 0; r < of.rows; r += kMostRows) {
    PackedRows packed = {.rows = std::min(kMostRows, of.rows - r), .cols = head.hidden()};
    bool any = false;
    for (int64_t i = 0; i < packed.rows; ++i) any |= wanted(of.first + r + i);
    if (!any) {
      std::fill_n(to + r * tokens, packed.rows * tokens, 0.0f);
      continue;
    }
    packed.data = scratch.packed.Get(packed.size());
    Pack(hidden, head, of.first + r, packed, pool);
    ComputeLogits(packed, head.weight, of.begin, of.end, epilogue, to + r * tokens, tokens,
                  kBlockItemTokens, pool);
  }
}

// Loss::Use(row) says how a row is used. Loss::Make(block, pool, scratch) writes the gradients of
// the block's logits before the head's softcap and its scale; those of rows that are not counted
// may be anything.
template <class Loss>
class Gradients {
 public:
  Gradients(const HeadGradients& of, const Loss& loss, ThreadPool& pool, LinearScratch& scratch)
      : of_(of),
        loss_(loss),
        pool_(pool),
        scratch_(scratch),
        padded_cols_(RoundUp(of.head.hidden(), kStripCols)) {}

  void Run() {
    const int64_t rows = of_.hidden.rows, vocab = of_.head.vocab();
    float* d_hidden = scratch_.d_hidden.Get(rows * padded_cols_);
    pool_.ParallelFor(
        rows, [&](int64_t r) { std::fill_n(d_hidden + r * padded_cols_, padded_cols_, 0.0f); });
    for (int64_t begin = 0; begin < vocab; begin += kBlockTokens)
      AddTokens(begin, std::min(vocab, begin + kBlockTokens), d_hidden);
    if (!WantsHidden()) return;
    pool_.ParallelFor(rows, [&](int64_t r) {
      const RowUse use = loss_.Use(r);
      if (use == RowUse::kSkipped) return;
      float* row = d_hidden + r * padded_cols_;
      // Zero also where weights are infinite.
      if (use == RowUse::kIgnored) std::fill_n(row, padded_cols_, 0.0f);
      StoreRow(row, of_.head.scale, of_.d_hidden, r);
    });
  }

 private:
  bool WantsHidden() const { return of_.d_hidden.data != nullptr; }
  bool WantsWeight() const { return of_.d_weight.data != nullptr; }
  bool Counts(int64_t r) const { return loss_.Use(r) == RowUse::kCounted; }

  // Adds the part of tokens [begin, end).
  void AddTokens(int64_t begin, int64_t end, float* d_hidden) {
    const int64_t tokens = end - begin;
    float* weight = scratch_.weight.Get(kBlockTokens * padded_cols_);
    float* d_weight = scratch_.d_weight.Get(kBlockTokens * padded_cols_);
    pool_.ParallelFor(tokens, [&](int64_t t) {
      WidenRow(of_.head.weight, begin + t, weight + t * padded_cols_, padded_cols_);
      std::fill_n(d_weight + t * padded_cols_, padded_cols_, 0.0f);
      if (of_.d_bias != nullptr) of_.d_bias[begin + t] = 0;
    });
    for (int64_t first = 0; first < of_.hidden.rows; first += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, of_.hidden.rows - first);
      bool any = false;
      for (int64_t r = first; r < first + rows; ++r) any |= Counts(r);
      if (!any) continue;
      AddRows(first, rows, begin, end, weight, d_weight, d_hidden + first * padded_cols_);
    }
    if (!WantsWeight()) return;
    pool_.ParallelFor(tokens, [&](int64_t t) {
      StoreRow(d_weight + t * padded_cols_, of_.head.scale, of_.d_weight, begin + t);
    });
  }

  // Adds the part of these tokens for rows [first, first + rows).
  void AddRows(int64_t first, int64_t rows, int64_t begin, int64_t end, const float* weight,
               float* d_weight, float* d_hidden) {
    const int64_t tokens = end - begin;
    float* gradient = scratch_.logits.Get(kBlockRows * kBlockTokens);
    float* hidden = scratch_.hidden.Get(kBlockRows * padded_cols_);
    loss_.Make({.first = first, .rows = rows, .begin = begin, .end = end, .to = gradient}, pool_,
               scratch_);
    // Rows that are not counted add nothing, also where their hidden states are NaN.
    pool_.ParallelFor(rows, [&](int64_t r) {
      float* row = hidden + r * padded_cols_;
      if (Counts(first + r)) {
        WidenRow(of_.hidden, first + r, row, padded_cols_);
      } else {
        std::fill_n(row, padded_cols_, 0.0f);
        std::fill_n(gradient + r * tokens, tokens, 0.0f);
      }
    });
    pool_.ParallelFor(padded_cols_ / kStripCols, [&](int64_t strip) {
      const int64_t at = strip * kStripCols;
      if (WantsHidden()) {
        AddProduct({.data = gradient, .m_stride = tokens, .k_stride = 1}, rows, tokens, weight + at,
                   padded_cols_, d_hidden + at, padded_cols_, kStripCols);
      }
      if (WantsWeight()) {
        AddProduct({.data = gradient, .m_stride = 1, .k_stride = tokens}, tokens, rows, hidden + at,
                   padded_cols_, d_weight + at, padded_cols_, kStripCols);
      }
    });
    if (of_.d_bias == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t t = 0; t < tokens; ++t) of_.d_bias[begin + t] += gradient[r * tokens + t];
    }
  }

  const HeadGradients of_;
  const Loss& loss_;
  ThreadPool& pool_;
  LinearScratch& scratch_;
  const int64_t padded_cols_;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LINEAR_GRADIENTS_H_
