#include "server/rpc/codecs/verify_codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/codec_parts.h"

namespace logitd::rpc {
namespace {

constexpr auto kInputs = [] {
  std::array<engine::Array, kVerifyInputs> arrays = {};
  std::copy(kSampleInputArrays.begin(), kSampleInputArrays.end(), arrays.begin());
  arrays[kVerifyInDrafts] = {kSampleRows, sizeof(VerifyDraft)};
  arrays[kVerifyInDraftIds] = {kVerifyDraftIds, sizeof(int32_t)};
  arrays[kVerifyInDraftProbs] = {kVerifyDraftProbs, sizeof(float)};
  arrays[kVerifyInSequences] = {kVerifySequences, sizeof(VerifySequence)};
  return arrays;
}();

constexpr auto kOutputs = [] {
  std::array<engine::Array, kVerifyOutputs> arrays = {};
  std::copy(kSampleOutputArrays.begin(), kSampleOutputArrays.end(), arrays.begin());
  arrays[kVerifyAccepted] = {kVerifySequences, sizeof(int32_t)};
  return arrays;
}();

absl::Status EnqueueVerify(Stream& stream, const engine::BatchView& batch) {
  return stream.Verify({
      .sample = SampleArgsOf(batch),
      .drafts = reinterpret_cast<const VerifyDraft*>(batch.inputs[kVerifyInDrafts]),
      .draft_ids = reinterpret_cast<const int32_t*>(batch.inputs[kVerifyInDraftIds]),
      .draft_probs = reinterpret_cast<const float*>(batch.inputs[kVerifyInDraftProbs]),
      .sequences = reinterpret_cast<const VerifySequence*>(batch.inputs[kVerifyInSequences]),
      .sequence_count = batch.counts[kVerifySequences],
      .accepted = reinterpret_cast<int32_t*>(batch.outputs[kVerifyAccepted]),
  });
}

constexpr auto kFields = JoinTables(
    JoinTables(LogitsFieldTable<VerifyFields>(), SampleParameterTable<VerifyFields>()),
    std::array<Field<VerifyFields>, 6>{{
        {v1::VerifyRequest::kSequenceRowsFieldNumber, "sequence_rows",
         &VerifyFields::sequence_rows},
        {v1::VerifyRequest::kDraftsFieldNumber, "drafts", &VerifyFields::drafts},
        {v1::VerifyRequest::kDraftKindFieldNumber, "draft_kind", &VerifyFields::draft_kind},
        {v1::VerifyRequest::kDraftCountFieldNumber, "draft_count", &VerifyFields::draft_count},
        {v1::VerifyRequest::kDraftIdsFieldNumber, "draft_ids", &VerifyFields::draft_ids},
        {v1::VerifyRequest::kDraftProbsFieldNumber, "draft_probs", &VerifyFields::draft_probs},
    }});

// What the two messages share has the same numbers in both.
constexpr bool Same(int a, int b) { return a == b; }
using Request = v1::VerifyRequest;
using Response = v1::VerifyResponse;
static_assert(Same(Request::kSeedFieldNumber, v1::SampleRequest::kSeedFieldNumber));
static_assert(Same(Request::kHistoryFieldNumber, v1::SampleRequest::kHistoryFieldNumber));
static_assert(Same(Request::kAllowedTokensMaskFieldNumber,
                   v1::SampleRequest::kAllowedTokensMaskFieldNumber));
static_assert(Same(Response::kTokensFieldNumber, v1::SampleResponse::kTokensFieldNumber));
static_assert(Same(Response::kTopIdsFieldNumber, v1::SampleResponse::kTopIdsFieldNumber));
static_assert(Same(Response::kTimingsFieldNumber, v1::SampleResponse::kTimingsFieldNumber));
static_assert(v1::DRAFT_KIND_GREEDY == static_cast<int>(DraftKind::kGreedy));
static_assert(v1::DRAFT_KIND_LIST == static_cast<int>(DraftKind::kList));
static_assert(v1::DRAFT_KIND_DENSE == static_cast<int>(DraftKind::kDense));

}  // namespace

const engine::OpTraits kVerifyTraits = {
    .name = "verify",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = &EnqueueVerify,
};

absl::Status ParseVerifyFields(Pieces pieces, size_t max_list, VerifyFields* fields) {
  return ParseMessage<VerifyFields>(pieces, kFields, max_list, fields);
}

absl::Status VerifyCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  VerifyFields fields;
  LOGITD_RETURN_IF_ERROR(ParseVerifyFields(pieces, static_cast<size_t>(max_rows), &fields));
  LOGITD_RETURN_IF_ERROR(body_.Build(pieces, max_rows, nullptr, &fields, spec));
  LOGITD_RETURN_IF_ERROR(BuildSequences(fields.sequence_rows));
  LOGITD_RETURN_IF_ERROR(BuildDrafts(pieces, &fields));
  body_.input().FillKey(kVerifyTraits, kVerifyTraits, &spec->key);
  spec->counts[kVerifyDraftIds] = static_cast<int64_t>(draft_ids_.size());
  spec->counts[kVerifyDraftProbs] = static_cast<int64_t>(draft_probs_.size());
  spec->counts[kVerifySequences] = static_cast<int64_t>(sequences_.size());
  return CheckVerify({.sample = body_.request(),
                      .drafts = drafts_,
                      .draft_ids = draft_ids_,
                      .draft_probs = draft_probs_,
                      .sequences = sequences_});
}

