// Sampler.TopK: proto <-> rows of softmax_topk, or of linear_topk where hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "server/engine/job.h"
#include "server/ops/softmax_topk.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/codecs/row_values.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// TopKRequest as it is in the message.
struct TopKFields : InputFields {
  AnyLists params = ListsFor(kSoftmaxTopKParams);
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields);

class TopKCodec final : public OpCodec {
 public:
  explicit TopKCodec(FindHead find_head) : find_head_(std::move(find_head)) {}

  const engine::OpTraits& op() const override {
    return input_.head() == nullptr ? ops::kSoftmaxTopKTraits : ops::kLinearTopKTraits;
  }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  int64_t list_bytes() const override { return rows_.bytes(); }
  Payload payload() const override { return input_.payload(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override {
    rows_.WriteInputs(inputs, first);
  }
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  const FindHead find_head_;
  LogitsOrHidden input_;
  ops::SoftmaxTopKRows rows_;
  int64_t answer_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_
