// The per-target half of sketch.h: how a cell is read and summed, and how tokens are found again in
// a finished sketch.
//
//   fold:   the cells' sums are brought to the row's maximum and added in cell order.
//   bound:  the k-th largest group maximum is a lower bound of the k-th largest logit, as each
//           group holds a logit that large. It is found by bisection over the maxima. No row is
//           slow: fewer than k groups are above an exact bound, whatever the order of the values.
//   pick:   groups that reach the bound are read again. Their logits above it, and the first k
//           equal to it, become 64-bit keys (order of the value, then of the index).
#if defined(LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/contrib/sort/vqsort.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"
#include "kernels/cpu/rows/sketch.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The elements of cell `c`: in place, or for the row's last few in `padded`, filled up with -inf.
template <typename T>
HWY_INLINE const T* CellAt(const T* logits, int64_t vocab, int64_t c, T* padded) {
  const int64_t begin = c * kCellElements;
  const int64_t count = vocab - begin;
  if (count >= kCellElements) return logits + begin;
  std::memcpy(padded, logits + begin, count * sizeof(T));
  std::fill(padded + count, padded + kCellElements, FromBits<T>(ElementBits<T>::kMinusInf));
  return padded;
}

// The sum of n and this has n + 127 in its low bits: an exponent field after a shift.
constexpr float kRound = 12582912.0f + 127.0f;

HWY_INLINE VF PowerOf2(DF d, VF rounded) {
  const DI di;
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, rounded)));
}

// sum + 2^(shrunk * log2e_over_temperature), shrunk in [floor, 0].
HWY_INLINE VF AddExp(DF d, VF shrunk, VF log2e_over_temperature, VF floor, VF sum) {
  const VF round = hn::Set(d, kRound);
  const VF y = hn::Max(shrunk, floor);
  const VF t = hn::MulAdd(y, log2e_over_temperature, round);
  const VF f = hn::MulSub(y, log2e_over_temperature, hn::Sub(t, round));
  return hn::MulAdd(Exp2Poly(d, f), PowerOf2(d, t), sum);
}

// exp((x - max) / temperature) for single results. It also carries what rounding takes from the
// difference and from log2(e) / temperature, which a large difference multiplies. 0 below 2^-126.
HWY_INLINE VF PreciseExp(DF d, VF x, VF max, const Exponent& e) {
  const VF round = hn::Set(d, kRound);
  const VF log2e_over_temperature = hn::Set(d, e.log2e_over_temperature);
  const VF low = hn::Set(d, e.log2e_over_temperature_low);
  const VF a = hn::Mul(x, hn::Set(d, kShrink));
  const VF b = hn::Mul(max, hn::Set(d, kShrink));
  const VF y = hn::Sub(a, b);
  const auto keep = hn::Ge(y, hn::Set(d, e.nothing));
  const VF back = hn::Sub(y, a);
  const VF lost = hn::Sub(hn::Sub(a, hn::Sub(y, back)), hn::Add(b, back));
  const VF t = hn::MulAdd(y, log2e_over_temperature, round);
  VF f = hn::MulSub(y, log2e_over_temperature, hn::Sub(t, round));
  f = hn::Add(f, hn::MulAdd(lost, log2e_over_temperature, hn::Mul(y, low)));
  return hn::IfThenElseZero(keep, hn::Mul(Exp2Poly(d, f), PowerOf2(d, t)));
}

template <typename T>
HWY_NOINLINE bool HasNan(const T* cell) {
  const DF d;
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
    if (!hn::AllFalse(d, hn::IsNaN(LoadF32(d, cell + i)))) return true;
  }
  return false;
}

template <typename T>
HWY_NOINLINE float CountPlusInf(const T* cell) {
  const DF d;
  size_t count = 0;
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
    count += hn::CountTrue(d, hn::Eq(LoadF32(d, cell + i), hn::Set(d, kInf)));
  }
  return static_cast<float>(count);
}

// The first look at a cell: maxima, and a sum whose only use is that a NaN shows in it.
class CellReader {
 public:
  HWY_INLINE CellReader() : max_(hn::Set(DF(), -kInf)), total_(hn::Zero(DF())) {}

