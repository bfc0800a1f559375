// verify and linear_verify in the engine.
#ifndef LOGITD_SERVER_OPS_VERIFY_H_
#define LOGITD_SERVER_OPS_VERIFY_H_

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "kernels/linear.h"
#include "kernels/verify.h"
#include "server/engine/job.h"
#include "server/ops/sample.h"

namespace logitd::ops {

// After the axes and arrays of sample.
enum VerifyAxis : size_t { kVerifyDraftIds = kSampleAxes, kVerifyDraftProbs, kVerifySequences };

inline constexpr engine::Input<VerifyDraft> kVerifyInDrafts{5, kSampleRows};
inline constexpr engine::Input<int32_t> kVerifyInDraftIds{6, kVerifyDraftIds};
inline constexpr engine::Input<float> kVerifyInDraftProbs{7, kVerifyDraftProbs};
inline constexpr engine::Input<VerifySequence> kVerifyInSequences{8, kVerifySequences};

inline constexpr engine::Output<int32_t> kVerifyAccepted{15, kVerifySequences};

inline constexpr auto kVerifyInputs = engine::ArraysOf(
    kSampleInRows, kSampleInHistory, kSampleInBias, kSampleInExtraIds, kSampleInMaskWords,
    kVerifyInDrafts, kVerifyInDraftIds, kVerifyInDraftProbs, kVerifyInSequences);
inline constexpr auto kVerifyOutputs =
    engine::ArraysOf(kSampleTokens, kSampleLogprobs, kSampleRanks, kSampleLogsumexp, kSampleStatus,
                     kSampleTopIds, kSampleTopLogprobs, kSampleExtraLogprobs, kSampleSupportSizes,
                     kSampleSupportIds, kSampleSupportLogprobs, kSampleEntropies,
                     kSampleRawEntropies, kSampleDrawTokens, kSampleDrawLogprobs, kVerifyAccepted);

// A bit of JobSpec::wanted, besides those of sample: some sequence has block verification.
inline constexpr uint32_t kBlockVerification = 1u << 8;

inline VerifyArgs VerifyArgsOf(const engine::BatchView& batch) {
  const bool blocks = (batch.wanted & kBlockVerification) != 0;
  SampleArgs sample = SampleArgsOf(batch);
  sample.edited |= blocks;
  sample.asks_more |= blocks;
  return {.sample = sample,
          .drafts = batch.In(kVerifyInDrafts),
          .draft_ids = batch.In(kVerifyInDraftIds),
          .draft_probs = batch.In(kVerifyInDraftProbs),
          .sequences = batch.In(kVerifyInSequences),
          .sequence_count = batch.counts[kVerifySequences],
          .blocks = blocks,
          .accepted = batch.Out(kVerifyAccepted)};
}

inline constexpr engine::OpTraits kVerifyTraits = {
    .name = "verify",
    .inputs = kVerifyInputs,
    .outputs = kVerifyOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.Run(VerifyArgsOf(batch)); },
    .rows_apart = true};

inline constexpr engine::OpTraits kLinearVerifyTraits = {
    .name = "linear_verify",
    .inputs = kVerifyInputs,
    .outputs = kVerifyOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.Run(LinearVerifyArgs{
          .hidden = batch.Payload(), .head = *batch.head, .verify = VerifyArgsOf(batch)});
    }};

inline constexpr RowPlace<VerifyDraft> kDraftPlaces[] = {
    {kVerifyDraftIds, &VerifyDraft::first_id}, {kVerifyDraftProbs, &VerifyDraft::first_prob}};
inline constexpr RowPlace<VerifySequence> kSequencePlaces[] = {
    {kSampleRows, &VerifySequence::first_row}};

// The rows of one job and their lists: see job_rows.h.
struct VerifyRows : SampleRows {
  std::vector<VerifyDraft> drafts;  // one for each row
  std::vector<int32_t> draft_ids;
  std::vector<float> draft_probs;
  std::vector<VerifySequence> sequences;

  static constexpr auto Columns() {
    return std::tuple_cat(
        SampleRows::Columns(),
        std::tuple(RowColumn(&VerifyRows::drafts, kVerifyInDrafts, kDraftPlaces),
                   Column(&VerifyRows::draft_ids, kVerifyInDraftIds),
                   Column(&VerifyRows::draft_probs, kVerifyInDraftProbs),
                   RowColumn(&VerifyRows::sequences, kVerifyInSequences, kSequencePlaces)));
  }
  void FillHints(engine::JobSpec* spec) const {
    SampleRows::FillHints(spec);
    for (const VerifySequence& sequence : sequences) {
      if (sequence.block != 0) spec->wanted |= kBlockVerification;
    }
    // A sequence is several rows, and refers to them by their places in the batch.
    spec->whole = true;
  }
  // For CheckVerify.
  VerifyRequest Request(int64_t vocab) const {
    return {.sample = SampleRows::Request(vocab),
            .drafts = drafts,
            .draft_ids = draft_ids,
            .draft_probs = draft_probs,
            .sequences = sequences};
  }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_VERIFY_H_
