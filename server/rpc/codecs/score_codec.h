// Scorer.Score, called or streamed: proto <-> cross_entropy job, or linear_cross_entropy where
// hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_SCORE_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_SCORE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cross_entropy.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/row_input.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Axes and arrays of the op. The wanted axes have no array: they tell a batch what any of its rows
// wants.
enum ScoreAxis : size_t {
  kScoreRows = engine::kRowAxis,
  kScoreExtraIds,
  kScoreTopEntries,
  kScoreExtraEntries,
  kScoreRanksWanted,
  kScoreEntropiesWanted,
};

enum ScoreInput : size_t { kScoreInRows, kScoreInExtraIds, kScoreInputs };

enum ScoreOutput : size_t {
  kScoreLosses,
  kScoreTargetLogprobs,
  kScoreRanks,
  kScoreLogsumexp,
  kScoreStatus,
  kScoreEntropies,
  kScoreTopIds,
  kScoreTopLogprobs,
  kScoreExtraLogprobs,
  kScoreOutputs
};

extern const engine::OpTraits kCrossEntropyTraits;
extern const engine::OpTraits kLinearCrossEntropyTraits;

// logitd.v1.ScoreTotals, but for what follows from it.
struct ScoreTotals {
  int64_t rows = 0;
  int64_t counted = 0;
  int64_t ignored = 0;
  int64_t faulty = 0;
  double loss_sum = 0;
  double target_logprob_sum = 0;
};

// What holds for a whole sequence where its first message says it.
struct ScoreParameters : RowInputFields {
  std::optional<int64_t> ignore_index;
  FloatList temperature;
  FloatList softcap;
  FloatList label_smoothing;
  Int32List smoothing;  // logitd.v1.SmoothingConvention
  FloatList z_loss;
  Int32List top_logprobs;
  Int32List extra_count;
  IdList extra_ids;
  bool want_rank = false;
  bool want_entropy = false;
};

// ScoreRequest as it lies in the message.
struct ScoreFields : ScoreParameters {
  IdList targets;
  std::optional<int64_t> offset;
  Nested totals_parts;
  ScoreTotals totals;  // of the parts
};

// As ParseMessage. Checks the encoding alone, not the values.
absl::Status ParseScoreFields(Pieces pieces, size_t max_list, ScoreFields* fields);

// What the messages of a stream have in common; a call is a stream of one. Their codecs are used
// one after another as far as Parse goes, and as far as Conclude goes.
struct ScoreSequence {
  // Of Parse.
  bool begun = false;
  ScoreParameters said;  // by the first message; a list with a value for each row is there as two
  std::shared_ptr<const engine::Head> head;
  int64_t next_row = 0;
  // Of the first Parse, then of Conclude.
  ScoreTotals totals;
};

class ScoreCodec final : public OpCodec {
 public:
  explicit ScoreCodec(FindHead find_head,
                      std::shared_ptr<ScoreSequence> sequence = std::make_shared<ScoreSequence>())
      : find_head_(std::move(find_head)), sequence_(std::move(sequence)) {}

  const engine::OpTraits& op() const override {
    return input_.head() == nullptr ? kCrossEntropyTraits : kLinearCrossEntropyTraits;
  }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return answer_bytes_; }
  int64_t list_bytes() const override;
  Payload payload() const override { return input_.payload(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;
  void Conclude(grpc::ByteBuffer* answer) override;

 private:
  absl::Status Inherit(ScoreFields* fields) const;
  absl::Status ReadPlace(const ScoreFields& fields);
  absl::Status BuildRows(const ScoreFields& fields);
  void Remember(ScoreFields* fields);
  void FillSpec(engine::JobSpec* spec);
  ScoreTotals TotalsOf(const engine::JobAnswer& answer) const;

  const FindHead find_head_;
  const std::shared_ptr<ScoreSequence> sequence_;
  RowInput input_;
  int64_t offset_ = 0;
  bool want_rank_ = false;
  bool want_entropy_ = false;
  std::vector<CrossEntropyRow> rows_;  // places count from the job's own first elements
  IdList extra_ids_;
  int64_t top_entries_ = 0;
  int64_t extra_entries_ = 0;
  int64_t answer_bytes_ = 0;
  ScoreTotals totals_;  // of this message, once encoded
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_SCORE_CODEC_H_
