// softmax_topk on the CPU: one streaming read of a row leaves a sketch; the answer is picked there.
//
//   sketch: maxima, and sums of exp against them, by cells of 1024 elements (rows/sketch.h).
//   fold:   the cells' sums give logsumexp.
//   pick:   the logits that reach a lower bound of the k-th largest one (rows/sketch-inl.h) are
//           sorted.
//
// With many rows, each thread takes whole rows; few rows are split by cells. The bits are the same.
// From 4096 tokens on, the pick of a long row that would leave threads idle is cut into pieces too
// (rows/row_threads.h, rows/token_list-inl.h).
//
// Cost at 64 x 131072 f32, k = 64: reads 33.6 MB once, which is the floor. The second look takes
// about 70 blocks of 128 elements a row, out of L2.
//
// Limited by: what a core can have in flight to memory, for f32; by arithmetic (12 instructions a
// vector for exp, one for the maxima) for f16 and bf16, and for rows in cache.
//
// Measured: one core of a Sapphire Rapids at 2.6 GHz, 16 lanes, 1 GB of inputs in rotation, by
// processor time: f32 12.2 GB/s where a bare read loop gets 15.4 (79%), 19 GB/s out of L2; bf16
// 8.3 GB/s. Equal, ascending, descending, tied and mostly -inf rows take at most 1.3 times as long.
//
// Tried and dropped, as shares of the same read: summing a cell right after it is read, so that
// memory idles meanwhile (72%); reading one cell while another is summed, without prefetch (55%),
// with prefetch 0.5 KiB (63%), 3 KiB (74%) or 4 KiB ahead (58%).
#include "kernels/cpu/sampling/softmax_topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sampling/softmax_topk.cc"
#include "hwy/contrib/sort/vqsort.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/token_list-inl.h"

#ifndef LOGITD_KERNELS_CPU_SOFTMAX_TOPK_ONCE_
#define LOGITD_KERNELS_CPU_SOFTMAX_TOPK_ONCE_

