// sample: one token out of every row, by the row's own parameters, with log-probabilities.
#ifndef LOGITD_KERNELS_SAMPLE_H_
#define LOGITD_KERNELS_SAMPLE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "kernels/types.h"

namespace logitd {

// Which logits the log-probabilities, the top tokens and the rank are of.
enum class LogprobMode : int32_t {
  kRaw = 0,        // as sent, at temperature 1
  kProcessed = 1,  // after the whole pipeline, renormalised over what may be drawn
};

// Added to the logit of a token.
struct SampleBias {
  int32_t id;   // 0..vocab-1, once in a row
  float value;  // not NaN; -inf bans the token
};

// Limits of one row.
inline constexpr int32_t kMaxTopLogprobs = 128;
inline constexpr int32_t kMaxExtraIds = 1024;
inline constexpr int32_t kMaxHistory = 1 << 20;

// 32-bit words of one row's allowed-token mask.
constexpr int64_t MaskWords(int64_t vocab) { return (vocab + 31) / 32; }

// What one row asks for, and where its lists and answers lie. All bytes zero means: skip this row,
// write nothing for it.
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
  int32_t top_k;              // 0..vocab; 0 and vocab = off
  float top_p;                // (0, 1]; 1 = off
  float min_p;                // [0, 1]; 0 = off
  float repetition;           // finite, > 0; 1 = off
  float presence;             // finite; 0 = off
  float frequency;            // finite; 0 = off
  int32_t history_count;      // 0..kMaxHistory; a token as often as it was seen
  int32_t bias_count;         // 0..vocab
  int32_t extra_count;        // 0..kMaxExtraIds
  int32_t top_logprobs;       // 0..min(kMaxTopLogprobs, vocab)
  LogprobMode logprob_mode;
  int32_t unused;  // 0
};
static_assert(sizeof(SampleRow) == 120);

inline constexpr ParamRange kTopLogprobs = {.low = 0, .high = kMaxTopLogprobs, .up_to_vocab = true};
inline constexpr RowParam<SampleRow> kSampleParams[] = {
    {"seed", &SampleRow::seed, 0, kFinite},  // the first: the server looks whether it was sent
    {"position", &SampleRow::position, 0, kFinite},
    {"temperature", &SampleRow::temperature, 1, kZeroOrMore},
    {"top_k", &SampleRow::top_k, 0, {.low = 0, .up_to_vocab = true}},
    {"top_p", &SampleRow::top_p, 1, {.low = 0, .high = 1, .above_low = true}},
    {"min_p", &SampleRow::min_p, 0, {.low = 0, .high = 1}},
    {"repetition_penalty", &SampleRow::repetition, 1, kAboveZero},
    {"presence_penalty", &SampleRow::presence, 0, kFinite},
    {"frequency_penalty", &SampleRow::frequency, 0, kFinite},
    {"top_logprobs", &SampleRow::top_logprobs, 0, kTopLogprobs},
    {"logprob_mode", &SampleRow::logprob_mode, 0, {.low = 0, .high = 1, .names = "raw, processed"}},
};

