// What attention_softmax weighs on the CPU: x = scale * score + mask, by pairs of vectors of keys.
#if defined(LOGITD_KERNELS_CPU_ATTENTION_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ATTENTION_KEYS_INL_H_
#undef LOGITD_KERNELS_CPU_ATTENTION_KEYS_INL_H_
#else
#define LOGITD_KERNELS_CPU_ATTENTION_KEYS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// In place of a mask's element type where there is no mask.
struct NoMask {};

// True where two vectors hold 2 * lanes keys in the order of LoadTwo: the even keys, then the odd
// ones. bf16 results are put together from them as they were taken apart, which saves most of the
// conversion.
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

// 2 * lanes elements, in the order of LoadTwo or as they lie.
template <bool kPairs, typename T>
HWY_INLINE void LoadBoth(DF d, const T* from, VF& a, VF& b) {
  if constexpr (kPairs) {
    LoadTwo(d, from, a, b);
  } else {
    a = LoadF32(d, from);
    b = LoadF32(d, from + hn::Lanes(d));
  }
}

#if HWY_TARGET <= HWY_AVX3
// The elements of one vector, or as LoadBoth, whose bits are set; those of `hidden` for the others,
// which are not read.
template <typename T>
HWY_INLINE VF LoadOneWhere(const T* from, uint32_t bits, __m512i hidden) {
  const auto k = static_cast<__mmask16>(bits);
  if constexpr (std::is_same_v<T, float>) {
    return VF{_mm512_mask_loadu_ps(_mm512_castsi512_ps(hidden), k, from)};
  } else {
    const __m256i half = _mm256_mask_loadu_epi16(_mm512_castsi512_si256(hidden), k, from);
    if constexpr (std::is_same_v<T, hwy::float16_t>) return VF{_mm512_cvtph_ps(half)};
    return VF{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
}
template <bool kPairs, typename T>
HWY_INLINE void LoadWhere(const T* from, uint32_t bits, __m512i hidden, VF& a, VF& b) {
  if constexpr (kPairs) {
    const __m512i words = _mm512_mask_loadu_epi16(hidden, bits, from);
    a = VF{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
    b = VF{_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff0000u)))};
  } else {
    a = LoadOneWhere(from, bits & 0xffff, hidden);
    b = LoadOneWhere(from + kMaxLanes, bits >> 16, hidden);
  }
}
#endif

// Prefetches, while a cell is read, what is read after it. The processor prefetches by itself, but
// begins anew at every page, and after the end of a row that is not read whole.
class NextCell {
 public:
  NextCell() = default;  // nothing
  // For the cell that ends at `end`, of a row's `count` elements. `next_row` is read after this
  // row, or is any address; null: nothing.
  template <typename T>
  HWY_INLINE NextCell(const T* row, int64_t end, int64_t count, const T* next_row)
      : at_(reinterpret_cast<const char*>(end < count ? row + end : next_row)) {}

  // For whatever lies `bytes` after what is read from `from` on.
  template <typename T>
  static HWY_INLINE NextCell After(const T* from, int64_t bytes) {
    NextCell next;
    next.at_ = reinterpret_cast<const char*>(from) + bytes;
    return next;
  }

  HWY_INLINE void ToFirstCache(int64_t bytes) { Prefetch<3>(bytes); }
  HWY_INLINE void ToSecondCache(int64_t bytes) { Prefetch<2>(bytes); }

 private:
  template <int kLocality>
  HWY_INLINE void Prefetch(int64_t bytes) {
    if (at_ == nullptr) return;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at_ + b, /*write=*/0, kLocality);
    at_ += bytes;
  }

  const char* at_ = nullptr;
};

