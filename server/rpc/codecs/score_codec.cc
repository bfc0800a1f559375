#include "server/rpc/codecs/score_codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/checks.h"
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
    {"totals.rows", &ScoreTotals::rows},
    {"totals.counted", &ScoreTotals::counted},
    {"totals.ignored", &ScoreTotals::ignored},
    {"totals.faulty", &ScoreTotals::faulty},
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

constexpr int64_t kDefaultIgnoreIndex = -100;
// So that the sum of three counts up to it, and of the rows to come, does not overflow.
constexpr int64_t kMaxOffset = int64_t{1} << 60;

absl::Status RowByRow(std::string_view name) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got none, allowed values in every message: the sequence's first one "
                      "gave them row by row",
                      name));
}

// A value that a later message may only repeat.
template <typename T>
absl::Status InheritSame(std::string_view name, const T& first, T* own) {
  if (*own == T()) *own = first;
  if (*own == first) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(std::string(name), ": got ", *own, ", allowed ",
                                                 first,
                                                 ", as in the sequence's first message, or "
                                                 "none"));
}

// The lists of parameters that a later message does not send.
absl::Status InheritParams(const AnyLists& first, AnyLists* own) {
  for (size_t i = 0; i < first.size(); ++i) {
    const bool is_sent = std::visit([](const auto& list) { return !list.empty(); }, (*own)[i]);
    if (is_sent) continue;
    const size_t values = std::visit([](const auto& list) { return list.size(); }, first[i]);
    if (values > 1) return RowByRow(kCrossEntropyParams[i].name);
    (*own)[i] = first[i];
  }
  return absl::OkStatus();
}

absl::Status CheckTotals(const ScoreTotals& totals, int64_t offset) {
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.counted", totals.counted, 0, offset));
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.ignored", totals.ignored, 0, offset));
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.faulty", totals.faulty, 0, offset));
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.rows", totals.rows, 0, offset));
  const int64_t sum = totals.counted + totals.ignored + totals.faulty;
  if (totals.rows != sum) {
    return absl::InvalidArgumentError(
        absl::StrFormat("totals.rows: got %d, allowed %d: counted %d + ignored %d + faulty %d",
                        totals.rows, sum, totals.counted, totals.ignored, totals.faulty));
  }
  if (std::isnan(totals.loss_sum) || std::isnan(totals.target_logprob_sum)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("totals: got sums %g and %g, allowed numbers and infinities",
                        totals.loss_sum, totals.target_logprob_sum));
  }
  if (totals.counted == 0 && (totals.loss_sum != 0 || totals.target_logprob_sum != 0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("totals: got sums %g and %g, allowed 0 and 0 where counted is 0",
                        totals.loss_sum, totals.target_logprob_sum));
  }
  return absl::OkStatus();
}

void Add(const ScoreTotals& part, ScoreTotals* totals) {
  totals->rows += part.rows;
  totals->counted += part.counted;
  totals->ignored += part.ignored;
  totals->faulty += part.faulty;
  totals->loss_sum += part.loss_sum;
  totals->target_logprob_sum += part.target_logprob_sum;
}

constexpr size_t kMaxTotalsBytes = 8 * (1 + kMaxVarintSize);

}  // namespace

absl::Status ParseScoreFields(Pieces pieces, size_t max_list, ScoreFields* fields) {
  static const auto* const table = new auto(FieldTable<ScoreFields>(v1::ScoreRequest::descriptor())
                                                .Add(kLogitsFields)
                                                .Add(kHiddenFields)
                                                .Add(kScoreFields)
                                                .Add(kCrossEntropyParams, &ScoreFields::params));
  static const auto* const totals_table =
      new auto(FieldTable<ScoreTotals>(v1::ScoreTotals::descriptor()).Add(kTotalsFields));
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
  FillSpec(spec,
           /*more_bytes: offset and totals*/ kMaxVarintSize + kMaxLengthHead + kMaxTotalsBytes);
  return absl::OkStatus();
}

