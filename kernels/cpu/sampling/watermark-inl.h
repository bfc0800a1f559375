// sample, the watermark: the token with the largest score of the row's key (kernels/watermark.h),
// in place of one drawn by random bits. A block of Philox for each token of the support; logarithms
// only for those that may win.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_WATERMARK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_WATERMARK_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_WATERMARK_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_WATERMARK_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/filter-inl.h"
#include "kernels/cpu/sampling/sample_row.h"
#include "kernels/watermark.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The best of `best` and the tokens of cell c that are in the support.
template <typename T>
MarkedToken RaceOfCell(const T* logits, const Row& row, int64_t c, const Support& support,
                       uint64_t state, MarkedToken best) {
  const DF d;
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float x[kCellElements];
  const T* cell = CellAt(logits, row.vocab, c, padded);
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d))
    hn::Store(LoadF32(d, cell + i), d, x + i);
  const float least = support.Least();
  const int64_t first = c * kCellElements;
  const auto count = static_cast<int32_t>(std::min(kCellElements, row.vocab - first));
  for (int32_t i = 0; i < count; ++i) {
    const auto token = static_cast<int32_t>(first + i);
    if (x[i] < least || !support.Has(x[i], token)) continue;
    const double above = -Surprise(x[i], support.max, support.temperature);
    const uint64_t bits = WatermarkBits(state, token);
    if (MarkBound(above, bits) < best.score) continue;
    const MarkedToken here{MarkScore(above, bits), token};
    if (here.ComesBefore(best)) best = here;
  }
  return best;
}

// The marked token of the support, which is of the row.
inline int32_t DrawMarked(const Row& row, const SampleRow& ask, const int32_t* history,
                          const Support& support, const RowThreads& threads) {
  const uint64_t state = StateOfMark(ask, history);
  const float least = support.Least();
  const RowPieces pieces = threads.Cut(row.vocab);
  MarkedToken best[kMostPieces];
  threads.For(pieces.count, [&](int64_t p) {
    best[p] = {-std::numeric_limits<double>::infinity(), static_cast<int32_t>(row.vocab)};
    AsType(row.dtype, row.logits, [&](const auto* logits) {
      for (int64_t c = pieces.begin(p); c < pieces.end(p); ++c) {
        if (row.sketch.max[c] < least) continue;
        best[p] = RaceOfCell(logits, row, c, support, state, best[p]);
      }
    });
  });
  return std::min_element(
             best, best + pieces.count,
             [](const MarkedToken& a, const MarkedToken& b) { return a.ComesBefore(b); })
      ->token;
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
