// cross_entropy and its gradient in double precision, by the formulas of kernels/cross_entropy.h,
// and how far from them an answer may be.
#ifndef LOGITD_TESTS_KERNELS_CROSS_ENTROPY_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_CROSS_ENTROPY_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/cross_entropy.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// The answer to one row; the meaning of each field is CrossEntropyAnswers's.
struct LossRowAnswer {
  RowStatus status;
  double loss = 0;
  double logsumexp = 0;
  double target_logprob = 0;
  int32_t rank = 0;
  double entropy = 0;
  std::vector<int32_t> top_ids;
  std::vector<double> top_logprobs;
  std::vector<double> extra_logprobs;

  // For the tolerances: the largest of |mean x| and |logsumexp|, where finite, and the x of the
  // tokens asked for.
  double size = 0;
  double target_x = 0;
  std::vector<double> top_x, extra_x;
};

// How far logits may be off: 0 where they are exact.
struct LossSlack {
  double logit = 0;  // the largest |error| of an x
};

inline std::vector<double> LogitsOf(const HostTensor& tensor, int64_t r) {
  std::vector<double> x(tensor.cols());
  for (int64_t c = 0; c < tensor.cols(); ++c) x[c] = tensor.At(r, c);
  return x;
}

// e of the contract's formula.
inline double SmoothingOf(const CrossEntropyRow& ask, int64_t vocab) {
  const double e = ask.label_smoothing;
  if (ask.smoothing == Smoothing::kTorch) return e;
  return vocab == 1 ? 0 : e * static_cast<double>(vocab) / static_cast<double>(vocab - 1);
}

// c of the contract's formula.
inline double SoftcapOf(const CrossEntropyRow& ask) {
  return ask.softcap == 0 ? 0 : std::clamp<double>(ask.softcap, 0x1p-100, 0x1p100);
}

inline LossRowAnswer ReferenceCrossEntropy(const std::vector<double>& sent,
                                           const CrossEntropyRow& ask,
                                           absl::Span<const int32_t> extra_ids) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNot = std::numeric_limits<double>::quiet_NaN();
  const auto n = static_cast<int64_t>(sent.size());
  const bool ignored = ask.target == kIgnoredTarget;
  const bool entropy_wanted = (ask.want & kWantEntropy) != 0;
  LossRowAnswer answer;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isnan(sent[i])) continue;
    answer.status = {RowCode::kNanLogit, static_cast<int32_t>(i)};
    answer.loss = answer.logsumexp = answer.target_logprob = kNot;
    answer.entropy = entropy_wanted ? kNot : 0;
    answer.top_ids.assign(ask.top_logprobs, -1);
    answer.top_logprobs.assign(ask.top_logprobs, kNot);
    answer.extra_logprobs.assign(ask.extra_count, kNot);
    answer.top_x.assign(ask.top_logprobs, 0);
    answer.extra_x.assign(ask.extra_count, 0);
    return answer;
  }
  std::vector<double> x(n);
  for (int64_t i = 0; i < n; ++i) {
    const double c = SoftcapOf(ask);
    x[i] = (c > 0 ? c * std::tanh(sent[i] / c) : sent[i]) / ask.temperature;
  }
  const double max = *std::max_element(x.begin(), x.end());
  const auto weight = [&](double v) {
    return max == kInfinity ? (v == max ? 1.0 : 0.0) : std::exp(v - max);
  };
  double sum = 0, mean = 0;
  if (max > -kInfinity) {
    for (double v : x) sum += weight(v);
  }
  for (double v : x) mean += v / static_cast<double>(n);
  const double log_sum = max > -kInfinity ? std::log(sum) : 0;
  const auto logprob = [&](double v) {
    if (v == -kInfinity) return -kInfinity;
    if (max == kInfinity) return v == kInfinity ? -log_sum : -kInfinity;
    return v - max - log_sum;
  };
  answer.status.code = max == -kInfinity ? RowCode::kEmptySupport : RowCode::kOk;
  answer.logsumexp = std::isfinite(max) ? max + log_sum : max;
  for (double v : {mean, answer.logsumexp}) {
    if (std::isfinite(v)) answer.size = std::max(answer.size, std::fabs(v));
  }
  const double e = SmoothingOf(ask, n);
  if (!ignored) {
    const double x_t = x[ask.target];
    answer.target_logprob = logprob(x_t);
    answer.target_x = x_t;
    if (max == -kInfinity) {
      answer.loss = kNot;
    } else if (max == kInfinity) {
      answer.loss = e > 0 || ask.z_loss > 0 ? kInfinity : -answer.target_logprob;
    } else if (x_t == -kInfinity || (e > 0 && mean == -kInfinity)) {
      answer.loss = kInfinity;
    } else {
      answer.loss = (1 - e) * -answer.target_logprob + ask.z_loss * std::pow(answer.logsumexp, 2);
      if (e > 0) answer.loss += e * (answer.logsumexp - mean);
    }
    if ((ask.want & kWantRank) != 0) {
      answer.rank = 1;
      for (int64_t i = 0; i < n; ++i) {
        const double t = sent[ask.target];
        answer.rank += sent[i] > t || (sent[i] == t && i < ask.target);
      }
    }
  }
  if (entropy_wanted) {
    answer.entropy = max == -kInfinity ? kNot : 0;
    for (double v : x) {
      const double p = max == -kInfinity ? 0 : weight(v) / sum;
      if (p > 0) answer.entropy -= p * logprob(v);
    }
  }
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(
      order.begin(), order.begin() + ask.top_logprobs, order.end(),
      [&](int32_t a, int32_t b) { return sent[a] != sent[b] ? sent[a] > sent[b] : a < b; });
  for (int32_t i = 0; i < ask.top_logprobs; ++i) {
    answer.top_ids.push_back(order[i]);
    answer.top_logprobs.push_back(logprob(x[order[i]]));
    answer.top_x.push_back(x[order[i]]);
  }
  for (int32_t id : extra_ids) {
    answer.extra_logprobs.push_back(logprob(x[id]));
    answer.extra_x.push_back(x[id]);
  }
  return answer;
}

