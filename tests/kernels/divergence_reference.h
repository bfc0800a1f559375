// divergence in double precision, by the formulas of kernels/divergence.h.
#ifndef LOGITD_TESTS_KERNELS_DIVERGENCE_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_DIVERGENCE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/divergence.h"
#include "tests/kernels/cross_entropy_reference.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

struct DivergenceRowAnswer {
  RowStatus status;
  double forward_kl, reverse_kl, entropy, reference_entropy, logsumexp, reference_logsumexp,
      target_logprob, reference_target_logprob;
};

// The log-probabilities of a row, and its logsumexp.
inline std::vector<double> LogProbabilities(std::vector<double> x, double temperature,
                                            double* logsumexp) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double t = std::max<double>(temperature, kLeastTemperature);
  const double max = *std::max_element(x.begin(), x.end());
  *logsumexp = max;
  double sum = 0;
  for (double& v : x) {
    if (max == kInfinity) {
      v = v == kInfinity ? 0 : -kInfinity;
    } else if (max != -kInfinity) {
      v = (v - max) / t;
    }
    sum += std::exp(v);
  }
  if (std::isfinite(max)) *logsumexp = max / t + std::log(sum);
  if (max != -kInfinity) {
    for (double& v : x) v -= std::log(sum);
  }
  return x;
}

inline DivergenceRowAnswer ReferenceDivergence(const std::vector<double>& x,
                                               const std::vector<double>& y,
                                               const DivergenceRow& ask) {
  constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) || std::isnan(y[i])) {
      return {{RowCode::kNanLogit, static_cast<int32_t>(i)},
              kNotANumber,
              kNotANumber,
              kNotANumber,
              kNotANumber,
              kNotANumber,
              kNotANumber,
              kNotANumber,
              kNotANumber};
    }
  }
  DivergenceRowAnswer answer{.status = {RowCode::kOk, -1}};
  const auto p = LogProbabilities(x, ask.temperature, &answer.logsumexp);
  const auto q = LogProbabilities(y, ask.reference_temperature, &answer.reference_logsumexp);
  const bool no_p = answer.logsumexp == -kInfinity, no_q = answer.reference_logsumexp == -kInfinity;
  if (no_p || no_q) answer.status.code = RowCode::kEmptySupport;
  const auto divergence = [&](const auto& of, const auto& from) {
    double sum = no_p || no_q ? kNotANumber : 0;
    for (size_t i = 0; i < of.size(); ++i) {
      if (of[i] > -kInfinity)
        sum += from[i] > -kInfinity ? std::exp(of[i]) * (of[i] - from[i]) : kInfinity;
    }
    return sum;
  };
  const auto entropy = [&](const auto& of, bool is_empty) {
    double sum = is_empty ? kNotANumber : 0;
    for (double v : of) {
      if (v > -kInfinity) sum -= std::exp(v) * v;
    }
    return sum;
  };
  answer.forward_kl = divergence(p, q);
  answer.reverse_kl = divergence(q, p);
  answer.entropy = entropy(p, no_p);
  answer.reference_entropy = entropy(q, no_q);
  const bool counts = ask.target != kIgnoredTarget;
  answer.target_logprob = counts ? p[ask.target] : 0;
  answer.reference_target_logprob = counts ? q[ask.target] : 0;
  return answer;
}

// "" where row r agrees with `want` within what the header promises, else what differs first.
// `slack`: more, of every answer.
inline std::string DescribeDifference(const DivergenceRowAnswer& want, const DivergenceAnswer& got,
                                      int64_t r, double vocab, double slack = 0) {
  if (std::string status = DescribeStatus(got.status[r], want.status); !status.empty()) {
    return status;
  }
  struct Field {
    const char* name;
    float got;
    double want;
    bool is_sum;
  };
  for (const Field& field :
       {Field{"logsumexp", got.logsumexp[r], want.logsumexp, true},
        Field{"reference_logsumexp", got.reference_logsumexp[r], want.reference_logsumexp, true},
        Field{"entropy", got.entropy[r], want.entropy},
        Field{"reference_entropy", got.reference_entropy[r], want.reference_entropy},
        Field{"target_logprob", got.target_logprob[r], want.target_logprob},
        Field{"reference_target_logprob", got.reference_target_logprob[r],
              want.reference_target_logprob},
        Field{"forward_kl", got.forward_kl[r], want.forward_kl},
        Field{"reverse_kl", got.reverse_kl[r], want.reverse_kl}}) {
    const double size = std::isfinite(field.want) ? std::fabs(field.want) : 0;
    const double allowed =
        field.is_sum ? 2e-6 * std::max(1.0, size) : 4e-6 * std::max({1.0, size, std::log(vocab)});
    if (IsWithin(field.got, field.want, allowed + slack)) continue;
    return absl::StrFormat("%s: got %.9g, want %.12g, allowed %.3g", field.name, field.got,
                           field.want, allowed + slack);
  }
  return "";
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_DIVERGENCE_REFERENCE_H_
