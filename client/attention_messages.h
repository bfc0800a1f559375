// A tensor of an attention call as the messages it goes in, and its answers.
#ifndef LOGITD_CLIENT_ATTENTION_MESSAGES_H_
#define LOGITD_CLIENT_ATTENTION_MESSAGES_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/attention.h"
#include "logitd/v1/server.pb.h"

namespace logitd::client {

// Cuts a tensor into messages of whole rows, encodes them over the caller's memory, and puts the
// answers together. The request outlives it. Not thread-safe.
class AttentionMessages {
 public:
  // Bytes of a message. A row that is larger than `about` goes alone.
  struct Sizes {
    int64_t about;     // of the payload
    int64_t most = 0;  // of all of it; 0: no limit but the server's
  };

  // INVALID_ARGUMENT: sizes that disagree, or one row with its mask that no message carries.
  static absl::StatusOr<AttentionMessages> Plan(const AttentionSoftmaxRequest& request,
                                                const v1::Limits& limits, Sizes sizes);
  static absl::StatusOr<AttentionMessages> Plan(const AttentionSoftmaxBackwardRequest& request,
                                                const v1::Limits& limits, Sizes sizes);

  int size() const { return static_cast<int>(chunks_.size()); }
  bool backward() const { return tensor_.backward; }
  const std::shared_ptr<const void>& owner() const { return tensor_.owner; }

  // Message `i`: the small fields, then slices over the caller's arrays, each of which shares
  // `owner` until gRPC drops it.
  grpc::ByteBuffer Encode(int i, const std::shared_ptr<const void>& owner) const;

  // Before the answers of an attempt.
  void Begin();
  // Takes answer `i`; they come in order. INTERNAL: it is not what was asked for.
  absl::Status Take(int i, grpc::ByteBuffer* answer);
  // After the last answer. Once.
  AttentionResult Finish() { return std::move(result_); }

 private:
  struct Chunk {
    int64_t first_row;
    int64_t rows;
  };
  // Either request.
  struct Tensor {
    bool backward = false;
    v1::DType dtype = v1::DTYPE_F32;
    v1::DType out_dtype = v1::DTYPE_F32;
    AttentionShape shape;
    absl::string_view payload;
    absl::string_view d_probs;
    absl::string_view logsumexp;
    AttentionMask mask;
    absl::Span<char> out;  // empty: to the result
    int64_t sinks = 0;
    bool want_logsumexp = false;
    std::string header;  // the small fields
    std::shared_ptr<const void> owner;
  };
  struct MaskRows {
    int64_t first;
    int64_t rows;
  };

  explicit AttentionMessages(Tensor tensor) : tensor_(std::move(tensor)) {}
  static absl::StatusOr<AttentionMessages> Plan(Tensor tensor, const v1::Limits& limits,
                                                Sizes sizes);
  absl::Status CheckSizes() const;
  absl::Status Cut(int64_t max_bytes, int64_t max_rows);
  int64_t row_bytes() const;
  int64_t out_row_bytes() const;
  int64_t mask_row_bytes() const;
  MaskRows MaskRowsOf(const Chunk& chunk) const;

  Tensor tensor_;
  std::vector<Chunk> chunks_;
  AttentionResult result_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_ATTENTION_MESSAGES_H_
