// softcap * tanh(logit / softcap) without tanhf: odd polynomials near 0, quotients of two of them
// up to where tanh is 1. The row's factors are in the coefficients, so that the logit itself is the
// variable.
//
// tanhf takes two branches and 20 instructions. The polynomials, in u * u, were fitted to tanh(u) /
// u by the Remez exchange. Their relative errors before rounding are 2^-26 for TanhNearest, 2^-28
// for TanhNear, 2^-25 and 2^-23.8 for the quotients TanhWide and TanhFar.
#ifndef LOGITD_KERNELS_CUDA_LOSS_SOFTCAP_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_SOFTCAP_CUH_

#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {

// min and max that keep a NaN; `bound` is a number.
__device__ inline float MinOrNan(float x, float bound) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}
__device__ inline float MaxOrNan(float x, float bound) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}

// An even polynomial in fp32: terms[0] + terms[1] x^2 + ...
template <int kTerms>
struct EvenPolynomial {
  float terms[kTerms];

  // The polynomial of x * sqrt(square), times `lead`.
  __device__ EvenPolynomial Scaled(float lead, float square) const {
    EvenPolynomial scaled;
    float factor = lead;
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      scaled.terms[i] = __fmul_rn(terms[i], factor);
      factor = __fmul_rn(factor, square);
    }
    return scaled;
  }
  __device__ float At(float squared) const {
    float sum = terms[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, squared, terms[i]);
    return sum;
  }
};

// tanh(u) / u for |u| up to a reach.
struct TanhNearest {
  static constexpr float kReach = 0.3f;
  __device__ static constexpr EvenPolynomial<4> Over() {
    return {{0.99999998960192741f, -0.33332962679951502f, 0.13312597242043046f,
             -0.050222439285542821f}};
  }
};
struct TanhNear {
  static constexpr float kReach = 0.6f;
  __device__ static constexpr EvenPolynomial<6> Over() {
    return {{0.99999999751099417f, -0.33333283257376432f, 0.13331688960187106f,
             -0.053768704705913242f, 0.020753628893482098f, -0.005852168662304591f}};
  }
};
struct TanhWide {
  static constexpr float kReach = 1.75f;
  __device__ static constexpr EvenPolynomial<3> Over() {
    return {{0.99999997598075798f, 0.10992611160025732f, 0.00098459243731313149f}};
  }
  __device__ static constexpr EvenPolynomial<3> Under() {
    return {{1.0f, 0.4432589305353623f, 0.015406023464366106f}};
  }
};
// At its reach tanh is 1 - 2^-24.
struct TanhFar {
  static constexpr float kReach = 8.7f;
  __device__ static constexpr EvenPolynomial<5> Over() {
    return {{0.99999999343352191f, 0.13348617380609256f, 0.0034576731515398359f,
             2.0015047237263361e-5f, 1.259707511773096e-8f}};
  }
  __device__ static constexpr EvenPolynomial<5> Under() {
    return {{1.0f, 0.46681929799983389f, 0.025731149930321007f, 0.00032248454574354757f,
             7.4522131391562091e-7f}};
  }
};

__device__ inline float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Softcaps whose coefficients and powers of two are all far inside the range of fp32. Others are
// left to tanhf. log2e_over_temperature is Log2EOverTemperature(softcap, temperature).
__device__ inline bool IsMildSoftcap(float softcap, float log2e_over_temperature) {
  return softcap >= 0x1p-7f && softcap <= 0x1p10f && log2e_over_temperature >= 0x1p-20f &&
         log2e_over_temperature <= 256.0f;
}

// tanh(logit / softcap) for a mild softcap and logits of type T: one function of the logit,
// whatever is beside it.
template <class T>
class MildTanh {
 public:
  __device__ static MildTanh Of(float softcap) {
    const float inverse = 1.0f / softcap;
    const float square = __fmul_rn(inverse, inverse);
    MildTanh tanh;
    tanh.most_ = ToFloat(FromFloat<T>(__fmul_rn(softcap, TanhFar::kReach)));
    tanh.over_ = TanhFar::Over().Scaled(inverse, square);
    tanh.under_ = TanhFar::Under().Scaled(1.0f, square);
    return tanh;
  }

  // A logit, or two of 16 bits, brought to where OfBounded is right. NaN stays.
  __device__ uint32_t Bounded(uint32_t word) const {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(MinOrNan(MaxOrNan(__uint_as_float(word), -most_), most_));
    } else {
      using Pair = PairOf<T>;
      const uint32_t high = PackPair<T>(most_, most_);
      const uint32_t low = PackPair<T>(-most_, -most_);
      const Pair pair = __hmin2_nan(
          __hmax2_nan(reinterpret_cast<const Pair&>(word), reinterpret_cast<const Pair&>(low)),
          reinterpret_cast<const Pair&>(high));
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }
  __device__ float OfBounded(float logit) const {
    const float squared = __fmul_rn(logit, logit);
    return __fmul_rn(__fmul_rn(logit, over_.At(squared)), Reciprocal(under_.At(squared)));
  }

