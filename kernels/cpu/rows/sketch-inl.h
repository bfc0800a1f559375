// The per-target half of sketch.h: how a cell is read and summed, and how the cells' sums are
// brought to the row's maximum and added in cell order. find-inl.h finds tokens in a finished
// sketch.
#if defined(LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/count-inl.h"
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

// An exponential as a product, which a fused multiply-add takes without a rounding of its own.
struct ExpFactors {
  VF power;  // of 2, whole or by sixteenths
  VF rest;   // exactly 1 where the exponent is 0
};

// exp for sums: 2^(y * scale), y * scale in [-126, 0]. Relative error 6e-7, and 1.3e-7 times the
// exponent.
HWY_INLINE ExpFactors ExpForSum(DF d, VF y, VF scale) {
#if HWY_TARGET <= HWY_AVX3
  // Rounded to sixteenths, of which the sum's low bits hold 127 whole ones more: what is left of
  // the exponent is at most 1/32, so that a parabola does.
  const VF round = hn::Set(d, 786432.0f + 127.0f);
  const VF t = hn::MulAdd(y, scale, round);
  const VF f = hn::MulSub(y, scale, hn::Sub(t, round));
  return {.power = PowerOfSixteenths(d, t, hn::Load(DI(), kSixteenths)),
          .rest = Exp2OfSixteenth(d, f)};
#else
  const VF round = hn::Set(d, kRound);
  const VF t = hn::MulAdd(y, scale, round);
  const VF f = hn::MulSub(y, scale, hn::Sub(t, round));
  return {.power = PowerOf2(d, t), .rest = Exp2Poly(d, f)};
#endif
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

// What the first look finds in a cell.
struct CellRange {
  float max;
  float min;    // or less
  bool is_nan;  // whether an element is NaN; it may not be seen where max is finite
};

// The first look at a cell. With kGroups it also writes the maxima of groups, which find tokens
// again; with kMin it finds the minimum too.
template <typename T, bool kGroups, bool kMin>
class CellReader {
 public:
  // f16 takes two operations to convert, so that the second look had better not do it again.
  static constexpr bool kKeeps = std::is_same_v<T, hwy::float16_t>;

  HWY_INLINE CellReader() : max_(hn::Set(DF(), -kInf)), min_(hn::Set(DF(), kInf)) {}

  // Reads the next kFineGroup vectors, from element i on. With kKeeps it writes them to `kept`.
  HWY_INLINE void Read(const T* HWY_RESTRICT cell, int64_t i, float* HWY_RESTRICT kept,
                       float* HWY_RESTRICT fine) {
    const DF d;
    const int64_t lanes = hn::Lanes(d);
    VF v[kFineGroup];
    for (int64_t j = 0; j < kFineGroup; j += 2) {
      LoadTwo(d, cell + i + j * lanes, v[j], v[j + 1]);
      if constexpr (kKeeps) {
        hn::StoreU(v[j], d, kept + i + j * lanes);
        hn::StoreU(v[j + 1], d, kept + i + (j + 1) * lanes);
      }
    }
    const VF m01 = hn::Max(v[0], v[1]), m23 = hn::Max(v[2], v[3]);
    const VF m45 = hn::Max(v[4], v[5]), m67 = hn::Max(v[6], v[7]);
    const VF m = hn::Max(hn::Max(m01, m23), hn::Max(m45, m67));
    if constexpr (kGroups) hn::StoreU(m, d, fine + i / kFineGroup);
    max_ = hn::Max(max_, m);
    if constexpr (kMin) {
      const VF n01 = hn::Min(v[0], v[1]), n23 = hn::Min(v[2], v[3]);
      const VF n45 = hn::Min(v[4], v[5]), n67 = hn::Min(v[6], v[7]);
      min_ = hn::Min(min_, hn::Min(hn::Min(n01, n23), hn::Min(n45, n67)));
    }
  }

  HWY_INLINE CellRange Finish(const T* cell, float* coarse) const {
    const DF d;
    if constexpr (kGroups) hn::StoreU(max_, d, coarse);
    const float max = hn::GetLane(hn::MaxOfLanes(d, max_));
    const bool is_nan = HWY_UNLIKELY(!std::isfinite(max)) && HasNan(cell);
    const float min = kMin ? hn::GetLane(hn::MinOfLanes(d, min_)) : -kInf;
    return {.max = max, .min = min, .is_nan = is_nan};
  }

 private:
  VF max_, min_;
};

#if HWY_TARGET != HWY_SCALAR
// The largest element of a cell of bf16 below 0.
HWY_NOINLINE inline float LargestNegative(const hwy::bfloat16_t* cell) {
  const hn::Repartition<uint16_t, DF> d16;
  const hn::RebindToUnsigned<DF> d32;
  auto least = hn::Set(d16, 0xffff);
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d16)) {
    least = hn::Min(least, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(cell + i)));
  }
  const auto words = hn::BitCast(d32, least);
  const auto halves = hn::Min(hn::ShiftRight<16>(words), hn::And(words, hn::Set(d32, 0xffff)));
  return FloatOf(static_cast<int32_t>(hn::GetLane(hn::MinOfLanes(d32, halves)) << 16));
}

