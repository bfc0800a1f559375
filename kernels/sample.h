// sample: one token out of every row, by the row's own parameters, with log-probabilities.
#ifndef LOGITD_KERNELS_SAMPLE_H_
#define LOGITD_KERNELS_SAMPLE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "kernels/types.h"

namespace logitd {

// The logits that log-probabilities, top tokens and the rank refer to.
enum class LogprobMode : int32_t {
  kRaw = 0,        // as sent, at temperature 1
  kProcessed = 1,  // after the whole pipeline, renormalised over what may be drawn
};

// Added to the logit of a token.
struct SampleBias {
  int32_t id;   // 0..vocab-1, each token at most once in a row
  float value;  // not NaN; -inf bans the token
};

// Limits of one row.
inline constexpr int32_t kMaxTopLogprobs = 128;
inline constexpr int32_t kMaxExtraIds = 1024;
inline constexpr int32_t kMaxHistory = 1 << 20;

// 32-bit words of one row's allowed-token mask.
constexpr int64_t MaskWords(int64_t vocab) { return (vocab + 31) / 32; }

// What one row asks for, and where its lists and answers are. All bytes zero: the row is skipped,
// and nothing is written for it.
struct SampleRow {
  uint64_t seed;              // the sequence of random numbers
  uint64_t position;          // the place in it; a decode loop counts it up
  int64_t first_history;      // history[first_history, first_history + history_count)
  int64_t first_bias;         // bias[first_bias, first_bias + bias_count)
  int64_t first_extra;        // extra_ids[first_extra, first_extra + extra_count)
  int64_t first_mask_word;    // mask_words[first_mask_word, + MaskWords(vocab)); -1 = no mask
  int64_t first_top_entry;    // answers [first_top_entry, first_top_entry + top_logprobs)
  int64_t first_extra_entry;  // answers [first_extra_entry, first_extra_entry + extra_count)
  int32_t active;             // 1; 0 = skip the row
  float temperature;          // finite, >= 0; 0 = the highest logit, nothing random
  int32_t top_k;              // >= -1; -1, 0, and vocab or more = off
  float top_p;                // (0, 1]; 1 = off
  float min_p;                // [0, 1]; 0 = off
  float repetition;           // finite, > 0; 1 = off
  float presence;             // finite; 0 = off
  float frequency;            // finite; 0 = off
  int32_t history_count;      // 0..kMaxHistory; each token as often as it was seen
  int32_t bias_count;         // 0..vocab
  int32_t extra_count;        // 0..kMaxExtraIds
  int32_t top_logprobs;       // 0..min(kMaxTopLogprobs, vocab)
  LogprobMode logprob_mode;
  bool want_rank;  // the token's rank is reported; it may cost a further look at the row
};
static_assert(sizeof(SampleRow) == 120);

inline constexpr ParamRange kTopLogprobs = {.low = 0, .high = kMaxTopLogprobs, .up_to_vocab = true};
// The parameters of a row: name on the wire, member, default, allowed range.
inline constexpr RowParam<SampleRow> kSampleParams[] = {
    {"seed", &SampleRow::seed, 0, kFinite},  // stays first: the server checks that it was sent
    {"position", &SampleRow::position, 0, kFinite},
    {"temperature", &SampleRow::temperature, 1, kZeroOrMore},
    {"top_k", &SampleRow::top_k, 0, {.low = -1}},
    {"top_p", &SampleRow::top_p, 1, {.low = 0, .high = 1, .above_low = true}},
    {"min_p", &SampleRow::min_p, 0, {.low = 0, .high = 1}},
    {"repetition_penalty", &SampleRow::repetition, 1, kAboveZero},
    {"presence_penalty", &SampleRow::presence, 0, kFinite},
    {"frequency_penalty", &SampleRow::frequency, 0, kFinite},
    {"top_logprobs", &SampleRow::top_logprobs, 0, kTopLogprobs},
    {"logprob_mode", &SampleRow::logprob_mode, 0, {.low = 0, .high = 1, .names = "raw, processed"}},
    {"want_rank", &SampleRow::want_rank, 0, {.low = 0, .high = 1}},
};

// True where step 6 below cuts.
constexpr bool TopKIsOn(const SampleRow& row, int64_t vocab) {
  return row.top_k > 0 && row.top_k < vocab;
}

// Draws one token for every row of `logits`. With x the row as sent, the steps are, in this order:
//
//   1. bias         x_i += value
//   2. penalties    for each token in the history, seen n times:
//                   x = x > 0 ? x / repetition : x * repetition; x -= frequency * n; x -= presence
//   3. mask         x_i = -inf where bit i is 0 (bit i % 32, least significant first, of word i/32)
//   4. temperature  z = x / temperature; max is the largest z
//   5. min_p        keeps z_i >= max + ln(min_p)
//   6. top_k        keeps the first k by (x descending, index ascending)
//   7. top_p        keeps the shortest prefix, in that order, whose share of the weight of what 5
//                   and 6 left is >= top_p; at least one token
//   8. draw         with w = exp(z - max), the lowest i of what 7 left, in index order, with
//                   sum_{j <= i} w_j > UniformBits(seed, position) / 2^64 * sum w
//
// Steps 1 and 2 round to f32 after every operation. Where infinities of both signs meet, the result
// is -inf: a ban wins. Equal logits (-0 equals +0) rank by ascending index.
//
// Temperature 0 is greedy: the token is the highest logit after step 3, the lowest index of equals,
// and steps 5 to 8 do nothing. A temperature below kLeastTemperature acts as kLeastTemperature
// everywhere, log-probabilities included.
//
// The support is the set of tokens that may be drawn. -inf is never in it. +inf is certain: where
// there is one, the +inf are the support, with equal weights. A row is filtered where step 5, 6 or
// 7 is on. A filtered row also keeps nothing below z_i = max + kLogLeastWeight, as if min_p were at
// least 2^-44: a lower weight rounds to 0. The support of an unfiltered row is every token above
// -inf. No filter has a cap on candidates. Every token is drawn at its true rate, to a relative
// 4e-6 and an absolute 2^-43.
//
// Weights (kernels/draw.h has the constants). A filtered row: integers w_i = round(exp(z_i - max) *
// 2^43), so every sum is exact. Step 7's whole is the sum of the integers where 5 or 6 is on, else
// the sum over the row by cells (below) times 2^43. An unfiltered row is drawn in two steps. Cells
// are 1024 tokens, counted from token 0, each with its maximum m_c and s_c = sum exp((x - m_c) /
// temperature). P_c is the prefix sum of s_c exp((m_c - max x) / temperature) in double, P the last
// one, and u the upper 53 of the 64 bits as a fraction. The cell is the first one with P_c > u P.
// Inside it, the weights are integers relative to m_c, and the target is floor((u P - P_(c-1)) /
// (P_c - P_(c-1)) * their sum), at most that sum less 1.
//
// Log-probabilities. Raw: x_i - logsumexp(x) of the row as sent. Processed: of the distribution
// that step 8 draws from; -inf outside the support; 0 for the token of a greedy row. Several +inf
// share probability. The top tokens are the first top_logprobs by (logit descending, index
// ascending) of the mode's logits (kRaw: as sent; kProcessed: after step 3). They include tokens
// outside the support, with -inf. The rank is 1 + the number of tokens before the drawn one in that
// order, and 0 for a row that does not want it.
//
// NaN anywhere in the row as sent, masked or not: kNanLogit with the lowest NaN index. Nothing left
// after step 3: kEmptySupport. Such a row has token -1, rank 0, ids -1 and every log-probability
// -inf; its logsumexp is NaN, or that of the row as sent. Other rows are not affected.
//
// A row's bits depend only on that row and its parameters: not on the batch, its place in it, the
// row stride, the alignment or the stream. Between backends, SIMD widths (from 4 lanes) and
// architectures:
//
//   ids, ranks, greedy tokens, and what min_p and top_k keep are equal.
//   |log-probability error| <= 4e-6 max(1, |log-probability|), against double precision; logsumexp
//   is as in softmax_topk.
//   The token, and what top_p keeps, are equal unless a border, which is a prefix sum of the exact
//   weights, is within a share e of the whole sum from its goal. With D the mean of max - z under
//   the row's distribution, e is
//     3e-7 + 2e-7 D + vocab 2^-44   for a filtered row,
//     3e-6 + 5e-7 D                 for an unfiltered row,
//     the sum of both               for what top_p keeps where steps 5 and 6 are off.
//   docs/semantics.md derives e, and says what remains where rounding errors average out.
//
// All pointers are in the memory of the backend that runs the op.
struct SampleArgs {
  TensorView logits;                     // [rows, vocab], f32 | f16 | bf16
  const SampleRow* rows = nullptr;       // [rows]
  const int32_t* history = nullptr;      // token ids of all rows; null: no row has any
  const SampleBias* bias = nullptr;      // of all rows; null: no row has any
  const int32_t* extra_ids = nullptr;    // token ids whose log-probability is wanted, of all rows
  const uint32_t* mask_words = nullptr;  // masks of all rows
  // False: no row has bias, penalties or a mask. It picks the variant, never the bits.
  bool edited = true;
  int32_t* tokens = nullptr;        // [rows]
  float* logprobs = nullptr;        // [rows], natural log, of the token
  int32_t* ranks = nullptr;         // [rows], of the token, from 1; 0: not wanted
  float* logsumexp = nullptr;       // [rows], natural log, of the row as sent
  int32_t* top_ids = nullptr;       // [top entries]
  float* top_logprobs = nullptr;    // [top entries]
  float* extra_logprobs = nullptr;  // [extra entries], in the order of the ids
  RowStatus* status = nullptr;      // [rows]
};

// The arguments of the rows from `first` on. The logits stay as they are.
inline SampleArgs RowsFrom(SampleArgs args, int64_t first) {
  args.rows += first;
  args.tokens += first;
  args.logprobs += first;
  args.ranks += first;
  args.logsumexp += first;
  args.status += first;
  return args;
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
