// Per-target: tanh of a vector of floats, and the softcap of logits.
#if defined(LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_SOFTCAP_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"
#include "kernels/cpu/rows/tanh_table.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// tanh of each z, relative error 3e-7, absolute 1.2e-7; +-1 at the infinities, NaN of NaN. A vector
// is a long chain of operations: several at once keep the units busy, and share the loads of the
// table.
#if HWY_TARGET <= HWY_AVX3
template <int kVectors>
HWY_INLINE void Tanh(DF d, VF (&z)[kVectors]) {
  const VF round = hn::Set(d, 12582912.0f);  // the sum's low bits are the number of the piece
  VF at[kVectors], p[kVectors];
  __m512i piece[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const VF size = MinOrSecond(hn::Set(d, 31 * kTanhStep), hn::Abs(z[v]));
    const VF t = hn::MulAdd(size, hn::Set(d, 1 / kTanhStep), round);
    at[v] = hn::NegMulAdd(hn::Sub(t, round), hn::Set(d, kTanhStep), size);
    piece[v] = hn::BitCast(DI(), t).raw;
  }
  for (int power = kTanhPowers - 1; power >= 0; --power) {
    const VF low = hn::Load(d, kTanhPieces[power]), high = hn::Load(d, kTanhPieces[power] + 16);
    for (int v = 0; v < kVectors; ++v) {
      // An instruction that Highway 1.0 does not have; it looks at the five low bits.
      const VF coefficient{_mm512_permutex2var_ps(low.raw, piece[v], high.raw)};
      p[v] = power == kTanhPowers - 1 ? coefficient : hn::MulAdd(p[v], at[v], coefficient);
    }
  }
  for (int v = 0; v < kVectors; ++v) z[v] = hn::CopySign(p[v], z[v]);
}
#else
HWY_INLINE VF TanhOfOne(DF d, VF z) {
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
  // As in kRound of sketch-inl.h, the sum's low bits are an exponent field.
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
template <int kVectors>
HWY_INLINE void Tanh(DF d, VF (&z)[kVectors]) {
  for (VF& v : z) v = TanhOfOne(d, v);
}
#endif

// softcap * tanh(l / softcap) of each l, in place, softcap > 0. A logit's bits do not depend on how
// many there are.
class SoftCap {
 public:
  static constexpr bool kChanges = true;  // see AsSent in sketch-inl.h

  explicit HWY_INLINE SoftCap(float softcap)
      : cap_(hn::Set(DF(), softcap)),
        // The least softcaps have no finite inverse. Then any large one will do.
        inverse_(hn::Set(DF(), std::min(1 / softcap, std::numeric_limits<float>::max()))) {}

  // The largest difference of two results.
  float range() const { return 2 * hn::GetLane(cap_); }

  // tanh(l / softcap) of each l, in place.
  template <int kVectors>
  HWY_INLINE void TanhOf(DF d, VF (&l)[kVectors]) const {
    for (VF& v : l) v = hn::Mul(v, inverse_);
    Tanh(d, l);
  }
  template <int kVectors>
  HWY_INLINE void operator()(DF d, VF (&l)[kVectors]) const {
    TanhOf(d, l);
    for (VF& v : l) v = hn::Mul(v, cap_);
  }
  HWY_INLINE VF operator()(DF d, VF l) const {
    VF one[1] = {l};
    (*this)(d, one);
    return one[0];
  }

 private:
  VF cap_, inverse_;
};

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