  // Reads the next kFineGroup vectors, from element i on. `as_f32` keeps them for the second look
  // unless T is float.
  template <typename T>
  HWY_INLINE void Read(const T* HWY_RESTRICT cell, int64_t i, float* HWY_RESTRICT as_f32,
                       float* HWY_RESTRICT fine) {
    const DF d;
    const int64_t lanes = hn::Lanes(d);
    const char* ahead = reinterpret_cast<const char*>(cell + i) + kAheadBytes;
    const int64_t bytes = kFineGroup * lanes * static_cast<int64_t>(sizeof(T));
    for (int64_t b = 0; b < bytes; b += 64) hwy::Prefetch(ahead + b);
    VF v[kFineGroup];
    for (int64_t j = 0; j < kFineGroup; ++j) {
      v[j] = LoadF32(d, cell + i + j * lanes);
      if constexpr (!std::is_same_v<T, float>) hn::StoreU(v[j], d, as_f32 + i + j * lanes);
    }
    const VF m01 = hn::Max(v[0], v[1]), m23 = hn::Max(v[2], v[3]);
    const VF m45 = hn::Max(v[4], v[5]), m67 = hn::Max(v[6], v[7]);
    const VF s01 = hn::Add(v[0], v[1]), s23 = hn::Add(v[2], v[3]);
    const VF s45 = hn::Add(v[4], v[5]), s67 = hn::Add(v[6], v[7]);
    const VF m = hn::Max(hn::Max(m01, m23), hn::Max(m45, m67));
    hn::StoreU(m, d, fine + i / kFineGroup);
    max_ = hn::Max(max_, m);
    total_ = hn::Add(total_, hn::Add(hn::Add(s01, s23), hn::Add(s45, s67)));
  }

  // Writes the cell's maxima. Returns whether its sum of exp is still to be computed; if not, it
  // writes the sum too.
  template <typename T>
  HWY_INLINE bool Finish(const T* cell, float* out_max, float* out_sum, float* coarse) const {
    const DF d;
    hn::StoreU(max_, d, coarse);
    // The total is NaN where an element is NaN, or where infinities of both signs meet.
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(total_))) && HasNan(cell)) {
      *out_max = -kInf;
      *out_sum = std::numeric_limits<float>::quiet_NaN();
      return false;
    }
    *out_max = hn::GetLane(hn::MaxOfLanes(d, max_));
    if (HWY_LIKELY(std::isfinite(*out_max))) return true;
    *out_sum = *out_max > 0 ? CountPlusInf(cell) : 0.0f;
    return false;
  }

 private:
  VF max_, total_;
};

// The second look: the sum of exp against the cell's maximum, which is finite.
class CellSummer {
 public:
  HWY_INLINE CellSummer(const Exponent& e, float max)
      : top_(hn::Set(DF(), max * kShrink)),
        log2e_over_temperature_(hn::Set(DF(), e.log2e_over_temperature)),
        floor_(hn::Set(DF(), e.floor)),
        s0_(hn::Zero(DF())),
        s1_(s0_),
        s2_(s0_),
        s3_(s0_) {}

  // Adds the next kFineGroup vectors.
  HWY_INLINE void Add(const float* HWY_RESTRICT x) {
    const DF d;
    const int64_t lanes = hn::Lanes(d);
    const VF shrink = hn::Set(d, kShrink);
    for (int64_t j = 0; j < kFineGroup; j += 4) {
      const VF x0 = hn::LoadU(d, x + j * lanes), x1 = hn::LoadU(d, x + (j + 1) * lanes);
      const VF x2 = hn::LoadU(d, x + (j + 2) * lanes), x3 = hn::LoadU(d, x + (j + 3) * lanes);
      s0_ = AddExp(d, hn::MulSub(x0, shrink, top_), log2e_over_temperature_, floor_, s0_);
      s1_ = AddExp(d, hn::MulSub(x1, shrink, top_), log2e_over_temperature_, floor_, s1_);
      s2_ = AddExp(d, hn::MulSub(x2, shrink, top_), log2e_over_temperature_, floor_, s2_);
      s3_ = AddExp(d, hn::MulSub(x3, shrink, top_), log2e_over_temperature_, floor_, s3_);
    }
  }

