// The per-target half of lanes.h: vectors of floats from and to every element type, and 2^f.
#if defined(LOGITD_KERNELS_CPU_ROWS_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_LANES_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_LANES_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_LANES_INL_H_
#endif

#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes.h"
#include "kernels/types.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kMaxLanes>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;

// Whether PromoteTo reads f16 by an instruction. Highway 1.0's substitute for it takes infinities
// and NaN for finite.
constexpr bool kHardwareF16 = HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2;

template <typename T>
HWY_INLINE VF LoadF32(DF d, const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(d, from);
  } else if constexpr (std::is_same_v<T, hwy::float16_t> && !kHardwareF16) {
    const hn::RebindToUnsigned<DF> du;
    const auto half = hn::PromoteTo(
        du, hn::LoadU(hn::Rebind<uint16_t, DF>(), reinterpret_cast<const uint16_t*>(from)));
    const auto size = hn::And(half, hn::Set(du, 0x7fff));
    const auto sign = hn::ShiftLeft<16>(hn::Sub(half, size));
    // Read as the bits of a float, `size` is 2^-112 of its f16 value, subnormals included.
    const VF value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(size)), hn::Set(d, 0x1p112f));
    // All ones in f16's exponent stand for all ones in f32's.
    const VF special = hn::IfThenElseZero(hn::Ge(value, hn::Set(d, 65536.0f)), hn::Set(d, kInf));
    return hn::Or(hn::Or(value, special), hn::BitCast(d, sign));
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, DF>(), from));
  }
}

// Reads 2 * lanes elements into two vectors, in an order that is the same for every call. The
// elements of bf16 are halves of 32-bit words: so it takes one operation a vector instead of two.
template <typename T>
HWY_INLINE void LoadTwo(DF d, const T* from, VF& a, VF& b) {
  if constexpr (std::is_same_v<T, hwy::bfloat16_t>) {
    const hn::RebindToUnsigned<DF> du;
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(from));
    a = hn::BitCast(d, hn::ShiftLeft<16>(words));
    b = hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u)));
  } else {
    a = LoadF32(d, from);
    b = LoadF32(d, from + hn::Lanes(d));
  }
}

// The larger one, or the smaller one; `b` where one of them is NaN. So do x86's instructions, but
// not Highway's scalars.
HWY_INLINE VF MaxOrSecond(VF a, VF b) {
  return HWY_TARGET == HWY_SCALAR ? hn::IfThenElse(hn::Gt(a, b), a, b) : hn::Max(a, b);
}
HWY_INLINE VF MinOrSecond(VF a, VF b) {
  return HWY_TARGET == HWY_SCALAR ? hn::IfThenElse(hn::Lt(a, b), a, b) : hn::Min(a, b);
}

// Copies `count` elements, fewer than kMost. std::memcpy of an unknown size is a string instruction
// or a call, which takes longer than a short row's arithmetic.
template <size_t kBytes>
HWY_INLINE void CopyEnds(const char* from, size_t bytes, char* to) {
  std::memcpy(to, from, kBytes);
  std::memcpy(to + bytes - kBytes, from + bytes - kBytes, kBytes);
}
template <size_t kMost, typename T>
HWY_INLINE void CopyShort(const T* source, int64_t count, void* target) {
  constexpr size_t kMostBytes = kMost * sizeof(T);
  static_assert(kMostBytes <= 128);
  const auto* from = reinterpret_cast<const char*>(source);
  auto* to = static_cast<char*>(target);
  // The modulus is for the compiler, which does not know that count is small.
  const size_t bytes = static_cast<size_t>(count) % kMost * sizeof(T);
  if (kMostBytes > 64 && bytes >= 64) return CopyEnds<64>(from, bytes, to);
  if (kMostBytes > 32 && bytes >= 32) return CopyEnds<32>(from, bytes, to);
  if (kMostBytes > 16 && bytes >= 16) return CopyEnds<16>(from, bytes, to);
  if (bytes >= 8) return CopyEnds<8>(from, bytes, to);
  if (bytes >= 4) return CopyEnds<4>(from, bytes, to);
  if (bytes >= 2) return CopyEnds<2>(from, bytes, to);
  if (bytes == 1) *to = *from;
}

