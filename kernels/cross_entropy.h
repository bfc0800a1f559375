// cross_entropy: per-token losses of rows of logits against their targets, and the gradient.
#ifndef LOGITD_KERNELS_CROSS_ENTROPY_H_
#define LOGITD_KERNELS_CROSS_ENTROPY_H_

#include <cstddef>
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
  kTorch = 0,     // 1 - e on the target, and e / V on every token, the target included
  kMegatron = 1,  // 1 - e on the target, and e / (V - 1) on every other token; none where V = 1
};

// What a row asks for beyond its loss and logsumexp.
inline constexpr int32_t kWantRank = 1;
inline constexpr int32_t kWantEntropy = 2;
inline constexpr int32_t kMaxScoreTopLogprobs = 128;

// What one row asks for, and where its lists and answers are. All bytes zero: the row is skipped,
// and nothing is written for it.
struct CrossEntropyRow {
  int64_t first_extra;        // extra_ids[first_extra, first_extra + extra_count)
  int64_t first_top_entry;    // answers [first_top_entry, first_top_entry + top_logprobs)
  int64_t first_extra_entry;  // answers [first_extra_entry, first_extra_entry + extra_count)
  int64_t first_support;      // support_ids[first_support, first_support + support_count)
  int32_t active;             // 1; 0 = skip the row
  int32_t target;             // 0..vocab-1, or kIgnoredTarget
  float temperature;          // finite, > 0
  float softcap;              // finite, >= 0; 0 = off, else held to 2^-100..2^100; 0 with a head
  float label_smoothing;      // [0, 1); 0 = off
  Smoothing smoothing;
  float z_loss;          // finite, >= 0; 0 = off
  int32_t extra_count;   // 0..kMaxExtraIds
  int32_t top_logprobs;  // 0..min(kMaxScoreTopLogprobs, vocab)
  int32_t want;          // kWantRank | kWantEntropy
  // 0..min(kMaxSupport, vocab), 0 = the whole vocabulary. With a support: no smoothing, z_loss,
  // rank, top tokens or extra ids.
  int32_t support_count;
  int32_t unused;  // 0
};
static_assert(sizeof(CrossEntropyRow) == 80);

// True where a row is ignored and asks only for its loss, which is 0.
constexpr bool AsksForNothing(const CrossEntropyRow& row) {
  return row.target == kIgnoredTarget && row.want == 0 && row.top_logprobs == 0 &&
         row.extra_count == 0;
}

inline constexpr ParamRange kSmoothings = {.low = 0, .high = 1, .names = "torch, megatron"};
inline constexpr ParamRange kBelowOne = {.low = 0, .high = 1, .below_high = true};
// The parameters of a row: name on the wire, member, default, allowed range.
inline constexpr RowParam<CrossEntropyRow> kCrossEntropyParams[] = {
    {"temperature", &CrossEntropyRow::temperature, 1, kAboveZero},
    {"softcap", &CrossEntropyRow::softcap, 0, kZeroOrMore},
    {"label_smoothing", &CrossEntropyRow::label_smoothing, 0, kBelowOne},
    {"smoothing", &CrossEntropyRow::smoothing, 0, kSmoothings},
    {"z_loss", &CrossEntropyRow::z_loss, 0, kZeroOrMore},
    {"top_logprobs",
     &CrossEntropyRow::top_logprobs,
     0,
     {.low = 0, .high = kMaxScoreTopLogprobs, .up_to_vocab = true}},
};

// Where the answers go; shared with linear_cross_entropy. An array that no row wants may be null.
struct CrossEntropyAnswers {
  float* loss = nullptr;            // [rows]
  float* logsumexp = nullptr;       // [rows], natural log
  float* target_logprob = nullptr;  // [rows], natural log
  int32_t* rank = nullptr;          // [rows], of the target, from 1; 0 where not wanted
  float* entropy = nullptr;         // [rows], in nats; 0 where not wanted
  int32_t* top_ids = nullptr;       // [top entries]
  float* top_logprobs = nullptr;    // [top entries]
  float* extra_logprobs = nullptr;  // [extra entries], in the order of the ids
  RowStatus* status = nullptr;      // [rows]
};

