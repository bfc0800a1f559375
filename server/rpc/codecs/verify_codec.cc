#include "server/rpc/codecs/verify_codec.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/answer_fields.h"

namespace logitd::rpc {
namespace {

constexpr NamedField<VerifyFields> kDraftFields[] = {
    {"sequence_rows", &VerifyFields::sequence_rows},
    {"drafts", &VerifyFields::drafts},
    {"draft_kind", &VerifyFields::draft_kind},
    {"draft_count", &VerifyFields::draft_count},
    {"draft_ids", &VerifyFields::draft_ids},
    {"draft_probs", &VerifyFields::draft_probs},
    {"block_verification", &VerifyFields::block_verification},
};

// WriteSampleAnswer writes with the numbers of SampleResponse.
using Response = v1::VerifyResponse;
static_assert(Response::kTokensFieldNumber == int{v1::SampleResponse::kTokensFieldNumber});
static_assert(Response::kTopIdsFieldNumber == int{v1::SampleResponse::kTopIdsFieldNumber});
static_assert(Response::kTimingsFieldNumber == int{v1::SampleResponse::kTimingsFieldNumber});
static_assert(Response::kSupportIdsFieldNumber == int{v1::SampleResponse::kSupportIdsFieldNumber});
static_assert(Response::kEntropiesFieldNumber == int{v1::SampleResponse::kEntropiesFieldNumber});
static_assert(v1::DRAFT_KIND_GREEDY == static_cast<int>(DraftKind::kGreedy));
static_assert(v1::DRAFT_KIND_LIST == static_cast<int>(DraftKind::kList));
static_assert(v1::DRAFT_KIND_DENSE == static_cast<int>(DraftKind::kDense));

absl::Status BuildSequences(const VerifyFields& fields, ops::VerifyRows* rows) {
  const Int32List& sequence_rows = fields.sequence_rows;
  const auto row_count = static_cast<int64_t>(rows->rows.size());
  int64_t next = 0;
  rows->sequences.reserve(sequence_rows.size());
  for (size_t s = 0; s < sequence_rows.size(); ++s) {
    const int64_t own = sequence_rows[s];
    if (own < 1 || own > row_count - next) {
      return absl::InvalidArgumentError(
          absl::StrFormat("sequence_rows: got %d at sequence %d, allowed 1..%d (rows left)", own, s,
                          row_count - next));
    }
    rows->sequences.push_back({.first_row = next,
                               .rows = static_cast<int32_t>(own),
                               .block = fields.block_verification ? 1 : 0});
    next += own;
  }
  if (next == row_count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("sequence_rows: got %d in total, allowed %d (rows)", next, row_count));
}

// What the drafts read so far have taken.
struct Taken {
  int64_t lists = 0;
  int64_t ids = 0;
  int64_t probs = 0;
};

// Reads draft `index`: its kind, and its pieces of draft_ids and draft_probs.
absl::Status ReadDraft(const VerifyFields& fields, int64_t index, Taken* taken,
                       VerifyDraft* draft) {
  draft->token = fields.drafts[static_cast<size_t>(index)];
  draft->kind = ValueAt(fields.draft_kind, index, DraftKind::kGreedy);
  draft->first_id = taken->ids;
  draft->first_prob = taken->probs;
  if (draft->kind == DraftKind::kDense) taken->probs += fields.vocab;
  if (draft->kind != DraftKind::kList) return absl::OkStatus();
  const Int32List& counts = fields.draft_count;
  const int64_t list = taken->lists++;
  if (counts.size() != 1 && list >= static_cast<int64_t>(counts.size())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_count: got %d values, allowed 1, or one for each draft of DRAFT_KIND_LIST: draft %d "
        "has none",
        counts.size(), index));
  }
  draft->count = ValueAt(counts, list, 0);
  if (draft->count < 1 || draft->count > fields.vocab) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_count: got %d at list %d, allowed 1..%d", draft->count, list, fields.vocab));
  }
  taken->ids += draft->count;
  taken->probs += draft->count;
  return absl::OkStatus();
}

