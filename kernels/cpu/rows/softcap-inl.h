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

// tanh(z) = z (1 + s P(s)), s = z^2, by kPowers coefficients of P, for |z| up to kReach: relative
// error 2e-7. Minimax for the relative error, by Lawson iteration.
template <int kPowers>
struct TanhPowers;
template <>
struct TanhPowers<5> {
  static constexpr float kReach = 0.75f;
  static constexpr float kOf[] = {-0.333330691f, 0.133265212f, -0.0533902571f, 0.0196649134f,
                                  -0.00476948963f};
};
template <>
struct TanhPowers<8> {
  static constexpr float kReach = 1.4f;
  static constexpr float kOf[] = {-0.33333078f,     0.133289561f,    -0.0537068099f,
                                  0.0210924745f,    -0.00752729969f, 0.00214627245f,
                                  -0.000405493454f, 3.62388964e-05f};
};

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
  float range() const { return 2 * cap(); }

  // How many powers take all l of this size or less to tanh; 0: these l need TanhOf.
  int PowersFor(float most) const {
    const float z = most * hn::GetLane(inverse_);
    return z <= TanhPowers<5>::kReach ? 5 : z <= TanhPowers<8>::kReach ? 8 : 0;
  }

  // Whether ByPowers takes this factor: its numbers are far from the ends of f32's range.
  bool TakesPowers(float factor) const {
    const auto is_plain = [](float x) { return x >= 1e-30f && x <= 1e30f; };
    return is_plain(cap()) && is_plain(cap() * factor);
  }

  // The result times a factor, for |l| within the powers' reach.
  template <int kPowers>
  class ByPowers {
   public:
    HWY_INLINE ByPowers(const SoftCap& cap, float factor) : inverse_(cap.inverse_) {
      const float all = cap.cap() * factor;
      of_[0] = hn::Set(DF(), all);
      for (int i = 0; i < kPowers; ++i) {
        of_[i + 1] = hn::Set(DF(), TanhPowers<kPowers>::kOf[i] * all);
      }
    }

    template <int kVectors>
    HWY_INLINE void operator()(DF d, VF (&l)[kVectors]) const {
      const VF tiny = hn::Set(d, 1e-30f);  // keeps a square from being subnormal
      VF s[kVectors], p[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        l[v] = hn::Mul(l[v], inverse_);
        s[v] = hn::MulAdd(l[v], l[v], tiny);
        p[v] = hn::MulAdd(of_[kPowers], s[v], of_[kPowers - 1]);
      }
      for (int i = kPowers - 2; i >= 0; --i) {
        for (int v = 0; v < kVectors; ++v) p[v] = hn::MulAdd(p[v], s[v], of_[i]);
      }
      for (int v = 0; v < kVectors; ++v) l[v] = hn::Mul(l[v], p[v]);
    }

   private:
    VF inverse_;
    VF of_[kPowers + 1];
  };

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
  float cap() const { return hn::GetLane(cap_); }

  VF cap_, inverse_;
};

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