  HWY_INLINE float Sum() const {
    return hn::GetLane(hn::SumOfLanes(DF(), hn::Add(hn::Add(s0_, s1_), hn::Add(s2_, s3_))));
  }

 private:
  VF top_, log2e_over_temperature_, floor_;
  VF s0_, s1_, s2_, s3_;
};

// A cell is read while the one before it is summed: loads from memory in the shadow of arithmetic.
template <typename T>
void SketchTyped(const T* logits, const Row& row, int64_t begin, int64_t end) {
  const int64_t lanes = hn::Lanes(DF());
  const int64_t block = kFineGroup * lanes;
  const Exponent e = MakeExponent(row.temperature);
  const RowSketch& sketch = row.sketch;
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float as_f32[2][std::is_same_v<T, float> ? 1 : kCellElements];

  const T* cell = nullptr;  // the one to sum, if `pending`
  bool pending = false;
  for (int64_t c = begin; c <= end; ++c) {
    const T* next = c < end ? CellAt(logits, row.vocab, c, padded) : nullptr;
    float* next_f32 = as_f32[c % 2];
    const float* cell_f32 = as_f32[(c + 1) % 2];
    if constexpr (std::is_same_v<T, float>) cell_f32 = cell;
    float* fine = sketch.fine + c * kFinePerCell;
    CellReader reader;
    if (pending) {
      CellSummer summer(e, sketch.max[c - 1]);
      if (next != nullptr) {
        for (int64_t i = 0; i < kCellElements; i += block) {
          reader.Read(next, i, next_f32, fine);
          summer.Add(cell_f32 + i);
        }
      } else {
        for (int64_t i = 0; i < kCellElements; i += block) summer.Add(cell_f32 + i);
      }
      sketch.sum[c - 1] = summer.Sum();
    } else if (next != nullptr) {
      for (int64_t i = 0; i < kCellElements; i += block) reader.Read(next, i, next_f32, fine);
    }
    if (next == nullptr) return;
    pending = reader.Finish(next, sketch.max + c, sketch.sum + c, sketch.coarse + c * lanes);
    cell = next;
  }
}

// Fills cells [begin, end) of the row's sketch.
inline void SketchCells(const Row& row, int64_t begin, int64_t end) {
  AsType(row.dtype, row.logits, [&](const auto* logits) { SketchTyped(logits, row, begin, end); });
}

// A value that at least k of maxima[0, count) reach, and few more than k unless there are ties.
// count >= k is a multiple of the lanes. `top` is the largest maximum.
inline float Bound(const float* maxima, int64_t count, int64_t k, float top) {
  const DF d;
  const DI di;
  const int64_t lanes = hn::Lanes(d);
  const int64_t enough = k + k / 8;
  int64_t low = OrderedBits(BitsOf(-kInf));              // reached by all
  int64_t high = int64_t{OrderedBits(BitsOf(top))} + 1;  // reached by too few
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const VF value = hn::Set(d, FloatOf(OrderedBits(static_cast<int32_t>(middle))));
    auto minus_reached = hn::Zero(di);
    for (int64_t i = 0; i < count; i += lanes) {
      const auto reaches = hn::Ge(hn::LoadU(d, maxima + i), value);
      minus_reached = hn::Add(minus_reached, hn::BitCast(di, hn::VecFromMask(d, reaches)));
    }
    const int64_t reached = -int64_t{hn::GetLane(hn::SumOfLanes(di, minus_reached))};
    if (reached < k) {
      high = middle;
      continue;
    }
    low = middle;
    if (reached <= enough) break;
  }
  return FloatOf(OrderedBits(static_cast<int32_t>(low)));
}

