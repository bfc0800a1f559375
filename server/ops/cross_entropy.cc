#include "server/ops/cross_entropy.h"

#include <algorithm>

#include "server/ops/row_places.h"

namespace logitd::ops {
namespace {

constexpr auto kInputs = engine::ArraysOf(kCrossEntropyInRows, kCrossEntropyInExtraIds);
constexpr auto kOutputs =
    engine::ArraysOf(kCrossEntropyLosses, kCrossEntropyTargetLogprobs, kCrossEntropyRanks,
                     kCrossEntropyLogsumexp, kCrossEntropyStatus, kCrossEntropyEntropies,
                     kCrossEntropyTopIds, kCrossEntropyTopLogprobs, kCrossEntropyExtraLogprobs);

constexpr AnswerSlice<CrossEntropyRow> kSlices[] = {
    {&CrossEntropyRow::first_top_entry, &CrossEntropyRow::top_logprobs, kCrossEntropyTopEntries},
    {&CrossEntropyRow::first_extra_entry, &CrossEntropyRow::extra_count, kCrossEntropyExtraEntries},
};

constexpr RowPlace<CrossEntropyRow> kPlaces[] = {
    {&CrossEntropyRow::first_extra, kCrossEntropyExtraIds},
    {&CrossEntropyRow::first_top_entry, kCrossEntropyTopEntries},
    {&CrossEntropyRow::first_extra_entry, kCrossEntropyExtraEntries},
};

CrossEntropyArgs ArgsOf(const engine::BatchView& batch) {
  return {.logits = batch.Payload(),
          .rows = batch.In(kCrossEntropyInRows),
          .extra_ids = batch.In(kCrossEntropyInExtraIds),
          .want = static_cast<int32_t>(batch.wanted),
          .max_top_logprobs = batch.max_row_entries,
          .answers = {.loss = batch.Out(kCrossEntropyLosses),
                      .logsumexp = batch.Out(kCrossEntropyLogsumexp),
                      .target_logprob = batch.Out(kCrossEntropyTargetLogprobs),
                      .rank = batch.Out(kCrossEntropyRanks),
                      .entropy = batch.Out(kCrossEntropyEntropies),
                      .top_ids = batch.Out(kCrossEntropyTopIds),
                      .top_logprobs = batch.Out(kCrossEntropyTopLogprobs),
                      .extra_logprobs = batch.Out(kCrossEntropyExtraLogprobs),
                      .status = batch.Out(kCrossEntropyStatus)}};
}

absl::Status EnqueueCrossEntropy(Stream& stream, const engine::BatchView& batch) {
  return stream.CrossEntropy(ArgsOf(batch));
}

absl::Status EnqueueLinearCrossEntropy(Stream& stream, const engine::BatchView& batch) {
  return stream.LinearCrossEntropy(
      {.hidden = batch.Payload(), .head = *batch.head, .cross_entropy = ArgsOf(batch)});
}

}  // namespace

const engine::OpTraits kCrossEntropyTraits = {.name = "cross_entropy",
                                              .inputs = kInputs,
                                              .outputs = kOutputs,
                                              .enqueue = &EnqueueCrossEntropy};

const engine::OpTraits kLinearCrossEntropyTraits = {.name = "linear_cross_entropy",
                                                    .inputs = kInputs,
                                                    .outputs = kOutputs,
                                                    .enqueue = &EnqueueLinearCrossEntropy};

CrossEntropyRequest CrossEntropyRows::Request(int64_t vocab) const {
  return {.vocab = vocab, .params = rows, .extra_ids = extra_ids};
}

void CrossEntropyRows::FillSpec(engine::JobSpec* spec) {
  spec->counts[kCrossEntropyRows] = static_cast<int64_t>(rows.size());
  spec->counts[kCrossEntropyExtraIds] = static_cast<int64_t>(extra_ids.size());
  PlaceAnswers(absl::MakeSpan(rows), kSlices, &spec->counts);
  for (const CrossEntropyRow& row : rows) {
    spec->max_row_entries = std::max(spec->max_row_entries, row.top_logprobs);
    spec->wanted |= static_cast<uint32_t>(row.want);
  }
}

void CrossEntropyRows::WriteInputs(absl::Span<std::byte* const> inputs,
                                   const engine::AxisCounts& first) {
  WriteRows<CrossEntropyRow>(rows, kPlaces, first, kCrossEntropyInRows, inputs);
  MoveOut(extra_ids, kCrossEntropyInExtraIds, inputs);
}

int64_t CrossEntropyRows::bytes() const {
  return static_cast<int64_t>(rows.size() * sizeof(CrossEntropyRow) +
                              extra_ids.size() * sizeof(int32_t));
}

}  // namespace logitd::ops
