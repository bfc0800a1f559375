// Results of attention_softmax on the CPU, from registers to memory. A row is written once, in
// order, zeros included.
#if defined(LOGITD_KERNELS_CPU_ATTENTION_WRITE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ATTENTION_WRITE_INL_H_
#undef LOGITD_KERNELS_CPU_ATTENTION_WRITE_INL_H_
#else
#define LOGITD_KERNELS_CPU_ATTENTION_WRITE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/rows/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// bf16 of two vectors in the order of LoadTwo, not NaN: rounded to nearest, ties to even.
HWY_INLINE auto RoundTwo(DF d, VF a, VF b) {
  const hn::RebindToUnsigned<DF> du;
  const auto rounded = [&](VF v) HWY_ATTR {
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    return hn::Add(hn::Add(bits, hn::Set(du, 0x7fff)), odd);
  };
  return hn::Or(hn::ShiftRight<16>(rounded(a)), hn::And(rounded(b), hn::Set(du, 0xffff0000u)));
}

#if HWY_TARGET <= HWY_AVX3
// As RoundTwo, by the instruction of AVX512_BF16, which also takes NaN and infinities. It takes
// subnormals for 0, and this target's compiler flags do not have it.
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> RoundTwoByInstruction(VF a, VF b) {
  alignas(64) static constexpr uint16_t kInTurn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both;
  asm("vcvtne2ps2bf16 %[a], %[b], %[both]" : [both] "=v"(both) : [a] "v"(a.raw), [b] "v"(b.raw));
  return {_mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), both)};
}
#endif

// As RoundTwo, for any numbers. `by_instruction`: AVX512_BF16 is there.
HWY_INLINE auto RoundAnyTwo(DF d, VF a, VF b, bool by_instruction) {
#if HWY_TARGET <= HWY_AVX3
  constexpr int kSubnormal = 0x20;
  const auto subnormal = [](VF v) HWY_ATTR { return _mm512_fpclass_ps_mask(v.raw, kSubnormal); };
  if (by_instruction && (subnormal(a) | subnormal(b)) == 0) return RoundTwoByInstruction(a, b);
#endif
  // Rounding carries a NaN with all bits set into a number.
  const VF nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  return RoundTwo(d, hn::IfThenElse(hn::IsNaN(a), nan, a), hn::IfThenElse(hn::IsNaN(b), nan, b));
}

// A vector of results: D is its tag. kPairs: 32-bit words of two bf16 each.
template <bool kPairs, typename Out>
struct OutOf {
  using D = hn::Rebind<uint16_t, DF>;
};
template <>
struct OutOf<true, hwy::bfloat16_t> {
  using D = hn::RebindToUnsigned<DF>;
};
template <>
struct OutOf<false, float> {
  using D = DF;
};

// What WriteRow needs of the results' vectors.
template <class D, typename Out>
struct OutVector {
  using Element = hn::TFromD<D>;
  static HWY_INLINE int64_t Keys() {
    return static_cast<int64_t>(hn::Lanes(D()) * sizeof(Element) / sizeof(Out));
  }
  static HWY_INLINE Element* At(Out* to) { return reinterpret_cast<Element*>(to); }
  static HWY_INLINE void Store(hn::Vec<D> v, Out* to) { hn::StoreU(v, D(), At(to)); }
  static HWY_INLINE void Stream(hn::Vec<D> v, Out* to) { hn::Stream(v, D(), At(to)); }
  // The first `count`, fewer than all.
  static HWY_INLINE void StoreFirst(hn::Vec<D> v, int64_t count, Out* to) {
#if HWY_TARGET <= HWY_AVX3
    const uint32_t bits = (1u << count) - 1;
    if constexpr (std::is_same_v<Out, float>) {
      _mm512_mask_storeu_ps(to, static_cast<__mmask16>(bits), v.raw);
    } else if constexpr (sizeof(Element) == 4) {
      _mm512_mask_storeu_epi16(to, bits, v.raw);
    } else {
      _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(bits), v.raw);
    }
#else
    HWY_ALIGN Element last[kMaxLanes];
    hn::Store(v, D(), last);
    CopyShort<sizeof(Element) / sizeof(Out) * kMaxLanes>(reinterpret_cast<const Out*>(last), count,
                                                         to);
#endif
  }
};

// To be called some time before WriteRow<D, true>, which writes lines that other rows share through
// the caches.
template <typename Out>
HWY_INLINE void PrefetchEnds(const Out* row, int64_t keys) {
  hwy::Prefetch(row);
  hwy::Prefetch(row + keys - 1);
}

