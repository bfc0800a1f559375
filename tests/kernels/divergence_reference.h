// divergence in double precision, by the formulas of kernels/divergence.h.
#ifndef LOGITD_TESTS_KERNELS_DIVERGENCE_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_DIVERGENCE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/divergence.h"
#include "tests/kernels/cross_entropy_reference.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// Top tokens of a row.
struct TopTokens {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
};

// The first `k` tokens by (logit descending, id ascending). `logprobs`: of all tokens; none where a
// logit is NaN.
inline TopTokens ReferenceTops(const std::vector<double>& x, const std::vector<double>& logprobs,
                               int32_t k) {
  const auto count = static_cast<size_t>(k);
  if (logprobs.empty()) {
    return {std::vector<int32_t>(count, -1),
            std::vector<double>(count, std::numeric_limits<double>::quiet_NaN())};
  }
  std::vector<int32_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  ids.resize(count);
  TopTokens tops = {.ids = ids, .logprobs = {}};
  for (const int32_t id : ids) tops.logprobs.push_back(logprobs[id]);
  return tops;
}

struct DivergenceRowAnswer {
  RowStatus status;
  double forward_kl, reverse_kl, entropy, reference_entropy, logsumexp, reference_logsumexp,
      target_logprob, reference_target_logprob;
  TopTokens top, reference_top;
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
              kNotANumber,
              ReferenceTops(x, {}, ask.top_logprobs),
              ReferenceTops(y, {}, ask.reference_top_logprobs)};
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
  answer.top = ReferenceTops(x, p, ask.top_logprobs);
  answer.reference_top = ReferenceTops(y, q, ask.reference_top_logprobs);
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

// "" where the entries from `first` on are `want`, within what the header promises, and the one
// after them is unwritten.
inline std::string DescribeTops(const char* name, const TopTokens& want,
                                const std::vector<int32_t>& ids, const std::vector<float>& logprobs,
                                int64_t first, double vocab) {
  const auto count = static_cast<int64_t>(want.ids.size());
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::isfinite(want.logprobs[i]) ? std::fabs(want.logprobs[i]) : 0;
    const double allowed = 4e-6 * std::max({1.0, size, std::log(vocab)});
    if (ids[first + i] == want.ids[i] && IsWithin(logprobs[first + i], want.logprobs[i], allowed)) {
      continue;
    }
    return absl::StrFormat("%s %d: got token %d with %.9g, want %d with %.12g, allowed %.3g", name,
                           i, ids[first + i], logprobs[first + i], want.ids[i], want.logprobs[i],
                           allowed);
  }
  const bool is_kept = ids[first + count] == kUnwrittenIndex &&
                       IsWithin(logprobs[first + count], kUnwrittenFloat, 0);
  return is_kept ? "" : absl::StrFormat("%s: the entry after the last is written", name);
}
inline std::string DescribeTops(const DivergenceRowAnswer& want, const DivergenceAnswer& got,
                                const DivergenceRow& ask, double vocab) {
  const std::string first =
      DescribeTops("top", want.top, got.top_ids, got.top_logprobs, ask.first_top_entry, vocab);
  return first.empty()
             ? DescribeTops("reference top", want.reference_top, got.reference_top_ids,
                            got.reference_top_logprobs, ask.first_reference_top_entry, vocab)
             : first;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_DIVERGENCE_REFERENCE_H_
