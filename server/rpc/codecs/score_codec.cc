#include "server/rpc/codecs/score_codec.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/answer_fields.h"

namespace logitd::rpc {
namespace {

using Response = v1::ScoreResponse;

constexpr NamedField<ScoreFields> kScoreFields[] = {
    {"targets", &ScoreFields::targets},           {"ignore_index", &ScoreFields::ignore_index},
    {"extra_count", &ScoreFields::extra_count},   {"extra_ids", &ScoreFields::extra_ids},
    {"want_rank", &ScoreFields::want_rank},       {"want_entropy", &ScoreFields::want_entropy},
    {"skip_ignored", &ScoreFields::skip_ignored}, {"offset", &ScoreFields::offset},
    {"totals", &ScoreFields::totals_parts},       {"support_count", &ScoreFields::support_count},
    {"support_ids", &ScoreFields::support_ids},
};

constexpr NamedField<ScoreTotals> kTotalsFields[] = {
    {"totals.loss_sum", &ScoreTotals::loss_sum},
    {"totals.target_logprob_sum", &ScoreTotals::target_logprob_sum},
};

constexpr RowList<CrossEntropyRow> kExtraIds = {
    "extra_ids", "extra_count", &CrossEntropyRow::first_extra, &CrossEntropyRow::extra_count};

constexpr RowList<CrossEntropyRow> kSupportIds = {"support_ids", "support_count",
                                                  &CrossEntropyRow::first_support,
                                                  &CrossEntropyRow::support_count};

static_assert(v1::SMOOTHING_CONVENTION_TORCH == static_cast<int>(Smoothing::kTorch));
static_assert(v1::SMOOTHING_CONVENTION_MEGATRON == static_cast<int>(Smoothing::kMegatron));

absl::Status CheckTotals(const ScoreTotals& totals, int64_t offset) {
  LOGITD_RETURN_IF_ERROR(CheckCounts(totals, offset));
  return CheckSums(totals, totals.loss_sum, totals.target_logprob_sum);
}

void Add(const ScoreTotals& part, ScoreTotals* totals) {
  AddCounts(part, totals);
  totals->loss_sum += part.loss_sum;
  totals->target_logprob_sum += part.target_logprob_sum;
}

}  // namespace

absl::Status ParseScoreFields(Pieces pieces, size_t max_list, ScoreFields* fields) {
  static const auto* const table = new auto(FieldTable<ScoreFields>(v1::ScoreRequest::descriptor())
                                                .Add(kLogitsFields)
                                                .Add(kHiddenFields)
                                                .Add(kScoreFields)
                                                .Add(kCrossEntropyParams, &ScoreFields::params));
  static const auto* const totals_table = new auto(
      FieldTable<ScoreTotals>(v1::ScoreTotals::descriptor()).Add(kCountsFields).Add(kTotalsFields));
  LOGITD_RETURN_IF_ERROR(ParseMessage<ScoreFields>(pieces, *table, max_list, fields));
  return ParseNested<ScoreTotals>(pieces, fields->totals_parts, *totals_table, max_list,
                                  &fields->totals);
}

absl::Status ScoreCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  ScoreFields fields;
  LOGITD_RETURN_IF_ERROR(ParseScoreFields(pieces, static_cast<size_t>(max_rows), &fields));
  if (sequence_->begun) {
    LOGITD_RETURN_IF_ERROR(Inherit(&fields));
    LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_.lease, sequence_->head));
  } else {
    LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_));
  }
  LOGITD_RETURN_IF_ERROR(ReadPlace(fields));
  LOGITD_RETURN_IF_ERROR(BuildRows(fields));
  rows_.extra_ids = std::move(fields.extra_ids);
  rows_.support_ids = std::move(fields.support_ids);
  LOGITD_RETURN_IF_ERROR(CheckCrossEntropy(rows_.Request(input_.vocab())));
  Remember(fields);
  FillSpec(spec, /*more_bytes: offset and totals*/ kMaxVarintSize + kMaxTotalsFieldBytes);
  return absl::OkStatus();
}

// Takes what the message does not say from the first one of its sequence.
absl::Status ScoreCodec::Inherit(ScoreFields* fields) const {
  const ScoreSettings& first = sequence_->first;
  LOGITD_RETURN_IF_ERROR(InheritInput(first, fields));
  if (!fields->ignore_index.has_value()) fields->ignore_index = first.ignore_index;
  LOGITD_RETURN_IF_ERROR(
      InheritParams<CrossEntropyRow>(kCrossEntropyParams, first.params, &fields->params));
  if (fields->extra_count.empty() && fields->extra_ids.empty()) {
    if (first.extra_count.size() > 1) return RowByRow("extra_count");
    fields->extra_ids = first.extra_ids;
  }
  fields->want_rank |= first.want_rank;
  fields->want_entropy |= first.want_entropy;
  fields->skip_ignored |= first.skip_ignored;
  return absl::OkStatus();
}

// Reads where in its sequence the message is.
absl::Status ScoreCodec::ReadPlace(const ScoreFields& fields) {
  LOGITD_RETURN_IF_ERROR(ReadOffset(fields.offset, fields.totals_parts, *sequence_, &offset_));
  return sequence_->begun ? absl::OkStatus() : CheckTotals(fields.totals, offset_);
}

