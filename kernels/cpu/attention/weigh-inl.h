// The weights of attention_softmax's rows on the CPU, and what they are divided by. There are two
// ways to them; attention_softmax.cc tells of both.
#if defined(LOGITD_KERNELS_CPU_ATTENTION_WEIGH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ATTENTION_WEIGH_INL_H_
#undef LOGITD_KERNELS_CPU_ATTENTION_WEIGH_INL_H_
#else
#define LOGITD_KERNELS_CPU_ATTENTION_WEIGH_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/attention/keys-inl.h"
#include "kernels/cpu/rows/lanes-inl.h"

#ifndef LOGITD_KERNELS_CPU_ATTENTION_WEIGH_ONCE_
#define LOGITD_KERNELS_CPU_ATTENTION_WEIGH_ONCE_

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
  double scale = 0;  // of the weights, against the row's largest cell; 0: there are none
};

// Zeros before the first weight and after the last, so that a vector may begin or end outside.
inline constexpr int64_t kWeightMargin = 2 * kMaxLanes;

// A row's weights, by keys from the first it sees: as they lie, or even and odd ones apart (see
// kPaired).
struct RowWeights {
  float* first;
  int64_t odd;  // the odd keys' weights begin there; unused where they are not apart

  static int64_t HalfOf(int64_t keys) {
    return (keys + 4 * kMaxLanes - 1) / (4 * kMaxLanes) * (2 * kMaxLanes);
  }
  // Floats for rows of `keys`.
  static int64_t RoomFor(int64_t keys) { return 2 * HalfOf(keys) + 3 * kWeightMargin; }
  // In that room. Writes the margins before the first weights.
  static RowWeights In(float* room, int64_t keys) {
    const RowWeights weights = {room + kWeightMargin, HalfOf(keys) + kWeightMargin};
    std::fill_n(weights.first - kWeightMargin, kWeightMargin, 0.0f);
    std::fill_n(weights.first + weights.odd - kWeightMargin, kWeightMargin, 0.0f);
    return weights;
  }

  // Where the first or second vector of the pair of vectors from an even `key` on is.
  template <bool kPairs>
  float* A(int64_t key) const {
    return first + (kPairs ? key / 2 : key);
  }
  template <bool kPairs>
  float* B(int64_t key, int64_t lanes) const {
    return kPairs ? first + odd + key / 2 : first + key + lanes;
  }
};

// What a row's weights are divided by: total * exp(unit).
struct Denominator {
  double unit;
  double total;

  double Log() const { return total == 1 ? unit : unit + std::log(total); }
};

// Turns the cells' sums into scales.
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
      if (cell->max == kInf) cell->scale = 1 / total;
    }
    return {.unit = kInf, .total = 1};
  }
  const double unit = reference.shift + reference.exponent * kLn2;
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
  const double share = sink == -kInf ? 0 : std::exp(sink - unit);
  total += share;
  for (Cell* cell = cells; cell < cells + count; ++cell) cell->scale /= total;
  if (std::isinf(share)) return {.unit = sink, .total = 1};
  return {.unit = unit, .total = total};
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_WEIGH_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr double kLog2E = 1.4426950408889634;

// Adding this to a number below 2^22 in size rounds it to a whole one, which is then in the low
// bits.
constexpr float kWhole = 12582912.0f;

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

// Zeros after the weights of `count` keys, which fill whole pairs of vectors.
template <bool kPairs>
HWY_INLINE void WriteMargin(const RowWeights& weights, int64_t count) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const int64_t end = (count + 2 * lanes - 1) / (2 * lanes) * (2 * lanes);
  for (int64_t i = 0; i < kWeightMargin; i += 2 * lanes) {
    hn::StoreU(hn::Zero(d), d, weights.A<kPairs>(end + i));
    hn::StoreU(hn::Zero(d), d, weights.B<kPairs>(end + i, lanes));
  }
}

// ---- All cells against the exponent 0

// A row's weights against 0 are right where their total is between these: none overflows, and what
// underflows, below 2^-126, is less than 1e-37 of the total.
constexpr double kLeastTotal = 0x1p-3;
constexpr double kMostTotal = 0x1p100;

// 2^(x log2(e)) for x = y * factor; `factor` is a power of two, 1 where there is no FMA. 0 where
// that is below 2^-126, also of -inf; more than kMostTotal, infinite or NaN where it is more than
// that; NaN of NaN.
class ZeroWeigher {
 public:
  explicit HWY_INLINE ZeroWeigher(float factor) {
    const DF d;
    constexpr auto kLn2 = static_cast<float>(1 / kLog2E);
    log2e_ = hn::Set(d, static_cast<float>(kLog2E) * factor);
#if HWY_TARGET <= HWY_AVX3
    low_ = hn::Set(d, -256 * kLn2 / factor);
    const DI di;
    const auto one = hn::Set(di, 127 << 23);
    const auto k = hn::ShiftLeft<19>(hn::Iota(di, 0));
    sixteenths_ = hn::BitCast(d, hn::Add(hn::Load(di, kSixteenths), hn::Add(one, k)));
#else
    low_ = hn::Set(d, -127 * kLn2 / factor);
    high_ = hn::Set(d, 127 * kLn2 / factor);
#endif
  }

