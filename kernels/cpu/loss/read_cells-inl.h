// cross_entropy, read: cells of a row become their sketch, their sum for label smoothing, and their
// sum of exp(y) y for the entropy, with or without a softcap.
#if defined(LOGITD_KERNELS_CPU_LOSS_READ_CELLS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_LOSS_READ_CELLS_INL_H_
#undef LOGITD_KERNELS_CPU_LOSS_READ_CELLS_INL_H_
#else
#define LOGITD_KERNELS_CPU_LOSS_READ_CELLS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/loss/cross_entropy.h"
#include "kernels/cpu/loss/loss_row.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/softcap-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Calls body(vector, elements in it, u) for `count` elements, kUnroll vectors in turn; zeros follow
// the last element.
constexpr int64_t kUnroll = 4;
template <typename T, class Body>
HWY_INLINE void ForEachVector(const T* from, int64_t count, const Body& body) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    for (int64_t u = 0; u < kUnroll; ++u) body(LoadF32(d, from + i + u * lanes), lanes, u);
  }
  for (; i + lanes <= count; i += lanes) body(LoadF32(d, from + i), lanes, 0);
  if (i == count) return;
  T last[kMaxLanes];
  CopyTail(from + i, count - i, last);
  body(LoadF32(d, last), count - i, 0);
}

HWY_INLINE float SumOf(const VF* s) {
  const DF d;
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
}

// sum x * kTotalShrink
template <typename T>
float CellTotal(const T* cell, int64_t count) {
  const DF d;
  const VF shrink = hn::Set(d, kTotalShrink);
  VF s[kUnroll];
  for (VF& v : s) v = hn::Zero(d);
  ForEachVector(cell, count,
                [&](VF x, int64_t, int64_t u) HWY_ATTR { s[u] = hn::MulAdd(x, shrink, s[u]); });
  return SumOf(s);
}

// sum exp((x - max) / temperature) * (x - max) * shrink_by, by the exponentials of CellSummer; max
// is finite. shrink_by: MomentShrink().
template <typename T>
float CellMoment(const T* cell, int64_t count, const Exponent& e, float shrink_by, float max) {
  const DF d;
  const float more = shrink_by / kShrink;
  const VF shrink = hn::Set(d, shrink_by);
  const VF log2e_over_temperature = hn::Set(d, e.log2e_over_temperature / more);
  const VF top = hn::Set(d, max * shrink_by), floor = hn::Set(d, e.floor * more);
  VF s[kUnroll];
  for (VF& v : s) v = hn::Zero(d);
  ForEachVector(cell, count, [&](VF x, int64_t n, int64_t u) HWY_ATTR {
    const VF y = hn::Max(hn::MulSub(x, shrink, top), floor);
    const ExpFactors exp = ExpForSum(d, y, log2e_over_temperature);
    VF w = hn::Mul(exp.rest, exp.power);
    if (n < static_cast<int64_t>(hn::Lanes(d))) {
      w = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n)), w);
    }
    s[u] = hn::MulAdd(w, y, s[u]);
  });
  return SumOf(s);
}

// Total and moment of cells [begin, end) of `x`, whose sketch is done.
template <typename T>
void SumCells(const T* x, const Row& row, int64_t begin, int64_t end, float* total, float* moment) {
  const Exponent e = MakeExponent(row.temperature);
  const float shrink = MomentShrink(row.temperature);
  for (int64_t c = begin; c < end; ++c) {
    const T* cell = x + c * kCellElements;
    const int64_t count = std::min(kCellElements, row.vocab - c * kCellElements);
    const float max = row.sketch.max[c];
    if (total != nullptr) total[c] = CellTotal(cell, count);
    if (moment != nullptr)
      moment[c] = std::isfinite(max) ? CellMoment(cell, count, e, shrink, max) : 0;
  }
}

inline void SumCellsOf(const Row& row, int64_t begin, int64_t end, float* total, float* moment) {
  if (total == nullptr && moment == nullptr) return;
  AsType(row.dtype, static_cast<const std::byte*>(row.logits),
         [&](const auto* x) { SumCells(x, row, begin, end, total, moment); });
}

// `count` elements of a row after the softcap, as f32.
template <typename T>
void Cap(const T* from, int64_t count, float softcap, float* to) {
  const DF d;
  const SoftCap cap(EffectiveSoftcap(softcap));
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    StoreAs(d, cap(d, LoadUpTo(d, from + i, count - i)), count - i, to + i);
  }
}

// One logit after the softcap, with the bits it has in a vector of others.
inline float CapOne(float logit, float softcap) {
  if (softcap == 0) return logit;
  const DF d;
  return hn::GetLane(SoftCap(EffectiveSoftcap(softcap))(d, hn::Set(d, logit)));
}

// Cells [begin, end) of a row with a softcap, which the sums see.
template <Order kOrder, typename T>
void SketchCapped(const T* sent, const LossRow& row, float softcap, int64_t begin, int64_t end) {
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float capped[kCellElements];
  const SoftCap cap(EffectiveSoftcap(softcap));
  CellSketcher<T, kOrder, SoftCap> sketcher({.groups = row.sent.sketch,
                                             .target = row.counted,
                                             .sums = row.x.sketch,
                                             .temperature = row.x.temperature},
                                            cap);
  for (int64_t c = begin; c < end; ++c) {
    sketcher.Add(CellAt(sent, row.sent.vocab, c, padded), c);
  }
  const int64_t last = (end - 1) * kCellElements;
  if (row.sent.vocab - last >= kCellElements) return sketcher.Finish();
  // What fills up the last cell is -inf, also after the softcap.
  std::fill(capped, capped + kCellElements, -kInf);
  Cap(sent + last, row.sent.vocab - last, softcap, capped);
  sketcher.FinishWith(capped);
}

// Reads cells [begin, end) of the row, at most kItemCells.
inline void ReadCells(const LossRow& row, const CrossEntropyRow& ask, int64_t begin, int64_t end,
                      LossThreadScratch& scratch) {
  const bool is_smooth = EffectiveSmoothing(ask, row.vocab) > 0;
  float* total = is_smooth ? row.total : nullptr;
  float* moment = (ask.want & kWantEntropy) != 0 ? row.moment : nullptr;
  if (ask.softcap == 0) {
    if (ask.top_logprobs > 0) {
      SketchCells(row.x, begin, end);
    } else {
      SketchSums(row.x, row.counted, begin, end);
    }
    SumCellsOf(row.x, begin, end, total, moment);
    return;
  }
  AsType(row.sent.dtype, row.sent.logits, [&](const auto* sent) {
    if (row.has_order) {
      SketchCapped<Order::kGroups>(sent, row, ask.softcap, begin, end);
    } else if (row.counted.logit != nullptr) {
      SketchCapped<Order::kCount>(sent, row, ask.softcap, begin, end);
    } else {
      SketchCapped<Order::kNone>(sent, row, ask.softcap, begin, end);
    }
    if (total == nullptr && moment == nullptr) return;
    // These cells after the softcap, as a row of their own.
    float* capped = scratch.capped.Get(kItemCells * kCellElements);
    const int64_t first = begin * kCellElements;
    const Row part = {.logits = capped,
                      .dtype = DType::kF32,
                      .vocab = std::min(row.x.vocab, end * kCellElements) - first,
                      .temperature = ask.temperature,
                      .sketch = {.max = row.x.sketch.max + begin}};
    Cap(sent + first, part.vocab, ask.softcap, capped);
    SumCellsOf(part, 0, end - begin, total == nullptr ? nullptr : total + begin,
               moment == nullptr ? nullptr : moment + begin);
  });
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
