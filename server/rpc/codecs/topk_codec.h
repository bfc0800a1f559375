// Sampler.TopK: proto <-> softmax_topk job, or linear_topk where hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/softmax_topk.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/row_input.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Axes and arrays of the op.
enum TopKAxis : size_t { kTopKRows = engine::kRowAxis, kTopKEntries };
enum TopKOutput : size_t { kTopKLogsumexp, kTopKStatus, kTopKIndices, kTopKProbs, kTopKOutputs };

extern const engine::OpTraits kSoftmaxTopKTraits;
extern const engine::OpTraits kLinearTopKTraits;

// TopKRequest as it lies in the message.
struct TopKFields : RowInputFields {
  Int32List k;
  FloatList temperature;
};

// As ParseMessage. Checks the encoding alone, not the values.
absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields);

class TopKCodec final : public OpCodec {
 public:
  explicit TopKCodec(FindHead find_head) : find_head_(std::move(find_head)) {}

  const engine::OpTraits& op() const override {
    return input_.head() == nullptr ? kSoftmaxTopKTraits : kLinearTopKTraits;
  }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  Payload payload() const override { return input_.payload(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  int32_t k_of(int64_t row) const { return fields_.k[fields_.k.size() == 1 ? 0 : row]; }
  float temperature_of(int64_t row) const;

  const FindHead find_head_;
  TopKFields fields_;
  RowInput input_;
  int64_t answer_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_
