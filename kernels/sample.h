// sample: one token out of every row, by the row's own parameters, with log-probabilities.
#ifndef LOGITD_KERNELS_SAMPLE_H_
#define LOGITD_KERNELS_SAMPLE_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/sampling_rules.h"
#include "kernels/types.h"

namespace logitd {

// Added to the logit of a token.
struct SampleBias {
  int32_t id;   // 0..vocab-1, each token at most once in a row
  float value;  // not NaN; -inf bans the token
};

// 32-bit words of one row's allowed-token mask.
constexpr int64_t MaskWords(int64_t vocab) { return (vocab + 31) / 32; }

// Draws one token for every row of `logits`, by the steps of kernels/sampling_rules.h, which says
// what a row's parameters mean.
//
// Log-probabilities. Raw: x_i - logsumexp(x) of the row as sent. Processed: of the distribution
// that the token is drawn from; -inf outside the support; 0 for the token of a greedy row. Several
// +inf share probability. The top tokens are the first top_logprobs by (logit descending, index
// ascending) of the mode's logits (kRaw: as sent; kProcessed: after the edits). They include tokens
// outside the support, with -inf. The rank is 1 + the number of tokens before the drawn one in that
// order, and 0 for a row that does not want it.
//
// Entropies, where wanted: -sum p ln p in nats of the distribution that the token is drawn from (0
// for a greedy row), and of the row as sent at temperature 1. n of +inf: ln n. NaN where nothing is
// drawn, except that of a row as sent without NaN and with a logit above -inf. Else 0.
//
// A row with want_support gets the size of its support, and the first want_support tokens of it by
// (logit after the edits descending, index ascending), with their processed log-probabilities in
// every mode. The support of a greedy row is its token.
//
// A row with draws n gets n tokens, drawn independently from the same distribution, with their
// log-probabilities of its mode. The first is its token. A greedy row repeats its token.
//
// The log-probabilities of a row with a watermark are those without it: over keys, or over
// contexts, a token is drawn at the rate that they say, up to vocab 2^-52 in all.
//
// NaN anywhere in the row as sent, masked or not: kNanLogit with the lowest NaN index. Nothing left
// after the edits: kEmptySupport. Such a row has token -1, rank 0, ids -1 and every log-probability
// -inf; its support has size 0; its logsumexp is NaN, or that of the row as sent. Other rows are
// not affected.
//
// A row's bits depend only on that row and its parameters: not on the batch, its place in it, the
// row stride, the alignment or the stream. Between backends, SIMD widths (from 4 lanes) and
// architectures:
//
//   ids, ranks, greedy tokens, and what the filters before top_p keep are equal.
//   |log-probability error| <= 4e-6 max(1, |log-probability|), against double precision; logsumexp
//   is as in softmax_topk. |entropy error| <= 4e-6 max(1, entropy). Where typical_p and xtc leave a
//   share s of the weight before them, an error of vocab 2^-44 / s adds to a processed one.
//   The token, and what top_p keeps, are equal unless a border, which is a prefix sum of the exact
//   weights, is within a share e of the whole sum from its goal. With D the mean of max - z under
//   the row's distribution, e is
//     3e-7 + 2e-7 D + vocab 2^-44   for a filtered row,
//     3e-6 + 5e-7 D                 for an unfiltered row,
//     the sum of both               for what top_p keeps where it is the only filter.
//   docs/semantics.md derives e, and says what remains where rounding errors average out.
//   The token of a row with a watermark is equal where what the filters keep is, unless the two
//   largest scores are within 1e-13 max(1, max - z) of each other.
//
// All pointers are in the memory of the backend that runs the op.
struct SampleArgs {
  TensorView logits;                     // [rows, vocab], f32 | f16 | bf16
  const SampleRow* rows = nullptr;       // [rows]
  const int32_t* history = nullptr;      // token ids of all rows; null: no row has any
  const SampleBias* bias = nullptr;      // of all rows; null: no row has any
  const int32_t* extra_ids = nullptr;    // token ids whose log-probability is wanted, of all rows
  const uint32_t* mask_words = nullptr;  // masks of all rows
  // False: no row has bias, penalties or a mask, and none AsksMore. It picks the variant, never the
  // bits; support_size, entropies and raw_entropies are then not written, and may be null.
  bool edited = true;
  // False: no row AsksMore, and `edited` is true only for edits. It too picks only the variant.
  bool asks_more = true;
  int32_t* tokens = nullptr;          // [rows]
  float* logprobs = nullptr;          // [rows], natural log, of the token
  int32_t* ranks = nullptr;           // [rows], of the token, from 1; 0: not wanted
  float* logsumexp = nullptr;         // [rows], natural log, of the row as sent
  int32_t* top_ids = nullptr;         // [top entries]
  float* top_logprobs = nullptr;      // [top entries]
  float* extra_logprobs = nullptr;    // [extra entries], in the order of the ids
  RowStatus* status = nullptr;        // [rows]
  int32_t* support_size = nullptr;    // [rows], tokens that can be drawn; 0 where not wanted
  int32_t* support_ids = nullptr;     // [support entries]; -1 beyond the support
  float* support_logprobs = nullptr;  // [support entries], of the distribution drawn from
  float* entropies = nullptr;         // [rows], of the distribution drawn from; 0 where not wanted
  float* raw_entropies = nullptr;     // [rows], of the row as sent; 0 where not wanted
  int32_t* draw_tokens = nullptr;     // [draw entries], in the order of the draws
  float* draw_logprobs = nullptr;     // [draw entries]
};

// The arguments of the rows from `first` on. The logits stay as they are.
inline SampleArgs RowsFrom(SampleArgs args, int64_t first) {
  args.rows += first;
  args.tokens += first;
  args.logprobs += first;
  args.ranks += first;
  args.logsumexp += first;
  args.status += first;
  if (args.edited) {
    args.support_size += first;
    args.entropies += first;
    args.raw_entropies += first;
  }
  return args;
}

// Writes the answers of row r, which asks for `ask`, where no token is drawn: token -1, rank 0, an
// empty support, ids -1, log-probabilities -inf, entropies NaN; its logsumexp is the caller's. By
// `threads` threads, of which this is one.
constexpr void Refuse(const SampleArgs& args, int64_t r, const SampleRow& ask, RowStatus status,
                      int thread = 0, int threads = 1) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  if (thread == 0) {
    args.status[r] = status;
    args.tokens[r] = -1;
    args.logprobs[r] = kNothing;
    args.ranks[r] = 0;
    if (args.edited) {
      args.support_size[r] = 0;
      args.entropies[r] = args.raw_entropies[r] =
          ask.want_entropy ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
  }
  for (int i = thread; i < ask.top_logprobs; i += threads) {
    args.top_ids[ask.first_top_entry + i] = -1;
    args.top_logprobs[ask.first_top_entry + i] = kNothing;
  }
  for (int i = thread; i < ask.extra_count; i += threads)
    args.extra_logprobs[ask.first_extra_entry + i] = kNothing;
  for (int i = thread; i < ask.want_support; i += threads) {
    args.support_ids[ask.first_support_entry + i] = -1;
    args.support_logprobs[ask.first_support_entry + i] = kNothing;
  }
  for (int i = thread; i < ask.draws; i += threads) {
    args.draw_tokens[ask.first_draw_entry + i] = -1;
    args.draw_logprobs[ask.first_draw_entry + i] = kNothing;
  }
}

// A request as it came in. The check ignores `first_*_entry` of the rows: the server sets them.
struct SampleRequest {
  int64_t vocab = 0;                   // 1..kMaxVocab
  absl::Span<const SampleRow> params;  // one for each row, each active
  absl::Span<const int32_t> history;
  absl::Span<const SampleBias> bias;
  absl::Span<const int32_t> extra_ids;
  absl::Span<const uint32_t> mask_words;
};

// OK, or INVALID_ARGUMENT with the field, the row, the value and what is allowed. Checks only the
// parameters: CheckLogits checks logits, CheckHidden hidden states. Thread-safe.
absl::Status CheckSample(const SampleRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_SAMPLE_H_