// bf16 without groups: two elements at a time, as integers. The largest signed one is the maximum,
// unless all are negative; the largest unsigned one is the most negative. NaN is above both
// infinities.
template <bool kMin>
class CellReader<hwy::bfloat16_t, /*kGroups=*/false, kMin> {
 public:
  static constexpr bool kKeeps = false;

  HWY_INLINE CellReader() : most_(hn::Set(D16(), -0x8000)), most_unsigned_(hn::Zero(DU16())) {}

  HWY_INLINE void Read(const hwy::bfloat16_t* HWY_RESTRICT cell, int64_t i, float*, float*) {
    const D16 d;
    for (int64_t j = 0; j < kFineGroup * static_cast<int64_t>(hn::Lanes(DF())); j += hn::Lanes(d)) {
      const auto v = hn::LoadU(d, reinterpret_cast<const int16_t*>(cell + i + j));
      most_ = hn::Max(most_, v);
      most_unsigned_ = hn::Max(most_unsigned_, hn::BitCast(DU16(), v));
    }
  }

  HWY_INLINE CellRange Finish(const hwy::bfloat16_t* cell, float*) const {
    const DI di;
    const auto words = hn::BitCast(di, most_);
    const auto halves =
        hn::Max(hn::ShiftRight<16>(words), hn::ShiftRight<16>(hn::ShiftLeft<16>(words)));
    const int32_t most = hn::GetLane(hn::MaxOfLanes(di, halves));
    const auto unsigned_words = hn::BitCast(hn::RebindToUnsigned<DF>(), most_unsigned_);
    const auto unsigned_halves =
        hn::Max(hn::BitCast(di, hn::ShiftRight<16>(unsigned_words)),
                hn::And(hn::BitCast(di, unsigned_words), hn::Set(di, 0xffff)));
    const int32_t most_unsigned = hn::GetLane(hn::MaxOfLanes(di, unsigned_halves));
    constexpr int32_t kPlusInf = 0x7f80, kMinusInf = 0xff80;
    const auto from_bits = [](int32_t bits) {
      return FloatOf(static_cast<int32_t>(static_cast<uint32_t>(bits) << 16));
    };
    return {.max = most >= 0 ? from_bits(most) : LargestNegative(cell),
            .min = most_unsigned >= 0x8000 ? from_bits(most_unsigned) : 0.0f,
            .is_nan = most > kPlusInf || most_unsigned > kMinusInf};
  }

 private:
  using D16 = hn::Repartition<int16_t, DF>;
  using DU16 = hn::Repartition<uint16_t, DF>;
  hn::Vec<D16> most_;
  hn::Vec<DU16> most_unsigned_;
};
#endif

// What the sums see: the logits as sent. softcap-inl.h has the other one.
struct AsSent {
  static constexpr bool kChanges = false;
  template <class Vectors>
  HWY_INLINE void operator()(DF, const Vectors&) const {}
  float range() const { return kInf; }
};

