// Sampler.TopK: proto <-> softmax_topk job.
#ifndef LOGITD_SERVER_RPC_TOPK_CODEC_H_
#define LOGITD_SERVER_RPC_TOPK_CODEC_H_

#include <cstddef>
#include <cstdint>

#include "kernels/softmax_topk.h"
#include "server/engine/job.h"
#include "server/rpc/codec.h"
#include "server/rpc/wire.h"

namespace logitd::rpc {

// Axes and arrays of the op.
enum TopKAxis : size_t { kTopKRows = engine::kRowAxis, kTopKEntries };
enum TopKOutput : size_t { kTopKLogsumexp, kTopKStatus, kTopKIndices, kTopKProbs, kTopKOutputs };

extern const engine::OpTraits kSoftmaxTopKTraits;

// TopKRequest as it lies in the message.
struct TopKFields {
  int32_t dtype = 0;  // logitd.v1.DType
  int64_t rows = 0;
  int64_t vocab = 0;
  ByteRange logits;
  Int32List k;
  FloatList temperature;
};

// As ParseMessage. Checks the encoding alone, not the values.
absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields);

class TopKCodec final : public OpCodec {
 public:
  const engine::OpTraits& op() const override { return kSoftmaxTopKTraits; }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  Payload payload() const override {
    return {.range = fields_.logits, .rows = fields_.rows, .row_bytes = row_bytes_};
  }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  int32_t k_of(int64_t row) const { return fields_.k[fields_.k.size() == 1 ? 0 : row]; }
  float temperature_of(int64_t row) const;

  TopKFields fields_;
  size_t row_bytes_ = 0;
  int64_t answer_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TOPK_CODEC_H_
