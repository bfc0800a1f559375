// attention_softmax on the CPU: a row is cut into cells of 1024 keys, counted from the first key it
// sees.
//
//   weigh:   the values x = scale * score + mask of a cell become weights 2^(x log2(e) - n). n is a
//            whole number, so that the subtraction loses no digit of x: 0 where that suits the
//            cell's maximum, which is known at the end; else the maximum's exponent, and the x go to
//            L1 first.
//   total:   the cells' sums are brought to one exponent in double precision; the sink is added.
//   scale:   the weights are multiplied by one factor a cell, and stored in the result's type.
//
// Weights lie in the result itself where it is f32, else in the thread's scratch: one row, 4 MiB at
// most. bf16 stays in the order in which LoadTwo takes it apart, up to the result.
//
// Cost at [16, 1024, 1024] f32: reads and writes 67 MB once each, which is the floor; causal rows
// 0.75 of that, as the zeros must be written.
//
// Limited by: memory for f32, whose stores read the lines first; by arithmetic for f16 and bf16 (24
// instructions a vector) and for rows in cache; by latencies for rows of a few vectors.
//
// Measured: one thread of a Zen 4 at 3.6 GHz, 16 lanes, by processor time, GB/s of scores and
// results, where a bare copy moves 28: f32 27.7, causal 25.8; bf16 14.1, causal 17.9, under a bool
// mask 12.6, rows of 131072 13.0. All cores: bench/results/cpu/kernels.json.
//
// Tried and dropped: no prefetch of the next row; prefetching the result for writing (the same or a
// few percent less); stores past the caches, line by line: 0.66 to 1.0 of the time for whole rows
// that begin at lines, but 1.3 to 1.6 for causal and odd rows, whose ends are parts of lines.
#include "kernels/cpu/attention/attention_softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention/attention_softmax.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/rows/lanes-inl.h"

#ifndef LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_
#define LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

