// Sampler.Verify: proto <-> rows of verify, or of linear_verify where hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "server/engine/job.h"
#include "server/ops/verify.h"
#include "server/rpc/codecs/row_codec.h"
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
  bool block_verification = false;
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseVerifyFields(Pieces pieces, size_t max_list, VerifyFields* fields);

class VerifyCodec final : public RowCodec<ops::VerifyRows> {
 public:
  explicit VerifyCodec(Finders find)
      : RowCodec(ops::kVerifyTraits, ops::kLinearVerifyTraits, std::move(find)) {}

  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) override;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_
