// divergence and linear_divergence in the engine. Both are exclusive: a job is one batch, because a
// batch has only one payload. The reference is an input beside it.
#ifndef LOGITD_SERVER_OPS_DIVERGENCE_H_
#define LOGITD_SERVER_OPS_DIVERGENCE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "kernels/divergence.h"
#include "kernels/linear.h"
#include "server/engine/job.h"
#include "server/ops/job_rows.h"

namespace logitd::ops {

enum DivergenceAxis : size_t {
  kDivergenceRows = engine::kRowAxis,
  kDivergenceReferenceBytes,
  kDivergenceTopEntries,
  kDivergenceReferenceTopEntries
};

inline constexpr engine::Input<std::byte> kDivergenceInReference{0, kDivergenceReferenceBytes};
inline constexpr engine::Input<DivergenceRow> kDivergenceInRows{1, kDivergenceRows};

inline constexpr engine::Output<float> kDivergenceForwardKl{0, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceReverseKl{1, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceEntropies{2, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceReferenceEntropies{3, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceLogsumexp{4, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceReferenceLogsumexp{5, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceTargetLogprobs{6, kDivergenceRows};
inline constexpr engine::Output<float> kDivergenceReferenceTargetLogprobs{7, kDivergenceRows};
inline constexpr engine::Output<RowStatus> kDivergenceStatus{8, kDivergenceRows};
inline constexpr engine::Output<int32_t> kDivergenceTopIds{9, kDivergenceTopEntries};
inline constexpr engine::Output<float> kDivergenceTopLogprobs{10, kDivergenceTopEntries};
inline constexpr engine::Output<int32_t> kDivergenceReferenceTopIds{11,
                                                                    kDivergenceReferenceTopEntries};
inline constexpr engine::Output<float> kDivergenceReferenceTopLogprobs{
    12, kDivergenceReferenceTopEntries};

inline constexpr auto kDivergenceInputs =
    engine::ArraysOf(kDivergenceInReference, kDivergenceInRows);
inline constexpr auto kDivergenceOutputs = engine::ArraysOf(
    kDivergenceForwardKl, kDivergenceReverseKl, kDivergenceEntropies, kDivergenceReferenceEntropies,
    kDivergenceLogsumexp, kDivergenceReferenceLogsumexp, kDivergenceTargetLogprobs,
    kDivergenceReferenceTargetLogprobs, kDivergenceStatus, kDivergenceTopIds,
    kDivergenceTopLogprobs, kDivergenceReferenceTopIds, kDivergenceReferenceTopLogprobs);

inline constexpr engine::OpTraits kDivergenceTraits = {.name = "divergence",
                                                       .inputs = kDivergenceInputs,
                                                       .outputs = kDivergenceOutputs,
                                                       .exclusive_batch = true};
// At least one of the two inputs is hidden states.
inline constexpr engine::OpTraits kLinearDivergenceTraits = {.name = "linear_divergence",
                                                             .inputs = kDivergenceInputs,
                                                             .outputs = kDivergenceOutputs,
                                                             .exclusive_batch = true};

// The parameters of a job, except its rows.
struct DivergenceCall final : engine::ExclusiveCall {
  // The reference's rows, which are padded to multiples of 16 bytes.
  DType reference_dtype = DType::kF32;
  int64_t reference_elements = 0;

  size_t reference_stride() const {
    constexpr size_t kBorder = 16;
    const size_t bytes = static_cast<size_t>(reference_elements) * SizeOf(reference_dtype);
    return (bytes + kBorder - 1) / kBorder * kBorder;
  }

  absl::Status Enqueue(Stream& stream, const engine::BatchView& batch) const override {
    const size_t stride = reference_stride();
    const TensorView first = batch.Payload();
    const TensorView reference = {
        .data = batch.In(kDivergenceInReference) + static_cast<size_t>(batch.first_row) * stride,
        .dtype = reference_dtype,
        .rows = batch.rows(),
        .cols = reference_elements,
        .row_stride = static_cast<int64_t>(stride / SizeOf(reference_dtype))};
    DivergenceArgs args = {
        .logits = first,
        .reference_logits = reference,
        .rows = batch.In(kDivergenceInRows),
        .max_top_logprobs = MostTops(batch, kDivergenceTopEntries),
        .max_reference_top_logprobs = MostTops(batch, kDivergenceReferenceTopEntries),
        .answers = AnswersOf(batch)};
    if (batch.head == nullptr && batch.reference_head == nullptr) return stream.Run(args);
    LinearDivergenceArgs linear = {.divergence = args};
    if (batch.head != nullptr) linear.head = *batch.head, linear.hidden = first;
    if (batch.reference_head != nullptr) {
      linear.reference_head = *batch.reference_head;
      linear.reference_hidden = reference;
    }
    return stream.Run(linear);
  }

 private:
  // The most top tokens that a row wants of an input, or more; 0: none.
  static int32_t MostTops(const engine::BatchView& batch, DivergenceAxis axis) {
    return batch.counts[axis] == 0 ? 0 : batch.max_row_entries;
  }
  static DivergenceAnswers AnswersOf(const engine::BatchView& batch) {
    return {.forward_kl = batch.Out(kDivergenceForwardKl),
            .reverse_kl = batch.Out(kDivergenceReverseKl),
            .entropy = batch.Out(kDivergenceEntropies),
            .reference_entropy = batch.Out(kDivergenceReferenceEntropies),
            .logsumexp = batch.Out(kDivergenceLogsumexp),
            .reference_logsumexp = batch.Out(kDivergenceReferenceLogsumexp),
            .target_logprob = batch.Out(kDivergenceTargetLogprobs),
            .reference_target_logprob = batch.Out(kDivergenceReferenceTargetLogprobs),
            .status = batch.Out(kDivergenceStatus),
            .top_ids = batch.Out(kDivergenceTopIds),
            .top_logprobs = batch.Out(kDivergenceTopLogprobs),
            .reference_top_ids = batch.Out(kDivergenceReferenceTopIds),
            .reference_top_logprobs = batch.Out(kDivergenceReferenceTopLogprobs)};
  }
};

inline constexpr RowPlace<DivergenceRow> kDivergencePlaces[] = {
    {kDivergenceTopEntries, &DivergenceRow::first_top_entry, &DivergenceRow::top_logprobs},
    {kDivergenceReferenceTopEntries, &DivergenceRow::first_reference_top_entry,
     &DivergenceRow::reference_top_logprobs},
};

// The rows of one job: see job_rows.h. Stays where it is until the job is done.
struct DivergenceRows {
  absl::InlinedVector<DivergenceRow, 1> rows;
  DivergenceCall call;

  static constexpr auto Columns() {
    return std::tuple(RowColumn(&DivergenceRows::rows, kDivergenceInRows, kDivergencePlaces));
  }
  void FillHints(engine::JobSpec* spec) const {
    spec->counts[kDivergenceReferenceBytes] =
        static_cast<int64_t>(rows.size() * call.reference_stride());
    for (const DivergenceRow& row : rows) {
      spec->max_row_entries =
          std::max({spec->max_row_entries, row.top_logprobs, row.reference_top_logprobs});
    }
    spec->call = &call;
  }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_DIVERGENCE_H_
