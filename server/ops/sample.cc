#include "server/ops/sample.h"

#include <algorithm>

#include "kernels/kept_tokens.h"
#include "server/ops/row_places.h"

namespace logitd::ops {
namespace {

// Of JobSpec::wanted: a row may need more than a few of its first tokens. The most that the others need
// is JobSpec::max_row_entries.
constexpr uint32_t kMoreThanKept = 1;

constexpr RowPlace<SampleRow> kPlaces[] = {
    {kSampleHistory, &SampleRow::first_history},
    {kSampleBias, &SampleRow::first_bias},
    {kSampleExtraIds, &SampleRow::first_extra},
    {kSampleMaskWords, &SampleRow::first_mask_word},
    {kSampleTopEntries, &SampleRow::first_top_entry, &SampleRow::top_logprobs},
    {kSampleExtraEntries, &SampleRow::first_extra_entry, &SampleRow::extra_count},
};

}  // namespace

const engine::OpTraits kSampleTraits = {
    .name = "sample",
    .inputs = kSampleInputs,
    .outputs = kSampleOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.Sample(SampleArgsOf(batch)); },
    .rows_apart = true};

const engine::OpTraits kLinearSampleTraits = {
    .name = "linear_sample",
    .inputs = kSampleInputs,
    .outputs = kSampleOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.LinearSampleOfKept(
          {.hidden = batch.Payload(), .head = *batch.head, .sample = SampleArgsOf(batch)},
          batch.wanted == 0 ? batch.max_row_entries : 0);
    }};

SampleArgs SampleArgsOf(const engine::BatchView& batch) {
  const auto& counts = batch.counts;
  return {.logits = batch.Payload(),
          .rows = batch.In(kSampleInRows),
          .history = batch.In(kSampleInHistory),
          .bias = batch.In(kSampleInBias),
          .extra_ids = batch.In(kSampleInExtraIds),
          .mask_words = batch.In(kSampleInMaskWords),
          .edited = counts[kSampleHistory] + counts[kSampleBias] + counts[kSampleMaskWords] > 0,
          .tokens = batch.Out(kSampleTokens),
          .logprobs = batch.Out(kSampleLogprobs),
          .ranks = batch.Out(kSampleRanks),
          .logsumexp = batch.Out(kSampleLogsumexp),
          .top_ids = batch.Out(kSampleTopIds),
          .top_logprobs = batch.Out(kSampleTopLogprobs),
          .extra_logprobs = batch.Out(kSampleExtraLogprobs),
          .status = batch.Out(kSampleStatus)};
}

SampleRequest SampleRows::Request(int64_t vocab) const {
  return {.vocab = vocab,
          .params = rows,
          .history = history,
          .bias = bias,
          .extra_ids = extra_ids,
          .mask_words = mask_words};
}

void SampleRows::FillSpec(const engine::BatchKey& key, engine::JobSpec* spec) {
  spec->key = key;
  spec->counts[kSampleRows] = static_cast<int64_t>(rows.size());
  spec->counts[kSampleHistory] = static_cast<int64_t>(history.size());
  spec->counts[kSampleBias] = static_cast<int64_t>(bias.size());
  spec->counts[kSampleExtraIds] = static_cast<int64_t>(extra_ids.size());
  spec->counts[kSampleMaskWords] = static_cast<int64_t>(mask_words.size());
  for (const SampleRow& row : rows) {
    const int32_t kept = KeptTokens(row);
    spec->max_row_entries = std::max(spec->max_row_entries, kept);
    if (kept == 0) spec->wanted |= kMoreThanKept;
  }
  PlaceAnswers(absl::MakeSpan(rows), kPlaces, &spec->counts);
  spec->size = engine::SizeOfJob(*spec);
}

void SampleRows::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  WriteRows<SampleRow>(rows, kPlaces, first, kSampleInRows, inputs);
  MoveOut(history, kSampleInHistory, inputs);
  MoveOut(bias, kSampleInBias, inputs);
  MoveOut(extra_ids, kSampleInExtraIds, inputs);
  MoveOut(mask_words, kSampleInMaskWords, inputs);
}

int64_t SampleRows::bytes() const {
  return static_cast<int64_t>(rows.size() * sizeof(SampleRow) + history.size() * sizeof(int32_t) +
                              bias.size() * sizeof(SampleBias) +
                              extra_ids.size() * sizeof(int32_t) +
                              mask_words.size() * sizeof(uint32_t));
}

}  // namespace logitd::ops
