// linear_divergence_training in double precision, by the formulas of kernels/divergence_training.h.
#ifndef LOGITD_TESTS_KERNELS_DIVERGENCE_TRAINING_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_DIVERGENCE_TRAINING_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/divergence_training.h"
#include "tests/kernels/divergence_reference.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {

// Logits after the head's softcap.
inline std::vector<double> Capped(std::vector<double> logits, double softcap) {
  for (double& x : logits) {
    if (softcap > 0) x = softcap * std::tanh(x / softcap);
  }
  return logits;
}

struct DivergenceGradient {
  double loss;
  std::vector<double> d_logits;  // G over upstream
  std::vector<double> size;      // t_i, over the temperature: what an error is in proportion to
  double bound;  // b over |upstream|: what an f16 head adds to an element, 2^37-fold
};

// The gradient by logits before the softcap. The row's are finite or -inf, and not all -inf.
inline DivergenceGradient ReferenceDivergenceGradient(const std::vector<double>& raw,
                                                      const std::vector<double>& y,
                                                      const DivergenceRow& ask, DivergenceLoss kind,
                                                      double beta, double softcap) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> x = Capped(raw, softcap);
  double unused;
  const auto p = LogProbabilities(x, ask.temperature, &unused);
  const auto q = LogProbabilities(y, ask.reference_temperature, &unused);
  const size_t vocab = x.size();
  // ln m, of which a direct sum is exact enough where p and q are not both far below 1.
  std::vector<double> m(vocab);
  for (size_t i = 0; i < vocab; ++i) {
    const double most = std::max(p[i], q[i]);
    m[i] = most == -kInfinity
               ? most
               : most + std::log((1 - beta) * std::exp(p[i] - most) + beta * std::exp(q[i] - most));
  }
  const auto divergence = [&](const auto& of, const auto& from) {
    double sum = 0;
    for (size_t i = 0; i < vocab; ++i) {
      if (of[i] > -kInfinity)
        sum += from[i] > -kInfinity ? std::exp(of[i]) * (of[i] - from[i]) : kInfinity;
    }
    return sum;
  };
  const bool mixed = kind == DivergenceLoss::kJensenShannon;
  const double own = mixed ? divergence(p, m) : divergence(p, q);
  DivergenceGradient to{
      .loss = mixed                                ? beta * divergence(q, m) + (1 - beta) * own
              : kind == DivergenceLoss::kForwardKl ? own
                                                   : divergence(q, p),
      .d_logits = std::vector<double>(vocab),
      .size = std::vector<double>(vocab),
      .bound = (kind == DivergenceLoss::kReverseKl ? 1 : 1 + own) / ask.temperature};
  if (!std::isfinite(to.loss)) return to;
  const double mixing = mixed ? std::fabs(std::log(beta - beta * beta)) : own;
  for (size_t i = 0; i < vocab; ++i) {
    const double weight = std::exp(p[i]);
    double gradient = 0, size = 0;
    if (kind == DivergenceLoss::kReverseKl) {
      gradient = weight - std::exp(q[i]);
      size = weight + std::exp(q[i]);
    } else if (weight > 0) {
      gradient = weight * (p[i] - (mixed ? m[i] : q[i]) - own) * (mixed ? 1 - beta : 1);
      // ln q is not used far below ln p.
      const double far = std::isfinite(q[i]) ? std::fabs(q[i]) : 0;
      size = weight * (1 + std::log(static_cast<double>(vocab)) + std::fabs(p[i]) + far + mixing);
    }
    const double bend = softcap > 0 ? 1 - std::pow(x[i] / softcap, 2) : 1;
    to.d_logits[i] = gradient * bend / ask.temperature;
    to.size[i] = size / ask.temperature;
  }
  return to;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_DIVERGENCE_TRAINING_REFERENCE_H_
