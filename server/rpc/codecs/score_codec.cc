#include "server/rpc/codecs/score_codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/codec_parts.h"

namespace logitd::rpc {
namespace {

using Request = v1::ScoreRequest;
using Response = v1::ScoreResponse;

constexpr engine::Array kInputArrays[kScoreInputs] = {
    {kScoreRows, sizeof(CrossEntropyRow)},  // kScoreInRows
    {kScoreExtraIds, sizeof(int32_t)},      // kScoreInExtraIds
};

constexpr engine::Array kOutputArrays[kScoreOutputs] = {
    {kScoreRows, sizeof(float)},          // kScoreLosses
    {kScoreRows, sizeof(float)},          // kScoreTargetLogprobs
    {kScoreRows, sizeof(int32_t)},        // kScoreRanks
    {kScoreRows, sizeof(float)},          // kScoreLogsumexp
    {kScoreRows, sizeof(RowStatus)},      // kScoreStatus
    {kScoreRows, sizeof(float)},          // kScoreEntropies
    {kScoreTopEntries, sizeof(int32_t)},  // kScoreTopIds
    {kScoreTopEntries, sizeof(float)},    // kScoreTopLogprobs
    {kScoreExtraEntries, sizeof(float)},  // kScoreExtraLogprobs
};

CrossEntropyArgs ArgsOf(const engine::BatchView& batch) {
  return {
      .logits = PayloadOf(batch),
      .rows = reinterpret_cast<const CrossEntropyRow*>(batch.inputs[kScoreInRows]),
      .extra_ids = reinterpret_cast<const int32_t*>(batch.inputs[kScoreInExtraIds]),
      .want = (batch.counts[kScoreRanksWanted] > 0 ? kWantRank : 0) |
              (batch.counts[kScoreEntropiesWanted] > 0 ? kWantEntropy : 0),
      .max_top_logprobs = batch.max_row_entries,
      .answers =
          {
              .loss = reinterpret_cast<float*>(batch.outputs[kScoreLosses]),
              .logsumexp = reinterpret_cast<float*>(batch.outputs[kScoreLogsumexp]),
              .target_logprob = reinterpret_cast<float*>(batch.outputs[kScoreTargetLogprobs]),
              .rank = reinterpret_cast<int32_t*>(batch.outputs[kScoreRanks]),
              .entropy = reinterpret_cast<float*>(batch.outputs[kScoreEntropies]),
              .top_ids = reinterpret_cast<int32_t*>(batch.outputs[kScoreTopIds]),
              .top_logprobs = reinterpret_cast<float*>(batch.outputs[kScoreTopLogprobs]),
              .extra_logprobs = reinterpret_cast<float*>(batch.outputs[kScoreExtraLogprobs]),
              .status = reinterpret_cast<RowStatus*>(batch.outputs[kScoreStatus]),
          },
  };
}

absl::Status EnqueueCrossEntropy(Stream& stream, const engine::BatchView& batch) {
  return stream.CrossEntropy(ArgsOf(batch));
}

absl::Status EnqueueLinearCrossEntropy(Stream& stream, const engine::BatchView& batch) {
  return stream.LinearCrossEntropy(
      {.hidden = PayloadOf(batch), .head = *batch.head, .cross_entropy = ArgsOf(batch)});
}

constexpr auto kFields = JoinTables(
    JoinTables(LogitsFieldTable<ScoreFields>(), HiddenFieldTable<ScoreFields>()),
    std::array<Field<ScoreFields>, 14>{{
        {Request::kTargetsFieldNumber, "targets", &ScoreFields::targets},
        {Request::kIgnoreIndexFieldNumber, "ignore_index", &ScoreFields::ignore_index},
        {Request::kTemperatureFieldNumber, "temperature", &ScoreFields::temperature},
        {Request::kSoftcapFieldNumber, "softcap", &ScoreFields::softcap},
        {Request::kLabelSmoothingFieldNumber, "label_smoothing", &ScoreFields::label_smoothing},
        {Request::kSmoothingFieldNumber, "smoothing", &ScoreFields::smoothing},
        {Request::kZLossFieldNumber, "z_loss", &ScoreFields::z_loss},
        {Request::kTopLogprobsFieldNumber, "top_logprobs", &ScoreFields::top_logprobs},
        {Request::kExtraCountFieldNumber, "extra_count", &ScoreFields::extra_count},
        {Request::kExtraIdsFieldNumber, "extra_ids", &ScoreFields::extra_ids},
        {Request::kWantRankFieldNumber, "want_rank", &ScoreFields::want_rank},
        {Request::kWantEntropyFieldNumber, "want_entropy", &ScoreFields::want_entropy},
        {Request::kOffsetFieldNumber, "offset", &ScoreFields::offset},
        {Request::kTotalsFieldNumber, "totals", &ScoreFields::totals_parts},
    }});

constexpr Field<ScoreTotals> kTotalsFields[] = {
    {v1::ScoreTotals::kRowsFieldNumber, "totals.rows", &ScoreTotals::rows},
    {v1::ScoreTotals::kCountedFieldNumber, "totals.counted", &ScoreTotals::counted},
    {v1::ScoreTotals::kIgnoredFieldNumber, "totals.ignored", &ScoreTotals::ignored},
    {v1::ScoreTotals::kFaultyFieldNumber, "totals.faulty", &ScoreTotals::faulty},
    {v1::ScoreTotals::kLossSumFieldNumber, "totals.loss_sum", &ScoreTotals::loss_sum},
    {v1::ScoreTotals::kTargetLogprobSumFieldNumber, "totals.target_logprob_sum",
     &ScoreTotals::target_logprob_sum},
};

static_assert(v1::SMOOTHING_CONVENTION_TORCH == static_cast<int>(Smoothing::kTorch));
static_assert(v1::SMOOTHING_CONVENTION_MEGATRON == static_cast<int>(Smoothing::kMegatron));

// The parameters with one value for all rows, or one a row.
template <typename List>
struct Parameter {
  std::string_view name;
  List ScoreParameters::*list;
};
constexpr Parameter<FloatList> kFloatParameters[] = {
    {"temperature", &ScoreParameters::temperature},
    {"softcap", &ScoreParameters::softcap},
    {"label_smoothing", &ScoreParameters::label_smoothing},
    {"z_loss", &ScoreParameters::z_loss},
};
constexpr Parameter<Int32List> kIntParameters[] = {
    {"smoothing", &ScoreParameters::smoothing},
    {"top_logprobs", &ScoreParameters::top_logprobs},
};

template <typename Visit>
absl::Status ForEachParameter(Visit visit) {
  for (const auto& parameter : kFloatParameters) LOGITD_RETURN_IF_ERROR(visit(parameter));
  for (const auto& parameter : kIntParameters) LOGITD_RETURN_IF_ERROR(visit(parameter));
  return absl::OkStatus();
}

constexpr int64_t kDefaultIgnoreIndex = -100;
// Of a first message: sums of three counts up to it, and of the rows to come, have room above.
constexpr int64_t kMaxOffset = int64_t{1} << 60;

absl::Status RowByRow(std::string_view name) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: none sent, but the sequence's first message gave it row by row; allowed: values in "
      "every message",
      name));
}

