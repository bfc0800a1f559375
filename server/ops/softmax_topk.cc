#include "server/ops/softmax_topk.h"

#include <algorithm>

#include "server/ops/row_places.h"

namespace logitd::ops {
namespace {

constexpr auto kInputs = engine::ArraysOf(kTopKInRows);
constexpr auto kOutputs = engine::ArraysOf(kTopKLogsumexp, kTopKStatus, kTopKIndices, kTopKProbs);

constexpr RowPlace<SoftmaxTopKRow> kPlaces[] = {
    {kTopKEntries, &SoftmaxTopKRow::first_entry, &SoftmaxTopKRow::k}};

SoftmaxTopKArgs ArgsOf(const engine::BatchView& batch) {
  return {.logits = batch.Payload(),
          .rows = batch.In(kTopKInRows),
          .max_k = batch.max_row_entries,
          .indices = batch.Out(kTopKIndices),
          .probs = batch.Out(kTopKProbs),
          .logsumexp = batch.Out(kTopKLogsumexp),
          .status = batch.Out(kTopKStatus)};
}

}  // namespace

const engine::OpTraits kSoftmaxTopKTraits = {
    .name = "softmax_topk",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.SoftmaxTopK(ArgsOf(batch)); },
    .rows_apart = true};

const engine::OpTraits kLinearTopKTraits = {
    .name = "linear_topk",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.LinearTopK(
          {.hidden = batch.Payload(), .head = *batch.head, .topk = ArgsOf(batch)});
    }};

void SoftmaxTopKRows::FillSpec(const engine::BatchKey& key, engine::JobSpec* spec) {
  spec->key = key;
  spec->counts[kTopKRows] = static_cast<int64_t>(rows.size());
  PlaceAnswers(absl::MakeSpan(rows), kPlaces, &spec->counts);
  for (const SoftmaxTopKRow& row : rows) {
    spec->max_row_entries = std::max(spec->max_row_entries, row.k);
  }
  spec->size = engine::SizeOfJob(*spec);
}

void SoftmaxTopKRows::WriteInputs(absl::Span<std::byte* const> inputs,
                                  const engine::AxisCounts& first) const {
  WriteRows<SoftmaxTopKRow>(rows, kPlaces, first, kTopKInRows, inputs);
}

}  // namespace logitd::ops
