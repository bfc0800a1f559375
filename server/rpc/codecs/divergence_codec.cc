#include "server/rpc/codecs/divergence_codec.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/answer_fields.h"

namespace logitd::rpc {
namespace {

using Request = v1::DivergenceRequest;
using Response = v1::DivergenceResponse;

constexpr NamedField<DivergenceFields> kDivergenceFields[] = {
    {"reference_dtype", &DivergenceFields::reference_dtype},
    {"reference_head", &DivergenceFields::reference_head},
    {"reference_hidden_size", &DivergenceFields::reference_hidden_size},
    {"reference_head_version", &DivergenceFields::reference_head_version},
    {"reference_shared", &DivergenceFields::reference},
    {"reference_hidden", &DivergenceFields::reference},
    {"reference_logits", &DivergenceFields::reference},
    {"targets", &DivergenceFields::targets},
    {"ignore_index", &DivergenceFields::ignore_index},
    {"offset", &DivergenceFields::offset},
    {"totals", &DivergenceFields::totals_parts},
};

constexpr NamedField<DivergenceTotals> kTotalsFields[] = {
    {"totals.forward_kl_sum", &DivergenceTotals::forward_kl_sum},
    {"totals.reverse_kl_sum", &DivergenceTotals::reverse_kl_sum},
};

// Between the number of a field in the oneof `reference` and that of the same one in `input`.
constexpr int kReferenceStep =
    int{Request::kReferenceLogitsFieldNumber} - int{Request::kLogitsFieldNumber};
static_assert(Request::kReferenceHiddenFieldNumber ==
              int{Request::kHiddenFieldNumber} + kReferenceStep);
static_assert(Request::kReferenceSharedFieldNumber ==
              int{Request::kSharedFieldNumber} + kReferenceStep);
static_assert(Response::kHeadVersionFieldNumber == int{kHeadVersionNumber});

// The reference as an input of its own. What it does not say itself it has from the first one.
InputFields ReferenceOf(const DivergenceSettings& fields, int64_t vocab) {
  InputFields reference = {
      .dtype = fields.reference_dtype == 0 ? fields.dtype : fields.reference_dtype,
      .rows = fields.rows,
      .vocab = vocab,
      .head = fields.reference_head,
      .hidden_size = fields.reference_hidden_size,
      .head_version = fields.reference_head_version,
      .input = fields.reference};
  reference.input.number -= uint32_t{kReferenceStep};
  return reference;
}

// An error of the reference as an input of its own: its text begins with a field, except where a
// name is not found.
absl::Status OfReference(const absl::Status& status) {
  if (status.ok()) return status;
  const bool has_field =
      !absl::IsNotFound(status) || absl::StartsWith(status.message(), "shared: ");
  const char* const prefix = has_field ? "reference_" : "reference: ";
  return {status.code(), absl::StrCat(prefix, status.message())};
}

std::string_view NameOf(const engine::Head& head) { return head.info().name; }

}  // namespace

absl::Status ParseDivergenceFields(Pieces pieces, size_t max_list, DivergenceFields* fields) {
  static const auto* const table = new auto(FieldTable<DivergenceFields>(Request::descriptor())
                                                .Add(kLogitsFields)
                                                .Add(kHiddenFields)
                                                .Add(kDivergenceFields)
                                                .Add(kDivergenceParams, &DivergenceFields::params));
  static const auto* const totals_table =
      new auto(FieldTable<DivergenceTotals>(v1::DivergenceTotals::descriptor())
                   .Add(kCountsFields)
                   .Add(kTotalsFields));
  LOGITD_RETURN_IF_ERROR(ParseMessage<DivergenceFields>(pieces, *table, max_list, fields));
  return ParseNested<DivergenceTotals>(pieces, fields->totals_parts, *totals_table, max_list,
                                       &fields->totals);
}

absl::Status DivergenceCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  DivergenceFields fields;
  LOGITD_RETURN_IF_ERROR(ParseDivergenceFields(pieces, static_cast<size_t>(max_rows), &fields));
  if (sequence_->begun) LOGITD_RETURN_IF_ERROR(Inherit(&fields));
  LOGITD_RETURN_IF_ERROR(ReadInputs(pieces, fields, max_rows));
  LOGITD_RETURN_IF_ERROR(ReadOffset(fields.offset, fields.totals_parts, *sequence_, &offset_));
  if (!sequence_->begun) {
    const DivergenceTotals& totals = fields.totals;
    LOGITD_RETURN_IF_ERROR(CheckCounts(totals, offset_));
    LOGITD_RETURN_IF_ERROR(CheckSums(totals, totals.forward_kl_sum, totals.reverse_kl_sum));
  }
  LOGITD_RETURN_IF_ERROR(BuildRows(fields));
  LOGITD_RETURN_IF_ERROR(CheckDivergence({.vocab = input_.vocab(), .params = rows_.rows}));
  Remember(fields);
  FillSpec(spec, /*more_bytes: offset, totals and the second version*/
           3 * kMaxVarintSize + kMaxTotalsFieldBytes, reference_.head().get());
  return absl::OkStatus();
}

