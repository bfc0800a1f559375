// verify: which draft tokens a target model would have drawn too, and the token after them
// (speculative decoding).
#ifndef LOGITD_KERNELS_VERIFY_H_
#define LOGITD_KERNELS_VERIFY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/sample.h"

namespace logitd {

// What is known of how a draft token was drawn.
enum class DraftKind : int32_t {
  kGreedy = 0,  // nothing, or it was certain
  kList = 1,    // from `count` tokens with probabilities; all others had none
  kDense = 2,   // from the whole vocabulary, a probability for each token
};

// The draft token of one row of logits. The last row of a sequence has none, and its draft is not
// looked at.
struct VerifyDraft {
  int64_t first_id;    // kList: draft_ids[first_id, first_id + count), strictly ascending
  int64_t first_prob;  // draft_probs[first_prob, + count); kDense: [first_prob, + vocab)
  int32_t token;       // 0..vocab-1
  int32_t count;       // kList: 1..vocab
  DraftKind kind;
  int32_t unused;  // 0
};
static_assert(sizeof(VerifyDraft) == 32);

// One sequence: rows [first_row, first_row + rows) of the logits, the target's at rows - 1 draft
// tokens and after the last of them. All bytes zero means: skip it, write nothing.
struct VerifySequence {
  int64_t first_row;
  int32_t rows;    // drafts + 1; 0 = skip
  int32_t unused;  // 0
};

// Emits, for every sequence, tokens as if each were drawn by `sample` from the target alone: the
// accepted drafts, then one more.
//
// With p the distribution that `sample` would draw a row from, by all of the row's parameters, and
// q the draft's: rows are gone through in order.
//
//   kGreedy: t is the token `sample` draws from the row. The draft is accepted where it is t, else
//     t is the one more. So tokens are, bit by bit, those of `sample` called token by token.
//   others: the draft d is accepted with probability min(1, p_d / q_d); else the one more is drawn
//     from max(p - q, 0), normalised.
//
// After the last draft the one more is what `sample` draws from the last row.
// Either way each token has probability p given those before it, provided that d was drawn from q
// and that q does not depend on the row's random bits.
//
// A row's history, bias, mask and position are those for its own place: the caller counts earlier
// drafts into the history of later rows.
//
// Integers (kernels/draw.h): W_i as in a filtered row of `sample`, also where the row is
// unfiltered, S their sum over the support; Q_i = q_i S rounded to nearest, ties to even, in
// double; q that is NaN or negative counts as 0, above 1 as 1. A greedy row has the one W = 2^43. d
// is accepted where floor(CoinBits(seed, position) Q_d / 2^64) < W_d. Else, over R_i = max(W_i -
// Q_i, 0), the lowest i with sum_{j <= i} R_j > floor(UniformBits(seed, position) sum R / 2^64);
// where sum R is 0, over W.
//
// Per row the outputs are those of `sample` for the token emitted there: the draft, or the one
// more. Rows behind the one more are kNotReached: token -1, rank 0, ids -1, log-probabilities -inf,
// logsumexp NaN. A row that `sample` would refuse ends its sequence: no token is emitted there.
//
// A sequence's bits depend on its own rows, parameters and drafts alone. Backends agree as in
// `sample`.
// Source: Leviathan, Kalman & Matias, Fast inference from transformers via speculative decoding,
// arXiv:2211.17192.
//
// All pointers are in the memory of the backend that runs the op.
struct VerifyArgs {
  SampleArgs sample;                          // rows, lists and outputs, per row of logits
  const VerifyDraft* drafts = nullptr;        // [rows]
  const int32_t* draft_ids = nullptr;         // all lists together
  const float* draft_probs = nullptr;         // all probabilities together
  const VerifySequence* sequences = nullptr;  // [sequence_count]; every active row is in one
  int64_t sequence_count = 0;
  int32_t* accepted = nullptr;  // [sequence_count], drafts accepted; the one more is at that row
};

// What a caller may ask for, as it came over a border.
struct VerifyRequest {
  SampleRequest sample;
  absl::Span<const VerifyDraft> drafts;  // one for each row
  absl::Span<const int32_t> draft_ids;
  absl::Span<const float> draft_probs;
  absl::Span<const VerifySequence> sequences;  // together all rows, in order, none skipped
};

// OK, or INVALID_ARGUMENT naming the field, the row, the value and what is allowed. Shared by both
// backends; below it nothing is checked again. Thread-safe.
absl::Status CheckVerify(const VerifyRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_VERIFY_H_