namespace logitd::cpu {

// A maximum of this size or more is subtracted from x before the exponent is. Every x close enough
// to matter is then within a factor of two of it, so that the difference is exact.
inline constexpr float kLargeMax = 0x1p12f;

// One cell. A weight w stands for w * exp(shift) * 2^exponent.
struct Cell {
  float max = 0;
  float shift = 0;
  float exponent = 0;
  float sum = 0;     // of the weights; where the maximum is +inf, the number of +inf
  double scale = 0;  // of the weights, against the row's largest cell
  float factor = 0;  // from weight to probability
};

struct ForwardScratch {
  AlignedBuffer weights;
  Buffer<Cell> cells;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// In place of a mask's element type where there is no mask.
struct NoMask {};

// Whether two vectors hold 2 * lanes keys in the order of LoadTwo. bf16 results are put together from
// them as they were taken apart, which saves most of the conversion.
template <typename T, typename M, typename Out>
constexpr bool kPaired =
    std::is_same_v<T, hwy::bfloat16_t>&& std::is_same_v<Out, hwy::bfloat16_t> &&
    !std::is_same_v<M, float> && !std::is_same_v<M, hwy::float16_t>;

// x = scale * score + mask, -inf where masked.
HWY_INLINE VF Added(DF d, VF score, VF scale, VF mask) {
  const VF minus_inf = hn::Set(d, -kInf);
  return hn::IfThenElse(hn::Eq(mask, minus_inf), minus_inf, hn::MulAdd(score, scale, mask));
}
template <class Flags>
HWY_INLINE VF Masked(DF d, VF score, VF scale, Flags flags) {
  const DI di;
  const auto seen = hn::RebindMask(d, hn::Eq(hn::BitCast(di, flags), hn::Zero(di)));
  return hn::IfThenElse(seen, hn::Mul(score, scale), hn::Set(d, -kInf));
}

// The x of 2 * lanes keys.
template <bool kPairs, typename T, typename M>
HWY_INLINE void LoadX(DF d, const T* scores, const M* mask, VF scale, VF& a, VF& b) {
  const int64_t lanes = hn::Lanes(d);
  if constexpr (kPairs) {
    LoadTwo(d, scores, a, b);
  } else {
    a = LoadF32(d, scores);
    b = LoadF32(d, scores + lanes);
  }
  if constexpr (std::is_same_v<M, NoMask>) {
    a = hn::Mul(a, scale);
    b = hn::Mul(b, scale);
  } else if constexpr (!std::is_same_v<M, uint8_t>) {
    VF mask_a, mask_b;
    if constexpr (kPairs) {
      LoadTwo(d, mask, mask_a, mask_b);
    } else {
      mask_a = LoadF32(d, mask);
      mask_b = LoadF32(d, mask + lanes);
    }
    a = Added(d, a, scale, mask_a);
    b = Added(d, b, scale, mask_b);
  } else if constexpr (kPairs) {
    const hn::RebindToUnsigned<DF> du;
    const auto two = hn::PromoteTo(
        du, hn::LoadU(hn::Rebind<uint16_t, DF>(), reinterpret_cast<const uint16_t*>(mask)));
    a = Masked(d, a, scale, hn::And(two, hn::Set(du, 0xff)));
    b = Masked(d, b, scale, hn::ShiftRight<8>(two));
  } else {
    const hn::Rebind<uint8_t, DF> d8;
    a = Masked(d, a, scale, hn::PromoteTo(DI(), hn::LoadU(d8, mask)));
    b = Masked(d, b, scale, hn::PromoteTo(DI(), hn::LoadU(d8, mask + lanes)));
  }
}

// The first `count` of 2 * lanes elements, then zeros.
template <typename T>
HWY_INLINE void CopyFirst(const T* from, int64_t count, T (&padded)[2 * kMaxLanes]) {
  std::memset(static_cast<void*>(padded), 0, sizeof(padded));
  CopyShort<2 * kMaxLanes>(from, count, padded);
}

// The mask's elements from i on.
template <typename M>
HWY_INLINE const M* From(const M* mask, int64_t i) {
  if constexpr (std::is_same_v<M, NoMask>) {
    return mask;
  } else {
    return mask + i;
  }
}

// As LoadX where only the first `left` keys are there; the others are -inf.
template <bool kPairs, typename T, typename M>
HWY_INLINE void LoadLastX(DF d, const T* scores, const M* mask, int64_t left, VF scale, VF& a,
                          VF& b) {
  const int64_t lanes = hn::Lanes(d);
  if (left >= 2 * lanes) return LoadX<kPairs>(d, scores, mask, scale, a, b);
  T last_scores[2 * kMaxLanes];
  CopyFirst(scores, left, last_scores);
  if constexpr (std::is_same_v<M, NoMask>) {
    LoadX<kPairs>(d, last_scores, mask, scale, a, b);
  } else {
    M last_mask[2 * kMaxLanes];
    CopyFirst(mask, left, last_mask);
    LoadX<kPairs>(d, last_scores, last_mask, scale, a, b);
  }
  const int64_t first = kPairs ? (left + 1) / 2 : std::min(left, lanes);
  const VF minus_inf = hn::Set(d, -kInf);
  a = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(first)), a, minus_inf);
  b = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(left - first)), b, minus_inf);
}

// Writes the x of a cell of `count` keys, then -inf up to a whole pair of vectors. Returns their
// maximum, which means nothing where one is NaN.
template <bool kPairs, typename T, typename M>
HWY_INLINE float ReadCell(const T* scores, const M* mask, int64_t count, float scale,
                          float* HWY_RESTRICT x) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vscale = hn::Set(d, scale);
  VF m[4];
  for (VF& v : m) v = hn::Set(d, -kInf);
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    VF v[4];
    LoadX<kPairs>(d, scores + i, From(mask, i), vscale, v[0], v[1]);
    LoadX<kPairs>(d, scores + i + 2 * lanes, From(mask, i + 2 * lanes), vscale, v[2], v[3]);
    for (int64_t u = 0; u < 4; ++u) {
      hn::StoreU(v[u], d, x + i + u * lanes);
      m[u] = hn::Max(m[u], v[u]);
    }
  }
  for (; i < count; i += 2 * lanes) {
    VF a, b;
    LoadLastX<kPairs>(d, scores + i, From(mask, i), count - i, vscale, a, b);
    hn::StoreU(a, d, x + i);
    hn::StoreU(b, d, x + i + lanes);
    m[0] = hn::Max(m[0], a);
    m[1] = hn::Max(m[1], b);
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m[0], m[1]), hn::Max(m[2], m[3]))));
}