// Takes what the message does not say from the first one of its sequence.
absl::Status ScoreCodec::Inherit(ScoreFields* fields) const {
  const ScoreSettings& first = sequence_->first;
  LOGITD_RETURN_IF_ERROR(InheritSame("dtype", first.dtype, &fields->dtype));
  LOGITD_RETURN_IF_ERROR(InheritSame("vocab", first.vocab, &fields->vocab));
  LOGITD_RETURN_IF_ERROR(CheckHeadName(fields->head));
  if (first.head.empty() && !fields->head.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "head: got %s, allowed none: the sequence's first message had logits", fields->head));
  }
  LOGITD_RETURN_IF_ERROR(InheritSame("head", first.head, &fields->head));
  LOGITD_RETURN_IF_ERROR(InheritSame("hidden_size", first.hidden_size, &fields->hidden_size));
  if (!fields->ignore_index.has_value()) fields->ignore_index = first.ignore_index;
  LOGITD_RETURN_IF_ERROR(InheritParams(first.params, &fields->params));
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
  offset_ = fields.offset.value_or(sequence_->next_row);
  if (!sequence_->begun) {
    LOGITD_RETURN_IF_ERROR(CheckRange("offset", offset_, 0, kMaxOffset));
    return CheckTotals(fields.totals, offset_);
  }
  if (offset_ != sequence_->next_row) {
    return absl::InvalidArgumentError(
        absl::StrFormat("offset: got %d, allowed %d, where the message before it ended, or none",
                        offset_, sequence_->next_row));
  }
  if (!fields.totals_parts.parts.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "totals: got some at row %d, allowed only in the first message of a stream", offset_));
  }
  return absl::OkStatus();
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
  const int64_t ignore_index = fields.ignore_index.value_or(kDefaultIgnoreIndex);
  const int32_t want = (want_rank_ ? kWantRank : 0) | (want_entropy_ ? kWantEntropy : 0);
  rows_.rows.resize(static_cast<size_t>(row_count), CrossEntropyRow{.active = 1, .want = want});
  const absl::Span<CrossEntropyRow> rows = absl::MakeSpan(rows_.rows);
  LOGITD_RETURN_IF_ERROR(FillParams<CrossEntropyRow>(kCrossEntropyParams, fields.params, rows));
  for (size_t r = 0; r < rows.size(); ++r) {
    const int32_t target = fields.targets[r];
    const bool ignored = target == ignore_index;
    if (!ignored && (target < 0 || target >= vocab)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("targets: got %d at row %d, allowed 0..%d, or %d (ignore_index)", target,
                          r, vocab - 1, ignore_index));
    }
    rows[r].target = ignored ? kIgnoredTarget : target;
    if (input_.head() != nullptr && rows[r].softcap != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "softcap: got %g at row %d, allowed 0 with hidden states: head %s has %g",
          rows[r].softcap, r, input_.head()->info().name, input_.head()->view().softcap));
    }
  }
  LOGITD_RETURN_IF_ERROR(CutList(kExtraIds, fields.extra_count, fields.extra_ids.size(), rows));
  LOGITD_RETURN_IF_ERROR(CutSupports(fields, rows));
  if (fields.skip_ignored) SkipIgnored(rows);
  return absl::OkStatus();
}

// Gives rows their supports.
absl::Status ScoreCodec::CutSupports(const ScoreFields& fields, absl::Span<CrossEntropyRow> rows) {
  if (!fields.support_ids.empty() && input_.head() != nullptr && input_.head()->sharded()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("support_ids: got some, allowed none with head %s, which is cut over "
                        "devices",
                        input_.head()->info().name));
  }
  return CutList(kSupportIds, fields.support_count, fields.support_ids.size(), rows);
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
  for (AnyList& any : first.params) {
    std::visit(
        [](auto& list) {
          list.resize(std::min<size_t>(list.size(), 2));
          list.shrink_to_fit();
        },
        any);
  }
  if (first.extra_count.size() > 1) {
    first.extra_count = {0, 0};
  } else {
    first.extra_count.clear();
    first.extra_ids = rows_.extra_ids;
  }
}

ScoreTotals ScoreCodec::TotalsOf(const engine::JobAnswer& answer) const {
  const auto losses = answer.Out(ops::kCrossEntropyLosses);
  const auto logprobs = answer.Out(ops::kCrossEntropyTargetLogprobs);
  const auto status = answer.Out(ops::kCrossEntropyStatus);
  ScoreTotals totals{.rows = input_.rows()};
  for (size_t r = 0; r < rows_.rows.size(); ++r) {
    if (status[r].code != RowCode::kOk) {
      ++totals.faulty;
    } else if (rows_.rows[r].target == kIgnoredTarget) {
      ++totals.ignored;
    } else {
      ++totals.counted;
      totals.loss_sum += losses[r];
      totals.target_logprob_sum += logprobs[r];
    }
  }
  return totals;
}

EncodedMessage ScoreCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  totals_ = TotalsOf(answer);
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
  using Totals = v1::ScoreTotals;
  ScoreTotals& totals = sequence_->totals;
  Add(totals_, &totals);
  std::array<uint8_t, kMaxTotalsBytes> bytes;
  WireWriter fields(bytes.data());
  fields.VarintField(Totals::kRowsFieldNumber, totals.rows);
  fields.VarintField(Totals::kCountedFieldNumber, totals.counted);
  fields.VarintField(Totals::kIgnoredFieldNumber, totals.ignored);
  fields.VarintField(Totals::kFaultyFieldNumber, totals.faulty);
  fields.DoubleField(Totals::kLossSumFieldNumber, totals.loss_sum);
  fields.DoubleField(Totals::kTargetLogprobSumFieldNumber, totals.target_logprob_sum);
  const auto counted = static_cast<double>(totals.counted);
  fields.DoubleField(Totals::kLossMeanFieldNumber, totals.loss_sum / counted);
  fields.DoubleField(Totals::kPerplexityFieldNumber,
                     std::exp(-totals.target_logprob_sum / counted));
  const auto size = static_cast<size_t>(fields.at() - bytes.data());
  const EncodedMessage tail =
      EncodedMessage::Make(kMaxLengthHead + kMaxTotalsBytes, [&](WireWriter& writer) {
        writer.LengthHead(Response::kTotalsFieldNumber, size);
        writer.Raw(bytes.data(), size);
      });
  answer->Append(tail);
}

}  // namespace logitd::rpc
