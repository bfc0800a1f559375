// softmax_topk on the CPU: one streaming read of a row leaves a sketch; the answer is picked there.
//
//   sketch: maxima, and sums of exp against them, by cells of 1024 elements (rows/sketch.h).
//   fold:   the cells' sums give logsumexp.
//   pick:   the logits that reach a lower bound of the k-th largest one (rows/sketch-inl.h) are
//           sorted.
//
// With many rows, each thread takes whole rows; few rows are split by cells. The bits are the same.
//
// Cost at 64 x 131072 f32, k = 64: reads 33.6 MB once, which is the floor. The second look takes
// about 70 blocks of 128 elements a row, out of L2.
//
// Limited by: what a core can have in flight to memory, for f32; by arithmetic (12 instructions a
// vector for exp, 2 for the maxima and the NaN check) for f16 and bf16, and for rows in cache.
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

#ifndef LOGITD_KERNELS_CPU_SOFTMAX_TOPK_ONCE_
#define LOGITD_KERNELS_CPU_SOFTMAX_TOPK_ONCE_

namespace logitd::cpu {

// Scratch of one thread.
struct ThreadScratch {
  SketchScratch sketch;
  Buffer<uint64_t> keys;
  hwy::Sorter sorter;
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

// Turns the finished sketch of a row into its answer.
void FinishRow(const Row& row, int64_t k, ThreadScratch& scratch, const RowAnswer& out) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const Peak peak = FindPeak(row);
  if (HWY_UNLIKELY(peak.nan_cell >= 0)) {
    *out.status = {RowCode::kNanLogit, FirstNan(row, peak.nan_cell)};
    // The contract leaves these open, but no value of an earlier batch may be read there.
    *out.logsumexp = std::numeric_limits<float>::quiet_NaN();
    std::fill(out.indices, out.indices + k, -1);
    std::fill(out.probs, out.probs + k, 0.0f);
    return;
  }
  const float max = peak.max;
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
  uint64_t* keys = scratch.keys.Get(row.vocab);
  TopKeys(row, k, max, -kInf, keys, scratch.sorter);

  HWY_ALIGN float x[kMaxLanes];
  HWY_ALIGN float probs[kMaxLanes];
  const VF vsum = hn::Set(d, sum);
  for (int64_t i = 0; i < k; i += lanes) {
    const int64_t n = std::min(lanes, k - i);
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

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(SketchCells);
HWY_EXPORT(FinishRow);
HWY_EXPORT(TargetName);

namespace {

// Cells handed to a thread at once: few enough to balance, enough to hide the cost of taking them.
constexpr int64_t kItemCells = 32;

// Fewer rows per thread than this are split by cells; otherwise a thread takes whole rows.
constexpr int64_t kWholeRowsPerThread = 4;

ThreadScratch& ScratchOfThisThread() {
  thread_local ThreadScratch scratch;
  return scratch;
}

Row RowAt(const SoftmaxTopKArgs& args, int64_t r) {
  const TensorView& logits = args.logits;
  const size_t offset = static_cast<size_t>(r * logits.row_stride) * SizeOf(logits.dtype);
  return {.logits = static_cast<const std::byte*>(logits.data) + offset,
          .dtype = logits.dtype,
          .vocab = logits.cols,
          .temperature = args.rows[r].temperature};
}

void Finish(const SoftmaxTopKArgs& args, int64_t r, const Row& row) {
  const SoftmaxTopKRow& ask = args.rows[r];
  HWY_DYNAMIC_DISPATCH(FinishRow)
  (row, ask.k, ScratchOfThisThread(),
   {.indices = args.indices + ask.first_entry,
    .probs = args.probs + ask.first_entry,
    .logsumexp = args.logsumexp + r,
    .status = args.status + r});
}

}  // namespace

const char* SimdTarget() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

void SoftmaxTopK(const SoftmaxTopKArgs& args, ThreadPool& pool, SketchScratch& scratch) {
  const int64_t rows = args.logits.rows;
  const int64_t vocab = args.logits.cols;
  const int64_t cells = CellCount(vocab);
  if (rows >= kWholeRowsPerThread * pool.threads() || rows * cells <= kItemCells) {
    const int64_t per_item = std::max<int64_t>(1, kItemCells / cells);
    pool.ParallelFor((rows + per_item - 1) / per_item, [&](int64_t item) {
      for (int64_t r = item * per_item; r < std::min(rows, (item + 1) * per_item); ++r) {
        if (args.rows[r].k == 0) continue;
        Row row = RowAt(args, r);
        row.sketch = SketchAt(ScratchOfThisThread().sketch, 1, 0, vocab);
        HWY_DYNAMIC_DISPATCH(SketchCells)(row, 0, cells);
        Finish(args, r, row);
      }
    });
    return;
  }
  // Sized here: no thread may grow memory that another reads.
  SketchAt(scratch, rows, 0, vocab);
  const int64_t per_row = (cells + kItemCells - 1) / kItemCells;
  pool.ParallelFor(rows * per_row, [&](int64_t item) {
    if (args.rows[item / per_row].k == 0) return;
    Row row = RowAt(args, item / per_row);
    row.sketch = SketchAt(scratch, rows, item / per_row, vocab);
    const int64_t begin = item % per_row * kItemCells;
    HWY_DYNAMIC_DISPATCH(SketchCells)(row, begin, std::min(cells, begin + kItemCells));
  });
  pool.ParallelFor(rows, [&](int64_t r) {
    if (args.rows[r].k == 0) return;
    Row row = RowAt(args, r);
    row.sketch = SketchAt(scratch, rows, r, vocab);
    Finish(args, r, row);
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
