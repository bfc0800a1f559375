// An output head: it turns hidden states into logits. Shared by the linear_* ops.
#ifndef LOGITD_KERNELS_HEAD_H_
#define LOGITD_KERNELS_HEAD_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace logitd {

// Longest hidden state any op takes.
inline constexpr int64_t kMaxHidden = int64_t{1} << 16;

// A head in the memory of the backend that runs the op. Owns nothing.
//
// The logits of a hidden state h, in this order:
//
//   g   = h                                           without a norm
//       = h * rsqrt(mean(h^2) + norm_epsilon) * norm  with one; then rounded to the weight's dtype
//   x_i = scale * sum_d weight_id g_d + bias_i
//   x_i = softcap * tanh(x_i / softcap)               where softcap > 0
//
// Products are exact, and summed in fp32 in an order that only the head fixes: so a row's bits do
// not depend on other rows. Logits are never rounded to 16 bits. The norm is fp32.
struct HeadView {
  TensorView weight;            // [vocab, hidden], f32 | f16 | bf16, 16-byte aligned rows
  const float* bias = nullptr;  // [vocab], or null
  const float* norm = nullptr;  // [hidden], of an RMSNorm before the product, or null
  float norm_epsilon = 0.0f;    // finite, >= 0
  float scale = 1.0f;           // finite
  float softcap = 0.0f;         // finite, >= 0; 0 = off
  // The part on each device, where the head is cut over several (kernels/shards.h). Then `weight`
  // has the shape of the whole head and no data, bias and norm have no data either, and only a
  // stream over those devices takes the head (kernels/sharded_stream.h). Null: the head is whole.
  const HeadView* shards = nullptr;
  int shard_count = 0;

  int64_t vocab() const { return weight.rows; }
  int64_t hidden() const { return weight.cols; }
};

// The shape of hidden states as they came in.
struct HiddenShape {
  DType dtype = DType::kF32;  // must be that of the head's weight
  int64_t rows = 0;
  int64_t hidden = 0;         // must be the head's
  int64_t payload_bytes = 0;  // must be rows * hidden * SizeOf(dtype)
};

// OK, or INVALID_ARGUMENT with the field, the value and what is allowed. Thread-safe.
absl::Status CheckHidden(const HiddenShape& shape, const HeadView& head);

// OK, or INVALID_ARGUMENT with the field of the head that is out of range: weight dtype, vocab,
// hidden, scale, softcap, norm_epsilon. `weight.data` is ignored. Thread-safe.
absl::Status CheckHead(const HeadView& head);

}  // namespace logitd

#endif  // LOGITD_KERNELS_HEAD_H_