// What a later message may only say again.
template <typename T>
absl::Status InheritSame(std::string_view name, const T& said, T* own) {
  if (*own == T()) *own = said;
  if (*own == said) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(name), ": got ", *own, ", allowed is ", said,
                   ", which the sequence's first message said, or none"));
}

absl::Status CheckTotals(const ScoreTotals& totals, int64_t offset) {
  for (const int64_t count : {totals.counted, totals.ignored, totals.faulty}) {
    LOGITD_RETURN_IF_ERROR(CheckRange("totals: a count", count, 0, offset));
  }
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.rows", totals.rows, 0, offset));
  const int64_t sum = totals.counted + totals.ignored + totals.faulty;
  if (totals.rows != sum) {
    return absl::InvalidArgumentError(
        absl::StrFormat("totals.rows: got %d, allowed is %d: counted %d + ignored %d + faulty %d",
                        totals.rows, sum, totals.counted, totals.ignored, totals.faulty));
  }
  if (std::isnan(totals.loss_sum) || std::isnan(totals.target_logprob_sum)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("totals: got sums %g and %g, allowed: numbers and infinities",
                        totals.loss_sum, totals.target_logprob_sum));
  }
  if (totals.counted == 0 && (totals.loss_sum != 0 || totals.target_logprob_sum != 0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("totals: got sums %g and %g, allowed 0 and 0, for counted is 0",
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

const engine::OpTraits kCrossEntropyTraits = {
    .name = "cross_entropy",
    .inputs = kInputArrays,
    .outputs = kOutputArrays,
    .enqueue = &EnqueueCrossEntropy,
};

const engine::OpTraits kLinearCrossEntropyTraits = {
    .name = "linear_cross_entropy",
    .inputs = kInputArrays,
    .outputs = kOutputArrays,
    .enqueue = &EnqueueLinearCrossEntropy,
};

absl::Status ParseScoreFields(Pieces pieces, size_t max_list, ScoreFields* fields) {
  LOGITD_RETURN_IF_ERROR(ParseMessage<ScoreFields>(pieces, kFields, max_list, fields));
  return ParseNested<ScoreTotals>(pieces, fields->totals_parts, kTotalsFields, max_list,
                                  &fields->totals);
}

absl::Status ScoreCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  ScoreFields fields;
  LOGITD_RETURN_IF_ERROR(ParseScoreFields(pieces, static_cast<size_t>(max_rows), &fields));
  if (sequence_->begun) {
    LOGITD_RETURN_IF_ERROR(Inherit(&fields));
    LOGITD_RETURN_IF_ERROR(input_.Read(fields, max_rows, sequence_->head));
  } else {
    LOGITD_RETURN_IF_ERROR(input_.Read(fields, max_rows, find_head_));
  }
  LOGITD_RETURN_IF_ERROR(ReadPlace(fields));
  want_rank_ = fields.want_rank;
  want_entropy_ = fields.want_entropy;
  LOGITD_RETURN_IF_ERROR(BuildRows(fields));
  LOGITD_RETURN_IF_ERROR(CheckCrossEntropy({.rows = input_.rows(),
                                            .vocab = input_.vocab(),
                                            .params = rows_,
                                            .extra_ids = fields.extra_ids}));
  Remember(&fields);
  extra_ids_ = std::move(fields.extra_ids);
  FillSpec(spec);
  return absl::OkStatus();
}

// What the message does not say, from the first one of its sequence.
absl::Status ScoreCodec::Inherit(ScoreFields* fields) const {
  const ScoreParameters& said = sequence_->said;
  LOGITD_RETURN_IF_ERROR(InheritSame("dtype", said.dtype, &fields->dtype));
  LOGITD_RETURN_IF_ERROR(InheritSame("vocab", said.vocab, &fields->vocab));
  LOGITD_RETURN_IF_ERROR(CheckHeadName(fields->head));
  if (said.head.empty() && !fields->head.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "head: got %s, allowed is none, for the sequence's first message had logits",
        fields->head));
  }
  LOGITD_RETURN_IF_ERROR(InheritSame("head", said.head, &fields->head));
  LOGITD_RETURN_IF_ERROR(InheritSame("hidden_size", said.hidden_size, &fields->hidden_size));
  if (!fields->ignore_index.has_value()) fields->ignore_index = said.ignore_index;
  LOGITD_RETURN_IF_ERROR(ForEachParameter([&](const auto& parameter) {
    auto& own = fields->*parameter.list;
    const auto& first = said.*parameter.list;
    if (!own.empty()) return absl::OkStatus();
    if (first.size() > 1) return RowByRow(parameter.name);
    own = first;
    return absl::OkStatus();
  }));
  if (fields->extra_count.empty() && fields->extra_ids.empty()) {
    if (said.extra_count.size() > 1) return RowByRow("extra_count");
    fields->extra_ids = said.extra_ids;
  }
  fields->want_rank |= said.want_rank;
  fields->want_entropy |= said.want_entropy;
  return absl::OkStatus();
}

