// How many tokens of a row's order sample needs.
#ifndef LOGITD_KERNELS_KEPT_TOKENS_H_
#define LOGITD_KERNELS_KEPT_TOKENS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/sample.h"

namespace logitd {

// Where a row has no edits, no ids whose log-probability is wanted, and is greedy or has a top_k of at
// most kMaxTopLogprobs, its draw and its report need only the first tokens by (logit descending, index
// ascending), besides the logsumexp. Returns how many, 1..kMaxTopLogprobs; a vocabulary may have no
// more than that, and then the row's top_k is off. 0: the row may need others too.
inline int32_t KeptTokens(const SampleRow& row) {
  const bool greedy = row.temperature == 0;
  const bool few = greedy || (row.top_k > 0 && row.top_k <= kMaxTopLogprobs);
  const bool edited = row.first_mask_word >= 0 || row.bias_count > 0 || row.history_count > 0;
  if (!few || edited || row.extra_count > 0) return 0;
  return std::max({1, row.top_logprobs, greedy ? 0 : row.top_k});
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_KEPT_TOKENS_H_
