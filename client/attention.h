// What the client's attention calls take and give. attention.proto has the meaning of every field.
#ifndef LOGITD_CLIENT_ATTENTION_H_
#define LOGITD_CLIENT_ATTENTION_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "logitd/v1/attention.pb.h"
#include "logitd/v1/types.pb.h"

namespace logitd::client {

// [batch, heads, queries, keys], each 1 or more.
struct AttentionShape {
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t queries = 0;
  int64_t keys = 0;

  int64_t rows() const { return batch * heads * queries; }
};

// The keys that a query sees; not set: no bound. Causal is right = 0.
struct AttentionWindow {
  std::optional<int64_t> left;
  std::optional<int64_t> right;
};

struct AttentionMask {
  v1::MaskKind kind = v1::MASK_KIND_NONE;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;      // of MASK_KIND_ADDITIVE
  std::array<int64_t, 4> shape = {0, 0, 0, 0};  // [batch or 1, heads or 1, queries or 1, keys]
  absl::string_view bytes;
};

// The arrays are the caller's, little-endian, rows without padding, and are not copied. They must
// not overlap the answer's. LogitsRequest::owner says how long they must live.
//
// With an arena, which outlives the call, `scores` must lie in it, one run of memory, and is not
// sent (of a gradient: `probs` and `d_probs`). If the answer's array lies in it too, the server
// writes the answer there. After an error it may still do so for a moment: use that memory only for
// the same call again, or end the lease.
struct AttentionSoftmaxRequest {
  v1::DType dtype = v1::DTYPE_F32;
  AttentionShape shape;
  absl::string_view scores;
  float scale = 1;
  AttentionWindow window;
  AttentionMask mask;
  std::vector<float> sinks;                     // none, or one per head
  v1::DType out_dtype = v1::DTYPE_UNSPECIFIED;  // of the probs: `dtype` (the default) or f32
  bool want_logsumexp = false;
  // Where the answer goes, of exactly its size; empty: into the result. Undefined after an error.
  absl::Span<char> probs;
  const Arena* arena = nullptr;
  std::shared_ptr<const void> owner;
};

struct AttentionSoftmaxBackwardRequest {
  v1::DType dtype = v1::DTYPE_F32;
  AttentionShape shape;
  absl::string_view probs;
  absl::string_view d_probs;
  float scale = 1;
  AttentionWindow window;
  std::vector<float> sinks;           // as in the forward
  absl::Span<const float> logsumexp;  // [rows], with sinks
  // The type of d_scores: `dtype` (the default), or any type where `dtype` is f32.
  v1::DType out_dtype = v1::DTYPE_UNSPECIFIED;
  absl::Span<char> d_scores;  // as AttentionSoftmaxRequest::probs
  const Arena* arena = nullptr;
  std::shared_ptr<const void> owner;
};

// A row whose status is not OK.
struct AttentionFault {
  int64_t row = 0;
  v1::RowStatus status = v1::ROW_STATUS_OK;
  int32_t position = -1;  // a key

  friend bool operator==(const AttentionFault&, const AttentionFault&) = default;
};

struct AttentionResult {
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;  // of the answer
  std::string values;                       // the answer, where the request has no array for it
  std::vector<float> logsumexp;             // [rows], where wanted
  std::vector<double> d_sinks;              // [heads], of a gradient with sinks
  std::vector<AttentionFault> faults;       // by ascending row
  v1::Timings timings;  // the server's clocks; of several messages: phases summed, largest batch
  int messages = 0;     // that the tensor took
  absl::Duration round_trip;  // this client's clock, last attempt only
  int attempts = 0;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_ATTENTION_H_