// An element's exponential against its cell's maximum, which is finite. With kBounds = false all
// elements are close enough to the maximum for ExpForSum, or NaN. The bits are the same.
template <bool kBounds>
class ExpOfLogit {
 public:
  HWY_INLINE ExpOfLogit(const Exponent& e, float max)
      : top_(hn::Set(DF(), kBounds ? max * kShrink : max)),
        scale_(
            hn::Set(DF(), kBounds ? e.log2e_over_temperature : e.log2e_over_temperature * kShrink)),
        floor_(hn::Set(DF(), e.floor)) {}

  HWY_INLINE ExpFactors operator()(DF d, VF x) const {
    if constexpr (kBounds) {
      return ExpForSum(d, MaxOrSecond(floor_, hn::MulSub(x, hn::Set(d, kShrink), top_)), scale_);
    } else {
      return ExpForSum(d, hn::Sub(x, top_), scale_);
    }
  }

 private:
  VF top_, scale_, floor_;
};

// 2^(exponent - that of the cell's maximum), where all are close enough to it.
struct ExpOfExponent {
  VF top;
  HWY_INLINE ExpFactors operator()(DF d, VF exponent) const {
    return ExpForSum(d, hn::Sub(exponent, top), hn::Set(d, 1.0f));
  }
};

// The second look: the sum of exp(element after `change`).
template <class Change, class Exp>
class CellSummer {
 public:
  HWY_INLINE CellSummer(const Change& change, const Exp& exp) : change_(change), exp_(exp) {
    for (VF& s : s_) s = hn::Zero(DF());
  }

  // Adds the next kFineGroup vectors.
  template <typename T>
  HWY_INLINE void Add(const T* HWY_RESTRICT from) {
    const DF d;
    const int64_t lanes = hn::Lanes(d);
    for (int64_t j = 0; j < kFineGroup; j += 4) {
      VF x[4];
      LoadTwo(d, from + j * lanes, x[0], x[1]);
      LoadTwo(d, from + (j + 2) * lanes, x[2], x[3]);
      change_(d, x);
      for (int64_t u = 0; u < 4; ++u) {
        const ExpFactors exp = exp_(d, x[u]);
        s_[u] = hn::MulAdd(exp.rest, exp.power, s_[u]);
      }
    }
  }

  // NaN where an element is.
  HWY_INLINE float Sum() const {
    const VF sum = hn::Add(hn::Add(s_[0], s_[1]), hn::Add(s_[2], s_[3]));
    return hn::GetLane(hn::SumOfLanes(DF(), sum));
  }

 private:
  const Change change_;
  const Exp exp_;
  VF s_[4];
};

// What a read leaves of the tokens' order besides the cells' maxima.
enum class Order {
  kNone,
  kCount,   // how many tokens go before a target
  kGroups,  // the maxima of groups
};

// What a CellSketcher fills. Both sketches are one where the sums see the logits as sent.
struct SketchPlan {
  RowSketch groups;   // maxima, as sent, and of groups; for Order::kGroups
  RankTarget target;  // for Order::kCount
  RowSketch sums;     // maxima after the change, and sums
  float temperature;
};

// Sketches the cells of a row, in order. A cell is read while the one before it is summed: loads
// from memory in the shadow of arithmetic. The bits of the sums do not depend on kOrder.
template <typename T, Order kOrder, class Change>
class CellSketcher {
 public:
  HWY_INLINE CellSketcher(const SketchPlan& plan, const Change& change)
      : plan_(plan),
        exponent_(MakeExponent(plan.temperature)),
        // Below this, shrinking keeps no float finite that would not be so without it.
        reach_(exponent_.log2e_over_temperature > 0x1p-60f ? -exponent_.floor / kShrink : -kInf),
        change_(change) {}

  // Reads cell c. `cell` stays as it is until the next call is done.
  HWY_INLINE void Add(const T* cell, int64_t c) {
    if (summed_ == nullptr) return Look(cell, c, [](int64_t) {});
    const int64_t summed_at = at_;
    const Summed* summed = summed_;
    Sum(summed_at, [&](const auto& add)
                       HWY_ATTR { Look(cell, c, [&](int64_t i) HWY_ATTR { add(summed + i); }); });
  }