// Keys of all logits above `bound` and of the first k equal to it. Returns how many; k or more.
template <typename T>
int64_t PickTyped(const T* logits, const Row& row, float bound, int64_t k, uint64_t* keys) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vbound = hn::Set(d, bound);
  const int64_t cells = CellCount(row.vocab);
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float values[kMaxLanes];
  uint8_t bits[8] = {};
  int64_t count = 0;
  int64_t ties_left = k;
  for (int64_t c = 0; c < cells; ++c) {
    if (ties_left > 0 ? row.sketch.max[c] < bound : row.sketch.max[c] <= bound) continue;
    const T* cell = CellAt(logits, row.vocab, c, padded);
    const float* fine = row.sketch.fine + c * kFinePerCell;
    for (int64_t i = 0; i < kCellElements; i += kFineGroup * lanes) {
      const VF group = hn::LoadU(d, fine + i / kFineGroup);
      if (hn::AllFalse(d, ties_left > 0 ? hn::Ge(group, vbound) : hn::Gt(group, vbound))) continue;
      for (int64_t j = i; j < i + kFineGroup * lanes; j += lanes) {
        const VF x = LoadF32(d, cell + j);
        const auto hit = ties_left > 0 ? hn::Ge(x, vbound) : hn::Gt(x, vbound);
        hn::StoreMaskBits(d, hit, bits);
        uint32_t left;
        std::memcpy(&left, bits, sizeof(left));
        if (left == 0) continue;
        hn::StoreU(x, d, values);
        for (; left != 0; left &= left - 1) {
          const int lane = hwy::Num0BitsBelowLS1Bit_Nonzero32(left);
          const int64_t index = c * kCellElements + j + lane;
          if (index >= row.vocab) return count;  // padding, which reaches a bound of -inf
          if (values[lane] == bound && ties_left-- <= 0) continue;
          keys[count++] = MakeKey(values[lane], index);
        }
      }
    }
  }
  return count;
}

inline int64_t Pick(const Row& row, float bound, int64_t k, uint64_t* keys) {
  return AsType(row.dtype, row.logits,
                [&](const auto* logits) { return PickTyped(logits, row, bound, k, keys); });
}

// The lowest NaN of cell c, -1 where it has none.
template <typename T>
int32_t FirstNanTyped(const T* logits, int64_t vocab, int64_t c) {
  const DF d;
  HWY_ALIGN T padded[kCellElements];
  const T* cell = CellAt(logits, vocab, c, padded);
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
    const intptr_t lane = hn::FindFirstTrue(d, hn::IsNaN(LoadF32(d, cell + i)));
    if (lane >= 0) return static_cast<int32_t>(c * kCellElements + i + lane);
  }
  return -1;
}

inline int32_t FirstNan(const Row& row, int64_t c) {
  return AsType(row.dtype, row.logits,
                [&](const auto* logits) { return FirstNanTyped(logits, row.vocab, c); });
}

template <typename T>
float ElementTyped(const T* logits, int64_t i) {
  HWY_ALIGN T values[kMaxLanes] = {};
  values[0] = logits[i];
  return hn::GetLane(LoadF32(DF(), values));
}
inline float ElementTyped(const float* logits, int64_t i) { return logits[i]; }

inline float Element(const Row& row, int64_t i) {
  return AsType(row.dtype, row.logits, [&](const auto* logits) { return ElementTyped(logits, i); });
}

// Tokens before (x, index) by (logit descending, index ascending).
template <typename T>
int64_t CountBeforeTyped(const T* logits, const Row& row, float x, int64_t index) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vx = hn::Set(d, x);
  HWY_ALIGN T padded[kCellElements];
  int64_t before = 0;
  for (int64_t c = 0; c < CellCount(row.vocab); ++c) {
    if (row.sketch.max[c] < x) continue;
    const T* cell = CellAt(logits, row.vocab, c, padded);
    const float* fine = row.sketch.fine + c * kFinePerCell;
    for (int64_t i = 0; i < kCellElements; i += kFineGroup * lanes) {
      if (hn::AllFalse(d, hn::Ge(hn::LoadU(d, fine + i / kFineGroup), vx))) continue;
      for (int64_t j = i; j < i + kFineGroup * lanes; j += lanes) {
        const VF v = LoadF32(d, cell + j);
        before += static_cast<int64_t>(hn::CountTrue(d, hn::Gt(v, vx)));
        const int64_t lower = index - (c * kCellElements + j);  // lanes with a lower index
        if (lower <= 0) continue;
        const auto ties =
            hn::And(hn::Eq(v, vx), hn::FirstN(d, static_cast<size_t>(std::min(lower, lanes))));
        before += static_cast<int64_t>(hn::CountTrue(d, ties));
      }
    }
  }
  return before;
}