// Takes what the message does not say from the first one of its sequence.
absl::Status DivergenceCodec::Inherit(DivergenceFields* fields) const {
  const DivergenceSettings& first = sequence_->first;
  LOGITD_RETURN_IF_ERROR(InheritInput(first, fields));
  InputFields reference = {.dtype = fields->reference_dtype,
                           .head = std::move(fields->reference_head),
                           .hidden_size = fields->reference_hidden_size};
  LOGITD_RETURN_IF_ERROR(OfReference(InheritInput({.dtype = first.reference_dtype,
                                                   .head = first.reference_head,
                                                   .hidden_size = first.reference_hidden_size},
                                                  &reference)));
  fields->reference_dtype = reference.dtype;
  fields->reference_head = std::move(reference.head);
  fields->reference_hidden_size = reference.hidden_size;
  if (!fields->ignore_index.has_value()) fields->ignore_index = first.ignore_index;
  if (sequence_->has_targets && fields->targets.empty()) return RowByRow("targets");
  return InheritParams<DivergenceRow>(kDivergenceParams, first.params, &fields->params);
}

absl::Status DivergenceCodec::ReadInputs(Pieces pieces, const DivergenceFields& fields,
                                         int64_t max_rows) {
  // The head says its vocabulary, and the reference is checked beside it.
  if (sequence_->begun) {
    LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_.lease, sequence_->head));
  } else {
    LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_));
  }
  if (fields.reference.number == 0) {
    return absl::InvalidArgumentError(
        "reference: got none, allowed reference_logits, reference_hidden with reference_head, or "
        "reference_shared");
  }
  LOGITD_RETURN_IF_ERROR(OfReference(ReadReference(pieces, fields, max_rows)));
  LOGITD_RETURN_IF_ERROR(CheckPair());
  if (input_.head() != nullptr || reference_.head() != nullptr) {
    UseOps(ops::kLinearDivergenceTraits, ops::kLinearDivergenceTraits);
  }
  rows_.call.reference_dtype = reference_.dtype();
  rows_.call.reference_elements = reference_.row_elements();
  copied_ = reference_.payload();
  copied_.field = "reference_shared";
  copied_.padded = true;
  return absl::OkStatus();
}

absl::Status DivergenceCodec::ReadReference(Pieces pieces, const DivergenceFields& fields,
                                            int64_t max_rows) {
  const InputFields reference =
      ReferenceOf(fields, fields.reference_head.empty() ? input_.vocab() : 0);
  if (sequence_->begun) {
    return reference_.Read(pieces, reference, max_rows, find_.lease, sequence_->reference_head);
  }
  return reference_.Read(pieces, reference, max_rows, find_);
}

// Checks that the two inputs go together. Each is good as it is.
absl::Status DivergenceCodec::CheckPair() const {
  const engine::Head* const head = input_.head().get();
  const engine::Head* const reference = reference_.head().get();
  if (reference != nullptr && reference_.vocab() != input_.vocab()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("reference_head: got %s with a vocabulary of %d, allowed one of %d, as %s",
                        NameOf(*reference), reference_.vocab(), input_.vocab(),
                        head == nullptr ? "the logits have" : NameOf(*head)));
  }
  if (head == nullptr && reference == nullptr && reference_.dtype() != input_.dtype()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("reference_dtype: got %s, allowed %s, as dtype, where both are logits",
                        Name(reference_.dtype()), Name(input_.dtype())));
  }
  if ((head == nullptr) == (reference == nullptr)) return absl::OkStatus();
  const DType logits = head == nullptr ? input_.dtype() : reference_.dtype();
  if (logits == DType::kF32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %s, allowed f32 for logits beside hidden states",
                      head == nullptr ? "dtype" : "reference_dtype", Name(logits)));
}

absl::Status DivergenceCodec::BuildRows(const DivergenceFields& fields) {
  const auto row_count = static_cast<size_t>(input_.rows());
  has_targets_ = !fields.targets.empty();
  if (has_targets_ && fields.targets.size() != row_count) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "targets: got %d values, allowed none or %d (rows)", fields.targets.size(), row_count));
  }
  std::vector<int32_t> targets;
  LOGITD_RETURN_IF_ERROR(
      ReadTargets(fields.targets, fields.ignore_index, input_.vocab(), &targets));
  rows_.rows.resize(row_count, DivergenceRow{.active = 1, .target = kIgnoredTarget});
  for (size_t r = 0; r < targets.size(); ++r) rows_.rows[r].target = targets[r];
  return FillParams<DivergenceRow>(kDivergenceParams, fields.params, absl::MakeSpan(rows_.rows));
}