  // Sums the last cell.
  HWY_INLINE void Finish() {
    if (summed_ == nullptr) return;
    Sum(at_, [&](const auto& add) HWY_ATTR {
      for (int64_t i = 0; i < kCellElements; i += Block()) add(summed_ + i);
    });
  }
  // As above. `changed` are the last cell's elements after the change.
  HWY_INLINE void FinishWith(const float* changed) {
    if (summed_ == nullptr) return;
    CellSummer summer(AsSent(), ExpOfLogit<true>(exponent_, plan_.sums.max[at_]));
    for (int64_t i = 0; i < kCellElements; i += Block()) summer.Add(changed + i);
    SetSum(at_, summer.Sum());
  }

 private:
  static constexpr bool kGroups = kOrder == Order::kGroups;
  using Reader = CellReader<T, kGroups, Change::kChanges>;
  using Summed = std::conditional_t<Reader::kKeeps, float, T>;
  static constexpr int64_t Block() { return kFineGroup * static_cast<int64_t>(hn::Lanes(DF())); }

  // How a cell is summed.
  enum class Way {
    kBounded,
    kClose,  // no bounds are needed
    kFivePowers,
    kEightPowers,  // the same, and powers take the logits to exponents
  };

  // Calls body(add), which calls add(elements) for the parts of cell c in turn; then sets its sum.
  template <class Body>
  HWY_INLINE void Sum(int64_t c, const Body& body) {
    if constexpr (Change::kChanges) {
      if (way_ == Way::kFivePowers) return SumByPowers<5>(c, body);
      if (way_ == Way::kEightPowers) return SumByPowers<8>(c, body);
    }
    const float max = plan_.sums.max[c];
    if (way_ == Way::kClose) return SumBy(c, change_, ExpOfLogit<false>(exponent_, max), body);
    SumBy(c, change_, ExpOfLogit<true>(exponent_, max), body);
  }
  template <class To, class Exp, class Body>
  HWY_INLINE void SumBy(int64_t c, const To& change, const Exp& exp, const Body& body) {
    CellSummer summer(change, exp);
    body([&](const Summed* from) HWY_ATTR { summer.Add(from); });
    SetSum(c, summer.Sum());
  }
  template <int kPowers, class Body>
  HWY_INLINE void SumByPowers(int64_t c, const Body& body) {
    const typename Change::template ByPowers<kPowers> exponents(change_, Log2E());
    VF top[1] = {hn::Set(DF(), sent_max_)};
    exponents(DF(), top);
    SumBy(c, exponents, ExpOfExponent{top[0]}, body);
  }

  // log2(e) / temperature
  float Log2E() const { return exponent_.log2e_over_temperature * kShrink; }

  // Reads cell c, and calls meanwhile(i) for its parts.
  template <class Meanwhile>
  HWY_INLINE void Look(const T* cell, int64_t c, const Meanwhile& meanwhile) {
    float* kept = kept_[c % 2];
    float* fine = kGroups ? plan_.groups.fine + c * kFinePerCell : nullptr;
    Reader reader;
    [[maybe_unused]] auto counter = CounterOf(c);
    for (int64_t i = 0; i < kCellElements; i += Block()) {
      const char* ahead = reinterpret_cast<const char*>(cell + i) + kAheadBytes;
      for (size_t b = 0; b < Block() * sizeof(T); b += 64) hwy::Prefetch(ahead + b);
      reader.Read(cell, i, kept, fine);
      if constexpr (kOrder == Order::kCount) counter.Read(cell, i);
      meanwhile(i);
    }
    if constexpr (kOrder == Order::kCount) plan_.target.before[c] = counter.Finish(cell);
    const CellRange range =
        reader.Finish(cell, kGroups ? plan_.groups.coarse + c * hn::Lanes(DF()) : nullptr);
    at_ = c;
    if constexpr (Reader::kKeeps) {
      summed_ = kept;
    } else {
      summed_ = cell;
    }
    if (!SetMaxima(cell, range)) summed_ = nullptr;
  }