// The lowest key of a cell whose x is NaN, -1 where there is none.
template <bool kPairs>
HWY_NOINLINE int64_t FirstNan(const float* x, int64_t count) {
  const int64_t lanes = hn::Lanes(DF());
  for (int64_t key = 0; key < count; ++key) {
    const int64_t in_pair = key % (2 * lanes);
    const int64_t at = key - in_pair + in_pair / 2 + in_pair % 2 * lanes;
    if (std::isnan(x[kPairs ? at : key])) return key;
  }
  return -1;
}

constexpr double kLog2E = 1.4426950408889634;

// f = y log2(e) - n, at most 1/2 in size, to 2^-23; |y| up to 2^13.
HWY_INLINE VF Fraction(DF d, VF y, VF n) {
#if HWY_NATIVE_FMA
  constexpr auto kHigh = static_cast<float>(kLog2E);
  const VF f = hn::MulSub(y, hn::Set(d, kHigh), n);
#else
  // Products of halves of 12 bits are exact.
  constexpr float kHigh = 1477.0f / 1024;
  const auto high_bits = hn::BitCast(d, hn::Set(DI(), static_cast<int32_t>(0xfffff000)));
  const VF y_high = hn::And(y, high_bits);
  const VF y_low = hn::Sub(y, y_high);
  const VF high = hn::Set(d, kHigh);
  const VF f = hn::Add(hn::Sub(hn::Mul(y_high, high), n), hn::Mul(y_low, high));
#endif
  return hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E - kHigh)), f);
}

// Adding this to a number below 2^22 in size rounds it to a whole one, which is then in the low
// bits.
constexpr float kWhole = 12582912.0f;

// A smaller weight counts as 0: as little as this is left of x = -inf.
constexpr float kLeastWeight = 0x1p-124f;

// 2^(y log2(e) - n), n the cell's exponent; about 2^-125 where it is less, also of -inf.
struct Weigher {
  VF shift, low;
#if HWY_TARGET <= HWY_AVX3
  hn::Vec<DI> sixteenths;
#else
  hn::Vec<DI> bias;
#endif

  explicit HWY_INLINE Weigher(const Cell& cell)
      : shift(hn::Set(DF(), cell.shift)),
        low(hn::Set(DF(), (cell.exponent - 125) * static_cast<float>(1 / kLog2E))) {
    const DI di;
    const auto exponent = hn::Set(di, static_cast<int32_t>(cell.exponent));
#if HWY_TARGET <= HWY_AVX3
    sixteenths =
        hn::Add(hn::Load(di, kSixteenths), hn::ShiftLeft<23>(hn::Sub(hn::Set(di, 127), exponent)));
#else
    bias = hn::Sub(hn::Set(di, 127), exponent);
#endif
  }

  HWY_INLINE VF operator()(DF d, VF x) const {
    const DI di;
    const VF y = MaxOrSecond(low, hn::Sub(x, shift));
#if HWY_TARGET <= HWY_AVX3
    const VF round = hn::Set(d, kWhole / 16);
    const VF t = hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E)), round);
    const VF rest = Exp2OfSixteenth(d, Fraction(d, y, hn::Sub(t, round)));
    return hn::Mul(rest, PowerOfSixteenths(d, t, sixteenths));
#else
    const VF round = hn::Set(d, kWhole);
    const VF t = hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E)), round);
    const VF p = Exp2Poly(d, Fraction(d, y, hn::Sub(t, round)));
    const auto power = hn::ShiftLeft<23>(hn::Add(hn::BitCast(di, t), bias));
    return hn::Mul(p, hn::BitCast(d, power));
#endif
  }
};

HWY_INLINE void SetExponent(Cell& cell) {
  const DF d;
  cell.shift = std::fabs(cell.max) < kLargeMax ? 0.0f : cell.max;
  const VF y = hn::Set(d, cell.max - cell.shift);
  const VF round = hn::Set(d, kWhole);
  cell.exponent =
      hn::GetLane(hn::Sub(hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E)), round), round));
}