inline int64_t CountBefore(const Row& row, float x, int64_t index) {
  return AsType(row.dtype, row.logits,
                [&](const auto* logits) { return CountBeforeTyped(logits, row, x, index); });
}

// Sum of the cells' sums, brought to the row's maximum, in a fixed order. max is finite.
inline float FoldSums(const Row& row, int64_t cells, float max, const Exponent& e) {
  const DF d;
  VF sum = hn::Zero(d);
  for (int64_t c = 0; c < cells; c += hn::Lanes(d)) {
    const VF factor = PreciseExp(d, hn::LoadU(d, row.sketch.max + c), hn::Set(d, max), e);
    sum = hn::MulAdd(hn::LoadU(d, row.sketch.sum + c), factor, sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// The maximum of a finished sketch, or the place of its first NaN.
struct Peak {
  float max;
  int64_t nan_cell;  // the first cell with a NaN in it; -1 = none
};

// Also fills the last vector of cells with empty cells.
inline Peak FindPeak(const Row& row) {
  const DF d;
  const int64_t cells = CellCount(row.vocab);
  for (int64_t c = cells; c % kMaxLanes != 0; ++c) {
    row.sketch.max[c] = -kInf;
    row.sketch.sum[c] = 0;
  }
  VF max = hn::Set(d, -kInf);
  auto nan = hn::FirstN(d, 0);
  for (int64_t c = 0; c < cells; c += hn::Lanes(d)) {
    max = hn::Max(max, hn::LoadU(d, row.sketch.max + c));
    nan = hn::Or(nan, hn::IsNaN(hn::LoadU(d, row.sketch.sum + c)));
  }
  Peak peak{hn::GetLane(hn::MaxOfLanes(d, max)), -1};
  if (HWY_LIKELY(hn::AllFalse(d, nan))) return peak;
  peak.nan_cell = 0;
  while (!std::isnan(row.sketch.sum[peak.nan_cell])) ++peak.nan_cell;
  return peak;
}

// Sum of exp((x - max) / temperature) over the row; where max is +inf, the number of +inf. max is
// the row's, and not -inf.
inline float TotalSum(const Row& row, float max, const Exponent& e) {
  const int64_t cells = CellCount(row.vocab);
  if (HWY_LIKELY(max < kInf)) return FoldSums(row, cells, max, e);
  float count = 0;
  for (int64_t c = 0; c < cells; ++c) count += row.sketch.max[c] == kInf ? row.sketch.sum[c] : 0;
  return count;
}

// A lower bound of the k-th largest logit; `max` is the largest. Coarse maxima give one for a
// fraction of the work, where there are enough of them. Where the fine ones are too few, the bound
// is -inf, which every logit reaches.
inline float BoundOf(const Row& row, int64_t k, float max) {
  const int64_t cells = CellCount(row.vocab);
  if (const int64_t maxima = cells * hn::Lanes(DF()); k + k / 2 <= maxima) {
    return Bound(row.sketch.coarse, maxima, k, max);
  }
  if (const int64_t maxima = cells * kFinePerCell; k + k / 8 <= maxima) {
    return Bound(row.sketch.fine, maxima, k, max);
  }
  return -kInf;
}

// Writes the keys of the first k logits >= `least`, in order. `keys` has room for the whole row.
// Returns how many there are: k, or fewer where `least` leaves fewer.
inline int64_t TopKeys(const Row& row, int64_t k, float max, float least, uint64_t* keys,
                       const hwy::Sorter& sorter) {
  int64_t count = Pick(row, std::max(BoundOf(row, k, max), least), k, keys);
  if (count > 2 * k + 128) {
    std::nth_element(keys, keys + k, keys + count, std::greater<>());
    count = k;
  }
  sorter(keys, static_cast<size_t>(count), hwy::SortDescending());
  return std::min(count, k);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
