// cross_entropy: per-token losses of rows of logits against their targets, and the gradient.
#ifndef LOGITD_KERNELS_CROSS_ENTROPY_H_
#define LOGITD_KERNELS_CROSS_ENTROPY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "kernels/sample.h"
#include "kernels/types.h"

namespace logitd {

// The target of a row that is not counted.
inline constexpr int32_t kIgnoredTarget = -1;

// How label smoothing spreads its weight e.
enum class Smoothing : int32_t {
  kTorch = 0,  // (1 - e) on the target, e / V on every token, the target included
  kMegatron =
      1,  // as kTorch with e V / (V - 1): e / (V - 1) on every token but the target; V = 1: 0
};

// What a row asks for beyond its loss and logsumexp.
inline constexpr int32_t kWantRank = 1;
inline constexpr int32_t kWantEntropy = 2;

// What one row asks for, and where its lists and answers lie. All bytes zero means: skip this row,
// write nothing for it.
struct CrossEntropyRow {
  int64_t first_extra;        // extra_ids[first_extra, first_extra + extra_count)
  int64_t first_top_entry;    // answers [first_top_entry, first_top_entry + top_logprobs)
  int64_t first_extra_entry;  // answers [first_extra_entry, first_extra_entry + extra_count)
  int32_t active;             // 1; 0 = skip the row
  int32_t target;             // 0..vocab-1, or kIgnoredTarget
  float temperature;          // finite, > 0
  float softcap;              // finite, >= 0; 0 = off; 0 where a head is, which has its own
  float label_smoothing;      // [0, 1); 0 = off
  Smoothing smoothing;
  float z_loss;          // finite, >= 0; 0 = off
  int32_t extra_count;   // 0..kMaxExtraIds
  int32_t top_logprobs;  // 0..min(kMaxTopLogprobs, vocab)
  int32_t want;          // kWantRank | kWantEntropy
};
static_assert(sizeof(CrossEntropyRow) == 64);

inline constexpr ParamRange kSmoothings = {.low = 0, .high = 1, .names = "torch, megatron"};
inline constexpr ParamRange kBelowOne = {.low = 0, .high = 1, .below_high = true};
inline constexpr RowParam<CrossEntropyRow> kCrossEntropyParams[] = {
    {"temperature", &CrossEntropyRow::temperature, 1, kAboveZero},
    {"softcap", &CrossEntropyRow::softcap, 0, kZeroOrMore},
    {"label_smoothing", &CrossEntropyRow::label_smoothing, 0, kBelowOne},
    {"smoothing", &CrossEntropyRow::smoothing, 0, kSmoothings},
    {"z_loss", &CrossEntropyRow::z_loss, 0, kZeroOrMore},
    {"top_logprobs", &CrossEntropyRow::top_logprobs, 0, kTopLogprobs},
};

// Where the answers go; shared with linear_cross_entropy. Arrays of what no row wants may be null.
struct CrossEntropyAnswers {
  float* loss = nullptr;            // [rows]
  float* logsumexp = nullptr;       // [rows], natural log
  float* target_logprob = nullptr;  // [rows], natural log
  int32_t* rank = nullptr;          // [rows], of the target, from 1; 0 where not wanted
  float* entropy = nullptr;         // [rows], in nats; 0 where not wanted
  int32_t* top_ids = nullptr;       // [top entries]
  float* top_logprobs = nullptr;    // [top entries]
  float* extra_logprobs = nullptr;  // [extra entries], in the order asked
  RowStatus* status = nullptr;      // [rows]
};

// Writes, for every row of `logits`, the loss of its target.
//
// With l the row as sent, V long, t its target, e its label smoothing (of kMegatron e V / (V - 1)):
//
//   x_i     = l_i, then softcap * tanh(x_i / softcap) where softcap > 0, then x_i / temperature
//   lse     = ln sum exp(x)
//   loss    = (1 - e) (lse - x_t) + e (lse - mean x) + z_loss lse^2
//
// target_logprob = x_t - lse; the rank is 1 + the number of tokens before the target by (logit
// descending, index ascending), where -0 equals +0 and logits are compared before softcap and
// temperature; entropy = - sum p ln p with p = exp(x - lse), 0 ln 0 = 0. Top tokens are the first
// top_logprobs in that order. An ignored row has loss 0, target_logprob 0 and rank 0; all else of
// it is as of any row.
//
// -inf has probability 0: as a target its loss is +inf, and with smoothing so is the row's whatever
// the target. +inf counts as certain: n of them have probability 1/n each and all else 0, logsumexp
// is +inf, entropy ln n, and the loss is -ln of the target's probability where there is neither
// smoothing nor z_loss, else +inf. A softcap makes infinities finite: they are +-softcap. A row of
// -inf alone, without a softcap, is kEmptySupport: logsumexp -inf, loss NaN (0 where ignored),
// entropy NaN, log-probs -inf, top ids 0... in order. NaN anywhere in a row: kNanLogit with the
// lowest NaN index; loss, logsumexp, entropy and log-probabilities NaN (those of the target also
// where ignored), rank 0, ids -1. Other rows are untouched.
// A row's bits depend on that row and what it asks for alone; not on the batch, its place in it,
// the row stride, the alignment, the stream or what other rows want. Bits may differ between
// backends, SIMD widths and GPU architectures; ids and ranks agree everywhere. Against double
// precision, from the same logits: |logsumexp error| <= 2e-6 max(1, |logsumexp|), and |error| <=
// 4e-6 max(1, m) of the losses, log-probabilities and entropies, with m the largest absolute value
// among x_t, mean x and logsumexp (z_loss: times 1 + 2 z_loss m). Source: Milakov & Gimelshein,
// arXiv:1805.02867; label smoothing: Szegedy et al., arXiv:1512.00567; z-loss: Chowdhery et al.,
// PaLM, arXiv:2204.02311.
//
// All pointers are in the memory of the backend that runs the op.
struct CrossEntropyArgs {
  TensorView logits;                      // [rows, vocab], f32 | f16 | bf16
  const CrossEntropyRow* rows = nullptr;  // [rows]
  const int32_t* extra_ids = nullptr;     // token ids whose log-probability is asked for
  // What any row wants, and the largest top_logprobs. Pick the variant, never the bits.
  int32_t want = kWantRank | kWantEntropy;
  int32_t max_top_logprobs = kMaxTopLogprobs;
  CrossEntropyAnswers answers;
};

// Writes d_logits_i = upstream * d loss / d l_i:
//
//   upstream * (p_i - (1 - e) [i = t] - e / V + 2 z_loss lse p_i) / temperature
//            * (1 - tanh(l_i / softcap)^2 where softcap > 0)
//
// Ignored rows: zeros, whatever their logsumexp. Other rows whose logsumexp is not finite: NaN in
// every element, so that none passes unseen. Skipped rows (all zero bytes): nothing is written.
// 16-bit results are rounded to nearest, ties to even, from fp32. Bits as in CrossEntropyArgs.
// Against double precision, from the same logits and logsumexp, before rounding to 16 bits: |error|
// <= a |upstream| / temperature (p_i (1 + 2 z_loss |lse|) + [i = t] + e / V), a = 4e-6, to which a
// softcap, whose x is rounded to fp32, adds 3e-7 softcap / temperature; p_i below 2^-126 may count
// as 0.
//
// All pointers are in the memory of the backend that runs the op.
struct CrossEntropyBackwardArgs {
  TensorView logits;                      // [rows, vocab], f32 | f16 | bf16
  const CrossEntropyRow* rows = nullptr;  // [rows]; lists and wants are not looked at
  const float* logsumexp = nullptr;       // [rows], as the forward wrote it
  const float* upstream = nullptr;        // [rows], d total / d loss of the row
  MutableTensorView d_logits;             // [rows, vocab], the logits' dtype; may be the logits
                                          // themselves where the stride is theirs
};

// What a caller may ask for, as it came over a border. `first_*_entry` of the rows are not looked
// at: where answers go is for the server to say.
struct CrossEntropyRequest {
  int64_t vocab = 0;                         // 1..kMaxVocab
  absl::Span<const CrossEntropyRow> params;  // one for each row, each active
  absl::Span<const int32_t> extra_ids;
};

// OK, or INVALID_ARGUMENT naming the field, the row, the value and what is allowed. Checks only the
// parameters: CheckLogits checks logits, CheckHidden hidden states. Thread-safe.
absl::Status CheckCrossEntropy(const CrossEntropyRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_CROSS_ENTROPY_H_