// Fewer than a vector of elements, then zeros.
template <typename T>
HWY_INLINE void CopyTail(const T* from, int64_t count, T* padded) {
  std::memset(static_cast<void*>(padded), 0, kMaxLanes * sizeof(T));
  CopyShort<kMaxLanes>(from, count, padded);
}

// The first `count` elements as a vector; zeros follow where they are fewer.
template <typename T>
HWY_INLINE VF LoadUpTo(DF d, const T* from, int64_t count) {
  if (HWY_LIKELY(count >= static_cast<int64_t>(hn::Lanes(d)))) return LoadF32(d, from);
  T last[kMaxLanes];
  CopyTail(from, count, last);
  return LoadF32(d, last);
}

// The last few elements of a row, which are less than a vector.
HWY_INLINE void StoreTail(DF d, VF v, int64_t count, float* to) {
  HWY_ALIGN float last[kMaxLanes];
  hn::Store(v, d, last);
  CopyShort<kMaxLanes>(last, count, to);
}

// The bits of v as 16-bit elements, rounded to nearest, ties to even. An overload for each type.
HWY_INLINE auto RoundTo(hwy::bfloat16_t, DF d, VF v) {
  const DI di;
  // Rounding carries a NaN with all bits set into a number, so NaN is replaced first.
  v = hn::IfThenElse(hn::IsNaN(v), hn::Set(d, std::numeric_limits<float>::quiet_NaN()), v);
  const auto bits = hn::BitCast(di, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(di, 0x7fff)), odd);
  const hn::RebindToUnsigned<DF> du;
  const auto half = hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(du, rounded)));
  return hn::DemoteTo(hn::Rebind<uint16_t, DF>(), half);
}

// Numbers beyond f16's range become infinities.
HWY_INLINE auto RoundTo(hwy::float16_t, DF d, VF v) {
  const hn::Rebind<uint16_t, DF> d16;
  if constexpr (kHardwareF16) {
    return hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, DF>(), v));
  } else {
    const DI di;
    const VF size = hn::Abs(v);
    const auto bits = hn::BitCast(di, size);
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(di, 1));
    // f16's exponent is f32's less 112.
    const auto normal =
        hn::ShiftRight<13>(hn::Add(hn::Add(bits, hn::Set(di, 0xfff - (112 << 23))), odd));
    // A float near 1/2 has the last place of a subnormal f16.
    const VF half = hn::Set(d, 0.5f);
    const auto tiny = hn::Sub(hn::BitCast(di, hn::Add(size, half)), hn::BitCast(di, half));
    auto result =
        hn::IfThenElse(hn::RebindMask(di, hn::Lt(size, hn::Set(d, 0x1p-14f))), tiny, normal);
    const auto large = hn::RebindMask(di, hn::Ge(size, hn::Set(d, 65520.0f)));
    result = hn::IfThenElse(large, hn::Set(di, 0x7c00), result);
    result = hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(v)), hn::Set(di, 0x7e00), result);
    const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(di, v)), hn::Set(di, 0x8000));
    return hn::DemoteTo(d16, hn::Or(result, sign));
  }
}

// Stores the first min(count, lanes) elements of v.
template <typename Out>
HWY_INLINE void StoreAs(DF d, VF v, int64_t count, Out* to) {
  const int64_t lanes = hn::Lanes(d);
  if constexpr (std::is_same_v<Out, float>) {
    if (HWY_LIKELY(count >= lanes)) {
      hn::StoreU(v, d, to);
    } else {
      StoreTail(d, v, count, to);
    }
  } else {
    const hn::Rebind<uint16_t, DF> d16;
    const auto half = RoundTo(Out(), d, v);
    if (HWY_LIKELY(count >= lanes)) {
      hn::StoreU(half, d16, reinterpret_cast<uint16_t*>(to));
    } else {
      HWY_ALIGN uint16_t last[kMaxLanes];
      hn::Store(half, d16, last);
      CopyShort<kMaxLanes>(last, count, to);
    }
  }
}

