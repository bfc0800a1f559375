// cross_entropy on the CPU: one streaming read of a row leaves a sketch (rows/sketch.h), from which
// come the loss and the top tokens.
//
//   read (read_cells-inl.h): 32 cells at a time: their sketch; for label smoothing their sum; for
//       the entropy the sum of exp(y) y, both out of L2. A softcap may make unequal logits equal
//       and so hide their order: maxima are those of the row as sent, and only sums see the
//       softcap. A rank is counted meanwhile, unless top tokens are wanted too.
//   answer (answer-inl.h): the cells' sums are brought to the row's maximum in cell order, in
//       double precision.
//
// linear_cross_entropy does both for the shards of a vocabulary (shard-inl.h). Rows with supports
// are not read: their few logits are gathered (support-inl.h).
//
// Cost at 64 x 131072 f32: reads 33.6 MB once, which is the floor. Smoothing and the entropy are
// passes over cells in L2. A rank with top tokens reads again the cells that hold a token before
// the target. A cell whose logits are small against the softcap takes 5 or 8 powers for it instead
// of a table: 18 or 21 operations to a vector's sum instead of 29.
//
// Limited by: memory for a plain loss; by arithmetic for f16 and for a softcap.
//
// Measured: bench/results/cpu/losses.json, as shares of a bare read; before and after powers of
// tanh and counted ranks, bench/results/cpu/softcap.json.
#include "kernels/cpu/loss/cross_entropy.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/loss/cross_entropy.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/loss/answer-inl.h"
#include "kernels/cpu/loss/loss_row.h"
#include "kernels/cpu/loss/read_cells-inl.h"
#include "kernels/cpu/loss/shard-inl.h"
#include "kernels/cpu/loss/support-inl.h"

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ReadCells);
HWY_EXPORT(Answer);
HWY_EXPORT(ReadCellOfRows);
HWY_EXPORT(JoinStretchesOf);
HWY_EXPORT(AnswerMerged);
HWY_EXPORT(AnswerSupported);

namespace {

LossThreadScratch& ScratchOfThisThread() {
  thread_local LossThreadScratch scratch;
  return scratch;
}

void ReadCellsOfRow(const CrossEntropyArgs& args, int64_t r, const LossRow& row, int64_t begin,
                    int64_t end) {
  HWY_DYNAMIC_DISPATCH(ReadCells)(row, args.rows[r], begin, end, ScratchOfThisThread());
}

void AnswerRow(const CrossEntropyArgs& args, int64_t r, const LossRow& row) {
  HWY_DYNAMIC_DISPATCH(Answer)(args, r, row, ScratchOfThisThread());
}

}  // namespace

void CrossEntropyOfSupport(const CrossEntropyArgs& args, int64_t r, const void* logits) {
  const Row row = {.logits = logits,
                   .dtype = args.logits.dtype,
                   .vocab = args.logits.cols,
                   .temperature = 1,
                   .sketch = {}};
  HWY_DYNAMIC_DISPATCH(AnswerSupported)(args, r, row, ScratchOfThisThread());
}

void CrossEntropyOfRow(const CrossEntropyArgs& args, int64_t r) {
  if (args.rows[r].active == 0) return;
  if (!IsWhole(args.rows[r])) return CrossEntropyOfSupport(args, r, RowData(args.logits, r));
  const LossRow row = LossRowAt(args, r, ScratchOfThisThread().row, 1, 0);
  const int64_t cells = CellCount(args.logits.cols);
  for (int64_t c = 0; c < cells; c += kItemCells) {
    ReadCellsOfRow(args, r, row, c, std::min(cells, c + kItemCells));
  }
  AnswerRow(args, r, row);
}

void CrossEntropy(const CrossEntropyArgs& args, ThreadPool& pool, LossScratch& scratch) {
  const int64_t rows = args.logits.rows;
  const int64_t cells = CellCount(args.logits.cols);
  if (TakesWholeRows(rows, args.logits.cols, pool)) {
    ForWholeRows(rows, args.logits.cols, pool, [&](int64_t r) { CrossEntropyOfRow(args, r); });
    return;
  }
  // Sized here: no thread may grow memory that another reads.
  SketchAt(scratch.x, rows, 0, args.logits.cols);
  SketchAt(scratch.order, rows, 0, args.logits.cols);
  scratch.before.Get(rows * cells);
  scratch.total.Get(rows * cells);
  scratch.moment.Get(rows * cells);
  ForCells(rows, args.logits.cols, pool, [&](int64_t r, int64_t begin, int64_t end) {
    if (!IsWhole(args.rows[r])) return;
    ReadCellsOfRow(args, r, LossRowAt(args, r, scratch, rows, r), begin, end);
  });
  pool.ParallelFor(rows, [&](int64_t r) {
    if (args.rows[r].active == 0) return;
    if (!IsWhole(args.rows[r])) return CrossEntropyOfSupport(args, r, RowData(args.logits, r));
    AnswerRow(args, r, LossRowAt(args, r, scratch, rows, r));
  });
}

void StartStretch(const LossShard& of, int stretch, int64_t first_row, int64_t rows) {
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    of.parts[of.PartOf(r, stretch)] = {.nan = -1, .before = 0, .keys = 0};
  }
}

void ReadLossCell(const LossShard& of, const LossCell& cell) {
  HWY_DYNAMIC_DISPATCH(ReadCellOfRows)(of, cell, ScratchOfThisThread());
}

void JoinStretches(const LossShard& of, int64_t r) {
  if (of.rows[r].active == 0) return;
  HWY_DYNAMIC_DISPATCH(JoinStretchesOf)(of, r, ScratchOfThisThread());
}

void CrossEntropyMerge(const LinearCrossEntropyMergeArgs& args, ThreadPool& pool) {
  pool.ParallelFor(args.shape.rows, [&](int64_t r) {
    if (args.cross_entropy.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(AnswerMerged)(args, r, ScratchOfThisThread());
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
