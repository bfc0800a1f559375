// sample on the CPU: one streaming read of a row leaves a sketch (rows/sketch.h), where the token
// is found: edit-inl.h reads, filter-inl.h lists, draw-inl.h draws, report-inl.h answers.
//
// With many rows, each thread takes whole rows; few rows are read by all threads, 8 to 32 cells at
// a time. Where many tokens of a long row are left to draw from, and threads would be idle, its
// filters and its draw are cut into pieces for all threads (rows/row_threads.h). The bits are the
// same.
//
// Cost at 64 x 131072 f32, top-k 50 and top-p 0.9: reads 33.6 MB once, which is the floor. Edits
// and another temperature for the whole row add a pass over cached memory; a flat top-p adds about
// ten operations a token.
//
// Limited by: memory for top-k and greedy; by arithmetic where the row is summed twice; by the
// edits and the sort of the history, where it has 4096 tokens; by scalar integer sums for a flat
// top-p.
//
// Measured: bench/results/cpu/kernels.json, two cores, 16 lanes, as shares of a bare read: top-k 50
// and top-p 0.9 69% (bf16 51%), greedy 78%, unfiltered 57%, at another temperature 46%, with 4096
// tokens of history and a mask 20%, only top-p 0.9 over a flat row 4.7%. NumPy takes 55 times as
// long for the first of these (bench/peers/sample_numpy.py, bench/results/cpu/sample_numpy.json).
// One row, flat and otherwise: bench/results/cpu/one_row.json.
//
// Tried and dropped: the flat top-p's list by a loop over mask bits, and its histograms' range by a
// search for the least and largest key (2.3%).
#include "kernels/cpu/sampling/sample.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sampling/sample.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/sampling/draw-inl.h"
#include "kernels/cpu/sampling/report-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {

void FinishSample(const SampleArgs& args, int64_t r, const Rows& rows, const RowThreads& threads,
                  SampleScratch& scratch) {
  OpenRow opened;
  if (!Open(args, r, rows, threads, scratch, opened)) return;
  const Drawn drawn =
      Draw(opened.rows.processed, args.rows[r], args.history, opened.max, threads, scratch);
  Report(args, r, opened, drawn, threads, scratch);
}

void SampleOne(const SampleArgs& args, int64_t r, SampleScratch& scratch) {
  FinishSample(args, r, ReadRow(args, r, RowThreads(), scratch), RowThreads(), scratch);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(SampleOne);
HWY_EXPORT(PlanRead);
HWY_EXPORT(ReadCells);
HWY_EXPORT(FinishSample);

namespace {

static_assert(kMostItemCells <= kChunkCells);

// With fewer rows per thread than this, several threads read a row. An edited row then needs memory
// of its own, so it is less than for other ops.
constexpr int64_t kWholeSampleRows = 2;

// True where many tokens of the row are looked at after it was read: for them, a row is cut into
// pieces for all threads.
bool TakesLong(const SampleRow& ask, int64_t vocab) {
  if (ask.active == 0 || !MayBeCut(vocab)) return false;
  if (ask.top_logprobs >= kManySorted || IsTempered(ask) || ask.want_entropy) return true;
  if (IsGreedy(ask)) return false;
  if (MarkIsOn(ask)) return true;
  if (TopKIsOn(ask, vocab)) return ask.top_k >= kManyTokens;
  return IsFiltered(ask, vocab) || ask.want_rank || ask.want_support > 0;
}

// Few rows: all threads read each row, and then one thread draws from it, or all.
void SampleFew(const SampleArgs& args, ThreadPool& pool, SampleCallScratch& scratch) {
  const int64_t rows = args.logits.rows;
  // Sized here: no thread may grow memory that another one reads.
  SketchAt(scratch.rows.raw, rows, 0, args.logits.cols);
  SketchAt(scratch.rows.processed, rows, 0, args.logits.cols);
  int64_t max_patches = 0;
  bool any_edited = false;
  for (int64_t r = 0; r < rows; ++r) {
    if (args.rows[r].active == 0) continue;
    max_patches = std::max(max_patches, MaxPatches(args.rows[r]));
    any_edited |= IsEdited(args.rows[r]);
  }
  if (any_edited) scratch.rows.edited.Get(rows * args.logits.cols);
  Patch* const patches = scratch.patches.Get(rows * max_patches);
  RowRead* const reads = scratch.reads.Get(rows);
  pool.ParallelFor(rows, [&](int64_t r) {
    if (args.rows[r].active == 0) return;
    reads[r] = HWY_DYNAMIC_DISPATCH(PlanRead)(
        args, r, rows, r, scratch.rows, SampleScratchOfThisThread(), patches + r * max_patches);
  });
  ForCells(rows, args.logits.cols, pool, [&](int64_t r, int64_t begin, int64_t end) {
    if (args.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(ReadCells)(reads[r], args.rows[r], begin, end);
  });
  FinishRows(
      rows, pool, [&](int64_t r) { return TakesLong(args.rows[r], args.logits.cols); },
      [&](int64_t r, const RowThreads& threads) {
        if (args.rows[r].active == 0) return;
        HWY_DYNAMIC_DISPATCH(FinishSample)
        (args, r, reads[r].rows, threads, SampleScratchOfThisThread());
      });
}

}  // namespace

SampleScratch& SampleScratchOfThisThread() {
  thread_local SampleScratch scratch;
  return scratch;
}

void Sample(const SampleArgs& args, ThreadPool& pool, SampleCallScratch& scratch) {
  const int64_t rows = args.logits.rows;
  if (!TakesWholeRows(rows, args.logits.cols, pool, kWholeSampleRows)) {
    return SampleFew(args, pool, scratch);
  }
  ForWholeRows(rows, args.logits.cols, pool, [&](int64_t r) {
    if (args.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(SampleOne)(args, r, SampleScratchOfThisThread());
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