// Writes the weights of x[0, count) under `weigh`: whole pairs of vectors where there is `room`.
// Returns their sum. Meanwhile it prefetches as many elements of kBytes from `next` on, which are
// read after these; any address is safe.
template <int64_t kBytes, class Weigh>
HWY_INLINE float WeighCell(const float* HWY_RESTRICT x, int64_t count, const Weigh& weigh,
                           bool room, float* HWY_RESTRICT weights, const void* next) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  VF s[4];
  for (VF& v : s) v = hn::Zero(d);
  int64_t i = 0;
  const char* ahead = static_cast<const char*>(next);
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    for (int64_t b = 0; b < 4 * lanes * kBytes; b += 64) hwy::Prefetch(ahead + i * kBytes + b);
    VF w[4];
    for (int64_t u = 0; u < 4; ++u) w[u] = weigh(d, hn::LoadU(d, x + i + u * lanes));
    for (int64_t u = 0; u < 4; ++u) {
      hn::StoreU(w[u], d, weights + i + u * lanes);
      s[u] = hn::Add(s[u], w[u]);
    }
  }
  const int64_t end = room ? (count + 2 * lanes - 1) / (2 * lanes) * (2 * lanes) : count;
  for (; i < end; i += lanes) {
    const VF w = weigh(d, hn::LoadU(d, x + i));  // nothing that counts after the end
    if (end - i >= lanes) {
      hn::StoreU(w, d, weights + i);
    } else {
      StoreTail(d, w, end - i, weights + i);
    }
    s[0] = hn::Add(s[0], w);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
}

// 1 for +inf, 0 for all else.
struct InfinityWeigher {
  HWY_INLINE VF operator()(DF d, VF x) const {
    return hn::IfThenElseZero(hn::Eq(x, hn::Set(d, kInf)), hn::Set(d, 1.0f));
  }
};

// As ReadCell and WeighCell at once, against the exponent 0, into weights with room for pairs of
// vectors. Returns whether that was right: the maximum is neither so large that a weight overflows,
// nor so small that one underflows that counts; and no x is NaN.
template <bool kPairs, typename T, typename M>
HWY_INLINE bool WeighAtOnce(const T* scores, const M* mask, int64_t count, float scale,
                            float* HWY_RESTRICT weights, const void* next, Cell& cell) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vscale = hn::Set(d, scale);
  const Weigher weigh{Cell()};
  const char* ahead = static_cast<const char*>(next);
  VF m[2], s[4];
  for (VF& v : m) v = hn::Set(d, -kInf);
  for (VF& v : s) v = hn::Zero(d);
  const auto add = [&](VF a, VF b, int64_t i, int64_t u) HWY_ATTR {
    m[0] = hn::Max(m[0], a);
    m[1] = hn::Max(m[1], b);
    a = weigh(d, a);
    b = weigh(d, b);
    hn::StoreU(a, d, weights + i);
    hn::StoreU(b, d, weights + i + lanes);
    s[u] = hn::Add(s[u], a);
    s[u + 1] = hn::Add(s[u + 1], b);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
    for (int64_t b = 0; b < 4 * lanes * kBytes; b += 64) hwy::Prefetch(ahead + i * kBytes + b);
    for (int64_t u = 0; u < 4; u += 2) {
      const int64_t at = i + u * lanes;
      VF a, b;
      LoadX<kPairs>(d, scores + at, From(mask, at), vscale, a, b);
      add(a, b, at, u);
    }
  }
  for (; i < count; i += 2 * lanes) {
    VF a, b;
    LoadLastX<kPairs>(d, scores + i, From(mask, i), count - i, vscale, a, b);
    add(a, b, i, 0);
  }
  cell.max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(m[0], m[1])));
  cell.sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
  return cell.max >= 0 && cell.max <= 60 && !std::isnan(cell.sum);
}

// Where a row's weights go while it is read.
struct RowWeights {
  Cell* cells;
  float* weights;  // [keys]; with `room` also whole pairs of vectors
  bool room;
  const void* next_row;  // the address read after this row, or any other
};