absl::Status VerifyCodec::BuildSequences(const Int32List& sequence_rows) {
  int64_t next = 0;
  sequences_.reserve(sequence_rows.size());
  for (size_t s = 0; s < sequence_rows.size(); ++s) {
    const int64_t rows = sequence_rows[s];
    if (rows < 1 || rows > body_.rows() - next) {
      return absl::InvalidArgumentError(
          absl::StrFormat("sequence_rows: got %d at sequence %d, allowed 1..%d (rows left)", rows,
                          s, body_.rows() - next));
    }
    sequences_.push_back({.first_row = next, .rows = static_cast<int32_t>(rows), .unused = 0});
    next += rows;
  }
  if (next == body_.rows()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("sequence_rows: adds up to %d, allowed is %d (rows)", next, body_.rows()));
}

absl::Status VerifyCodec::BuildDrafts(Pieces pieces, VerifyFields* fields) {
  const auto draft_count = body_.rows() - static_cast<int64_t>(sequences_.size());
  if (static_cast<int64_t>(fields->drafts.size()) != draft_count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("drafts: got %d values, allowed %d: rows %d less sequences %d",
                        fields->drafts.size(), draft_count, body_.rows(), sequences_.size()));
  }
  const Int32List& kinds = fields->draft_kind;
  if (kinds.size() > 1 && static_cast<int64_t>(kinds.size()) != draft_count) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_kind: got %d values, allowed none, 1 or %d (drafts)", kinds.size(), draft_count));
  }
  if (fields->draft_probs.bytes % sizeof(float) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_probs: got %d bytes, allowed a multiple of 4", fields->draft_probs.bytes));
  }
  draft_ids_ = std::move(fields->draft_ids);
  draft_probs_.resize(fields->draft_probs.bytes / sizeof(float));
  if (!draft_probs_.empty()) CopyRange(pieces, fields->draft_probs, draft_probs_.data());

  const auto vocab = fields->vocab;
  const Int32List& counts = fields->draft_count;
  const auto id_count = static_cast<int64_t>(draft_ids_.size());
  const auto prob_count = static_cast<int64_t>(draft_probs_.size());
  int64_t draft = 0;
  int64_t lists = 0;
  int64_t next_id = 0;
  int64_t next_prob = 0;
  drafts_.resize(static_cast<size_t>(body_.rows()));
  for (const VerifySequence& sequence : sequences_) {
    for (int64_t r = sequence.first_row; r + 1 < sequence.first_row + sequence.rows; ++r, ++draft) {
      VerifyDraft& to = drafts_[static_cast<size_t>(r)];
      to.token = fields->drafts[static_cast<size_t>(draft)];
      if (!kinds.empty()) {
        to.kind = static_cast<DraftKind>(kinds[kinds.size() == 1 ? 0 : static_cast<size_t>(draft)]);
      }
      to.first_id = next_id;
      to.first_prob = next_prob;
      if (to.kind == DraftKind::kDense) next_prob += vocab;
      if (to.kind != DraftKind::kList) continue;
      const auto list = static_cast<size_t>(lists++);
      if (counts.size() != 1 && list >= counts.size()) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "draft_count: got %d values, but draft %d is list %d of DRAFT_KIND_LIST: allowed 1, or "
            "one for each list",
            counts.size(), draft, list));
      }
      to.count = counts[counts.size() == 1 ? 0 : list];
      if (to.count < 1 || to.count > vocab) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "draft_count: got %d at list %d, allowed 1..%d", to.count, list, vocab));
      }
      next_id += to.count;
      next_prob += to.count;
    }
  }
  if (lists == 0 ? !counts.empty()
                 : counts.size() != 1 && static_cast<int64_t>(counts.size()) != lists) {
    return absl::InvalidArgumentError(
        absl::StrFormat("draft_count: got %d values for %d drafts of DRAFT_KIND_LIST: allowed one "
                        "for each, or 1 for all",
                        counts.size(), lists));
  }
  if (next_id != id_count) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_ids: got %d values, but draft_count asks for %d of drafts of DRAFT_KIND_LIST",
        id_count, next_id));
  }
  if (next_prob != prob_count) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draft_probs: got %d values, but draft_kind and draft_count ask for %d: draft_count of a "
        "LIST, %d (vocab) of a DENSE, none of a GREEDY draft",
        prob_count, next_prob, vocab));
  }
  return absl::OkStatus();
}

