// Scorer.Score, called or streamed: proto <-> rows of cross_entropy, or of linear_cross_entropy
// where hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_SCORE_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_SCORE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/ops/cross_entropy.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/codecs/row_codec.h"
#include "server/rpc/codecs/row_values.h"
#include "server/rpc/codecs/sequence.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// logitd.v1.ScoreTotals, except what is computed from the rest of it.
struct ScoreTotals : SequenceCounts {
  double loss_sum = 0;
  double target_logprob_sum = 0;
};

// Settings that the first message of a sequence may say for the later ones.
struct ScoreSettings : InputFields {
  std::optional<int64_t> ignore_index;
  AnyLists params = ListsFor(kCrossEntropyParams);
  Int32List extra_count;
  IdList extra_ids;
  bool want_rank = false;
  bool want_entropy = false;
  bool skip_ignored = false;
};

// ScoreRequest as it is in the message.
struct ScoreFields : ScoreSettings {
  IdList targets;
  Int32List support_count;
  IdList support_ids;
  std::optional<int64_t> offset;
  Nested totals_parts;
  ScoreTotals totals;  // of the parts
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseScoreFields(Pieces pieces, size_t max_list, ScoreFields* fields);

// The common state of the messages of a stream; a call is a stream of one. The calls of Parse come
// one after another, and so do those of Conclude.
struct ScoreSequence : SequencePlace {
  // For Parse, with the place.
  ScoreSettings first;  // of the first message; of a list with a value for each row, two values
  std::shared_ptr<const engine::Head> head;
  // For the first Parse, then for Conclude.
  ScoreTotals totals;
};

class ScoreCodec final : public RowCodec<ops::CrossEntropyRows> {
 public:
  explicit ScoreCodec(Finders find,
                      std::shared_ptr<ScoreSequence> sequence = std::make_shared<ScoreSequence>())
      : RowCodec(ops::kCrossEntropyTraits, ops::kLinearCrossEntropyTraits, std::move(find)),
        sequence_(std::move(sequence)) {}

  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) override;
  void Conclude(EncodedMessage* answer) override;

 private:
  absl::Status Inherit(ScoreFields* fields) const;
  absl::Status ReadPlace(const ScoreFields& fields);
  absl::Status BuildRows(const ScoreFields& fields);
  void SkipIgnored(absl::Span<CrossEntropyRow> rows);
  void Remember(const ScoreFields& fields);

  const std::shared_ptr<ScoreSequence> sequence_;
  int64_t offset_ = 0;
  bool want_rank_ = false;
  bool want_entropy_ = false;
  ScoreTotals totals_;  // of this message, after Encode
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_SCORE_CODEC_H_