absl::Status ScoreCodec::BuildRows(const ScoreFields& fields) {
  const int64_t row_count = input_.rows();
  const int64_t vocab = input_.vocab();
  if (static_cast<int64_t>(fields.targets.size()) != row_count) {
    return absl::InvalidArgumentError(absl::StrFormat("targets: got %d values, allowed %d (rows)",
                                                      fields.targets.size(), row_count));
  }
  want_rank_ = fields.want_rank;
  want_entropy_ = fields.want_entropy;
  std::vector<int32_t> targets;
  LOGITD_RETURN_IF_ERROR(ReadTargets(fields.targets, fields.ignore_index, vocab, &targets));
  const int32_t want = (want_rank_ ? kWantRank : 0) | (want_entropy_ ? kWantEntropy : 0);
  rows_.rows.resize(static_cast<size_t>(row_count), CrossEntropyRow{.active = 1, .want = want});
  const absl::Span<CrossEntropyRow> rows = absl::MakeSpan(rows_.rows);
  LOGITD_RETURN_IF_ERROR(FillParams<CrossEntropyRow>(kCrossEntropyParams, fields.params, rows));
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].target = targets[r];
    if (input_.head() != nullptr && rows[r].softcap != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "softcap: got %g at row %d, allowed 0 with hidden states: head %s has %g",
          rows[r].softcap, r, input_.head()->info().name, input_.head()->view().softcap));
    }
  }
  LOGITD_RETURN_IF_ERROR(CutList(kExtraIds, fields.extra_count, fields.extra_ids.size(), rows));
  LOGITD_RETURN_IF_ERROR(
      CutList(kSupportIds, fields.support_count, fields.support_ids.size(), rows));
  if (fields.skip_ignored) SkipIgnored(rows);
  return absl::OkStatus();
}

// Has ignored rows left out: they ask for nothing.
void ScoreCodec::SkipIgnored(absl::Span<CrossEntropyRow> rows) {
  for (CrossEntropyRow& row : rows) {
    if (row.target != kIgnoredTarget) continue;
    row.want = row.top_logprobs = row.extra_count = row.support_count = 0;
  }
  rows_.skip_ignored = true;
  UseOps(ops::kCountedCrossEntropyTraits, ops::kCountedLinearCrossEntropyTraits);
}

// Keeps what the later messages of the sequence need.
void ScoreCodec::Remember(const ScoreFields& fields) {
  sequence_->next_row = offset_ + input_.rows();
  if (sequence_->begun) return;
  sequence_->begun = true;
  sequence_->totals = fields.totals;
  sequence_->head = input_.head();
  ScoreSettings& first = sequence_->first;
  first = fields;
  first.vocab = input_.vocab();  // of a head too
  first.input.number = 0;
  first.input.message.parts.clear();
  Shorten(&first.params);
  if (first.extra_count.size() > 1) {
    first.extra_count = {0, 0};
  } else {
    first.extra_count.clear();
    first.extra_ids = rows_.extra_ids;
  }
}

EncodedMessage ScoreCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  const auto losses = answer.Out(ops::kCrossEntropyLosses);
  const auto logprobs = answer.Out(ops::kCrossEntropyTargetLogprobs);
  totals_ = TotalsOf<ScoreTotals>(
      answer.Out(ops::kCrossEntropyStatus),
      [&](size_t r) { return rows_.rows[r].target == kIgnoredTarget; },
      [&](size_t r, ScoreTotals* totals) {
        totals->loss_sum += losses[r];
        totals->target_logprob_sum += logprobs[r];
      });
  return EncodedMessage::Make(answer_bytes_, [&](WireWriter& writer) {
    const auto array = [&](uint32_t number, auto output) {
      WriteArray(writer, number, answer.Out(output));
    };
    array(Response::kLossesFieldNumber, ops::kCrossEntropyLosses);
    array(Response::kTargetLogprobsFieldNumber, ops::kCrossEntropyTargetLogprobs);
    if (want_rank_) array(Response::kRanksFieldNumber, ops::kCrossEntropyRanks);
    array(Response::kLogsumexpFieldNumber, ops::kCrossEntropyLogsumexp);
    WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
                answer.Out(ops::kCrossEntropyStatus));
    WriteVarints(writer, Response::kTopCountFieldNumber, rows_.rows,
                 [](const CrossEntropyRow& row) { return row.top_logprobs; });
    array(Response::kTopIdsFieldNumber, ops::kCrossEntropyTopIds);
    array(Response::kTopLogprobsFieldNumber, ops::kCrossEntropyTopLogprobs);
    WriteVarints(writer, Response::kExtraCountFieldNumber, rows_.rows,
                 [](const CrossEntropyRow& row) { return row.extra_count; });
    array(Response::kExtraLogprobsFieldNumber, ops::kCrossEntropyExtraLogprobs);
    if (want_entropy_) array(Response::kEntropiesFieldNumber, ops::kCrossEntropyEntropies);
    WriteTimings(writer, Response::kTimingsFieldNumber, times);
    writer.VarintField(Response::kOffsetFieldNumber, offset_);
    writer.VarintField(kHeadVersionNumber, input_.head_version());
  });
}

// Adds the totals: all messages before this one have been counted by now.
void ScoreCodec::Conclude(EncodedMessage* answer) {
  ScoreTotals& totals = sequence_->totals;
  Add(totals_, &totals);
  const auto counted = static_cast<double>(totals.counted);
  AppendTotals(Response::kTotalsFieldNumber, totals,
               {totals.loss_sum, totals.target_logprob_sum, totals.loss_sum / counted,
                std::exp(-totals.target_logprob_sum / counted)},
               answer);
}

}  // namespace logitd::rpc
