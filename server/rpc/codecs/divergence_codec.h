// Scorer.Divergence, called or streamed: proto <-> rows of divergence, or of linear_divergence
// where hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_DIVERGENCE_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_DIVERGENCE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/ops/divergence.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/codecs/row_codec.h"
#include "server/rpc/codecs/row_values.h"
#include "server/rpc/codecs/sequence.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// logitd.v1.DivergenceTotals, except what is computed from the rest of it.
struct DivergenceTotals : SequenceCounts {
  double forward_kl_sum = 0;
  double reverse_kl_sum = 0;
};

// Fields 42 to 48 of a request, as they are in the message.
struct ReferenceFields {
  int32_t reference_dtype = 0;  // logitd.v1.DType; 0: that of the first input
  std::string reference_head;
  int64_t reference_hidden_size = 0;
  int64_t reference_head_version = 0;
  Choice reference;
};

// Settings that the first message of a sequence may say for the later ones.
struct DivergenceSettings : InputFields, ReferenceFields {
  std::optional<int64_t> ignore_index;
  AnyLists params = ListsFor(kDivergenceParams);
};

// DivergenceRequest as it is in the message.
struct DivergenceFields : DivergenceSettings {
  IdList targets;
  std::optional<int64_t> offset;
  Nested totals_parts;
  DivergenceTotals totals;  // of the parts
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseDivergenceFields(Pieces pieces, size_t max_list, DivergenceFields* fields);

// The common state of the messages of a stream; a call is a stream of one. The calls of Parse come
// one after another, and so do those of Conclude.
struct DivergenceSequence : SequencePlace {
  // For Parse, with the place.
  DivergenceSettings first;  // as in ScoreSequence; reference_dtype is set
  bool has_targets = false;
  std::shared_ptr<const engine::Head> head;
  std::shared_ptr<const engine::Head> reference_head;
  // For the first Parse, then for Conclude.
  DivergenceTotals totals;
};

class DivergenceCodec final : public RowCodec<ops::DivergenceRows> {
 public:
  explicit DivergenceCodec(Finders find, std::shared_ptr<DivergenceSequence> sequence =
                                             std::make_shared<DivergenceSequence>())
      : RowCodec(ops::kDivergenceTraits, ops::kLinearDivergenceTraits, std::move(find)),
        sequence_(std::move(sequence)) {}

  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  absl::Span<const Payload> copied_inputs() const override {
    return absl::MakeConstSpan(&copied_, 1);
  }
  void PayloadCopied() override;
  EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) override;
  void Conclude(EncodedMessage* answer) override;

 private:
  absl::Status Inherit(DivergenceFields* fields) const;
  absl::Status ReadInputs(Pieces pieces, const DivergenceFields& fields, int64_t max_rows);
  absl::Status ReadReference(Pieces pieces, const DivergenceFields& fields, int64_t max_rows);
  absl::Status CheckPair() const;
  absl::Status BuildRows(const DivergenceFields& fields);
  void Remember(const DivergenceFields& fields);

  const std::shared_ptr<DivergenceSequence> sequence_;
  LogitsOrHidden reference_;
  Payload copied_;  // of the reference
  int64_t offset_ = 0;
  bool has_targets_ = false;
  DivergenceTotals totals_;  // of this message, after Encode
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_DIVERGENCE_CODEC_H_