// Writes, for every row of `logits`, the loss of its target.
//
// l is the row as sent, V its length, t its target, e its label smoothing (kMegatron: e V/(V - 1)):
//
//   x_i     = l_i, then softcap * tanh(x_i / softcap) where softcap > 0, then x_i / temperature
//   lse     = ln sum exp(x)
//   loss    = (1 - e) (lse - x_t) + e (lse - mean x) + z_loss lse^2
//
// target_logprob = x_t - lse. entropy = - sum p ln p with p = exp(x - lse), 0 ln 0 = 0. The rank is
// 1 + the number of tokens before the target by (logit descending, index ascending): -0 equals +0,
// and the logits are compared as sent, before softcap and temperature. Top tokens are the first
// top_logprobs in that order. An ignored row has loss 0, target_logprob 0 and rank 0; its other
// answers are those of any row, unless counted_rows says that they are not wanted.
//
// -inf has probability 0. As a target its loss is +inf; with smoothing a row that has one has loss
// +inf whatever the target. +inf counts as certain: n of them have probability 1/n each and all
// else 0, logsumexp is +inf, entropy ln n, and the loss is -ln of the target's probability; with
// smoothing or z_loss it is +inf. A softcap makes infinities finite: they become +-softcap. A row
// with nothing but -inf, and no softcap, is kEmptySupport: logsumexp -inf, loss NaN (0 where
// ignored), entropy NaN, log-probabilities -inf, top ids 0, 1, ... NaN anywhere in a row: kNanLogit
// with the lowest NaN index; loss, logsumexp, entropy and log-probabilities NaN, also where the row
// is ignored; rank 0, ids -1. Other rows are not affected.
//
// A row with a support: its logits are those of the support's tokens, and nothing of the others
// counts, not even NaN. Sums are those of a filtered row of `sample` (kernels/sampling_rules.h):
// with m the largest of the support's l after the softcap, integers W_i = round(exp((l_i - m) /
// temperature) 2^43), target_logprob = LogprobOf(l_t, m, temperature, ln(sum W / 2^43)), loss
// -target_logprob. So target_logprob has the bits of the processed log-probability that `sample`
// reports on the same backend for that token of the same logits at the same temperature, where the
// row has no edits, a filter is on or it is greedy, its highest logit is in its support, and all of
// the support comes back. That also holds between linear_sample and linear_cross_entropy.
//
// A row's bits depend only on that row and what it asks for: not on the batch, its place in it, the
// row stride, the alignment, the stream or what other rows want. Bits may differ between backends,
// SIMD widths and GPU architectures; ids and ranks agree everywhere. Against double precision, from
// the same logits: |logsumexp error| <= 2e-6 max(1, |logsumexp|); |error| <= 4e-6 max(1, m) for
// losses, log-probabilities and entropies, with m the largest of |x_t|, |mean x| and |logsumexp|
// (with z_loss times 1 + 2 z_loss m). At a temperature below kLeastTemperature max(1, softcap),
// where logits are less than 1e-33 max(1, softcap) apart, logsumexp and what follows from it may be
// off by ln V. Sources: Milakov & Gimelshein, arXiv:1805.02867; label smoothing: Szegedy et al.,
// arXiv:1512.00567; z-loss: Chowdhery et al., arXiv:2204.02311.
//
// All pointers are in the memory of the backend that runs the op.
struct CrossEntropyArgs {
  TensorView logits;                      // [rows, vocab], f32 | f16 | bf16
  const CrossEntropyRow* rows = nullptr;  // [rows]
  const int32_t* extra_ids = nullptr;     // token ids whose log-probability is wanted, of all rows
  const int32_t* support_ids = nullptr;   // of all rows' supports
  // The largest support_count, or more; 0: no row has a support.
  int32_t max_support = 0;
  // True: every active row that is not left out has a support. It picks the variant, never the
  // bits.
  bool all_supported = false;
  // The wants of any row, the largest top_logprobs and the largest extra_count, or more. They pick
  // the variant, never the bits.
  int32_t want = kWantRank | kWantEntropy;
  int32_t max_top_logprobs = kMaxScoreTopLogprobs;
  int32_t max_extra_ids = kMaxExtraIds;
  // -1: every active row has all its answers. Else rows for which AsksForNothing() are left out:
  // whatever their input holds, their status is kOk and their loss, logsumexp and other answers are
  // 0. Then it is the number of the other active rows, which the host knows, or more, and ops on
  // hidden states may multiply only so many. With fewer than there are, answers are unspecified.
  // Other rows have the bits they always have.
  int64_t counted_rows = -1;
  CrossEntropyAnswers answers;
};