namespace logitd::cpu {

// Scratch of one thread.
struct ThreadScratch {
  SketchScratch sketch;
  ListScratch list;
};

struct RowAnswer {
  int32_t* indices;
  float* probs;
  float* logsumexp;
  RowStatus* status;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SOFTMAX_TOPK_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The answer of a row whose lowest NaN is `nan`.
void FinishNan(int64_t k, int32_t nan, const RowAnswer& out) {
  *out.status = {RowCode::kNanLogit, nan};
  // The contract leaves these open, but no value of an earlier batch may be read there.
  *out.logsumexp = std::numeric_limits<float>::quiet_NaN();
  std::fill(out.indices, out.indices + k, -1);
  std::fill(out.probs, out.probs + k, 0.0f);
}

// Writes the first tokens, from `begin` to `end`, of a row whose sum is `sum`.
void WriteTop(const uint64_t* keys, int64_t begin, int64_t end, float max, float sum,
              const Exponent& e, const RowAnswer& out) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  HWY_ALIGN float x[kMaxLanes];
  HWY_ALIGN float probs[kMaxLanes];
  const VF vsum = hn::Set(d, sum);
  for (int64_t i = begin; i < end; i += lanes) {
    const int64_t n = std::min(lanes, end - i);
    for (int64_t j = 0; j < n; ++j) {
      out.indices[i + j] = KeyIndex(keys[i + j]);
      x[j] = KeyLogit(keys[i + j]);
    }
    std::fill(x + n, x + kMaxLanes, -kInf);
    const VF v = hn::Load(d, x);
    const VF weight = max == kInf
                          ? hn::IfThenElseZero(hn::Eq(v, hn::Set(d, kInf)), hn::Set(d, 1.0f))
                          : PreciseExp(d, v, hn::Set(d, max), e);
    hn::Store(hn::Div(weight, vsum), d, probs);
    std::memcpy(out.probs + i, probs, n * sizeof(float));
  }
}

// The answer of a row without NaN: from its cells, and the keys of its first k tokens, which are
// not read where max is -inf.
void FinishWhole(const Row& row, int64_t k, float max, const uint64_t* keys,
                 const RowThreads& threads, const RowAnswer& out) {
  if (HWY_UNLIKELY(max == -kInf)) {
    *out.status = {RowCode::kEmptySupport, -1};
    *out.logsumexp = -kInf;
    for (int64_t i = 0; i < k; ++i) out.indices[i] = static_cast<int32_t>(i);
    std::fill(out.probs, out.probs + k, 0.0f);
    return;
  }
  *out.status = {RowCode::kOk, -1};

  const Exponent e = MakeExponent(row.temperature);
  const float sum = TotalSum(row, max, e);
  *out.logsumexp = max == kInf
                       ? kInf
                       : static_cast<float>(double{max} / row.temperature + std::log(double{sum}));
  constexpr int64_t kAtOnce = 4096;
  if (k < 2 * kAtOnce) return WriteTop(keys, 0, k, max, sum, e, out);
  threads.For((k + kAtOnce - 1) / kAtOnce, [&](int64_t i) {
    WriteTop(keys, i * kAtOnce, std::min(k, (i + 1) * kAtOnce), max, sum, e, out);
  });
}

// Turns the finished sketch of a row into its answer.
void FinishRow(const Row& row, int64_t k, const RowThreads& threads, ThreadScratch& scratch,
               const RowAnswer& out) {
  const Peak peak = FindPeak(row);
  if (HWY_UNLIKELY(peak.nan_cell >= 0)) return FinishNan(k, FirstNan(row, peak.nan_cell), out);
  const uint64_t* keys = nullptr;
  if (HWY_LIKELY(peak.max > -kInf)) {
    keys = TopKeys(row, k, peak.max, -kInf, threads, scratch.list).keys;
  }
  FinishWhole(row, k, peak.max, keys, threads, out);
}

// ---- Shards

// Writes what a shard says of row r, whose sketch is finished.
void WriteTopKPartial(const Row& row, int64_t k, int64_t r, const TopKShard& of,
                      const RowThreads& threads, ThreadScratch& scratch) {
  const VocabShard shard = of.shape.shards.at(of.index);
  const int64_t to_row = of.first_row + r;
  const int64_t cells = shard.cells();
  const int64_t first_cell = to_row * of.shape.shards.most_cells();
  std::copy_n(row.sketch.max, cells, of.to.max + first_cell);
  std::copy_n(row.sketch.sum, cells, of.to.sum + first_cell);
  of.to.nan[to_row] = -1;
  if (cells == 0) return;
  const Peak peak = FindPeak(row);
  if (HWY_UNLIKELY(peak.nan_cell >= 0)) {
    of.to.nan[to_row] = static_cast<int32_t>(shard.first + FirstNan(row, peak.nan_cell));
    return;
  }
  const int64_t count = std::min(k, shard.tokens);
  const uint64_t* const keys = TopKeys(row, count, peak.max, -kInf, threads, scratch.list).keys;
  for (int64_t i = 0; i < count; ++i) {
    of.to.keys[to_row * of.shape.keys() + i] = LaterKey(keys[i], shard.first);
  }
}

// Turns what all shards say of row r into its answer.
void FinishMerged(const LinearTopKMergeArgs& args, int64_t r, ThreadScratch& scratch,
                  const RowAnswer& out) {
  const SoftmaxTopKRow& ask = args.topk.rows[r];
  const VocabShards& shards = args.shape.shards;
  const Row row = {.logits = nullptr,
                   .dtype = DType::kF32,
                   .vocab = shards.vocab,
                   .temperature = ask.temperature,
                   .sketch = SketchAt(scratch.sketch, 1, 0, shards.vocab)};
  uint64_t* const keys =
      scratch.list.keys.Get(std::min(shards.count * int64_t{ask.k}, shards.vocab));
  int64_t key_count = 0;
  for (int s = 0; s < shards.count; ++s) {
    const VocabShard shard = shards.at(s);
    if (shard.tokens == 0) break;
    const TopKPartials from = args.shape.Of(args.blocks, s);
    if (from.nan[r] >= 0) return FinishNan(ask.k, from.nan[r], out);
    const int64_t first = r * shards.most_cells();
    std::copy_n(from.max + first, shard.cells(), row.sketch.max + shard.first / kCellElements);
    std::copy_n(from.sum + first, shard.cells(), row.sketch.sum + shard.first / kCellElements);
    const int64_t count = std::min<int64_t>(ask.k, shard.tokens);
    std::copy_n(from.keys + r * args.shape.keys(), count, keys + key_count);
    key_count += count;
  }
  scratch.list.sorter(keys, static_cast<size_t>(key_count), hwy::SortDescending());
  FinishWhole(row, ask.k, FindPeak(row).max, keys, RowThreads(), out);
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(SketchCells);
HWY_EXPORT(FinishRow);
HWY_EXPORT(WriteTopKPartial);
HWY_EXPORT(FinishMerged);
HWY_EXPORT(TargetName);

namespace {

ThreadScratch& ScratchOfThisThread() {
  thread_local ThreadScratch scratch;
  return scratch;
}

Row RowAt(const SoftmaxTopKArgs& args, int64_t r) {
  const TensorView& logits = args.logits;
  return {.logits = RowData(logits, r),
          .dtype = logits.dtype,
          .vocab = logits.cols,
          .temperature = args.rows[r].temperature};
}

RowAnswer AnswerAt(const SoftmaxTopKArgs& args, int64_t r) {
  return {.indices = args.indices + args.rows[r].first_entry,
          .probs = args.probs + args.rows[r].first_entry,
          .logsumexp = args.logsumexp + r,
          .status = args.status + r};
}

// Sketches all rows, and calls finish(r, row, threads) for each.
template <class Finish>
void SketchRows(const SoftmaxTopKArgs& args, ThreadPool& pool, SketchScratch& scratch,
                const Finish& finish) {
  const int64_t rows = args.logits.rows;
  const int64_t vocab = args.logits.cols;
  if (TakesWholeRows(rows, vocab, pool)) {
    ForWholeRows(rows, vocab, pool, [&](int64_t r) {
      if (args.rows[r].k == 0) return;
      Row row = RowAt(args, r);
      row.sketch = SketchAt(ScratchOfThisThread().sketch, 1, 0, vocab);
      HWY_DYNAMIC_DISPATCH(SketchCells)(row, 0, CellCount(vocab));
      finish(r, row, RowThreads());
    });
    return;
  }
  // Sized here: no thread may grow memory that another reads.
  SketchAt(scratch, rows, 0, vocab);
  ForCells(rows, vocab, pool, [&](int64_t r, int64_t begin, int64_t end) {
    if (args.rows[r].k == 0) return;
    Row row = RowAt(args, r);
    row.sketch = SketchAt(scratch, rows, r, vocab);
    HWY_DYNAMIC_DISPATCH(SketchCells)(row, begin, end);
  });
  FinishRows(
      rows, pool, [&](int64_t r) { return args.rows[r].k >= kManySorted && MayBeCut(vocab); },
      [&](int64_t r, const RowThreads& threads) {
        if (args.rows[r].k == 0) return;
        Row row = RowAt(args, r);
        row.sketch = SketchAt(scratch, rows, r, vocab);
        finish(r, row, threads);
      });
}

}  // namespace

const char* SimdTarget() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

void SoftmaxTopK(const SoftmaxTopKArgs& args, ThreadPool& pool, SketchScratch& scratch) {
  SketchRows(args, pool, scratch, [&](int64_t r, const Row& row, const RowThreads& threads) {
    HWY_DYNAMIC_DISPATCH(FinishRow)
    (row, args.rows[r].k, threads, ScratchOfThisThread(), AnswerAt(args, r));
  });
}

void TopKPartial(const SoftmaxTopKArgs& args, const TopKShard& shard, ThreadPool& pool,
                 SketchScratch& scratch) {
  SketchRows(args, pool, scratch, [&](int64_t r, const Row& row, const RowThreads& threads) {
    HWY_DYNAMIC_DISPATCH(WriteTopKPartial)
    (row, args.rows[r].k, r, shard, threads, ScratchOfThisThread());
  });
}

void TopKMerge(const LinearTopKMergeArgs& args, ThreadPool& pool) {
  pool.ParallelFor(args.shape.rows, [&](int64_t r) {
    if (args.topk.rows[r].k == 0) return;
    HWY_DYNAMIC_DISPATCH(FinishMerged)(args, r, ScratchOfThisThread(), AnswerAt(args.topk, r));
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
