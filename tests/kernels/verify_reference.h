// verify by its contract, in double precision: what block verification decides, and how many drafts
// each rule accepts on average.
#ifndef LOGITD_TESTS_KERNELS_VERIFY_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_VERIFY_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace logitd::testing {

using Distribution = std::vector<double>;

// Block verification of one sequence.
class ReferenceBlock {
 public:
  // p: of n + 1 rows; q and drafts: of the first n.
  ReferenceBlock(std::vector<Distribution> p, std::vector<Distribution> q,
                 std::vector<int32_t> drafts)
      : p_(std::move(p)), q_(std::move(q)), shares_(1, 1.0) {
    for (size_t i = 0; i < drafts.size(); ++i) {
      const double reach = shares_[i] * p_[i][drafts[i]];
      shares_.push_back(reach == 0 ? 0 : std::min(1.0, reach / q_[i][drafts[i]]));
    }
  }

  // max(s_i p - q, 0) of row i; p of the last row.
  Distribution Left(size_t i) const {
    if (i == q_.size()) return p_[i];
    Distribution left(p_[i].size());
    for (size_t t = 0; t < left.size(); ++t)
      left[t] = std::max(0.0, shares_[i] * p_[i][t] - q_[i][t]);
    return left;
  }

  // "" where the answer is right for these coins and bits, as fractions, by row; rounding may
  // decide close to a border.
  std::string Difference(const std::vector<double>& coins, const std::vector<double>& bits,
                         int32_t accepted, int32_t token) const {
    size_t sure = 0;  // the largest i that is chosen for sure
    std::vector<size_t> close;
    for (size_t i = 1; i < p_.size(); ++i) {
      const double share = shares_[i];
      const Distribution left = Left(i);
      const double sum = std::accumulate(left.begin(), left.end(), 0.0);
      const bool last = i == q_.size();
      const double whole = last ? 1 : sum + 1 - share;
      const double chance = last ? share : whole == 0 ? 1 : sum / whole;
      const double slack = 1e-5 * static_cast<double>(i) / whole;
      if (std::fabs(coins[i - 1] - chance) <= slack && chance < 1) {
        close.push_back(i);
      } else if (coins[i - 1] < chance) {
        sure = i;
        close.clear();
      }
    }
    const auto is = static_cast<size_t>(accepted);
    if (is != sure && std::find(close.begin(), close.end(), is) == close.end())
      return absl::StrFormat("accepted %d, want %d", accepted, sure);
    return TokenDifference(Left(is), bits[is], token, 1e-5 * static_cast<double>(is + 1));
  }

 private:
  static std::string TokenDifference(const Distribution& left, double bits, int32_t token,
                                     double slack) {
    const double sum = std::accumulate(left.begin(), left.end(), 0.0);
    if (sum < 1e-4) return "";  // what rounding left
    const double before = std::accumulate(left.begin(), left.begin() + token, 0.0);
    const double reach = bits * sum;
    if (before - slack <= reach && reach <= before + left[token] + slack) return "";
    return absl::StrFormat("token %d has [%.9g, %.9g], but the bits say %.9g", token, before / sum,
                           (before + left[token]) / sum, bits);
  }

  std::vector<Distribution> p_, q_;
  std::vector<double> shares_;
};

// How many of n drafts are accepted on average, where p(prefix) and q(prefix) are the next token's
// distributions: the sum of E[a_i], with a_i = min(1, a_(i-1) p / q) by block verification, and
// a_i = a_(i-1) min(1, p / q) token by token.
template <class Next>
double MeanAccepted(const Next& p, const Next& q, int n, bool block,
                    const std::vector<int32_t>& prefix = {}, double weight = 1, double a = 1) {
  if (n == 0) return 0;
  const Distribution target = p(prefix), draft = q(prefix);
  double mean = 0;
  for (size_t t = 0; t < draft.size(); ++t) {
    if (draft[t] == 0) continue;
    const double ratio = target[t] / draft[t];
    const double next = block ? std::min(1.0, a * ratio) : a * std::min(1.0, ratio);
    std::vector<int32_t> longer = prefix;
    longer.push_back(static_cast<int32_t>(t));
    mean += weight * draft[t] * next +
            MeanAccepted(p, q, n - 1, block, longer, weight * draft[t], next);
  }
  return mean;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_VERIFY_REFERENCE_H_