// True where a row is left out; and the answers it then has.
constexpr bool IsLeftOut(const CrossEntropyArgs& args, const CrossEntropyRow& row) {
  return args.counted_rows >= 0 && AsksForNothing(row);
}
constexpr void AnswerLeftOut(const CrossEntropyAnswers& to, int64_t r) {
  to.loss[r] = to.logsumexp[r] = to.target_logprob[r] = 0;
  if (to.rank != nullptr) to.rank[r] = 0;
  if (to.entropy != nullptr) to.entropy[r] = 0;
  to.status[r] = {};
}

// True where a row's answers are of the whole vocabulary.
constexpr bool IsWhole(const CrossEntropyRow& row) {
  return row.active != 0 && row.support_count == 0;
}

// The arguments of the rows from `first` on. The logits stay as they are.
inline CrossEntropyArgs RowsFrom(CrossEntropyArgs args, int64_t first) {
  CrossEntropyAnswers& to = args.answers;
  args.rows += first;
  to.loss += first;
  to.logsumexp += first;
  to.target_logprob += first;
  if (to.rank != nullptr) to.rank += first;
  if (to.entropy != nullptr) to.entropy += first;
  to.status += first;
  return args;
}

// Writes d_logits_i = upstream * d loss / d l_i:
//
//   upstream * (p_i - (1 - e) [i = t] - e / V + 2 z_loss lse p_i) / temperature
//            * (1 - tanh(l_i / softcap)^2 where softcap > 0)
//
// An ignored row is zeros, whatever its logsumexp. Any other row whose logsumexp is not finite is
// NaN in every element, so that it is noticed. A skipped row (all bytes zero) is not written.
// 16-bit results are rounded to nearest, ties to even, from fp32. Bits as in CrossEntropyArgs.
// Against double precision, from the same logits and logsumexp, before rounding to 16 bits: |error|
// <= a |upstream| / temperature (p_i (1 + 2 z_loss |lse|) + [i = t] + e / V) with a = 4e-6. A
// softcap, whose x is rounded to fp32, adds 3e-7 softcap / temperature to a. p_i below 2^-126 may
// count as 0.
//
// All pointers are in the memory of the backend that runs the op.
struct CrossEntropyBackwardArgs {
  TensorView logits;                      // [rows, vocab], f32 | f16 | bf16
  const CrossEntropyRow* rows = nullptr;  // [rows]; lists and wants are ignored
  const float* logsumexp = nullptr;       // [rows], as the forward wrote it
  const float* upstream = nullptr;        // [rows], d total / d loss of the row
  MutableTensorView d_logits;             // [rows, vocab], the logits' dtype; may be the logits
                                          // themselves where the stride is the same
};

// A request as it came in. The check ignores `first_*_entry` of the rows: the server sets them.
struct CrossEntropyRequest {
  int64_t vocab = 0;                         // 1..kMaxVocab
  absl::Span<const CrossEntropyRow> params;  // one for each row, each active
  absl::Span<const int32_t> extra_ids;
  absl::Span<const int32_t> support_ids;
};

// OK, or INVALID_ARGUMENT with the field, the row, the value and what is allowed. Checks only the
// parameters: CheckLogits checks logits, CheckHidden hidden states. Thread-safe.
absl::Status CheckCrossEntropy(const CrossEntropyRequest& request);

// OK where the target of row `r` is a token or kIgnoredTarget, else INVALID_ARGUMENT. Thread-safe.
absl::Status CheckTarget(size_t r, int32_t target, int64_t vocab);

}  // namespace logitd

#endif  // LOGITD_KERNELS_CROSS_ENTROPY_H_