 private:
  float most_;  // an absolute logit from which on tanh is 1
  EvenPolynomial<5> over_;
  EvenPolynomial<5> under_;
};

// A row with a mild softcap: its logits as powers of two.
struct CappedPowers {
  float softcap;
  float inverse;  // 1 / softcap
  float lead;     // log2(e) / temperature
  float square;   // 1 / softcap^2

  __device__ static CappedPowers Of(float softcap, float log2e_over_temperature) {
    const float inverse = 1.0f / softcap;
    return {softcap, inverse, log2e_over_temperature / softcap, __fmul_rn(inverse, inverse)};
  }

  // Calls take(e, log2(e) / temperature * softcap * tanh(x[e] / softcap) + shift) for each of a
  // lane's elements in the quarters that a cell's first `count` are in. No absolute logit of these
  // is above `reach`.
  template <bool kWhole, class T, class Take>
  __device__ void Each(const LaneCell<T>& x, float reach, float shift, int count, Take take) const {
    if (reach <= __fmul_rn(softcap, TanhNearest::kReach)) {
      EachBy<kWhole>(x, Polynomial<TanhNearest>::Of(*this), shift, count, take);
    } else if (reach <= __fmul_rn(softcap, TanhNear::kReach)) {
      EachBy<kWhole>(x, Polynomial<TanhNear>::Of(*this), shift, count, take);
    } else if (kWhole && reach <= __fmul_rn(softcap, TanhWide::kReach)) {
      EachBy<kWhole>(x, Quotient<TanhWide>::Of(*this), shift, count, take);
    } else {
      EachBy<kWhole>(x, OfAny::Of(*this), shift, count, take);
    }
  }

  // The powers of two logits within the reach of `Tanh`, which share the time of a reciprocal: both
  // must be within it.
  template <class Tanh>
  struct Quotient {
    decltype(Tanh::Over()) over;
    decltype(Tanh::Under()) under;

    __device__ static Quotient Of(const CappedPowers& of) {
      return {Tanh::Over().Scaled(of.lead, of.square), Tanh::Under().Scaled(1.0f, of.square)};
    }
    __device__ float2 operator()(float x, float y, float shift) const {
      const float xx = __fmul_rn(x, x), yy = __fmul_rn(y, y);
      const float under_x = under.At(xx), under_y = under.At(yy);
      const float inverse = Reciprocal(__fmul_rn(under_x, under_y));
      const float over_x = __fmul_rn(x, over.At(xx)), over_y = __fmul_rn(y, over.At(yy));
      return {fmaf(__fmul_rn(over_x, under_y), inverse, shift),
              fmaf(__fmul_rn(over_y, under_x), inverse, shift)};
    }
  };
  // The powers of any two logits.
  struct OfAny {
    float most;
    Quotient<TanhFar> quotient;

    __device__ static OfAny Of(const CappedPowers& of) {
      return {__fmul_rn(of.softcap, TanhFar::kReach), Quotient<TanhFar>::Of(of)};
    }
    __device__ float2 operator()(float x, float y, float shift) const {
      return quotient(MinOrNan(MaxOrNan(x, -most), most), MinOrNan(MaxOrNan(y, -most), most),
                      shift);
    }
  };

 private:
  template <class Tanh>
  struct Polynomial {
    decltype(Tanh::Over()) over;

    __device__ static Polynomial Of(const CappedPowers& of) {
      return {Tanh::Over().Scaled(of.lead, of.square)};
    }
    __device__ float2 operator()(float x, float y, float shift) const {
      return {fmaf(x, over.At(__fmul_rn(x, x)), shift), fmaf(y, over.At(__fmul_rn(y, y)), shift)};
    }
  };

  template <bool kWhole, class T, class Powers, class Take>
  __device__ void EachBy(const LaneCell<T>& x, const Powers& powers, float shift, int count,
                         Take take) const {
#pragma unroll
    for (int q = 0; q < kSums; ++q) {
      if (!kWhole && count <= q * kQuarter) break;
#pragma unroll
      for (int e = q * kSumElements; e < (q + 1) * kSumElements; e += 2) {
        const float2 two = powers(x[e], x[e + 1], shift);
        take(e, two.x);
        take(e + 1, two.y);
      }
    }
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_SOFTCAP_CUH_