  HWY_INLINE VF operator()(DF d, VF y) const {
    y = MaxOrSecond(low_, y);
#if HWY_TARGET <= HWY_AVX3
    const VF round = hn::Set(d, kWhole / 16);
    const VF t = hn::MulAdd(y, log2e_, round);
    const VF n = hn::Sub(t, round);
    const VF part{_mm512_permutexvar_ps(hn::BitCast(DI(), t).raw, sixteenths_.raw)};
    const VF rest = Exp2OfSixteenth(d, hn::MulSub(y, log2e_, n));
    return VF{_mm512_scalef_ps(hn::Mul(rest, part).raw, n.raw)};  // by 2^floor(n)
#else
    y = MinOrSecond(high_, y);
    const DI di;
    const VF round = hn::Set(d, kWhole);
    const VF t = hn::MulAdd(y, log2e_, round);
    const VF n = hn::Sub(t, round);
    const VF f = HWY_NATIVE_FMA ? hn::MulSub(y, log2e_, n) : Fraction(d, y, n);
    const auto power = hn::ShiftLeft<23>(hn::Add(hn::BitCast(di, t), hn::Set(di, 127)));
    return hn::Mul(Exp2Poly(d, f), hn::BitCast(d, power));
#endif
  }

 private:
  VF low_;
  VF log2e_;  // rounded: that costs 1.2e-6 of a weight 1e-37 times the largest, less of larger ones
#if HWY_TARGET <= HWY_AVX3
  VF sixteenths_;  // 2^(k/16)
#else
  VF high_;
#endif
};

// Writes the weights against 0 of a row of `count` keys, then zeros. Returns their total, which
// tells whether they are right. `ahead`: prefetches that many bytes ahead, if it is not 0;
// otherwise `next_row` is for NextCell. meanwhile() is called after every four vectors of keys.
template <bool kPairs, bool kScaleLater, typename T, typename M, class Meanwhile>
HWY_INLINE double WeighAtOnce(const T* scores, const M* mask, int64_t count, float scale,
                              const T* next_row, int64_t ahead, const RowWeights& to,
                              const Meanwhile& meanwhile) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const FastReader<kPairs, kScaleLater, T, M> read(scale);
  const ZeroWeigher weigh(kScaleLater ? scale : 1.0f);
  const auto store = [&](VF a, VF b, int64_t key) HWY_ATTR {
    hn::StoreU(a, d, to.A<kPairs>(key));
    hn::StoreU(b, d, to.B<kPairs>(key, lanes));
  };
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t end = std::min(begin + kCellKeys, count);
    NextCell next = ahead != 0 ? NextCell::After(scores + begin, ahead)
                               : NextCell(scores, end, count, next_row);
    VF s[4];
    for (VF& v : s) v = hn::Zero(d);
    const auto add = [&](VF a, VF b, int64_t key, int64_t u) HWY_ATTR {
      a = weigh(d, a);
      b = weigh(d, b);
      store(a, b, key);
      s[u] = hn::Add(s[u], a);
      s[u + 1] = hn::Add(s[u + 1], b);
    };
    int64_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      const int64_t bytes = 4 * lanes * static_cast<int64_t>(sizeof(T));
      // Next to its weights, the first cache has no room for the next row of f32.
      sizeof(T) == 2 || ahead != 0 ? next.ToFirstCache(bytes) : next.ToSecondCache(bytes);
      for (int64_t u = 0; u < 4; u += 2) {
        const int64_t key = i + u * lanes;
        VF a, b;
        read(d, scores + key, From(mask, key), a, b);
        add(a, b, key, u);
      }
      meanwhile();
    }
    for (; i < end; i += 2 * lanes) {
      VF a, b;
      read.Last(d, scores + i, From(mask, i), end - i, a, b);
      add(a, b, i, 0);
    }
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
  }
  WriteMargin<kPairs>(to, count);
  return total;
}

// ---- Each cell against the exponent of its maximum