// Keeps what the later messages of the sequence need.
void DivergenceCodec::Remember(const DivergenceFields& fields) {
  sequence_->next_row = offset_ + input_.rows();
  if (sequence_->begun) return;
  sequence_->begun = true;
  sequence_->totals = fields.totals;
  sequence_->has_targets = has_targets_;
  sequence_->head = input_.head();
  sequence_->reference_head = reference_.head();
  DivergenceSettings& first = sequence_->first;
  first = fields;
  first.vocab = input_.vocab();  // of a head too
  if (first.reference_dtype == 0) first.reference_dtype = first.dtype;
  first.input = {};
  first.reference = {};
  Shorten(&first.params);
}

void DivergenceCodec::PayloadCopied() {
  RowCodec::PayloadCopied();
  reference_.DropLease();
  copied_.arena.reset();
}

EncodedMessage DivergenceCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  const auto forward = answer.Out(ops::kDivergenceForwardKl);
  const auto reverse = answer.Out(ops::kDivergenceReverseKl);
  totals_ = TotalsOf<DivergenceTotals>(
      answer.Out(ops::kDivergenceStatus),
      [&](size_t r) { return has_targets_ && rows_.rows[r].target == kIgnoredTarget; },
      [&](size_t r, DivergenceTotals* totals) {
        totals->forward_kl_sum += forward[r];
        totals->reverse_kl_sum += reverse[r];
      });
  return EncodedMessage::Make(answer_bytes_, [&](WireWriter& writer) {
    const auto array = [&](uint32_t number, auto output) {
      WriteArray(writer, number, answer.Out(output));
    };
    array(Response::kForwardKlFieldNumber, ops::kDivergenceForwardKl);
    array(Response::kReverseKlFieldNumber, ops::kDivergenceReverseKl);
    array(Response::kEntropiesFieldNumber, ops::kDivergenceEntropies);
    array(Response::kLogsumexpFieldNumber, ops::kDivergenceLogsumexp);
    WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
                answer.Out(ops::kDivergenceStatus));
    array(Response::kReferenceEntropiesFieldNumber, ops::kDivergenceReferenceEntropies);
    array(Response::kReferenceLogsumexpFieldNumber, ops::kDivergenceReferenceLogsumexp);
    if (has_targets_) {
      array(Response::kTargetLogprobsFieldNumber, ops::kDivergenceTargetLogprobs);
      array(Response::kReferenceTargetLogprobsFieldNumber, ops::kDivergenceReferenceTargetLogprobs);
    }
    WriteVarints(writer, Response::kTopCountFieldNumber, rows_.rows,
                 [](const DivergenceRow& row) { return row.top_logprobs; });
    array(Response::kTopIdsFieldNumber, ops::kDivergenceTopIds);
    array(Response::kTopLogprobsFieldNumber, ops::kDivergenceTopLogprobs);
    WriteVarints(writer, Response::kReferenceTopCountFieldNumber, rows_.rows,
                 [](const DivergenceRow& row) { return row.reference_top_logprobs; });
    array(Response::kReferenceTopIdsFieldNumber, ops::kDivergenceReferenceTopIds);
    array(Response::kReferenceTopLogprobsFieldNumber, ops::kDivergenceReferenceTopLogprobs);
    WriteTimings(writer, Response::kTimingsFieldNumber, times);
    writer.VarintField(Response::kOffsetFieldNumber, offset_);
    writer.VarintField(kHeadVersionNumber, input_.head_version());
    writer.VarintField(Response::kReferenceHeadVersionFieldNumber, reference_.head_version());
  });
}

// Adds the totals: all messages before this one have been counted by now.
void DivergenceCodec::Conclude(EncodedMessage* answer) {
  DivergenceTotals& totals = sequence_->totals;
  AddCounts(totals_, &totals);
  totals.forward_kl_sum += totals_.forward_kl_sum;
  totals.reverse_kl_sum += totals_.reverse_kl_sum;
  const auto counted = static_cast<double>(totals.counted);
  AppendTotals(Response::kTotalsFieldNumber, totals,
               {totals.forward_kl_sum, totals.reverse_kl_sum, totals.forward_kl_sum / counted,
                totals.reverse_kl_sum / counted},
               answer);
}

}  // namespace logitd::rpc