// Bit patterns of an element type. There is no general form: a type without one does not compile.
template <typename T>
struct ElementBits;
template <>
struct ElementBits<float> {
  static constexpr uint32_t kMinusInf = 0xff800000u, kNan = 0x7fc00000u;
};
template <>
struct ElementBits<hwy::float16_t> {
  static constexpr uint16_t kMinusInf = 0xfc00, kNan = 0x7e00;
};
template <>
struct ElementBits<hwy::bfloat16_t> {
  static constexpr uint16_t kMinusInf = 0xff80, kNan = 0x7fc0;
};

template <typename T, typename Bits>
HWY_INLINE T FromBits(Bits bits) {
  static_assert(sizeof(T) == sizeof(Bits));
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Calls body(data as a pointer to the element type). This is the only place that turns a dtype into
// a C++ type, and a dtype without a case does not compile.
template <class Pointer, class Body>
HWY_INLINE auto AsType(DType dtype, Pointer data, const Body& body) {
  using Const = std::is_const<std::remove_pointer_t<Pointer>>;
  const auto as = [&](auto value) {
    using T = decltype(value);
    return body(reinterpret_cast<std::conditional_t<Const::value, const T, T>*>(data));
  };
  switch (dtype) {
    case DType::kF32:
      return as(0.0f);
    case DType::kF16:
      return as(hwy::float16_t());
    case DType::kBF16:
      return as(hwy::bfloat16_t());
  }
  HWY_ABORT("dtype %d", static_cast<int>(dtype));  // the op's check has refused it
}

// 2^f for |f| <= 1/2, relative error 1e-7; exactly 1 at 0. Minimax for the relative error, by
// Lawson iteration.
HWY_INLINE VF Exp2Poly(DF d, VF f) {
  VF p = hn::Set(d, 0.00132647273f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.00967151299f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0555073358f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240222424f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693147004f));
  return hn::MulAdd(p, f, hn::Set(d, 1.0f));
}

#if HWY_TARGET <= HWY_AVX3
// 2^f for |f| <= 1/32, relative error 4.3e-7; exactly 1 at 0. Minimax for the relative error.
HWY_INLINE VF Exp2OfSixteenth(DF d, VF f) {
  const VF p = hn::MulAdd(hn::Set(d, 0.240226433f), f, hn::Set(d, 0.693187714f));
  return hn::MulAdd(p, f, hn::Set(d, 1.0f));
}

// The bits of 2^(k/16) beyond those of 1, less those that k sixteenths of an exponent already are.
HWY_ALIGN inline constexpr int32_t kSixteenths[16] = {
    0x00000000,  -0x0002553d, -0x00046a3e, -0x00063c2d, -0x0007c810, -0x00090ace,
    -0x000a0129, -0x000aa7c1, -0x000afb0d, -0x000af75c, -0x000a98d6, -0x0009db74,
    -0x0008bb03, -0x00073321, -0x00053f39, -0x0002da83};

// 2^(n / 16), n + 16 times an exponent's bias in the low bits of `t`. `sixteenths` is kSixteenths,
// to which a multiple of 2^23 may be added. The lookup takes the four low bits.
HWY_INLINE VF PowerOfSixteenths(DF d, VF t, hn::Vec<DI> sixteenths) {
  const auto bits = hn::BitCast(DI(), t);
  const hn::Vec<DI> part{_mm512_permutexvar_epi32(bits.raw, sixteenths.raw)};
  return hn::BitCast(d, hn::Add(hn::ShiftLeft<19>(bits), part));
}
#endif

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
