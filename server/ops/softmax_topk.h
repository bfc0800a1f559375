// softmax_topk and linear_topk in the engine.
#ifndef LOGITD_SERVER_OPS_SOFTMAX_TOPK_H_
#define LOGITD_SERVER_OPS_SOFTMAX_TOPK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "absl/container/inlined_vector.h"
#include "kernels/softmax_topk.h"
#include "server/engine/job.h"
#include "server/ops/job_rows.h"

namespace logitd::ops {

enum SoftmaxTopKAxis : size_t { kTopKRows = engine::kRowAxis, kTopKEntries };

inline constexpr engine::Input<SoftmaxTopKRow> kTopKInRows{0, kTopKRows};

inline constexpr engine::Output<float> kTopKLogsumexp{0, kTopKRows};
inline constexpr engine::Output<RowStatus> kTopKStatus{1, kTopKRows};
inline constexpr engine::Output<int32_t> kTopKIndices{2, kTopKEntries};
inline constexpr engine::Output<float> kTopKProbs{3, kTopKEntries};

inline constexpr auto kTopKInputs = engine::ArraysOf(kTopKInRows);
inline constexpr auto kTopKOutputs =
    engine::ArraysOf(kTopKLogsumexp, kTopKStatus, kTopKIndices, kTopKProbs);

inline SoftmaxTopKArgs TopKArgsOf(const engine::BatchView& batch) {
  return {.logits = batch.Payload(),
          .rows = batch.In(kTopKInRows),
          .max_k = batch.max_row_entries,
          .indices = batch.Out(kTopKIndices),
          .probs = batch.Out(kTopKProbs),
          .logsumexp = batch.Out(kTopKLogsumexp),
          .status = batch.Out(kTopKStatus)};
}

inline constexpr engine::OpTraits kSoftmaxTopKTraits = {
    .name = "softmax_topk",
    .inputs = kTopKInputs,
    .outputs = kTopKOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.Run(TopKArgsOf(batch)); },
    .rows_apart = true};

inline constexpr engine::OpTraits kLinearTopKTraits = {
    .name = "linear_topk",
    .inputs = kTopKInputs,
    .outputs = kTopKOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.Run(LinearTopKArgs{
          .hidden = batch.Payload(), .head = *batch.head, .topk = TopKArgsOf(batch)});
    }};

inline constexpr RowPlace<SoftmaxTopKRow> kTopKPlaces[] = {
    {kTopKEntries, &SoftmaxTopKRow::first_entry, &SoftmaxTopKRow::k}};

// The rows of one job: see job_rows.h.
struct SoftmaxTopKRows {
  absl::InlinedVector<SoftmaxTopKRow, 1> rows;

  static constexpr auto Columns() {
    return std::tuple(RowColumn(&SoftmaxTopKRows::rows, kTopKInRows, kTopKPlaces));
  }
  void FillHints(engine::JobSpec* spec) const {
    for (const SoftmaxTopKRow& row : rows) {
      spec->max_row_entries = std::max(spec->max_row_entries, row.k);
    }
  }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_SOFTMAX_TOPK_H_
