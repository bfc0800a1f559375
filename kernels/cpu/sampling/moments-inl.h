// sample, moments: sums over a row at a temperature that its sketches are not at, for
// log-probabilities and entropies that only few rows ask for. A further read of the row.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_MOMENTS_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_MOMENTS_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_MOMENTS_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/filter-inl.h"
#include "kernels/cpu/sampling/sample_row.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The sums over the tokens of cell c that are in the support, whose maximum is finite.
template <typename T>
Moments CellMoments(const T* cell, int64_t c, const Support& support, const Exponent& e) {
  const DF d;
  const DI di;
  const int64_t lanes = hn::Lanes(d);
  const VF max = hn::Set(d, support.max);
  const VF shrunk_max = hn::Set(d, support.max * kShrink);
  const bool is_whole = support.last == kLowestKey;
  const VF border = hn::Set(d, is_whole ? -kInf : KeyLogit(support.last));
  // A border without a token has the largest index.
  const int64_t end = static_cast<uint32_t>(KeyIndex(support.last)) + int64_t{1};
  const auto end_of_border =
      hn::Set(di, static_cast<int32_t>(std::min(end - c * kCellElements, kCellElements)));
  VF sums[4], below[4];  // the latter in bits, not nats
  for (VF& sum : sums) sum = hn::Zero(d);
  for (VF& sum : below) sum = hn::Zero(d);
  for (int64_t i = 0; i < kCellElements; i += 4 * lanes) {
    for (int64_t u = 0; u < 4; ++u) {
      const int64_t at = i + u * lanes;
      const VF x = LoadF32(d, cell + at);
      const VF y = hn::Max(hn::MulSub(x, hn::Set(d, kShrink), shrunk_max), hn::Set(d, e.nothing));
      const auto places = hn::Iota(di, static_cast<int32_t>(at));
      const auto early = hn::RebindMask(d, hn::Lt(places, end_of_border));
      const auto in = hn::Or(hn::Gt(x, border), hn::And(hn::Eq(x, border), early));
      const VF w = hn::IfThenElseZero(in, PreciseExp(d, x, max, e));
      sums[u] = hn::Add(sums[u], w);
      const VF bits = hn::Mul(y, hn::Set(d, e.log2e_over_temperature));
      below[u] = hn::NegMulAdd(w, bits, below[u]);
    }
  }
  const auto fold = [d](const VF* of) HWY_ATTR {
    const VF sum = hn::Add(hn::Add(of[0], of[1]), hn::Add(of[2], of[3]));
    return double{hn::GetLane(hn::SumOfLanes(d, sum))};
  };
  constexpr double kLn2 = 0.6931471805599453;
  return {.sum = fold(sums), .below = fold(below) * kLn2};
}

// The sums of a cell whose support typical_p and xtc choose: a token outside it counts as -inf.
template <typename T>
Moments ChosenCellMoments(const T* cell, int64_t c, Support support, const Exponent& e) {
  const DF d;
  HWY_ALIGN float chosen[kCellElements];
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d))
    hn::Store(LoadF32(d, cell + i), d, chosen + i);
  for (int64_t i = 0; i < kCellElements; ++i) {
    if (!support.Has(chosen[i], c * kCellElements + i)) chosen[i] = -kInf;
  }
  support.last = kLowestKey;
  return CellMoments(chosen, c, support, e);
}

// The sums over the tokens of the row that are in the support, whose maximum is finite.
inline Moments MomentsOf(const Row& row, const Support& support, const RowThreads& threads,
                         SampleScratch& scratch) {
  const Exponent e = MakeExponent(static_cast<float>(support.temperature));
  const int64_t cells = CellCount(row.vocab);
  Moments* const of_cells = scratch.moments.Get(cells);
  const RowPieces pieces = threads.Cut(row.vocab);
  threads.For(pieces.count, [&](int64_t p) {
    AsType(row.dtype, row.logits, [&]<typename T>(const T* logits) {
      HWY_ALIGN T padded[kCellElements];
      for (int64_t c = pieces.begin(p); c < pieces.end(p); ++c) {
        const T* const cell = CellAt(logits, row.vocab, c, padded);
        of_cells[c] = support.choice.KeepsAll() ? CellMoments(cell, c, support, e)
                                                : ChosenCellMoments(cell, c, support, e);
      }
    });
  });
  Moments total{};
  for (int64_t c = 0; c < cells; ++c) {
    total.sum += of_cells[c].sum;
    total.below += of_cells[c].below;
  }
  return total;
}

// The entropy of the support, which is of the row.
inline float EntropyOf(const Row& row, const Support& support, const RowThreads& threads,
                       SampleScratch& scratch) {
  if (support.max == kInf) return static_cast<float>(support.log_sum);
  return static_cast<float>(logitd::EntropyOf(MomentsOf(row, support, threads, scratch)));
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