  HWY_INLINE auto CounterOf([[maybe_unused]] int64_t c) const {
    if constexpr (kOrder == Order::kCount) {
      return CellCounter<T>(plan_.target, c);
    } else {
      return nullptr;
    }
  }

  // Returns whether the sum of the cell is still to be computed; if not, it writes the sum too.
  HWY_INLINE bool SetMaxima(const T* cell, const CellRange& range) {
    float& max = plan_.sums.max[at_];
    float& sum = plan_.sums.sum[at_];
    if constexpr (kGroups) plan_.groups.max[at_] = range.max;
    if constexpr (kGroups && Change::kChanges) plan_.groups.sum[at_] = 0;  // only a NaN would count
    if (HWY_UNLIKELY(range.is_nan)) {
      max = -kInf;
      sum = std::numeric_limits<float>::quiet_NaN();
      return false;
    }
    if constexpr (Change::kChanges) {
      max = hn::GetLane(change_(DF(), hn::Set(DF(), range.max)));
      sent_max_ = range.max;
      way_ = WayOf(std::max(std::fabs(range.max), std::fabs(range.min)));
      return true;
    }
    max = range.max;
    way_ = range.max - range.min <= reach_ ? Way::kClose : Way::kBounded;
    if (HWY_LIKELY(std::isfinite(max))) return true;
    sum = max > 0 ? CountPlusInf(cell) : 0.0f;
    return false;
  }

  // How a cell is summed whose logits are of this size or less, and are changed.
  HWY_INLINE Way WayOf(float most) const {
    if (change_.TakesPowers(Log2E()) && 2 * most <= reach_) {
      const int powers = change_.PowersFor(most);
      if (powers > 0) return powers == 5 ? Way::kFivePowers : Way::kEightPowers;
    }
    return change_.range() <= reach_ ? Way::kClose : Way::kBounded;
  }

  HWY_INLINE void SetSum(int64_t c, float sum) {
    plan_.sums.sum[c] = sum;
    // The maximum of a cell with a NaN means nothing.
    if (HWY_UNLIKELY(std::isnan(sum))) plan_.sums.max[c] = -kInf;
  }

  const SketchPlan plan_;
  const Exponent exponent_;
  const float reach_;  // a larger difference needs CellSummer's bounds
  const Change change_;
  const Summed* summed_ = nullptr;  // the elements of cell at_, if they are still to be summed
  int64_t at_ = 0;
  float sent_max_ = 0;  // of that cell
  Way way_ = Way::kBounded;
  HWY_ALIGN float kept_[2][Reader::kKeeps ? kCellElements : 1];
};

template <Order kOrder, typename T>
void SketchTyped(const T* logits, const Row& row, const RankTarget& target, int64_t begin,
                 int64_t end) {
  HWY_ALIGN T padded[kCellElements];
  CellSketcher<T, kOrder, AsSent> sketcher(
      {.groups = row.sketch, .target = target, .sums = row.sketch, .temperature = row.temperature},
      AsSent());
  for (int64_t c = begin; c < end; ++c) sketcher.Add(CellAt(logits, row.vocab, c, padded), c);
  sketcher.Finish();
}

// Fills cells [begin, end) of the row's sketch.
inline void SketchCells(const Row& row, int64_t begin, int64_t end) {
  AsType(row.dtype, row.logits,
         [&](const auto* logits) { SketchTyped<Order::kGroups>(logits, row, {}, begin, end); });
}

// As above without the maxima of groups, for ops that look for no token but a target, which is
// counted if its logit is given. The bits are the same.
inline void SketchSums(const Row& row, const RankTarget& target, int64_t begin, int64_t end) {
  AsType(row.dtype, row.logits, [&](const auto* logits) {
    if (target.logit == nullptr) {
      SketchTyped<Order::kNone>(logits, row, target, begin, end);
    } else {
      SketchTyped<Order::kCount>(logits, row, target, begin, end);
    }
  });
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

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // LOGITD_KERNELS_CPU_ROWS_SKETCH_INL_H_