// Within `slack` of `want`; infinities and NaN must be the same, and what is more than a float
// holds must be infinite.
inline bool IsWithin(float got, double want, double slack) {
  if (std::isnan(want)) return std::isnan(got);
  const auto rounded = static_cast<float>(want);
  if (std::isinf(rounded)) return got == rounded;
  return std::fabs(got - want) <= slack;
}

// "" where row r agrees with the reference within what the header promises, else what differs
// first.
inline std::string DescribeDifference(const LossRowAnswer& want, const CrossEntropyRow& ask,
                                      const LossAnswer& got, int64_t r, LossSlack slack = {}) {
  if (std::string status = DescribeStatus(got.status[r], want.status); !status.empty()) {
    return status;
  }
  const auto differs = [](std::string_view field, float a, double b, double allowed) {
    return IsWithin(a, b, allowed)
               ? std::string()
               : absl::StrFormat("%s: got %.9g, want %.12g, off by %.3g, allowed %.3g", field, a, b,
                                 a - b, allowed);
  };
  const double logit_slack = slack.logit / ask.temperature;
  const auto allowed = [&](double x) {
    return 4e-6 * std::max({1.0, want.size, std::isfinite(x) ? std::fabs(x) : 0.0}) +
           2 * logit_slack;
  };
  const double m =
      std::max({1.0, want.size, std::isfinite(want.target_x) ? std::fabs(want.target_x) : 0.0});
  std::string difference = differs("logsumexp", got.logsumexp[r], want.logsumexp,
                                   2e-6 * std::max(1.0, std::fabs(want.logsumexp)) + logit_slack);
  if (difference.empty()) {
    difference =
        differs("loss", got.loss[r], want.loss, allowed(want.target_x) * (1 + 2 * ask.z_loss * m));
  }
  if (difference.empty()) {
    difference = differs("target_logprob", got.target_logprob[r], want.target_logprob,
                         allowed(want.target_x));
  }
  if (difference.empty() && (ask.want & kWantRank) != 0 && got.rank[r] != want.rank) {
    difference = absl::StrFormat("rank: got %d, want %d", got.rank[r], want.rank);
  }
  if (difference.empty() && (ask.want & kWantEntropy) != 0) {
    // A logit error d moves the entropy by at most d times the spread of the likely tokens.
    difference = differs("entropy", got.entropy[r], want.entropy,
                         allowed(0) + logit_slack * 2 * std::max(1.0, want.entropy));
  }
  for (int32_t i = 0; i < ask.top_logprobs && difference.empty(); ++i) {
    const int64_t at = ask.first_top_entry + i;
    if (got.top_ids[at] != want.top_ids[i]) {
      return absl::StrFormat("top %d: got id %d, want %d", i, got.top_ids[at], want.top_ids[i]);
    }
    difference = differs(absl::StrFormat("top %d", i), got.top_logprobs[at], want.top_logprobs[i],
                         allowed(want.top_x[i]));
  }
  for (int32_t i = 0; i < ask.extra_count && difference.empty(); ++i) {
    difference =
        differs(absl::StrFormat("extra %d", i), got.extra_logprobs[ask.first_extra_entry + i],
                want.extra_logprobs[i], allowed(want.extra_x[i]));
  }
  return difference;
}

// d loss / d l of a counted row whose logsumexp is finite, and for every element how far off it may
// be before it is rounded; both times upstream.
struct LossGradient {
  std::vector<double> d_logits;
  std::vector<double> slack;
};

inline LossGradient ReferenceGradient(const std::vector<double>& sent, const CrossEntropyRow& ask,
                                      double logsumexp, double upstream) {
  const auto n = static_cast<int64_t>(sent.size());
  const double e = SmoothingOf(ask, n), c = SoftcapOf(ask), t = ask.temperature;
  const double relative = 4e-6 + (c > 0 ? 3e-7 * c / t : 0.0);
  LossGradient gradient;
  for (int64_t i = 0; i < n; ++i) {
    const double tanh = c > 0 ? std::tanh(sent[i] / c) : 0;
    const double x = (c > 0 ? c * tanh : sent[i]) / t;
    const double p = std::exp(x - logsumexp);
    const double hit = i == ask.target ? 1 : 0, other = e / static_cast<double>(n);
    const double z = 2.0 * ask.z_loss;
    gradient.d_logits.push_back(upstream / t * (1 - tanh * tanh) *
                                (p - (1 - e) * hit - other + z * logsumexp * p));
    // p below 2^-126 may count as 0.
    const double of_p = (relative * p + 1.2e-38) * (1 + z * std::fabs(logsumexp));
    gradient.slack.push_back(std::fabs(upstream) / t * (of_p + relative * (hit + other)));
  }
  return gradient;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CROSS_ENTROPY_REFERENCE_H_
