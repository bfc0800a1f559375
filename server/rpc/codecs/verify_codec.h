// Sampler.Verify: proto <-> verify job.
#ifndef LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/verify.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Axes and arrays of the op, behind those of sample.
enum VerifyAxis : size_t {
  kVerifyDraftIds = kSampleAxes,
  kVerifyDraftProbs,
  kVerifySequences,
  kVerifyAxes
};
static_assert(kVerifyAxes <= engine::kMaxAxes);

enum VerifyInput : size_t {
  kVerifyInDrafts = kSampleInputs,
  kVerifyInDraftIds,
  kVerifyInDraftProbs,
  kVerifyInSequences,
  kVerifyInputs
};

enum VerifyOutput : size_t { kVerifyAccepted = kSampleOutputs, kVerifyOutputs };

extern const engine::OpTraits kVerifyTraits;

// VerifyRequest as it lies in the message; hidden states are not in its table.
struct VerifyFields : SampleFields {
  Int32List sequence_rows;
  IdList drafts;
  Int32List draft_kind;  // logitd.v1.DraftKind
  Int32List draft_count;
  IdList draft_ids;
  ByteRange draft_probs;
};

// As ParseMessage. Checks the encoding alone, not the values.
absl::Status ParseVerifyFields(Pieces pieces, size_t max_list, VerifyFields* fields);

class VerifyCodec final : public OpCodec {
 public:
  const engine::OpTraits& op() const override { return kVerifyTraits; }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override;
  int64_t list_bytes() const override;
  Payload payload() const override { return body_.input().payload(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  absl::Status BuildSequences(const Int32List& sequence_rows);
  absl::Status BuildDrafts(Pieces pieces, VerifyFields* fields);

  SampleBody body_;
  std::vector<VerifySequence> sequences_;
  std::vector<VerifyDraft> drafts_;  // one a row
  IdList draft_ids_;
  ValueList draft_probs_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_VERIFY_CODEC_H_
