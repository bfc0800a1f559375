// A tensor of an attention call as the messages of a stream, and its answers.
#ifndef LOGITD_CLIENT_MESSAGES_ATTENTION_MESSAGES_H_
#define LOGITD_CLIENT_MESSAGES_ATTENTION_MESSAGES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "client/attention.h"
#include "client/options.h"
#include "client/transport/transport.h"
#include "logitd/v1/server.pb.h"

namespace logitd::client {

// Cuts a tensor into messages of whole rows, encodes them over the caller's memory, and joins the
// answers. The request outlives it. Not thread-safe.
class AttentionMessages final : public MessageStream {
 public:
  // INVALID_ARGUMENT: sizes that disagree, or not even one row with its mask fits into a message.
  static absl::StatusOr<AttentionMessages> Plan(const AttentionSoftmaxRequest& request,
                                                const v1::Limits& limits,
                                                const ClientOptions& options);
  static absl::StatusOr<AttentionMessages> Plan(const AttentionSoftmaxBackwardRequest& request,
                                                const v1::Limits& limits,
                                                const ClientOptions& options);

  bool backward() const { return tensor_.backward; }

  // Before the first message of an attempt.
  void Begin();

  int size() const override { return static_cast<int>(chunks_.size()); }
  // The small fields, then slices over the caller's arrays.
  absl::StatusOr<grpc::ByteBuffer> Encode(int i,
                                          const std::shared_ptr<const void>& owner) const override;
  // INTERNAL: the answer does not fit the message.
  absl::Status Take(int i, grpc::ByteBuffer* answer) override;

  // After the last answer. Once.
  AttentionResult Finish() { return std::move(result_); }

 private:
  struct Chunk {
    int64_t first_row;
    int64_t rows;
  };
  // What both kinds of request have.
  struct Tensor {
    bool backward = false;
    v1::DType dtype = v1::DTYPE_F32;
    v1::DType out_dtype = v1::DTYPE_F32;
    AttentionShape shape;
    absl::string_view payload;
    absl::string_view d_probs;
    absl::string_view logsumexp;
    AttentionMask mask;
    absl::Span<char> out;  // empty: the answer goes into the result
    int64_t sinks = 0;
    bool want_logsumexp = false;
    const Arena* arena = nullptr;  // where payload and d_probs lie
    std::string header;            // the small fields
  };
  struct MaskRows {
    int64_t first;
    int64_t rows;
  };

  explicit AttentionMessages(Tensor tensor) : tensor_(std::move(tensor)) {}
  static absl::StatusOr<AttentionMessages> Plan(Tensor tensor, const v1::Limits& limits,
                                                const ClientOptions& options);
  absl::Status CheckSizes() const;
  absl::Status CheckMask() const;
  absl::Status CheckArena() const;
  // The fields that say where in the arena the chunk's arrays lie.
  absl::StatusOr<std::string> SharedFields(const Chunk& chunk) const;
  bool out_is_shared() const;
  absl::Status Cut(int64_t max_bytes, int64_t max_rows);
  int64_t row_bytes() const;
  int64_t out_row_bytes() const;
  int64_t mask_row_bytes() const;
  MaskRows MaskRowsOf(const Chunk& chunk) const;
  template <typename Fields>
  bool TakeFields(const Chunk& chunk, const Fields& fields);

  Tensor tensor_;
  std::vector<Chunk> chunks_;
  AttentionResult result_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_MESSAGES_ATTENTION_MESSAGES_H_