// Zeros [begin, end). A call of std::memset takes longer than a short row.
template <class D, typename Out>
HWY_INLINE void WriteZeros(Out* row, int64_t begin, int64_t end) {
  using V = OutVector<D, Out>;
  const int64_t keys = V::Keys();
  if (end - begin > 8 * keys) {
    std::memset(static_cast<void*>(row + begin), 0, static_cast<size_t>(end - begin) * sizeof(Out));
    return;
  }
  const hn::Vec<D> zero = hn::Zero(D());
  for (; begin + keys <= end; begin += keys) V::Store(zero, row + begin);
  if (begin < end) V::StoreFirst(zero, end - begin, row + begin);
}

// Writes results [begin, end) of a row; see WriteRow.
template <class D, typename Out, class Results>
HWY_INLINE void WritePart(const Results& results, Out* row, int64_t begin, int64_t end,
                          KeyRange seen) {
  using V = OutVector<D, Out>;
  const int64_t keys = V::Keys();
  const int64_t zeros = std::clamp(seen.begin, begin, end);
  if (begin < zeros) WriteZeros<D>(row, begin, zeros);
  int64_t at = zeros;
  if (at < end && at < seen.end) {
    auto cursor = results.From(at - seen.begin);
    for (; at + keys <= end && at < seen.end; at += keys) V::Store(cursor.Next(), row + at);
  }
  if (at >= end) return;
  if (at >= seen.end) return WriteZeros<D>(row, at, end);
  V::StoreFirst(results(at - seen.begin), end - at, row + at);
}

// Writes the `keys` results of a row in steps, as WriteRow<D, true>.
template <class D, typename Out>
class RowStream {
 public:
  RowStream() = default;  // nothing is left to write
  HWY_INLINE RowStream(Out* row, int64_t keys, KeyRange seen)
      : row_(row), keys_(keys), seen_(seen) {
    const int64_t in_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(Out));
    first_line_ = std::min(keys, -in_line & (kLine - 1));
    end_ = first_line_ + (keys - first_line_) / kLine * kLine;
    at_ = first_line_;
  }

  // How many results are to be written in whole lines.
  int64_t left() const { return end_ - at_; }

  // The next `count` of them or all that are left. `count` is a multiple of kLine.
  template <class Results>
  HWY_INLINE void Write(const Results& results, int64_t count) {
    using V = OutVector<D, Out>;
    const int64_t end = std::min(end_, at_ + count);
    const hn::Vec<D> zero = hn::Zero(D());
    int64_t at = at_;
    for (; at < end && at + V::Keys() <= seen_.begin; at += V::Keys()) V::Stream(zero, row_ + at);
    const int64_t last = std::min(end, seen_.end);
    if (at < last) {
      auto cursor = results.From(at - seen_.begin);
      for (; at < last; at += V::Keys()) V::Stream(cursor.Next(), row_ + at);
    }
    for (; at < end; at += V::Keys()) V::Stream(zero, row_ + at);
    at_ = end;
  }

  // All that is left, and the results outside whole lines.
  template <class Results>
  HWY_INLINE void Finish(const Results& results) {
    if (first_line_ > 0) WritePart<D>(results, row_, 0, first_line_, seen_);
    Write(results, left());
    if (end_ < keys_) WritePart<D>(results, row_, end_, keys_, seen_);
  }

  static constexpr int64_t kLine = 64 / sizeof(Out);

 private:
  Out* row_ = nullptr;
  int64_t keys_ = 0;
  KeyRange seen_ = {0, 0};
  int64_t first_line_ = 0;  // where the first whole line begins
  int64_t at_ = 0;
  int64_t end_ = 0;  // of the last whole line
};

// Writes the `keys` results of a row, zeros outside `seen`. `results(i)` returns the vector of
// those from key i on, counted from seen.begin; results.From(i).Next() returns it and, called
// again, those that follow. i may be negative and a vector may end after the last key, but some key
// of it is seen; the others are zeros. With kStream, whole lines of memory pass the caches; a fence
// must follow before other threads read them.
template <class D, bool kStream, typename Out, class Results>
HWY_INLINE void WriteRow(const Results& results, Out* row, int64_t keys, KeyRange seen) {
  if constexpr (kStream) {
    RowStream<D, Out>(row, keys, seen).Finish(results);
  } else {
    WritePart<D>(results, row, 0, keys, seen);
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
