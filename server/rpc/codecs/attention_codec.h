// Attention.Softmax and Attention.SoftmaxBackward, called or streamed: proto <-> a call of
// attention_softmax.
#ifndef LOGITD_SERVER_RPC_CODECS_ATTENTION_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_ATTENTION_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/ops/attention_softmax.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/shared_rows.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Fields that are said once for a tensor, as they are in the message. The backward has some of
// them.
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

// AttentionSoftmaxRequest or AttentionSoftmaxBackwardRequest as it is in the message.
struct AttentionFields : AttentionHeader {
  Choice payload;       // scores; backward: probs; or shared
  ByteRange mask;       // forward
  Choice d_probs;       // backward; or shared
  ByteRange logsumexp;  // backward
  int64_t shared_rows = 0;
  Choice output;  // shared_output
};

enum class AttentionDirection { kForward, kBackward };

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseAttentionFields(AttentionDirection direction, Pieces pieces, size_t max_list,
                                  AttentionFields* fields);

// The tensor whose rows the messages of a stream bring. Their codecs share it; their calls of Parse
// come one after another.
struct AttentionTensor {
  AttentionHeader header;
  int64_t next_row = 0;  // 0: the next message begins a tensor, with a header of its own
};

class AttentionCodec final : public OpCodec {
 public:
  // `tensor`: the stream's; null: a call, whose message has all rows.
  // `find_lease`: null: the server leases nothing.
  explicit AttentionCodec(AttentionDirection direction, FindLease find_lease = nullptr,
                          std::shared_ptr<AttentionTensor> tensor = nullptr)
      : find_lease_(std::move(find_lease)), tensor_(std::move(tensor)) {
    call_.backward = direction == AttentionDirection::kBackward;
  }

  const engine::OpTraits& op() const override { return call_.op(); }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  int64_t list_bytes() const override {
    return static_cast<int64_t>(header_.sinks.size() * sizeof(float));
  }
  Payload payload() const override { return payload_; }
  absl::Span<const Payload> copied_inputs() const override {
    return absl::MakeConstSpan(copied_).first(backward() ? 2 : 1);
  }
  void PayloadCopied() override {
    payload_.arena.reset();
    copied_[0].arena.reset();
  }
  SharedPlace shared_place() const override {
    return {.arena = output_.arena, .offset = output_.offset, .bytes = output_.bytes};
  }
  SharedAnswer shared_answer(const engine::JobAnswer& answer) const override;
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  bool backward() const { return call_.backward; }
  absl::Status ReadRows(const AttentionFields& fields);
  absl::Status Locate(Pieces pieces, const AttentionFields& fields);
  absl::Status ReadParameters(AttentionSoftmaxRequest* request);
  absl::Status ReadMask(const ByteRange& mask, AttentionSoftmaxRequest* request);
  absl::Status CheckMaskRows(size_t bytes);
  absl::Status CheckBackwardInputs(const AttentionFields& fields) const;

  const FindLease find_lease_;
  const std::shared_ptr<AttentionTensor> tensor_;
  AttentionHeader header_;
  ops::AttentionCall call_;
  Payload payload_;
  std::array<Payload, 2> copied_;
  SharedOutput output_;
  int64_t answer_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_ATTENTION_CODEC_H_