// Draws, for every row of `logits`, one token. With x the row as sent, in this order:
//
//   1. bias         x_i += value
//   2. penalties    for each token in the history, seen n times: x > 0 ? x / repetition
//                   : x * repetition; then x -= frequency * n; then x -= presence
//   3. mask         x_i = -inf where bit i is 0 (bit i % 32, least significant first, of word i/32)
//   4. temperature  z = x / temperature, max over what is left
//   5. min_p        keeps z_i >= max + ln(min_p)
//   6. top_k        keeps the first k by (x descending, index ascending)
//   7. top_p        keeps the shortest prefix, in that order, whose share of the weight of what 5
//                   and 6 left is >= top_p; one token at least
//   8. draw         with w = exp(z - max), the lowest i of what 7 left, in index order, with
//                   sum_{j <= i} w_j > UniformBits(seed, position) / 2^64 * sum w
//
// Steps 1 and 2 round to f32 after every operation; where infinities of both signs meet, the result
// is -inf: a ban wins. Temperature 0: after step 3 the highest logit, the lowest index of equals;
// 5 to 8 leave it alone. -inf is never drawn and is in no support. +inf is certain: only the +inf
// of a row are its support, with equal weights. Equal logits (-0 equals +0) rank by ascending
// index. No filter has a cap on candidates. Every token is drawn at its true rate, to a relative
// 4e-6 and an absolute 2^-43.
//
// Weights (kernels/draw.h has the constants). A filtered row (5, 6 or 7 is on): integers
// w_i = round(exp(z_i - max) * 2^43), so every sum is exact; step 7's whole is the integers' sum
// where 5 or 6 is on, else the sum over the row by cells (below) times 2^43. An unfiltered row, in
// two steps: cells of 1024 tokens counted from token 0, each with its maximum m_c and
// s_c = sum exp((x - m_c) / temperature); the first cell with P_c > u P, where P_c is the prefix
// sum of s_c exp((m_c - max) / temperature) in double, P the last of them and u the upper 53 of the
// 64 bits as a fraction; then, inside it, integers relative to m_c and the target floor((u P -
// P_(c-1)) / (P_c - P_(c-1)) * their sum), at most that sum less 1.
//
// Log-probabilities. Raw: x_i - logsumexp(x) of the row as sent. Processed: of the distribution
// step 8 draws from; -inf outside it; 0 for the token of a greedy row. The top tokens are the first
// top_logprobs by (logit descending, index ascending) of the mode's logits (kRaw: as sent;
// kProcessed: after step 3), those outside the support included, with -inf; the rank is
// 1 + the number of tokens before the drawn one in the same order. Several +inf share probability.
//
// NaN anywhere in the row as sent, masked or not: kNanLogit with the lowest NaN index. Nothing left
// after step 3: kEmptySupport. Such a row has token -1, rank 0, ids -1 and every log-probability
// -inf; its logsumexp is NaN, or that of the row as sent. Other rows are untouched.
//
// A row's bits depend on that row and its parameters alone; not on the batch, its place in it, the
// row stride, the alignment or the stream. Between backends, SIMD widths and architectures: tokens,
// ids and ranks agree wherever f32 rounding does not decide (a relative 4e-6 of a weight or a sum
// moves no border); |log-probability error| <= 4e-6 max(1, |log-probability|), and logsumexp is as
// in softmax_topk, against double precision.
//
// All pointers are in the memory of the backend that runs the op.
struct SampleArgs {
  TensorView logits;                     // [rows, vocab], f32 | f16 | bf16
  const SampleRow* rows = nullptr;       // [rows]
  const int32_t* history = nullptr;      // token ids, all rows' together; null: no row has any
  const SampleBias* bias = nullptr;      // all rows' together; null: no row has any
  const int32_t* extra_ids = nullptr;    // token ids whose log-probability is asked for
  const uint32_t* mask_words = nullptr;  // all rows' masks together
  // False: no row has bias, penalties or a mask. Picks the variant, never the bits.
  bool edited = true;
  int32_t* tokens = nullptr;        // [rows]
  float* logprobs = nullptr;        // [rows], natural log, of the token
  int32_t* ranks = nullptr;         // [rows], of the token, from 1
  float* logsumexp = nullptr;       // [rows], natural log, of the row as sent
  int32_t* top_ids = nullptr;       // [top entries]
  float* top_logprobs = nullptr;    // [top entries]
  float* extra_logprobs = nullptr;  // [extra entries], in the order asked
  RowStatus* status = nullptr;      // [rows]
};

// What a caller may ask for, as it came over a border. `first_*_entry` of the rows are not looked
// at: where answers go is for the server to say.
struct SampleRequest {
  int64_t vocab = 0;                   // 1..kMaxVocab
  absl::Span<const SampleRow> params;  // one for each row, each active
  absl::Span<const int32_t> history;
  absl::Span<const SampleBias> bias;
  absl::Span<const int32_t> extra_ids;
  absl::Span<const uint32_t> mask_words;
};

// OK, or INVALID_ARGUMENT naming the field, the row, the value and what is allowed. Checks only the
// parameters: CheckLogits checks logits, CheckHidden hidden states. Thread-safe.
absl::Status CheckSample(const SampleRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_SAMPLE_H_