// Writes the x of a cell of `count` keys, then -inf up to a whole pair of vectors. Returns their
// maximum, which means nothing where one is NaN.
template <bool kPairs, typename T, typename M>
HWY_INLINE float ReadCell(const T* scores, const M* mask, int64_t count, float scale,
                          float* HWY_RESTRICT x) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vscale = hn::Set(d, scale);
  VF m[2] = {hn::Set(d, -kInf), hn::Set(d, -kInf)};
  for (int64_t i = 0; i < count; i += 2 * lanes) {
    VF a, b;
    LoadLastX<kPairs>(d, scores + i, From(mask, i), count - i, vscale, a, b);
    hn::StoreU(a, d, x + i);
    hn::StoreU(b, d, x + i + lanes);
    m[0] = hn::Max(m[0], a);
    m[1] = hn::Max(m[1], b);
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(m[0], m[1])));
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

// 2^(y log2(e) - n), n the cell's exponent, for y = x - shift; 0 where it is below 2^-126, also of
// -inf.
struct Weigher {
  VF shift, low;
#if HWY_TARGET <= HWY_AVX3
  hn::Vec<DI> sixteenths;
#else
  hn::Vec<DI> bias;
#endif

  explicit HWY_INLINE Weigher(const Cell& cell)
      : shift(hn::Set(DF(), cell.shift)),
        low(hn::Set(DF(), (cell.exponent - 127) * static_cast<float>(1 / kLog2E))) {
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

// 1 for +inf, 0 for all else.
struct InfinityWeigher {
  HWY_INLINE VF operator()(DF d, VF x) const {
    return hn::IfThenElseZero(hn::Eq(x, hn::Set(d, kInf)), hn::Set(d, 1.0f));
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

// Writes the weights of x[0, count) under `weigh`, from key `begin` on. Returns their sum.
template <bool kPairs, class Weigh>
HWY_INLINE float WeighCell(const float* HWY_RESTRICT x, int64_t count, const Weigh& weigh,
                           int64_t begin, const RowWeights& to) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  VF s[2] = {hn::Zero(d), hn::Zero(d)};
  for (int64_t i = 0; i < count; i += 2 * lanes) {
    const VF a = weigh(d, hn::LoadU(d, x + i)), b = weigh(d, hn::LoadU(d, x + i + lanes));
    hn::StoreU(a, d, to.A<kPairs>(begin + i));
    hn::StoreU(b, d, to.B<kPairs>(begin + i, lanes));
    s[0] = hn::Add(s[0], a);
    s[1] = hn::Add(s[1], b);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(s[0], s[1])));
}

// Multiplies the weights of `count` keys from `begin` on by the cell's scale; 0 where that is 0,
// whatever they are.
template <bool kPairs>
void ScaleCell(double scale, int64_t begin, int64_t count, const RowWeights& weights) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF factor = hn::Set(d, static_cast<float>(scale));
  const auto scaled = [&](float* w) HWY_ATTR {
    hn::StoreU(scale == 0 ? hn::Zero(d) : hn::Mul(hn::LoadU(d, w), factor), d, w);
  };
  for (int64_t i = 0; i < count; i += 2 * lanes) {
    scaled(weights.A<kPairs>(begin + i));
    scaled(weights.B<kPairs>(begin + i, lanes));
  }
}

// What a row comes to: its denominator, and either a factor from weights to results, or the lowest
// key whose x is NaN.
struct RowTotal {
  Denominator denominator;
  float factor = 1;
  int64_t nan = -1;
};

// As WeighAtOnce, for any row; the weights are the results.
template <bool kPairs, typename T, typename M>
HWY_NOINLINE RowTotal WeighByCells(const T* scores, const M* mask, int64_t count, float scale,
                                   float sink, Cell* cells, const RowWeights& to) {
  HWY_ALIGN float x[kCellKeys];
  const auto keys_of = [&](int64_t begin) { return std::min(kCellKeys, count - begin); };
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t n = keys_of(begin);
    Cell& cell = cells[begin / kCellKeys];
    cell = Cell();
    cell.max = ReadCell<kPairs>(scores + begin, From(mask, begin), n, scale, x);
    bool may_be_nan = true;
    if (HWY_LIKELY(std::isfinite(cell.max))) {
      SetExponent(cell);
      cell.sum = WeighCell<kPairs>(x, n, Weigher(cell), begin, to);
      may_be_nan = std::isnan(cell.sum);
    } else if (cell.max > 0) {
      cell.sum = WeighCell<kPairs>(x, n, InfinityWeigher(), begin, to);
    }
    if (HWY_LIKELY(!may_be_nan)) continue;
    const int64_t nan = FirstNan<kPairs>(x, n);
    if (nan < 0) continue;
    return {.denominator = {std::numeric_limits<double>::quiet_NaN(), 1}, .nan = begin + nan};
  }
  const Denominator denominator = Total(cells, (count + kCellKeys - 1) / kCellKeys, sink);
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    ScaleCell<kPairs>(cells[begin / kCellKeys].scale, begin, keys_of(begin), to);
  }
  WriteMargin<kPairs>(to, count);
  return {.denominator = denominator};
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
