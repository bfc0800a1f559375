// Sampler.Verify: proto <-> rows of verify.
#ifndef LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_

#include <cstddef>
#include <cstdint>

#include "server/engine/job.h"
#include "server/ops/verify.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// VerifyRequest as it is in the message.
struct VerifyFields : SampleFields {
  Int32List sequence_rows;
  IdList drafts;
  Int32List draft_kind;  // logitd.v1.DraftKind
  Int32List draft_count;
  IdList draft_ids;
  ByteRange draft_probs;
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseVerifyFields(Pieces pieces, size_t max_list, VerifyFields* fields);

class VerifyCodec final : public OpCodec {
 public:
  const engine::OpTraits& op() const override { return ops::kVerifyTraits; }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  int64_t list_bytes() const override { return rows_.bytes(); }
  Payload payload() const override { return input_.payload(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override {
    rows_.WriteInputs(inputs, first);
  }
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  LogitsOrHidden input_;
  ops::VerifyRows rows_;
  int64_t answer_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_
