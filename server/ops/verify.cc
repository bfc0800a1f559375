#include "server/ops/verify.h"

#include "server/ops/row_places.h"

namespace logitd::ops {
namespace {

constexpr auto kInputs = engine::ArraysOf(
    kSampleInRows, kSampleInHistory, kSampleInBias, kSampleInExtraIds, kSampleInMaskWords,
    kVerifyInDrafts, kVerifyInDraftIds, kVerifyInDraftProbs, kVerifyInSequences);
constexpr auto kOutputs =
    engine::ArraysOf(kSampleTokens, kSampleLogprobs, kSampleRanks, kSampleLogsumexp, kSampleStatus,
                     kSampleTopIds, kSampleTopLogprobs, kSampleExtraLogprobs, kVerifyAccepted);

constexpr RowPlace<VerifyDraft> kDraftPlaces[] = {{kVerifyDraftIds, &VerifyDraft::first_id},
                                                  {kVerifyDraftProbs, &VerifyDraft::first_prob}};
constexpr RowPlace<VerifySequence> kSequencePlaces[] = {{kSampleRows, &VerifySequence::first_row}};

absl::Status EnqueueVerify(Stream& stream, const engine::BatchView& batch) {
  return stream.Verify({.sample = SampleArgsOf(batch),
                        .drafts = batch.In(kVerifyInDrafts),
                        .draft_ids = batch.In(kVerifyInDraftIds),
                        .draft_probs = batch.In(kVerifyInDraftProbs),
                        .sequences = batch.In(kVerifyInSequences),
                        .sequence_count = batch.counts[kVerifySequences],
                        .accepted = batch.Out(kVerifyAccepted)});
}

}  // namespace

const engine::OpTraits kVerifyTraits = {.name = "verify",
                                        .inputs = kInputs,
                                        .outputs = kOutputs,
                                        .enqueue = &EnqueueVerify,
                                        .rows_apart = true};

VerifyRequest VerifyRows::Request(int64_t vocab) const {
  return {.sample = sample.Request(vocab),
          .drafts = drafts,
          .draft_ids = draft_ids,
          .draft_probs = draft_probs,
          .sequences = sequences};
}

void VerifyRows::FillSpec(const engine::BatchKey& key, engine::JobSpec* spec) {
  sample.FillSpec(key, spec);
  spec->counts[kVerifyDraftIds] = static_cast<int64_t>(draft_ids.size());
  spec->counts[kVerifyDraftProbs] = static_cast<int64_t>(draft_probs.size());
  spec->counts[kVerifySequences] = static_cast<int64_t>(sequences.size());
  spec->whole =
      true;  // a sequence is several rows, and refers to them by their places in the batch
  spec->size = engine::SizeOfJob(*spec);
}

void VerifyRows::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  sample.WriteInputs(inputs, first);
  WriteRows<VerifyDraft>(drafts, kDraftPlaces, first, kVerifyInDrafts, inputs);
  WriteRows<VerifySequence>(sequences, kSequencePlaces, first, kVerifyInSequences, inputs);
  MoveOut(draft_ids, kVerifyInDraftIds, inputs);
  MoveOut(draft_probs, kVerifyInDraftProbs, inputs);
}

int64_t VerifyRows::bytes() const {
  return sample.bytes() + static_cast<int64_t>(drafts.size() * sizeof(VerifyDraft) +
                                               sequences.size() * sizeof(VerifySequence) +
                                               draft_ids.size() * sizeof(int32_t) +
                                               draft_probs.size() * sizeof(float));
}

}  // namespace logitd::ops