// Where in its sequence the message is.
absl::Status ScoreCodec::ReadPlace(const ScoreFields& fields) {
  offset_ = fields.offset.value_or(sequence_->next_row);
  if (!sequence_->begun) {
    LOGITD_RETURN_IF_ERROR(CheckRange("offset", offset_, 0, kMaxOffset));
    return CheckTotals(fields.totals, offset_);
  }
  if (offset_ != sequence_->next_row) {
    return absl::InvalidArgumentError(
        absl::StrFormat("offset: got %d, allowed is %d, where the message before it ended, or none",
                        offset_, sequence_->next_row));
  }
  if (!fields.totals_parts.parts.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "totals: got some at row %d, allowed in the first message of a stream alone", offset_));
  }
  return absl::OkStatus();
}

absl::Status ScoreCodec::BuildRows(const ScoreFields& fields) {
  const int64_t rows = input_.rows();
  const int64_t vocab = input_.vocab();
  if (static_cast<int64_t>(fields.targets.size()) != rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("targets: got %d values, allowed %d (rows)", fields.targets.size(), rows));
  }
  LOGITD_RETURN_IF_ERROR(ForEachParameter([&](const auto& parameter) {
    return CheckCount(parameter.name, fields.*parameter.list, rows);
  }));
  const int64_t ignore_index = fields.ignore_index.value_or(kDefaultIgnoreIndex);
  const int32_t want = (want_rank_ ? kWantRank : 0) | (want_entropy_ ? kWantEntropy : 0);
  rows_.resize(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t target = fields.targets[static_cast<size_t>(r)];
    const bool ignored = target == ignore_index;
    if (!ignored && (target < 0 || target >= vocab)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("targets: got %d at row %d, allowed 0..%d, or %d (ignore_index)", target,
                          r, vocab - 1, ignore_index));
    }
    rows_[r] = {
        .first_top_entry = top_entries_,
        .active = 1,
        .target = ignored ? kIgnoredTarget : target,
        .temperature = ValueAt(fields.temperature, r, 1.0f),
        .softcap = ValueAt(fields.softcap, r, 0.0f),
        .label_smoothing = ValueAt(fields.label_smoothing, r, 0.0f),
        .smoothing = ValueAt(fields.smoothing, r, Smoothing::kTorch),
        .z_loss = ValueAt(fields.z_loss, r, 0.0f),
        .top_logprobs = ValueAt(fields.top_logprobs, r, 0),
        .want = want,
    };
    if (input_.head() != nullptr && rows_[r].softcap != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "softcap: got %g at row %d, allowed 0 with hidden states: head %s has %g",
          rows_[r].softcap, r, input_.head()->info().name, input_.head()->view().softcap));
    }
    top_entries_ += rows_[r].top_logprobs;
  }
  LOGITD_RETURN_IF_ERROR(CutList("extra", fields.extra_count, fields.extra_ids.size(),
                                 absl::MakeSpan(rows_), &CrossEntropyRow::first_extra,
                                 &CrossEntropyRow::extra_count));
  for (CrossEntropyRow& row : rows_) {
    row.first_extra_entry = extra_entries_;
    extra_entries_ += row.extra_count;
  }
  return absl::OkStatus();
}

