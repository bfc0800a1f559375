// softmax_topk: the K most probable tokens of every row, with their probabilities under the full
// softmax.
#ifndef LOGITD_KERNELS_SOFTMAX_TOPK_H_
#define LOGITD_KERNELS_SOFTMAX_TOPK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "kernels/types.h"

namespace logitd {

// What one row asks for, and where its answer goes. All bytes zero: the row is skipped, and nothing
// is written for it.
struct SoftmaxTopKRow {
  int64_t first_entry;  // the row's k answers go to entries [first_entry, first_entry + k)
  float temperature;    // finite, > 0
  int32_t k;            // 1..vocab; 0 = skip the row
};

// The parameters of a row: name on the wire, member, default, allowed range.
inline constexpr RowParam<SoftmaxTopKRow> kSoftmaxTopKParams[] = {
    {"k", &SoftmaxTopKRow::k, 0, {.low = 1, .up_to_vocab = true}},
    {"temperature", &SoftmaxTopKRow::temperature, 1, kAboveZero},
};

// Writes, for every row of `logits`, its k most probable tokens under softmax(logits /
// temperature).
//
// Order: descending logit; equal logits (-0 equals +0) by ascending index. Probabilities are those
// of the full softmax over the row, not renormalised over the k. -inf has probability 0 and is
// returned only when fewer than k other logits remain. A row with nothing but -inf is
// kEmptySupport: indices 0..k-1, probabilities 0, logsumexp -inf. +inf counts as certain: n of them
// have probability 1/n each, all else has 0, and logsumexp is +inf. NaN anywhere in a row:
// kNanLogit with the lowest NaN index; the row's other outputs are unspecified. A logsumexp beyond
// f32's range, which a small temperature can bring, is an infinity with its sign; the row stays kOk
// and its probabilities are not affected. A row's bits depend only on that row, its k and its
// temperature: not on the batch, its place in it, the row stride, the alignment or the stream. Bits
// may differ between backends, SIMD widths and GPU architectures. Against double precision: indices
// are exact, |probability error| <= 4e-6 relative (plus 1e-37), |logsumexp error| <= 2e-6 max(1,
// |logsumexp|). A temperature below kLeastTemperature: logits less than 1e-33 apart have
// unspecified probabilities, and logsumexp may be off by ln vocab. Source: Milakov & Gimelshein,
// arXiv:1805.02867.
//
// All pointers are in the memory of the backend that runs the op.
struct SoftmaxTopKArgs {
  TensorView logits;                     // [rows, vocab], f32 | f16 | bf16
  const SoftmaxTopKRow* rows = nullptr;  // [rows]
  int32_t max_k = 0;                     // >= every row's k; it picks the variant, never the bits
  int32_t* indices = nullptr;            // [entries]
  float* probs = nullptr;                // [entries]
  float* logsumexp = nullptr;            // [rows], natural log, of logits / temperature
  RowStatus* status = nullptr;           // [rows]
};

// The arguments of the rows from `first` on. The logits stay as they are.
inline SoftmaxTopKArgs RowsFrom(SoftmaxTopKArgs args, int64_t first) {
  args.rows += first;
  args.logsumexp += first;
  args.status += first;
  return args;
}

// A request as it came in. The check ignores `first_entry` of the rows: the server sets it.
struct SoftmaxTopKRequest {
  int64_t vocab = 0;                        // 1..kMaxVocab
  absl::Span<const SoftmaxTopKRow> params;  // one for each row
};

// OK, or INVALID_ARGUMENT with the field, the row, the value and what is allowed. Checks only the
// parameters: CheckLogits checks logits, CheckHidden hidden states. Thread-safe.
absl::Status CheckSoftmaxTopK(const SoftmaxTopKRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_SOFTMAX_TOPK_H_