// Fills the cells and the weights; a cell whose sum is 0 has no weights. Returns the lowest key
// whose x is NaN, where it stops, or -1.
template <bool kPairs, typename T, typename M>
int64_t Weigh(const T* scores, const M* mask, int64_t count, float scale, const RowWeights& to) {
  HWY_ALIGN float x[kCellKeys];
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t n = std::min(kCellKeys, count - begin);
    Cell& cell = to.cells[begin / kCellKeys];
    cell = Cell();
    const void* ahead =
        begin + n < count ? static_cast<const void*>(scores + begin + n) : to.next_row;
    const M* cell_mask = From(mask, begin);
    float* weights = to.weights + begin;
    if (to.room && WeighAtOnce<kPairs>(scores + begin, cell_mask, n, scale, weights, ahead, cell)) {
      continue;
    }
    cell.sum = 0;
    cell.max = ReadCell<kPairs>(scores + begin, cell_mask, n, scale, x);
    bool may_be_nan = true;
    if (HWY_LIKELY(std::isfinite(cell.max))) {
      SetExponent(cell);
      cell.sum = WeighCell<sizeof(T)>(x, n, Weigher(cell), to.room, weights, ahead);
      may_be_nan = std::isnan(cell.sum);
    } else if (cell.max > 0) {
      cell.sum = WeighCell<sizeof(T)>(x, n, InfinityWeigher(), to.room, weights, ahead);
    }
    if (HWY_LIKELY(!may_be_nan)) continue;
    const int64_t nan = FirstNan<kPairs>(x, n);
    if (nan >= 0) return begin + nan;
  }
  return -1;
}

// The order of keys in the weights depends on `Out`, the results' type.
template <typename Out, typename T>
int64_t WeighUnder(const AttentionMask& mask, int64_t at, const T* scores, int64_t count,
                   float scale, const RowWeights& to) {
  const auto under = [&](const auto* data) {
    using M = std::remove_cvref_t<decltype(*data)>;
    return Weigh<kPaired<T, M, Out>>(scores, data + at, count, scale, to);
  };
  switch (mask.kind) {
    case MaskKind::kNone:
      return Weigh<kPaired<T, NoMask, Out>, T, NoMask>(scores, nullptr, count, scale, to);
    case MaskKind::kBool:
      return under(static_cast<const uint8_t*>(mask.data));
    case MaskKind::kAdditive:
      return AsType(mask.dtype, mask.data, under);
  }
  HWY_ABORT("mask kind %d", static_cast<int>(mask.kind));  // the op's check has refused it
}

// bf16 of two vectors of weights in the order of LoadTwo, neither NaN nor infinite: rounded to
// nearest, ties to even.
HWY_INLINE auto RoundTwo(DF d, VF a, VF b) {
  const hn::RebindToUnsigned<DF> du;
  const auto rounded = [&](VF v) HWY_ATTR {
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    return hn::Add(hn::Add(bits, hn::Set(du, 0x7fff)), odd);
  };
  return hn::Or(hn::ShiftRight<16>(rounded(a)), hn::And(rounded(b), hn::Set(du, 0xffff0000u)));
}

