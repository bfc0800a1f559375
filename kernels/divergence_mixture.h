// The mixture m = (1 - beta) p + beta q of two distributions: what a Jensen-Shannon divergence
// measures them from. Host and device include this file.
#ifndef LOGITD_KERNELS_DIVERGENCE_MIXTURE_H_
#define LOGITD_KERNELS_DIVERGENCE_MIXTURE_H_

namespace logitd {

// A token beside the mixture, from `apart` = ln p - ln q; +-inf where only one row has the token.
// The larger of p and q is above m by
//
//   Above() = -ln(rest + share exp(below)) = -ln(1 + share (exp(below) - 1))
//
// in nats, which the caller computes: by the second form where below > -1, so that equal
// probabilities are above m by exactly 0, else by the first one, so that no digits cancel.
template <typename Float>
struct MixtureToken {
  bool p_is_larger;
  Float below;  // how far the smaller of the two is below the larger one, in nats; <= 0
  Float share;  // the weight of the smaller one in m
  Float rest;   // that of the larger one

  // less: 1 - beta.
  static constexpr MixtureToken Of(Float apart, Float beta, Float less) {
    const bool p_is_larger = apart >= 0;
    return {.p_is_larger = p_is_larger,
            .below = p_is_larger ? -apart : apart,
            .share = p_is_larger ? beta : less,
            .rest = p_is_larger ? less : beta};
  }

  constexpr bool IsNear() const { return below > -1; }
  // ln p - ln m and ln q - ln m.
  constexpr Float OfP(Float above) const { return p_is_larger ? above : above + below; }
  constexpr Float OfQ(Float above) const { return p_is_larger ? above + below : above; }
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_DIVERGENCE_MIXTURE_H_
