// Per-target: how many elements of a cell go before a token, counted while the cell is read.
#if defined(LOGITD_KERNELS_CPU_ROWS_COUNT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_COUNT_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_COUNT_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_COUNT_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"
#include "kernels/cpu/rows/sketch.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Elements are compared as integers of their size, so that 16-bit ones need no conversion. No
// element is NaN; -0 and +0 are equal.
template <typename T>
class CellCounter {
 public:
  // For cell c.
  HWY_INLINE CellCounter(const RankTarget& target, int64_t c)
      : before_(hn::Zero(D())), place_(target.index - c * kCellElements) {
    std::memcpy(&logit_, target.logit, sizeof(logit_));
    // In a cell that ends before the target, equal elements count too.
    const bool with_equal = place_ >= kCellElements;
    const Bits bits = Plain(logit_) != 0 ? logit_ : with_equal ? kSign : Bits{0};
    // Flipped so, negative elements are in their order. Positive ones are not where the target is
    // negative, but above it all the same.
    const Bits flip = bits < 0 ? static_cast<Bits>(~kSign) : Bits{0};
    flip_ = hn::Set(D(), flip);
    const auto ordered = static_cast<uint32_t>(bits ^ flip);  // unsigned: a NaN may overflow
    below_ = hn::Set(D(), static_cast<Bits>(with_equal ? ordered - 1 : ordered));
  }

  // Counts the next kFineGroup vectors of floats, as elements from i on.
  HWY_INLINE void Read(const T* HWY_RESTRICT cell, int64_t i) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    for (int64_t j = 0; j < kFineGroup * static_cast<int64_t>(hn::Lanes(DF())); j += lanes) {
      const auto v = hn::LoadU(d, reinterpret_cast<const Bits*>(cell + i + j));
      before_ = CountGreater(hn::Xor(v, flip_), below_, before_);
    }
  }

  HWY_INLINE int32_t Finish(const T* cell) const {
    HWY_ALIGN Bits lanes[kMaxLanes * sizeof(float) / sizeof(Bits)];
    hn::Store(before_, D(), lanes);
    int32_t before = 0;
    for (size_t i = 0; i < hn::Lanes(D()); ++i) before += lanes[i];
    if (place_ > 0 && place_ < kCellElements) before += EqualBefore(cell);
    return before;
  }

 private:
  using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;
  using D = std::conditional_t<HWY_TARGET == HWY_SCALAR, hn::CappedTag<Bits, 1>,
                               hn::Repartition<Bits, DF>>;
  static constexpr Bits kSign = std::numeric_limits<Bits>::min();

  static Bits Plain(Bits bits) { return bits == kSign ? Bits{0} : bits; }

  // counts + 1 where v > below.
  static HWY_INLINE hn::Vec<D> CountGreater(hn::Vec<D> v, hn::Vec<D> below, hn::Vec<D> counts) {
#if HWY_TARGET <= HWY_AVX3
    // Masked, which Highway 1.0 does not have.
    if constexpr (sizeof(T) == 2) {
      const __mmask32 greater = _mm512_cmpgt_epi16_mask(v.raw, below.raw);
      return {_mm512_mask_add_epi16(counts.raw, greater, counts.raw, _mm512_set1_epi16(1))};
    } else {
      const __mmask16 greater = _mm512_cmpgt_epi32_mask(v.raw, below.raw);
      return {_mm512_mask_add_epi32(counts.raw, greater, counts.raw, _mm512_set1_epi32(1))};
    }
#else
    const D d;
    return hn::Sub(counts, hn::VecFromMask(d, hn::Gt(v, below)));
#endif
  }

  // Elements of the target's own cell before it that equal it.
  HWY_NOINLINE int32_t EqualBefore(const T* cell) const {
    const Bits logit = Plain(logit_);
    int32_t equal = 0;
    for (int64_t i = 0; i < place_; ++i) {
      Bits bits;
      std::memcpy(&bits, cell + i, sizeof(bits));
      equal += Plain(bits) == logit ? 1 : 0;
    }
    return equal;
  }

  hn::Vec<D> flip_, below_, before_;
  Bits logit_;
  int64_t place_;  // of the target, from the cell's first element on
};

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
