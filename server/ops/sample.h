// sample and linear_sample in the engine.
#ifndef LOGITD_SERVER_OPS_SAMPLE_H_
#define LOGITD_SERVER_OPS_SAMPLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "kernels/sample.h"
#include "server/engine/job.h"
#include "server/ops/job_rows.h"

namespace logitd::ops {

// verify has the same axes and arrays, and its own after them.
enum SampleAxis : size_t {
  kSampleRows = engine::kRowAxis,
  kSampleHistory,
  kSampleBias,
  kSampleExtraIds,
  kSampleMaskWords,
  kSampleTopEntries,
  kSampleExtraEntries,
  kSampleSupportEntries,
  kSampleDrawEntries,
  kSampleAxes
};

inline constexpr engine::Input<SampleRow> kSampleInRows{0, kSampleRows};
inline constexpr engine::Input<int32_t> kSampleInHistory{1, kSampleHistory};
inline constexpr engine::Input<SampleBias> kSampleInBias{2, kSampleBias};
inline constexpr engine::Input<int32_t> kSampleInExtraIds{3, kSampleExtraIds};
inline constexpr engine::Input<uint32_t> kSampleInMaskWords{4, kSampleMaskWords};
inline constexpr auto kSampleInputs = engine::ArraysOf(
    kSampleInRows, kSampleInHistory, kSampleInBias, kSampleInExtraIds, kSampleInMaskWords);

inline constexpr engine::Output<int32_t> kSampleTokens{0, kSampleRows};
inline constexpr engine::Output<float> kSampleLogprobs{1, kSampleRows};
inline constexpr engine::Output<int32_t> kSampleRanks{2, kSampleRows};
inline constexpr engine::Output<float> kSampleLogsumexp{3, kSampleRows};
inline constexpr engine::Output<RowStatus> kSampleStatus{4, kSampleRows};
inline constexpr engine::Output<int32_t> kSampleTopIds{5, kSampleTopEntries};
inline constexpr engine::Output<float> kSampleTopLogprobs{6, kSampleTopEntries};
inline constexpr engine::Output<float> kSampleExtraLogprobs{7, kSampleExtraEntries};
inline constexpr engine::Output<int32_t> kSampleSupportSizes{8, kSampleRows};
inline constexpr engine::Output<int32_t> kSampleSupportIds{9, kSampleSupportEntries};
inline constexpr engine::Output<float> kSampleSupportLogprobs{10, kSampleSupportEntries};
inline constexpr engine::Output<float> kSampleEntropies{11, kSampleRows};
inline constexpr engine::Output<float> kSampleRawEntropies{12, kSampleRows};
inline constexpr engine::Output<int32_t> kSampleDrawTokens{13, kSampleDrawEntries};
inline constexpr engine::Output<float> kSampleDrawLogprobs{14, kSampleDrawEntries};
inline constexpr auto kSampleOutputs =
    engine::ArraysOf(kSampleTokens, kSampleLogprobs, kSampleRanks, kSampleLogsumexp, kSampleStatus,
                     kSampleTopIds, kSampleTopLogprobs, kSampleExtraLogprobs, kSampleSupportSizes,
                     kSampleSupportIds, kSampleSupportLogprobs, kSampleEntropies,
                     kSampleRawEntropies, kSampleDrawTokens, kSampleDrawLogprobs);

// Bits of JobSpec::wanted. Some row may need more than a few of its first tokens; the other rows
// need at most JobSpec::max_row_entries.
inline constexpr uint32_t kMoreThanKept = 1;
// Some row AsksMore.
inline constexpr uint32_t kAsksMore = 2;

// The arguments of a batch of sample; of verify, those for its rows.
inline SampleArgs SampleArgsOf(const engine::BatchView& batch) {
  const auto& counts = batch.counts;
  return {.logits = batch.Payload(),
          .rows = batch.In(kSampleInRows),
          .history = batch.In(kSampleInHistory),
          .bias = batch.In(kSampleInBias),
          .extra_ids = batch.In(kSampleInExtraIds),
          .mask_words = batch.In(kSampleInMaskWords),
          .edited = counts[kSampleHistory] + counts[kSampleBias] + counts[kSampleMaskWords] > 0 ||
                    (batch.wanted & kAsksMore) != 0,
          .asks_more = (batch.wanted & kAsksMore) != 0,
          .tokens = batch.Out(kSampleTokens),
          .logprobs = batch.Out(kSampleLogprobs),
          .ranks = batch.Out(kSampleRanks),
          .logsumexp = batch.Out(kSampleLogsumexp),
          .top_ids = batch.Out(kSampleTopIds),
          .top_logprobs = batch.Out(kSampleTopLogprobs),
          .extra_logprobs = batch.Out(kSampleExtraLogprobs),
          .status = batch.Out(kSampleStatus),
          .support_size = batch.Out(kSampleSupportSizes),
          .support_ids = batch.Out(kSampleSupportIds),
          .support_logprobs = batch.Out(kSampleSupportLogprobs),
          .entropies = batch.Out(kSampleEntropies),
          .raw_entropies = batch.Out(kSampleRawEntropies),
          .draw_tokens = batch.Out(kSampleDrawTokens),
          .draw_logprobs = batch.Out(kSampleDrawLogprobs)};
}

inline constexpr engine::OpTraits kSampleTraits = {
    .name = "sample",
    .inputs = kSampleInputs,
    .outputs = kSampleOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.Run(SampleArgsOf(batch)); },
    .rows_apart = true};