// For the messages to come.
void ScoreCodec::Remember(ScoreFields* fields) {
  sequence_->next_row = offset_ + input_.rows();
  if (sequence_->begun) return;
  sequence_->begun = true;
  sequence_->totals = fields->totals;
  sequence_->head = input_.head();
  ScoreParameters& said = sequence_->said;
  said = *fields;
  said.vocab = input_.vocab();  // of a head too
  said.input = {};
  ForEachParameter([&](const auto& parameter) {
    auto& list = said.*parameter.list;
    list.resize(std::min<size_t>(list.size(), 2));
    list.shrink_to_fit();
    return absl::OkStatus();
  }).IgnoreError();
  if (said.extra_count.size() > 1) {
    said.extra_count = {0, 0};
    IdList().swap(said.extra_ids);
  } else {
    said.extra_count.clear();
  }
}

void ScoreCodec::FillSpec(engine::JobSpec* spec) {
  const int64_t rows = input_.rows();
  input_.FillKey(kCrossEntropyTraits, kLinearCrossEntropyTraits, &spec->key);
  spec->counts[kScoreRows] = rows;
  spec->counts[kScoreExtraIds] = static_cast<int64_t>(extra_ids_.size());
  spec->counts[kScoreTopEntries] = top_entries_;
  spec->counts[kScoreExtraEntries] = extra_entries_;
  spec->counts[kScoreRanksWanted] = want_rank_ ? rows : 0;
  spec->counts[kScoreEntropiesWanted] = want_entropy_ ? rows : 0;
  for (const CrossEntropyRow& row : rows_) {
    spec->max_row_entries = std::max(spec->max_row_entries, row.top_logprobs);
  }
  constexpr int64_t kRowBytes = 5 * sizeof(float) + kMaxStatusBytes + 2 * 2;  // counts below 2^14
  constexpr int64_t kTopBytes = sizeof(int32_t) + sizeof(float);
  answer_bytes_ = kRowBytes * rows + kTopBytes * top_entries_ +
                  static_cast<int64_t>(sizeof(float)) * extra_entries_ + 10 * kMaxLengthHead +
                  kMaxFixedBytes + kMaxVarintSize + kMaxTotalsBytes;
}

