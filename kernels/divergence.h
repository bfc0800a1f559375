// divergence: how far two rows of logits over one vocabulary are from each other.
#ifndef LOGITD_KERNELS_DIVERGENCE_H_
#define LOGITD_KERNELS_DIVERGENCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cross_entropy.h"
#include "kernels/row_params.h"
#include "kernels/types.h"

namespace logitd {

inline constexpr int32_t kMaxDivergenceTopLogprobs = 1024;

// One row's parameters, and the places of its lists of answers. All bytes zero: the row is skipped,
// and nothing is written for it.
struct DivergenceRow {
  int32_t active;                     // 1; 0 = skip the row
  int32_t target;                     // 0..vocab-1, or kIgnoredTarget
  float temperature;                  // finite, > 0
  float reference_temperature;        // finite, > 0
  int32_t top_logprobs;               // 0..min(kMaxDivergenceTopLogprobs, vocab)
  int32_t reference_top_logprobs;     // likewise
  int64_t first_top_entry;            // answers [first_top_entry, first_top_entry + top_logprobs)
  int64_t first_reference_top_entry;  // likewise
};
static_assert(sizeof(DivergenceRow) == 40);

inline constexpr ParamRange kDivergenceTops = {
    .low = 0, .high = kMaxDivergenceTopLogprobs, .up_to_vocab = true};
// The parameters of a row: name on the wire, member, default, allowed range.
inline constexpr RowParam<DivergenceRow> kDivergenceParams[] = {
    {"temperature", &DivergenceRow::temperature, 1, kAboveZero},
    {"reference_temperature", &DivergenceRow::reference_temperature, 1, kAboveZero},
    {"top_logprobs", &DivergenceRow::top_logprobs, 0, kDivergenceTops},
    {"reference_top_logprobs", &DivergenceRow::reference_top_logprobs, 0, kDivergenceTops},
};

// The numbers that make ln p and ln q of a row, without the rounding of a logsumexp:
// ln p_i = (logit_i - max) / temperature - log_sum. The form in which ops hand them on.
struct DivergenceNorms {
  float max, reference_max;           // of the row, as sent
  double log_sum, reference_log_sum;  // ln sum exp((logit - max) / temperature)
};

// Output arrays, shared with linear_divergence. Each is [rows], except the top tokens, which are
// [entries]; logarithms are natural.
struct DivergenceAnswers {
  float* forward_kl = nullptr;
  float* reverse_kl = nullptr;
  float* entropy = nullptr;
  float* reference_entropy = nullptr;
  float* logsumexp = nullptr;
  float* reference_logsumexp = nullptr;
  float* target_logprob = nullptr;
  float* reference_target_logprob = nullptr;
  RowStatus* status = nullptr;
  // Those of an input of which no row wants top tokens may be null.
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
  int32_t* reference_top_ids = nullptr;
  float* reference_top_logprobs = nullptr;
  DivergenceNorms* norms = nullptr;  // not wanted where null; unspecified of a row with NaN
};

// Writes, for every row, the divergences of two distributions: p = softmax(logits / temperature)
// and q = softmax(reference_logits / reference_temperature). A temperature below kLeastTemperature
// acts as that one.
//
//   forward_kl     = KL(p || q) = sum p (ln p - ln q)
//   reverse_kl     = KL(q || p) = sum q (ln q - ln p)
//   entropy        = - sum p ln p                       reference_entropy of q, in nats
//   logsumexp      = ln sum exp(logits / temperature)   reference_logsumexp of the other row
//   target_logprob = ln p of the target                 reference_target_logprob: ln q of it
//   top_logprobs   = ln p of the row's top tokens       reference_top_logprobs: ln q of q's own
//
// Top tokens are the first by (logit descending, index ascending): -0 equals +0, and the logits are
// compared as sent. A log-probability has the same bits whether the token is a target or a top one.
//
// Divergences and entropies are never below 0; a row beside itself, at one temperature, has
// divergences of exactly 0. The log-probabilities of an ignored target are 0.
//
// -inf has probability 0, and only -inf: it adds nothing to a sum that weighs it. A token that q
// has not and p has makes forward_kl +inf, however small its p; reverse_kl likewise. +inf counts
// as certain: n of them in a row have probability 1/n each and all else has 0; its logsumexp is
// +inf. A row with nothing but -inf is empty: where one of the two is, the status is kEmptySupport,
// both divergences are NaN, and the empty row has entropy NaN, logsumexp -inf, target
// log-probability -inf, and the top tokens 0, 1, ... with log-probability -inf; the answers of the
// other are those it always has. NaN anywhere in the two rows: kNanLogit with the lowest token id
// that is NaN in either; all answers NaN, also those of an ignored target, and all top ids -1.
// Other rows are not affected.
//
// A row's bits depend only on its two rows and what it asks for. Bits may differ between backends,
// SIMD widths and GPU architectures. Against double precision, from the same logits: |error of a
// logsumexp| <= 2e-6 max(1, |logsumexp|); other |errors| <= 4e-6 max(1, m), where m is the larger
// of the answer's own size and ln V. A token whose weight is below 2^-120 of the largest of its
// cell adds nothing, also where its logits are more than 2^100 apart. A result beyond f32's range
// is infinite. Source: Kullback & Leibler, On information and sufficiency, 1951.
//
// All pointers are in the memory of the backend that runs the op.
struct DivergenceArgs {
  TensorView logits;                    // [rows, vocab], f32 | f16 | bf16
  TensorView reference_logits;          // the same shape and type; a stride of its own
  const DivergenceRow* rows = nullptr;  // [rows]
  // The largest top_logprobs of any row, or more, and that of the reference: they pick the variant,
  // never the bits. 0: top tokens of that input are not looked for, whatever rows say.
  int32_t max_top_logprobs = 0;
  int32_t max_reference_top_logprobs = 0;
  DivergenceAnswers answers;
};

// True where any row may want top tokens.
constexpr bool WantsTops(const DivergenceArgs& args) {
  return args.max_top_logprobs > 0 || args.max_reference_top_logprobs > 0;
}

// The arguments of the rows from `first` on. The logits stay as they are.
inline DivergenceArgs RowsFrom(DivergenceArgs args, int64_t first) {
  DivergenceAnswers& to = args.answers;
  args.rows += first;
  for (float** values :
       {&to.forward_kl, &to.reverse_kl, &to.entropy, &to.reference_entropy, &to.logsumexp,
        &to.reference_logsumexp, &to.target_logprob, &to.reference_target_logprob}) {
    *values += first;
  }
  to.status += first;
  if (to.norms != nullptr) to.norms += first;
  return args;
}

// A request as it came in. The check ignores `first_*_entry` of the rows: the server sets them.
struct DivergenceRequest {
  int64_t vocab = 0;                       // 1..kMaxVocab
  absl::Span<const DivergenceRow> params;  // one for each row, each active
};

// OK, or INVALID_ARGUMENT with the field, the row, the value and what is allowed. Checks only the
// parameters: CheckLogits checks logits, CheckHidden hidden states. Thread-safe.
absl::Status CheckDivergence(const DivergenceRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_DIVERGENCE_H_
