// The per-target half of lanes.h: vectors of floats out of any element type, and 2^f.
#if defined(LOGITD_KERNELS_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_LANES_INL_H_
#undef LOGITD_KERNELS_CPU_LANES_INL_H_
#else
#define LOGITD_KERNELS_CPU_LANES_INL_H_
#endif

#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/lanes.h"

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
    // As the bits of a float, the size is 2^-112 of what it means, subnormals included.
    const VF value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(size)), hn::Set(d, 0x1p112f));
    // All ones in f16's exponent stand for all ones in f32's.
    const VF special = hn::IfThenElseZero(hn::Ge(value, hn::Set(d, 65536.0f)), hn::Set(d, kInf));
    return hn::Or(hn::Or(value, special), hn::BitCast(d, sign));
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, DF>(), from));
  }
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

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
