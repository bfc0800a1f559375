// verify: which draft tokens a target model accepts, and the bonus token after them (speculative
// decoding).
#ifndef LOGITD_KERNELS_VERIFY_H_
#define LOGITD_KERNELS_VERIFY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/sample.h"

namespace logitd {

// How a draft token was drawn, as far as is known.
enum class DraftKind : int32_t {
  kGreedy = 0,  // nothing is known, or it was certain
  kList = 1,    // from `count` tokens with probabilities; all others had probability 0
  kDense = 2,   // from the whole vocabulary, with a probability for each token
};

// The draft token of one row of logits. The last row of a sequence has none; its VerifyDraft is
// ignored.
struct VerifyDraft {
  int64_t first_id;    // kList: draft_ids[first_id, first_id + count), strictly ascending
  int64_t first_prob;  // draft_probs[first_prob, + count); kDense: [first_prob, + vocab)
  int32_t token;       // 0..vocab-1
  int32_t count;       // kList: 1..vocab
  DraftKind kind;
  int32_t unused;  // 0
};
static_assert(sizeof(VerifyDraft) == 32);

// One sequence: rows [first_row, first_row + rows) of the logits. They are the target's logits at
// rows - 1 draft tokens, and after the last of them. All bytes zero: the sequence is skipped, and
// nothing is written for it.
struct VerifySequence {
  int64_t first_row;
  int32_t rows;   // drafts + 1; 0 = skip
  int32_t block;  // 1: block verification, without drafts of kGreedy; else 0
};

// Emits tokens for every sequence: the accepted drafts, then one bonus token. Each has the
// distribution from which `sample` draws a token from the target.
//
// p is the distribution from which `sample` draws a token of the row, by all of the row's
// parameters; q is the draft's. Rows are taken in order.
//
//   kGreedy: t is the token that `sample` draws from the row. The draft is accepted where it equals
//     t; else t is the bonus token. So the tokens are, bit by bit, those of `sample` called token
//     by token.
//   others: the draft d is accepted with probability min(1, p_d / q_d); else the bonus token is
//     drawn from max(p - q, 0), normalised.
//
// Where all drafts are accepted, the bonus token is the one that `sample` draws from the last row.
// In both cases each token has probability p given the tokens before it, provided that d was drawn
// from q and that q does not depend on the row's random bits.
//
// Block verification decides about all drafts of a sequence together. The tokens have the same
// joint distribution, and on average as many drafts or more are accepted. With rows 0..n, and d_i
// the draft of row i - 1:
//
//   s_0 = 1, s_i = min(1, s_(i-1) p(d_i) / q(d_i)) with p, q of row i - 1
//   h_i = R_i / (R_i + 1 - s_i), R_i = sum max(s_i p - q, 0) over row i; h_n = s_n
//
// Every i >= 1 is chosen with probability h_i. The largest i that is chosen is how many drafts are
// accepted; 0 where none is. The bonus token is drawn from max(s_i p - q, 0) of row i, normalised;
// at row n it is that of `sample`. A row that `sample` refuses is the last of its sequence: drafts
// after it count as not sent.
//
// A row's draws are refused. xtc is refused with a draft of the others, whose coin it would use,
// and so is a watermark, whose token such a draft need not be. typical_p and the other filters
// shape p.
//
// A row's history, bias, mask and position are those of its own place: the caller counts earlier
// drafts into the history of later rows.
//
// Integers (kernels/draw.h): W_i as in a filtered row of `sample`, also where the row is
// unfiltered; S is their sum over the support. Q_i = q_i S rounded to nearest, ties to even, in
// double; a q that is NaN or negative counts as 0, one above 1 as 1. A greedy row has W = 2^43 for
// its one token. d is accepted where floor(CoinBits(seed, position) Q_d / 2^64) < W_d. Else, with
// R_i = max(W_i - Q_i, 0), the token is the lowest i with sum_{j <= i} R_j >
// floor(UniformBits(seed, position) sum R / 2^64); where sum R is 0, W takes the place of R, and if
// the token is then d, the draft counts as accepted.
//
// Block verification: s is a double. s_i = min(1, t / Q_d), with t = s_(i-1) W_d, each operation
// rounded; 0 where t is 0, else 1 where Q_d is 0. R_j = max(s_i W_j - Q_j, 0), with the product
// rounded to nearest, ties to even. i is chosen by the coin of row i - 1: where s_i = 1, or
// floor(coin D / 2^64) < sum R, with D = sum R + ((1 - s_i) S, rounded likewise); n where s_n = 1,
// or coin < floor(s_n 2^64). The bonus token as above, by the bits of its row.
//
// The outputs of a row are those of `sample` for the token emitted there: the draft, or the bonus
// token. Rows after the last one reached are kNotReached: token -1, rank 0, ids -1,
// log-probabilities -inf, logsumexp NaN. A row that `sample` refuses ends its sequence without a
// token.
//
// A sequence's bits depend only on its own rows, parameters and drafts. Backends agree as in
// `sample`; by block verification they may choose otherwise where a coin, as a fraction, is within
// 1e-5 i / (R_i + 1 - s_i) of h_i.
// Source: Leviathan, Kalman & Matias, Fast inference from transformers via speculative decoding,
// arXiv:2211.17192. Block verification: Sun et al., Block verification accelerates speculative
// decoding, arXiv:2403.10444.
//
// All pointers are in the memory of the backend that runs the op.
struct VerifyArgs {
  SampleArgs sample;                          // rows, lists and outputs, per row of logits
  const VerifyDraft* drafts = nullptr;        // [rows]
  const int32_t* draft_ids = nullptr;         // of all lists
  const float* draft_probs = nullptr;         // of all drafts
  const VerifySequence* sequences = nullptr;  // [sequence_count]; every active row is in one
  int64_t sequence_count = 0;
  bool blocks = false;          // of any sequence; needs sample.edited, sample.asks_more
  int32_t* accepted = nullptr;  // [sequence_count], drafts accepted; the bonus token's row
};

// A request as it came in.
struct VerifyRequest {
  SampleRequest sample;
  absl::Span<const VerifyDraft> drafts;  // one for each row
  absl::Span<const int32_t> draft_ids;
  absl::Span<const float> draft_probs;
  absl::Span<const VerifySequence> sequences;  // cover all rows, in order, none skipped
};

// OK, or INVALID_ARGUMENT with the field, the row, the value and what is allowed. Both backends
// rely on it and check nothing again. Thread-safe.
absl::Status CheckVerify(const VerifyRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_VERIFY_H_