inline constexpr engine::OpTraits kLinearSampleTraits = {
    .name = "linear_sample",
    .inputs = kSampleInputs,
    .outputs = kSampleOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.Run(
          LinearSampleArgs{.hidden = batch.Payload(),
                           .head = *batch.head,
                           .sample = SampleArgsOf(batch),
                           .max_kept = batch.wanted == 0 ? batch.max_row_entries : 0});
    }};

inline constexpr RowPlace<SampleRow> kSamplePlaces[] = {
    {kSampleHistory, &SampleRow::first_history},
    {kSampleBias, &SampleRow::first_bias},
    {kSampleExtraIds, &SampleRow::first_extra},
    {kSampleMaskWords, &SampleRow::first_mask_word},
    {kSampleTopEntries, &SampleRow::first_top_entry, &SampleRow::top_logprobs},
    {kSampleExtraEntries, &SampleRow::first_extra_entry, &SampleRow::extra_count},
    {kSampleSupportEntries, &SampleRow::first_support_entry, &SampleRow::want_support},
    {kSampleDrawEntries, &SampleRow::first_draw_entry, &SampleRow::draws},
};

// The rows of one job and their lists: see job_rows.h.
struct SampleRows {
  absl::InlinedVector<SampleRow, 1> rows;
  std::vector<int32_t> history;
  std::vector<SampleBias> bias;
  std::vector<int32_t> extra_ids;
  std::vector<uint32_t> mask_words;

  static constexpr auto Columns() {
    return std::tuple(RowColumn(&SampleRows::rows, kSampleInRows, kSamplePlaces),
                      Column(&SampleRows::history, kSampleInHistory),
                      Column(&SampleRows::bias, kSampleInBias),
                      Column(&SampleRows::extra_ids, kSampleInExtraIds),
                      Column(&SampleRows::mask_words, kSampleInMaskWords));
  }
  void FillHints(engine::JobSpec* spec) const {
    for (const SampleRow& row : rows) {
      const int32_t kept = KeptTokens(row);
      spec->max_row_entries = std::max(spec->max_row_entries, kept);
      if (kept == 0) spec->wanted |= kMoreThanKept;
      if (AsksMore(row)) spec->wanted |= kAsksMore;
    }
  }
  // For CheckSample.
  SampleRequest Request(int64_t vocab) const {
    return {.vocab = vocab,
            .params = rows,
            .history = history,
            .bias = bias,
            .extra_ids = extra_ids,
            .mask_words = mask_words};
  }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_SAMPLE_H_
