// softcap * tanh(logit / softcap) without tanhf: odd polynomials near 0, a quotient of two of them
// up to where tanh is 1. The row's factors are in the coefficients, so that the logit itself is the
// variable.
//
// tanhf takes two branches and 20 instructions. The polynomials, in u * u, were fitted to tanh(u) / u
// by the Remez exchange. Their relative errors before rounding are 2^-26 for TanhNearest, 2^-28 for
// TanhNear and TanhMiddle, and 2^-23.8 for the quotient, TanhFar.
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
struct TanhMiddle {
  static constexpr float kReach = 1.0f;
  __device__ static constexpr EvenPolynomial<8> Over() {
    return {{0.9999999957776926f, -0.33333278673691896f, 0.13332159677151203f,
             -0.053870912980645674f, 0.021464820838550561f, -0.0079174453256097479f,
             0.0022822300310561331f, -0.00035334563555669778f}};
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

// tanh(logit / softcap) for a mild softcap and logits of type T: one function of the logit, whatever
// is beside it.
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
  // lane's elements in the quarters that a cell's first `count` are in. No absolute logit of these is
  // above `reach`.
  template <bool kWhole, class T, class Take>
  __device__ void Each(const LaneCell<T>& x, float reach, float shift, int count, Take take) const {
    if (reach <= __fmul_rn(softcap, TanhNearest::kReach)) {
      EachBy<kWhole>(x, Within<TanhNearest>::Of(*this), shift, count, take);
    } else if (reach <= __fmul_rn(softcap, TanhNear::kReach)) {
      EachBy<kWhole>(x, Within<TanhNear>::Of(*this), shift, count, take);
    } else if (reach <= __fmul_rn(softcap, TanhMiddle::kReach)) {
      EachBy<kWhole>(x, Within<TanhMiddle>::Of(*this), shift, count, take);
    } else {
      EachBy<kWhole>(x, OfAny::Of(*this), shift, count, take);
    }
  }

  // The power of any logit.
  struct OfAny {
    float most;
    EvenPolynomial<5> over;
    EvenPolynomial<5> under;

    __device__ static OfAny Of(const CappedPowers& of) {
      return {__fmul_rn(of.softcap, TanhFar::kReach), TanhFar::Over().Scaled(of.lead, of.square),
              TanhFar::Under().Scaled(1.0f, of.square)};
    }
    __device__ float operator()(float x, float shift) const {
      const float logit = MinOrNan(MaxOrNan(x, -most), most);
      const float squared = __fmul_rn(logit, logit);
      return fmaf(__fmul_rn(logit, over.At(squared)), Reciprocal(under.At(squared)), shift);
    }
  };

 private:
  // The power of a logit within the reach of `Tanh`.
  template <class Tanh>
  struct Within {
    decltype(Tanh::Over()) over;

    __device__ static Within Of(const CappedPowers& of) {
      return {Tanh::Over().Scaled(of.lead, of.square)};
    }
    __device__ float operator()(float x, float shift) const {
      return fmaf(x, over.At(__fmul_rn(x, x)), shift);
    }
  };

  template <bool kWhole, class T, class Power, class Take>
  __device__ void EachBy(const LaneCell<T>& x, const Power& power, float shift, int count,
                         Take take) const {
#pragma unroll
    for (int q = 0; q < kSums; ++q) {
      if (!kWhole && count <= q * kQuarter) break;
#pragma unroll
      for (int e = q * kSumElements; e < (q + 1) * kSumElements; ++e) take(e, power(x[e], shift));
    }
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_SOFTCAP_CUH_