int64_t ScoreCodec::list_bytes() const {
  return static_cast<int64_t>(rows_.capacity() * sizeof(CrossEntropyRow) +
                              extra_ids_.size() * sizeof(int32_t));
}

void ScoreCodec::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  std::byte* to = inputs[kScoreInRows];
  for (CrossEntropyRow row : rows_) {
    row.first_extra += first[kScoreExtraIds];
    row.first_top_entry += first[kScoreTopEntries];
    row.first_extra_entry += first[kScoreExtraEntries];
    std::memcpy(to, &row, sizeof(row));
    to += sizeof(row);
  }
  MoveOut(extra_ids_, inputs[kScoreInExtraIds]);
}

ScoreTotals ScoreCodec::TotalsOf(const engine::JobAnswer& answer) const {
  const auto* losses = reinterpret_cast<const float*>(answer.outputs[kScoreLosses].data());
  const auto* logprobs =
      reinterpret_cast<const float*>(answer.outputs[kScoreTargetLogprobs].data());
  const auto* status = reinterpret_cast<const RowStatus*>(answer.outputs[kScoreStatus].data());
  ScoreTotals totals{.rows = input_.rows()};
  for (size_t r = 0; r < rows_.size(); ++r) {
    if (status[r].code != RowCode::kOk) {
      ++totals.faulty;
    } else if (rows_[r].target == kIgnoredTarget) {
      ++totals.ignored;
    } else {
      ++totals.counted;
      totals.loss_sum += losses[r];
      totals.target_logprob_sum += logprobs[r];
    }
  }
  return totals;
}

grpc::ByteBuffer ScoreCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  totals_ = TotalsOf(answer);
  const auto& outputs = answer.outputs;
  return WriteMessage(answer_bytes_, [&](WireWriter& writer) {
    WriteArray(writer, Response::kLossesFieldNumber, outputs[kScoreLosses]);
    WriteArray(writer, Response::kTargetLogprobsFieldNumber, outputs[kScoreTargetLogprobs]);
    if (want_rank_) WriteArray(writer, Response::kRanksFieldNumber, outputs[kScoreRanks]);
    WriteArray(writer, Response::kLogsumexpFieldNumber, outputs[kScoreLogsumexp]);
    WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
                outputs[kScoreStatus]);
    WriteVarints(writer, Response::kTopCountFieldNumber, input_.rows(),
                 [this](int64_t r) { return rows_[static_cast<size_t>(r)].top_logprobs; });
    WriteArray(writer, Response::kTopIdsFieldNumber, outputs[kScoreTopIds]);
    WriteArray(writer, Response::kTopLogprobsFieldNumber, outputs[kScoreTopLogprobs]);
    WriteVarints(writer, Response::kExtraCountFieldNumber, input_.rows(),
                 [this](int64_t r) { return rows_[static_cast<size_t>(r)].extra_count; });
    WriteArray(writer, Response::kExtraLogprobsFieldNumber, outputs[kScoreExtraLogprobs]);
    if (want_entropy_) {
      WriteArray(writer, Response::kEntropiesFieldNumber, outputs[kScoreEntropies]);
    }
    WriteTimings(writer, Response::kTimingsFieldNumber, times);
    writer.VarintField(Response::kOffsetFieldNumber, offset_);
  });
}

// The totals, which only now are those of all messages before this one.
void ScoreCodec::Conclude(grpc::ByteBuffer* answer) {
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
  const grpc::ByteBuffer tail =
      WriteMessage(kMaxLengthHead + kMaxTotalsBytes, [&](WireWriter& writer) {
        writer.LengthHead(Response::kTotalsFieldNumber, size);
        writer.Raw(bytes.data(), size);
      });
  grpc::Slice slices[2];
  answer->DumpToSingleSlice(&slices[0]).IgnoreError();
  tail.DumpToSingleSlice(&slices[1]).IgnoreError();
  *answer = grpc::ByteBuffer(slices, 2);
}

}  // namespace logitd::rpc
