// Per-target: tanh of a vector of floats, and the softcap of logits.
#if defined(LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// tanh z, relative error 2e-7; +-1 at the infinities, NaN of NaN.
HWY_INLINE VF Tanh(DF d, VF z) {
  // z + z s P(s) with s = z^2: minimax for the relative error to 0.625, by Lawson iteration.
  const VF s = hn::Mul(z, z);
  VF p = hn::Set(d, -0.005704987f);
  p = hn::MulAdd(p, s, hn::Set(d, 0.020639088f));
  p = hn::MulAdd(p, s, hn::Set(d, -0.053739715f));
  p = hn::MulAdd(p, s, hn::Set(d, 0.13331442f));
  p = hn::MulAdd(p, s, hn::Set(d, -0.3333328f));
  const VF small = hn::MulAdd(hn::Mul(p, s), z, z);
  // 1 - 2 / (exp(2 |z|) + 1), which is 1 from 10 on.
  const VF size = hn::Abs(z);
  const VF bounded = hn::Min(size, hn::Set(d, 10.0f));
  const VF two_log2e = hn::Set(d, 2.8853900817779268f);
  // As kRound in sketch-inl.h: the sum's low bits are an exponent field.
  const VF round = hn::Set(d, 12582912.0f + 127.0f);
  const VF t = hn::MulAdd(bounded, two_log2e, round);
  const VF f = hn::MulSub(bounded, two_log2e, hn::Sub(t, round));
  const DI di;
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, t)));
  const VF one = hn::Set(d, 1.0f);
  const VF exp = hn::Mul(Exp2Poly(d, f), power);
  const VF large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(exp, one)));
  return hn::IfThenElse(hn::Gt(size, hn::Set(d, 0.625f)), hn::CopySign(large, z), small);
}

// softcap * tanh(l / softcap), softcap > 0.
HWY_INLINE VF SoftCap(DF d, VF l, float softcap) {
  const VF cap = hn::Set(d, softcap);
  return hn::Mul(cap, Tanh(d, hn::Div(l, cap)));
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
