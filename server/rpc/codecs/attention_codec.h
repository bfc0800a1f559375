// Attention.Softmax and Attention.SoftmaxBackward, called or streamed: proto <-> attention_softmax
// job.
#ifndef LOGITD_SERVER_RPC_CODECS_ATTENTION_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_ATTENTION_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/attention_softmax.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Axes and arrays of the two ops. The large output comes first, for it may run in place.
enum AttentionAxis : size_t {
  kAttentionRows = engine::kRowAxis,
  kAttentionOutBytes,    // of probs or d_scores
  kAttentionSinks,       // heads, or 0
  kAttentionLogsumexps,  // rows, or 0
  kAttentionMaskBytes,   // forward
  kAttentionDProbBytes,  // backward
};

enum AttentionInput : size_t { kAttentionInMask, kAttentionInSinks };
enum AttentionOutput : size_t { kAttentionProbs, kAttentionLogsumexp, kAttentionStatus };

enum AttentionBackwardInput : size_t {
  kAttentionBackwardInDProbs,
  kAttentionBackwardInLogsumexp,
  kAttentionBackwardInSinks
};
enum AttentionBackwardOutput : size_t {
  kAttentionBackwardDScores,
  kAttentionBackwardDSinks,
  kAttentionBackwardStatus
};

extern const engine::OpTraits kAttentionSoftmaxTraits;
extern const engine::OpTraits kAttentionSoftmaxBackwardTraits;

// What is said of a tensor once, as it lies in the message; of the backward, its part of it.
struct AttentionHeader {
  int32_t dtype = 0;  // logitd.v1.DType
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  std::optional<float> scale;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
  int32_t mask_kind = 0;   // logitd.v1.MaskKind
  int32_t mask_dtype = 0;  // logitd.v1.DType
  Int64List mask_shape;
  ValueList sinks;
  int32_t out_dtype = 0;  // logitd.v1.DType
  bool want_logsumexp = false;
  friend bool operator==(const AttentionHeader&, const AttentionHeader&) = default;
};

// AttentionSoftmaxRequest or AttentionSoftmaxBackwardRequest as it lies in the message.
struct AttentionFields : AttentionHeader {
  ByteRange payload;    // scores; backward: probs
  ByteRange mask;       // forward
  ByteRange d_probs;    // backward
  ByteRange logsumexp;  // backward
};

enum class AttentionDirection { kForward, kBackward };

// As ParseMessage. Checks the encoding alone, not the values.
absl::Status ParseAttentionFields(AttentionDirection direction, Pieces pieces, size_t max_list,
                                  AttentionFields* fields);

// The tensor that the messages of a stream are of, shared by their codecs, which are used one after
// another as far as Parse goes.
struct AttentionTensor {
  AttentionHeader header;
  int64_t next_row = 0;  // 0: the next message begins a tensor
};

// What enqueue is told beside the batch.
struct AttentionCall {
  AttentionShape shape;
  DType out_dtype = DType::kF32;
  float scale = 1.0f;
  AttentionWindow window;
  AttentionMask mask;  // but for its data
};

class AttentionCodec final : public OpCodec {
 public:
  // `tensor`: the stream's; null: the message is a call, with all rows.
  explicit AttentionCodec(AttentionDirection direction,
                          std::shared_ptr<AttentionTensor> tensor = nullptr)
      : direction_(direction), tensor_(std::move(tensor)) {}

  const engine::OpTraits& op() const override;
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  int64_t list_bytes() const override {
    return static_cast<int64_t>(header_.sinks.size() * sizeof(float));
  }
  Payload payload() const override {
    return {.range = payload_, .rows = call_.shape.rows, .row_bytes = row_bytes_};
  }
  absl::Span<const ByteRange> copied_inputs() const override {
    return absl::MakeConstSpan(copied_).first(backward() ? 2 : 1);
  }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  bool backward() const { return direction_ == AttentionDirection::kBackward; }
  absl::Status ReadRows(size_t bytes);
  absl::Status ReadParameters(AttentionSoftmaxRequest* request);
  absl::Status ReadMask(const ByteRange& mask, AttentionSoftmaxRequest* request);
  absl::Status CheckMaskRows(size_t bytes);
  void FillSpec(const AttentionFields& fields, engine::JobSpec* spec);

  const AttentionDirection direction_;
  const std::shared_ptr<AttentionTensor> tensor_;
  AttentionHeader header_;
  DType dtype_ = DType::kF32;
  AttentionCall call_;
  ByteRange payload_;
  std::array<ByteRange, 2> copied_;
  size_t row_bytes_ = 0;
  int64_t answer_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_ATTENTION_CODEC_H_
