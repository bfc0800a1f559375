// attention_softmax: scale, mask and softmax of attention scores, in one pass, and its gradient.
#ifndef LOGITD_KERNELS_ATTENTION_SOFTMAX_H_
#define LOGITD_KERNELS_ATTENTION_SOFTMAX_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/types.h"

namespace logitd {

// Longest row attention_softmax takes.
inline constexpr int64_t kMaxKeys = int64_t{1} << 20;

// A tensor [batch, heads, queries, keys], and the rows a call works on: [first_row, first_row +
// rows) of batch * heads * queries, in order. A tensor may be cut into calls that differ only in
// these two: the bits are those of one call.
struct AttentionShape {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;  // 1..kMaxKeys
  int64_t first_row = 0;
  int64_t rows = 0;
};

// The keys a query sees. With o = keys - queries (the last query is aligned with the last key),
// query i sees keys j with i + o - left <= j <= i + o + right. Causal is right = 0.
struct AttentionWindow {
  static constexpr int64_t kUnbounded = -1;
  int64_t left = kUnbounded;   // >= 0, or kUnbounded
  int64_t right = kUnbounded;  // >= 0, or kUnbounded
};

enum class MaskKind : uint8_t {
  kNone = 0,
  kBool = 1,      // a byte each; nonzero = masked
  kAdditive = 2,  // f32 | f16 | bf16; added in fp32 after the scale; -inf = masked
};

// Element (b, h, i, j) is at data[b * batch_stride + h * head_stride + i * query_stride + j -
// origin]. A stride of 0 broadcasts.
struct AttentionMask {
  MaskKind kind = MaskKind::kNone;
  DType dtype = DType::kF32;  // of kAdditive
  const void* data = nullptr;
  int64_t batch_stride = 0;  // elements, each >= 0
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t origin = 0;  // elements of the mask before data[0], where only a chunk's part is there
};

// Writes probs = softmax(scale * scores + mask) over the keys each query sees.
//
// x_j = scale * score_j (+ mask_j), in fp32, over the keys that are inside the window and not
// masked; m = max x_j; s is the head's sink, where there are sinks:
//
//   prob_j = exp(x_j - m) / (sum exp(x - m) + exp(s - m))
//
// The sink's own share is not returned. "Softmax off by one" is s = 0. A key that a query does not
// see gets exactly 0, and its score has no effect; keys outside the window are not even read. A row
// with no visible key, or only x of -inf, is all zeros: kEmptySupport without a sink, kOk with one.
// n values x of +inf have 1 / n each, and all else 0. NaN among the x of a row: kNanLogit with the
// lowest such key, and NaN for every key the query sees; other rows are not affected. 16-bit
// results are rounded to nearest, ties to even, from fp32. A row's bits depend only on that row,
// its mask, its window and its sink: not on the call's other rows, the chunk, the strides, the
// alignment or the stream. Bits may differ between backends, SIMD widths and GPU architectures.
// Against double precision, from the same x: |error| <= 4e-6 relative (plus 1e-37) before rounding
// to 16 bits; |logsumexp error| <= 2e-6 max(1, |logsumexp|). The product and the sum in x are
// rounded once together or each, and a score below 2^-126 may count as 0. Sources: Milakov &
// Gimelshein, arXiv:1805.02867; sinks: Xiao et al., arXiv:2309.17453.
//
// All pointers are in the memory of the backend that runs the op. On CUDA, tensors are read in
// aligned blocks of 16 bytes. So up to 15 bytes before and after a tensor are read too, but not
// used, and the memory around it must be readable to the next multiple of 16 bytes.
struct AttentionSoftmaxArgs {
  AttentionShape shape;
  TensorView scores;   // [shape.rows, keys], f32 | f16 | bf16
  float scale = 1.0f;  // finite
  AttentionWindow window;
  AttentionMask mask;
  const float* sinks = nullptr;  // [heads], each finite or -inf (none); null: no sinks
  MutableTensorView probs;       // [shape.rows, keys], the scores' dtype or f32; may be the scores
                                 // themselves where dtype and stride are the same
  float* logsumexp = nullptr;    // [shape.rows], ln of the denominator, sink included; +inf or NaN
                                 // where an x is +inf or NaN; null: not wanted
  RowStatus* status = nullptr;   // [shape.rows]; position: a key
};

// Writes d_scores = scale * y * (dy - sum_j y_j dy_j), y the probs and dy their gradient.
//
// Where y is 0 the gradient is exactly 0 and dy has no effect: so the mask is not needed again, and
// the gradient of a fully masked row is zeros. Keys outside the window are not read. Sums are fp32,
// in an order fixed by the row. NaN in y, or in dy where y is not 0, makes the row's gradient NaN
// for every key with y != 0: kNanLogit with the lowest such key. d_sinks_h = - sum over the call's
// rows of head h, in order, of exp(sinks_h - logsumexp) * sum_j y_j dy_j; the caller adds up the
// calls of a tensor. A row with NaN makes its head's NaN. Bits as in AttentionSoftmaxArgs; d_sinks
// depends on the call's rows. Against double precision, from the same y and dy: |error| <= 4e-6
// |scale| (|y dy| + |y| sum |y dy|) before rounding to 16 bits.
//
// All pointers are in the memory of the backend that runs the op.
struct AttentionSoftmaxBackwardArgs {
  AttentionShape shape;
  TensorView probs;    // y: [shape.rows, keys], f32 | f16 | bf16
  TensorView d_probs;  // dy: as probs, the same dtype
  float scale = 1.0f;
  AttentionWindow window;
  MutableTensorView d_scores;    // [shape.rows, keys], the probs' dtype; any where probs are f32;
                                 // may be probs or d_probs where dtype and stride are the same
  const float* sinks = nullptr;  // [heads]; null: no sinks, and the next two are null
  const float* logsumexp = nullptr;  // [shape.rows], as the forward wrote it
  double* d_sinks = nullptr;         // [heads]; 0 for heads without a row in the call
  RowStatus* status = nullptr;       // [shape.rows]; position: a key
};

// A request as it came in. Shared by forward and backward.
struct AttentionSoftmaxRequest {
  AttentionShape shape;
  DType dtype = DType::kF32;      // of the scores; backward: of probs and d_probs
  DType out_dtype = DType::kF32;  // of the probs; backward: of d_scores
  bool backward = false;
  int64_t payload_bytes = 0;  // must be shape.rows * keys * SizeOf(dtype); backward: each of two
  float scale = 1.0f;
  AttentionWindow window;
  MaskKind mask = MaskKind::kNone;
  DType mask_dtype = DType::kF32;
  int64_t mask_shape[4] = {1, 1, 1, 1};  // [batch or 1, heads or 1, queries or 1, keys]
  int64_t mask_bytes = 0;                // must be what mask_shape and its type need
  absl::Span<const float> sinks;         // none, or one for each head
};

// OK, or INVALID_ARGUMENT with the field, the value and what is allowed. Both backends rely on it
// and check nothing again. Thread-safe.
absl::Status CheckAttentionSoftmax(const AttentionSoftmaxRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_ATTENTION_SOFTMAX_H_