// Multiplies a cell's weights by its factor, which is not 0.
template <bool kPairs, typename Out>
HWY_INLINE void ScaleCell(const float* weights, int64_t count, float factor, bool room, Out* to) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vfactor = hn::Set(d, factor);
  // Results below f32's normal range are 0: computing a subnormal takes a hundred times as long.
  const VF least = hn::Set(d, std::max(kLeastWeight, std::numeric_limits<float>::min() / factor));
  const auto scaled = [&](VF w) HWY_ATTR {
    return hn::IfThenElseZero(hn::Ge(w, least), hn::Mul(w, vfactor));
  };
  if constexpr (kPairs) {
    for (int64_t i = 0; i < count; i += 2 * lanes) {
      const auto words =
          RoundTwo(d, scaled(hn::LoadU(d, weights + i)), scaled(hn::LoadU(d, weights + i + lanes)));
      const hn::RebindToUnsigned<DF> du;
      if (HWY_LIKELY(count - i >= 2 * lanes)) {
        hn::StoreU(words, du, reinterpret_cast<uint32_t*>(to + i));
      } else {
        HWY_ALIGN uint32_t last[kMaxLanes];
        hn::Store(words, du, last);
        CopyShort<2 * kMaxLanes>(reinterpret_cast<const Out*>(last), count - i, to + i);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; i += lanes) {
    VF w;
    if (HWY_LIKELY(room || count - i >= lanes)) {
      w = hn::LoadU(d, weights + i);
    } else {
      float last[kMaxLanes];
      CopyTail(weights + i, count - i, last);
      w = hn::LoadU(d, last);
    }
    StoreAs(d, scaled(w), count - i, to + i);
  }
}

template <bool kPairs, typename Out>
void Scale(const RowWeights& from, int64_t count, Out* to) {
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t n = std::min(kCellKeys, count - begin);
    const float factor = from.cells[begin / kCellKeys].factor;
    if (factor == 0) {
      std::memset(static_cast<void*>(to + begin), 0, static_cast<size_t>(n) * sizeof(Out));
    } else {
      ScaleCell<kPairs>(from.weights + begin, n, factor, from.room, to + begin);
    }
  }
}

// What a row's weights are divided by: total * exp(unit).
struct Denominator {
  double unit;
  double total;

  double Log() const { return total == 1 ? unit : unit + std::log(total); }
};

// Turns the cells' sums into factors. Most rows have one cell and no sink: those need no
// exponential here.
inline Denominator Total(Cell* cells, int64_t count, float sink) {
  constexpr double kLn2 = 0.6931471805599453;
  const Cell* top = nullptr;
  for (Cell* cell = cells; cell < cells + count; ++cell) {
    if (cell->max > (top == nullptr ? -kInf : top->max)) top = cell;
  }
  if (top == nullptr) return {.unit = sink, .total = 1};
  const Cell reference = *top;
  double total = 0;
  if (reference.max == kInf) {
    for (const Cell* cell = cells; cell < cells + count; ++cell) {
      if (cell->max == kInf) total += cell->sum;
    }
    for (Cell* cell = cells; cell < cells + count; ++cell) {
      if (cell->max == kInf) cell->factor = static_cast<float>(1 / total);
    }
    return {.unit = kInf, .total = 1};
  }
  const double unit = reference.shift + reference.exponent * kLn2;
  const double share = sink == -kInf ? 0 : std::exp(sink - unit);
  for (Cell* cell = cells; cell < cells + count; ++cell) {
    if (cell->sum == 0) continue;
    const double steps = double{cell->exponent} - reference.exponent;
    if (cell->shift != reference.shift) {
      cell->scale = std::exp(double{cell->shift} - reference.shift + steps * kLn2);
    } else {
      cell->scale = steps == 0 ? 1 : std::exp2(steps);
    }
    total += cell->scale * cell->sum;
  }
  total += share;
  for (Cell* cell = cells; cell < cells + count; ++cell) {
    cell->factor = static_cast<float>(cell->scale / total);
  }
  if (std::isinf(share)) return {.unit = sink, .total = 1};
  return {.unit = unit, .total = total};
}

inline bool IsMasked(const AttentionMask& mask, int64_t at) {
  if (mask.kind == MaskKind::kNone) return false;
  if (mask.kind == MaskKind::kBool) return static_cast<const uint8_t*>(mask.data)[at] != 0;
  return AsType(mask.dtype, mask.data, [&](const auto* values) {
    using T = std::remove_cvref_t<decltype(*values)>;
    return std::memcmp(values + at, &ElementBits<T>::kMinusInf, sizeof(T)) == 0;
  });
}

// Writes NaN for every key of the range that is not masked. `mask_at`: the mask's element of the
// first of them.
inline void WriteNan(const AttentionSoftmaxArgs& args, int64_t row, KeyRange seen,
                     int64_t mask_at) {
  const MutableTensorView& probs = args.probs;
  Zero(probs, row, seen.begin, seen.end);
  AsType(probs.dtype, At(probs.data, probs.dtype, row * probs.row_stride), [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      if (!IsMasked(args.mask, mask_at + j - seen.begin)) to[j] = FromBits<T>(ElementBits<T>::kNan);
    }
  });
}