// The drafts must have taken all that was sent.
absl::Status CheckTaken(const VerifyFields& fields, const Taken& taken,
                        const ops::VerifyRows& rows) {
  const auto counts = static_cast<int64_t>(fields.draft_count.size());
  if (taken.lists == 0 ? counts != 0 : counts != 1 && counts != taken.lists) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_count: got %d values, allowed 1 for all or one for each of %d drafts "
        "of DRAFT_KIND_LIST",
        counts, taken.lists));
  }
  if (taken.ids != static_cast<int64_t>(rows.draft_ids.size())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("draft_ids: got %d values, allowed %d, the sum of draft_count",
                        rows.draft_ids.size(), taken.ids));
  }
  if (taken.probs != static_cast<int64_t>(rows.draft_probs.size())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_probs: got %d values, allowed %d: draft_count of a LIST, %d (vocab) of a DENSE, "
        "none of a GREEDY draft",
        rows.draft_probs.size(), taken.probs, fields.vocab));
  }
  return absl::OkStatus();
}

absl::Status BuildDrafts(Pieces pieces, VerifyFields* fields, ops::VerifyRows* rows) {
  const auto drafts =
      static_cast<int64_t>(rows->rows.size()) - static_cast<int64_t>(rows->sequences.size());
  if (static_cast<int64_t>(fields->drafts.size()) != drafts) {
    return absl::InvalidArgumentError(
        absl::StrFormat("drafts: got %d values, allowed %d: rows %d less sequences %d",
                        fields->drafts.size(), drafts, rows->rows.size(), rows->sequences.size()));
  }
  const auto kinds = static_cast<int64_t>(fields->draft_kind.size());
  if (kinds > 1 && kinds != drafts) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_kind: got %d values, allowed none, 1 or %d (drafts)", kinds, drafts));
  }
  if (fields->draft_probs.bytes % sizeof(float) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_probs: got %d bytes, allowed a multiple of 4", fields->draft_probs.bytes));
  }
  rows->draft_ids = std::move(fields->draft_ids);
  rows->draft_probs.resize(fields->draft_probs.bytes / sizeof(float));
  if (!rows->draft_probs.empty()) {
    CopyRange(pieces, fields->draft_probs, rows->draft_probs.data());
  }
  rows->drafts.resize(rows->rows.size());
  Taken taken;
  int64_t index = 0;
  for (const VerifySequence& sequence : rows->sequences) {
    for (int64_t r = sequence.first_row; r + 1 < sequence.first_row + sequence.rows; ++r) {
      LOGITD_RETURN_IF_ERROR(ReadDraft(*fields, index++, &taken, &rows->drafts[r]));
    }
  }
  return CheckTaken(*fields, taken, *rows);
}

}  // namespace

absl::Status ParseVerifyFields(Pieces pieces, size_t max_list, VerifyFields* fields) {
  static const auto* const table =
      new auto(FieldTable<VerifyFields>(v1::VerifyRequest::descriptor())
                   .Add(kLogitsFields)
                   .Add(kHiddenFields)
                   .Add(kSampleListFields)
                   .Add(kDraftFields)
                   .Add(kSampleParams, &SampleFields::params));
  return ParseMessage<VerifyFields>(pieces, *table, max_list, fields);
}

absl::Status VerifyCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  VerifyFields fields;
  LOGITD_RETURN_IF_ERROR(ParseVerifyFields(pieces, static_cast<size_t>(max_rows), &fields));
  LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_));
  fields.vocab = input_.vocab();  // a head's, where the request does not say it
  LOGITD_RETURN_IF_ERROR(BuildSampleRows(pieces, input_, &fields, &rows_));
  LOGITD_RETURN_IF_ERROR(BuildSequences(fields, &rows_));
  LOGITD_RETURN_IF_ERROR(BuildDrafts(pieces, &fields, &rows_));
  LOGITD_RETURN_IF_ERROR(CheckVerify(rows_.Request(input_.vocab())));
  FillSpec(spec);
  return absl::OkStatus();
}

EncodedMessage VerifyCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  return EncodedMessage::Make(answer_bytes_, [&](WireWriter& writer) {
    WriteSampleAnswer(rows_, answer, times, writer);
    WriteVarints(writer, Response::kAcceptedFieldNumber, answer.Out(ops::kVerifyAccepted),
                 [](int32_t accepted) { return accepted; });
    writer.VarintField(kHeadVersionNumber, input_.head_version());
    WriteSampleWanted(rows_, answer, writer);
  });
}

}  // namespace logitd::rpc