// The x of 2 * lanes keys.
template <bool kPairs, typename T, typename M>
HWY_INLINE void LoadX(DF d, const T* scores, const M* mask, VF scale, VF& a, VF& b) {
  LoadBoth<kPairs>(d, scores, a, b);
  if constexpr (std::is_same_v<M, NoMask>) {
    a = hn::Mul(a, scale);
    b = hn::Mul(b, scale);
  } else if constexpr (!std::is_same_v<M, uint8_t>) {
    VF mask_a, mask_b;
    LoadBoth<kPairs>(d, mask, mask_a, mask_b);
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
    const int64_t lanes = hn::Lanes(d);
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

// As LoadBoth where only the first `left` elements are there; zeros for the others.
template <bool kPairs, typename T>
HWY_INLINE void LoadFirst(DF d, const T* from, int64_t left, VF& a, VF& b) {
  if (left >= 2 * static_cast<int64_t>(hn::Lanes(d))) return LoadBoth<kPairs>(d, from, a, b);
#if HWY_TARGET <= HWY_AVX3
  LoadWhere<kPairs>(from, (1u << left) - 1, _mm512_setzero_si512(), a, b);
#else
  T first[2 * kMaxLanes];
  CopyFirst(from, left, first);
  LoadBoth<kPairs>(d, first, a, b);
#endif
}

// A vector of elements from `at` on, which may be negative; with kPairs a pair of them, as
// LoadBoth. Zeros for those outside [0, count).
template <bool kPairs, typename T>
HWY_INLINE void LoadAround(DF d, const T* from, int64_t at, int64_t count, VF& a, VF& b) {
  const int64_t most = (kPairs ? 2 : 1) * static_cast<int64_t>(hn::Lanes(d));
  const T* start = from + at;
  if (HWY_UNLIKELY(at < 0 || at + most > count)) {
    const int64_t first = std::max<int64_t>(0, -at), last = std::min(most, count - at);
#if HWY_TARGET <= HWY_AVX3
    const uint32_t bits = static_cast<uint32_t>((uint64_t{1} << last) - (uint64_t{1} << first));
    if constexpr (kPairs) {
      LoadWhere<true>(start, bits, _mm512_setzero_si512(), a, b);
    } else {
      a = LoadOneWhere(start, bits, _mm512_setzero_si512());
    }
    return;
#else
    T some[2 * kMaxLanes] = {};
    std::copy(start + first, start + last, some + first);
    if constexpr (kPairs) {
      LoadBoth<true>(d, some, a, b);
    } else {
      a = LoadF32(d, some);
    }
    return;
#endif
  }
  if constexpr (kPairs) {
    LoadBoth<true>(d, start, a, b);
  } else {
    a = LoadF32(d, start);
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

// Whether a factor of `scale` may be left to a later product with a constant near 1: it is a power
// of two, so that the order of the products changes no bit.
inline bool IsPlainPower(float scale) {
  int exponent;
  return std::frexp(scale, &exponent) == 0.5f && std::abs(exponent) <= 20;
}

// Reads x in fewer instructions than LoadX and LoadLastX: x of a masked key may be NaN instead of
// -inf, if its score is NaN or infinite, or the scale is 0. With kScaleLater and a mask that is not
// added, x is the bare score, and -inf if masked.
template <bool kPairs, bool kScaleLater, typename T, typename M>
class FastReader {
 public:
  explicit HWY_INLINE FastReader(float scale) : scale_(hn::Set(DF(), kScaleLater ? 1.0f : scale)) {
#if HWY_TARGET <= HWY_AVX3
    constexpr uint32_t kMinusInf = ElementBits<T>::kMinusInf;
    constexpr uint32_t kPlusInf = kMinusInf & ~(1u << (8 * sizeof(T) - 1));
    const uint32_t bits = scale < 0 ? kPlusInf : kMinusInf;
    hidden_ = sizeof(T) == 4 ? _mm512_set1_epi32(bits) : _mm512_set1_epi16(bits);
#endif
  }

  HWY_INLINE void operator()(DF d, const T* scores, const M* mask, VF& a, VF& b) const {
#if HWY_TARGET <= HWY_AVX3
    if constexpr (std::is_same_v<M, uint8_t>) {
      return LoadBits(d, scores, mask, Visible(_mm256_loadu_si256(Words(mask))), a, b);
    }
#endif
    if constexpr (kScaleLater && std::is_same_v<M, NoMask>) {
      LoadBoth<kPairs>(d, scores, a, b);
    } else if constexpr (HWY_NATIVE_FMA && kIsAdded) {
      VF mask_a, mask_b;
      LoadBoth<kPairs>(d, mask, mask_a, mask_b);
      LoadBoth<kPairs>(d, scores, a, b);
      a = hn::MulAdd(a, scale_, mask_a);
      b = hn::MulAdd(b, scale_, mask_b);
    } else {
      LoadX<kPairs>(d, scores, mask, scale_, a, b);
    }
  }

  // `left` > 0.
  HWY_INLINE void Last(DF d, const T* scores, const M* mask, int64_t left, VF& a, VF& b) const {
#if HWY_TARGET <= HWY_AVX3
    const uint32_t there = left >= 2 * kMaxLanes ? ~0u : (1u << left) - 1;
    if constexpr (std::is_same_v<M, uint8_t>) {
      LoadBits(d, scores, mask, there & Visible(_mm256_maskz_loadu_epi8(there, mask)), a, b);
    } else {
      LoadBits(d, scores, mask, there, a, b);
    }
#else
    LoadLastX<kPairs>(d, scores, mask, left, scale_, a, b);
#endif
  }

 private:
  static constexpr bool kIsAdded = !std::is_same_v<M, NoMask> && !std::is_same_v<M, uint8_t>;

  VF scale_;

#if HWY_TARGET <= HWY_AVX3
  __m512i hidden_;  // the element type's infinity that x = scale * score takes to -inf

  static HWY_INLINE const __m256i* Words(const void* at) { return static_cast<const __m256i*>(at); }
  // Bit i: byte i is 0.
  static HWY_INLINE uint32_t Visible(__m256i mask) { return _mm256_testn_epi8_mask(mask, mask); }

  HWY_INLINE void LoadBits(DF d, const T* scores, const M* mask, uint32_t bits, VF& a,
                           VF& b) const {
    LoadWhere<kPairs>(scores, bits, hidden_, a, b);
    if constexpr (kIsAdded) {
      VF mask_a, mask_b;
      LoadWhere<kPairs>(mask, bits, _mm512_setzero_si512(), mask_a, mask_b);
      a = hn::MulAdd(a, scale_, mask_a);
      b = hn::MulAdd(b, scale_, mask_b);
    } else if constexpr (!kScaleLater) {
      a = hn::Mul(a, scale_);
      b = hn::Mul(b, scale_);
    }
  }
#endif
};

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
