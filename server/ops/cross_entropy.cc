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

using Row = CrossEntropyRow;
constexpr RowPlace<Row> kPlaces[] = {
    {kCrossEntropyExtraIds, &Row::first_extra},
    {kCrossEntropyTopEntries, &Row::first_top_entry, &Row::top_logprobs},
    {kCrossEntropyExtraEntries, &Row::first_extra_entry, &Row::extra_count},
};

CrossEntropyArgs ArgsOf(const engine::BatchView& batch) {
  return {.logits = batch.Payload(),
          .rows = batch.In(kCrossEntropyInRows),
          .extra_ids = batch.In(kCrossEntropyInExtraIds),
          .want = static_cast<int32_t>(batch.wanted),
          .max_top_logprobs = batch.max_row_entries,
          .max_extra_ids = static_cast<int32_t>(
              std::min<int64_t>(kMaxExtraIds, batch.counts[kCrossEntropyExtraIds])),
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

}  // namespace

const engine::OpTraits kCrossEntropyTraits = {
    .name = "cross_entropy",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.CrossEntropy(ArgsOf(batch)); },
    .rows_apart = true};

const engine::OpTraits kLinearCrossEntropyTraits = {
    .name = "linear_cross_entropy",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.LinearCrossEntropy(
          {.hidden = batch.Payload(), .head = *batch.head, .cross_entropy = ArgsOf(batch)});
    }};

CrossEntropyRequest CrossEntropyRows::Request(int64_t vocab) const {
  return {.vocab = vocab, .params = rows, .extra_ids = extra_ids};
}

void CrossEntropyRows::FillSpec(const engine::BatchKey& key, engine::JobSpec* spec) {
  spec->key = key;
  spec->counts[kCrossEntropyRows] = static_cast<int64_t>(rows.size());
  spec->counts[kCrossEntropyExtraIds] = static_cast<int64_t>(extra_ids.size());
  PlaceAnswers(absl::MakeSpan(rows), kPlaces, &spec->counts);
  for (const CrossEntropyRow& row : rows) {
    spec->max_row_entries = std::max(spec->max_row_entries, row.top_logprobs);
    spec->wanted |= static_cast<uint32_t>(row.want);
  }
  spec->size = engine::SizeOfJob(*spec);
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