int64_t VerifyCodec::list_bytes() const {
  return body_.list_bytes() + static_cast<int64_t>(drafts_.size() * sizeof(VerifyDraft) +
                                                   sequences_.size() * sizeof(VerifySequence) +
                                                   draft_ids_.size() * sizeof(int32_t) +
                                                   draft_probs_.size() * sizeof(float));
}

int64_t VerifyCodec::answer_bytes() const {
  // There are at most as many sequences as rows, and fewer accepted in each.
  const size_t count_bytes = VarintSize(static_cast<uint64_t>(body_.rows()));
  return body_.answer_bytes() + static_cast<int64_t>(kMaxLengthHead) +
         body_.rows() * static_cast<int64_t>(count_bytes);
}

void VerifyCodec::WriteInputs(absl::Span<std::byte* const> inputs,
                              const engine::AxisCounts& first) {
  body_.WriteInputs(inputs.first(kSampleInputs), first);
  for (VerifyDraft& draft : drafts_) {
    draft.first_id += first[kVerifyDraftIds];
    draft.first_prob += first[kVerifyDraftProbs];
  }
  for (VerifySequence& sequence : sequences_) sequence.first_row += first[kSampleRows];
  MoveOut(drafts_, inputs[kVerifyInDrafts]);
  MoveOut(draft_ids_, inputs[kVerifyInDraftIds]);
  MoveOut(draft_probs_, inputs[kVerifyInDraftProbs]);
  MoveOut(sequences_, inputs[kVerifyInSequences]);
}

grpc::ByteBuffer VerifyCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  const auto outputs = answer.outputs;
  const auto* accepted = reinterpret_cast<const int32_t*>(outputs[kVerifyAccepted].data());
  const auto sequences = static_cast<int64_t>(outputs[kVerifyAccepted].size() / sizeof(int32_t));
  return WriteMessage(answer_bytes(), [&](WireWriter& writer) {
    body_.Encode(outputs.first(kSampleOutputs), times, writer);
    WriteVarints(writer, v1::VerifyResponse::kAcceptedFieldNumber, sequences,
                 [accepted](int64_t s) { return accepted[s]; });
  });
}

}  // namespace logitd::rpc