// Whether the mask keeps bf16 in the order of LoadTwo; see kPaired.
bool IsPaired(const AttentionSoftmaxArgs& args) {
  const bool mask = args.mask.kind != MaskKind::kAdditive || args.mask.dtype == DType::kBF16;
  return args.scores.dtype == DType::kBF16 && args.probs.dtype == DType::kBF16 && mask;
}

void ForwardRow(const AttentionSoftmaxArgs& args, int64_t row, const RowPlace& place,
                ForwardScratch& scratch) {
  const MutableTensorView& probs = args.probs;
  const KeyRange seen = SeenKeys(args.shape, args.window, place.query);
  const int64_t count = seen.end - seen.begin;
  const int64_t mask_at = place.batch * args.mask.batch_stride +
                          place.head * args.mask.head_stride +
                          place.query * args.mask.query_stride + seen.begin - args.mask.origin;
  const void* scores =
      At(args.scores.data, args.scores.dtype, row * args.scores.row_stride + seen.begin);
  void* to = At(probs.data, probs.dtype, row * probs.row_stride + seen.begin);
  const bool in_place = probs.dtype == DType::kF32;
  const int64_t cell_count = (count + kCellKeys - 1) / kCellKeys;
  const RowWeights weights = {
      .cells = scratch.cells.Get((args.shape.keys + kCellKeys - 1) / kCellKeys),
      .weights =
          in_place ? static_cast<float*>(to) : scratch.weights.Get(args.shape.keys + 2 * kMaxLanes),
      .room = !in_place,
      .next_row = static_cast<const std::byte*>(scores) +
                  args.scores.row_stride * static_cast<int64_t>(SizeOf(args.scores.dtype))};
  const int64_t nan = AsType(args.scores.dtype, scores, [&](const auto* typed) {
    using T = std::remove_cvref_t<decltype(*typed)>;
    // Results have the scores' type, or are f32.
    return probs.dtype == DType::kF32
               ? WeighUnder<float>(args.mask, mask_at, typed, count, args.scale, weights)
               : WeighUnder<T>(args.mask, mask_at, typed, count, args.scale, weights);
  });
  Denominator denominator = {.unit = std::numeric_limits<double>::quiet_NaN(), .total = 1};
  RowStatus status;
  if (HWY_UNLIKELY(nan >= 0)) {
    status = {RowCode::kNanLogit, static_cast<int32_t>(seen.begin + nan)};
    WriteNan(args, row, seen, mask_at);
  } else {
    denominator =
        Total(weights.cells, cell_count, args.sinks == nullptr ? -kInf : args.sinks[place.head]);
    if (denominator.unit == -kInf) status.code = RowCode::kEmptySupport;
    AsType(probs.dtype, to, [&](auto* typed) {
      if constexpr (std::is_same_v<decltype(typed), hwy::bfloat16_t*>) {
        if (IsPaired(args)) return Scale<true>(weights, count, typed);
      }
      Scale<false>(weights, count, typed);
    });
  }
  Zero(probs, row, 0, seen.begin);
  Zero(probs, row, seen.end, args.shape.keys);
  if (args.logsumexp != nullptr) args.logsumexp[row] = static_cast<float>(denominator.Log());
  args.status[row] = status;
}

void ForwardRows(const AttentionSoftmaxArgs& args, int64_t begin, int64_t end,
                 ForwardScratch& scratch) {
  RowPlace place = PlaceOf(args.shape, begin);
  for (int64_t row = begin; row < end; ++row, Advance(args.shape, place)) {
    ForwardRow(args, row, place, scratch);
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ForwardRows);

namespace {

ForwardScratch& ScratchOfThisThread() {
  thread_local ForwardScratch scratch;
  return scratch;
}

}  // namespace

void AttentionSoftmax(const AttentionSoftmaxArgs& args, ThreadPool& pool) {
  ForEachPiece(pool, args.shape.keys, 0, args.shape.rows, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ForwardRows)(args, begin, end, ScratchOfThisThread());
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
