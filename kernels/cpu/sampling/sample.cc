// sample on the CPU: one streaming read of a row leaves a sketch (rows/sketch.h), where the token
// is found: edit-inl.h reads, filter-inl.h lists, draw-inl.h draws, report-inl.h answers.
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
// tokens of history and a mask 20%, top-p 0.9 alone over a flat row 4.7%. NumPy takes 55 times as
// long for the first of these (bench/peers/sample_numpy.py, bench/results/cpu/sample_numpy.json).
//
// Tried and dropped: the flat top-p's list by a loop over mask bits, and its histograms' range by a
// search for the least and largest key (2.3%).
#include "kernels/cpu/sampling/sample.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sampling/sample.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/sampling/draw-inl.h"
#include "kernels/cpu/sampling/report-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {

void SampleOne(const SampleArgs& args, int64_t r, SampleScratch& scratch) {
  OpenRow opened;
  if (!Open(args, r, scratch, opened)) return;
  const Drawn drawn = Draw(opened.rows.processed, args.rows[r], opened.max, scratch);
  Report(args, r, opened, drawn, scratch);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(SampleOne);

namespace {

// Cells handed to a thread at once: few enough to balance, enough to hide the cost of taking them.
constexpr int64_t kItemCells = 32;

// A ban wins where infinities of both signs meet.
float BanIfNan(float x) { return std::isnan(x) ? -kInf : x; }

}  // namespace

SampleScratch& SampleScratchOfThisThread() {
  thread_local SampleScratch scratch;
  return scratch;
}

HWY_NOINLINE float EditLogit(float x, const Patch& patch, const SampleRow& ask) {
  x = BanIfNan(x + patch.bias);
  if (patch.count == 0) return x;
  x = x > 0 ? x / ask.repetition : x * ask.repetition;
  const float often = ask.frequency * static_cast<float>(patch.count);
  return BanIfNan(x - often) - ask.presence;
}

void Sample(const SampleArgs& args, ThreadPool& pool) {
  const int64_t rows = args.logits.rows;
  const int64_t per_item = std::max<int64_t>(1, kItemCells / CellCount(args.logits.cols));
  pool.ParallelFor((rows + per_item - 1) / per_item, [&](int64_t item) {
    for (int64_t r = item * per_item; r < std::min(rows, (item + 1) * per_item); ++r) {
      if (args.rows[r].active == 0) continue;
      HWY_DYNAMIC_DISPATCH(SampleOne)(args, r, SampleScratchOfThisThread());
    }
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
