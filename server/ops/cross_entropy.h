// cross_entropy and linear_cross_entropy in the engine.
#ifndef LOGITD_SERVER_OPS_CROSS_ENTROPY_H_
#define LOGITD_SERVER_OPS_CROSS_ENTROPY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "kernels/cross_entropy.h"
#include "server/engine/job.h"
#include "server/ops/job_rows.h"

namespace logitd::ops {

enum CrossEntropyAxis : size_t {
  kCrossEntropyRows = engine::kRowAxis,
  kCrossEntropyExtraIds,
  kCrossEntropyTopEntries,
  kCrossEntropyExtraEntries,
  kCrossEntropySupportIds,
  kCrossEntropyCounted  // rows that are not left out; no array has elements for it
};

inline constexpr engine::Input<CrossEntropyRow> kCrossEntropyInRows{0, kCrossEntropyRows};
inline constexpr engine::Input<int32_t> kCrossEntropyInExtraIds{1, kCrossEntropyExtraIds};
inline constexpr engine::Input<int32_t> kCrossEntropyInSupportIds{2, kCrossEntropySupportIds};

inline constexpr engine::Output<float> kCrossEntropyLosses{0, kCrossEntropyRows};
inline constexpr engine::Output<float> kCrossEntropyTargetLogprobs{1, kCrossEntropyRows};
inline constexpr engine::Output<int32_t> kCrossEntropyRanks{2, kCrossEntropyRows};
inline constexpr engine::Output<float> kCrossEntropyLogsumexp{3, kCrossEntropyRows};
inline constexpr engine::Output<RowStatus> kCrossEntropyStatus{4, kCrossEntropyRows};
inline constexpr engine::Output<float> kCrossEntropyEntropies{5, kCrossEntropyRows};
inline constexpr engine::Output<int32_t> kCrossEntropyTopIds{6, kCrossEntropyTopEntries};
inline constexpr engine::Output<float> kCrossEntropyTopLogprobs{7, kCrossEntropyTopEntries};
inline constexpr engine::Output<float> kCrossEntropyExtraLogprobs{8, kCrossEntropyExtraEntries};

inline constexpr auto kCrossEntropyInputs =
    engine::ArraysOf(kCrossEntropyInRows, kCrossEntropyInExtraIds, kCrossEntropyInSupportIds);
inline constexpr auto kCrossEntropyOutputs =
    engine::ArraysOf(kCrossEntropyLosses, kCrossEntropyTargetLogprobs, kCrossEntropyRanks,
                     kCrossEntropyLogsumexp, kCrossEntropyStatus, kCrossEntropyEntropies,
                     kCrossEntropyTopIds, kCrossEntropyTopLogprobs, kCrossEntropyExtraLogprobs);

// Bits of JobSpec::wanted after those of CrossEntropyRow::want: some row that is not left out has a
// support; some has none.
inline constexpr uint32_t kAnySupport = 1 << 8;
inline constexpr uint32_t kAnyWhole = 1 << 9;

inline CrossEntropyArgs CrossEntropyArgsOf(const engine::BatchView& batch) {
  return {.logits = batch.Payload(),
          .rows = batch.In(kCrossEntropyInRows),
          .extra_ids = batch.In(kCrossEntropyInExtraIds),
          .support_ids = batch.In(kCrossEntropyInSupportIds),
          .max_support = (batch.wanted & kAnySupport) != 0 ? kMaxSupport : 0,
          .all_supported = (batch.wanted & kAnyWhole) == 0,
          .want = static_cast<int32_t>(batch.wanted & (kWantRank | kWantEntropy)),
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

// The same where ignored rows are left out: see CrossEntropyArgs::counted_rows.
inline CrossEntropyArgs CountedCrossEntropyArgsOf(const engine::BatchView& batch) {
  CrossEntropyArgs args = CrossEntropyArgsOf(batch);
  args.counted_rows = std::min(batch.rows(), batch.counts[kCrossEntropyCounted]);
  return args;
}

template <CrossEntropyArgs (*ArgsOf)(const engine::BatchView&)>
inline constexpr engine::OpTraits kCrossEntropyTraitsOf = {
    .name = "cross_entropy",
    .inputs = kCrossEntropyInputs,
    .outputs = kCrossEntropyOutputs,
    .enqueue = [](Stream& stream,
                  const engine::BatchView& batch) { return stream.Run(ArgsOf(batch)); },
    .rows_apart = true};

template <CrossEntropyArgs (*ArgsOf)(const engine::BatchView&)>
inline constexpr engine::OpTraits kLinearCrossEntropyTraitsOf = {
    .name = "linear_cross_entropy",
    .inputs = kCrossEntropyInputs,
    .outputs = kCrossEntropyOutputs,
    .enqueue = [](Stream& stream, const engine::BatchView& batch) {
      return stream.Run(LinearCrossEntropyArgs{
          .hidden = batch.Payload(), .head = *batch.head, .cross_entropy = ArgsOf(batch)});
    }};

inline constexpr const engine::OpTraits& kCrossEntropyTraits =
    kCrossEntropyTraitsOf<&CrossEntropyArgsOf>;
inline constexpr const engine::OpTraits& kLinearCrossEntropyTraits =
    kLinearCrossEntropyTraitsOf<&CrossEntropyArgsOf>;
// Of jobs whose ignored rows are left out. They have batches of their own.
inline constexpr const engine::OpTraits& kCountedCrossEntropyTraits =
    kCrossEntropyTraitsOf<&CountedCrossEntropyArgsOf>;
inline constexpr const engine::OpTraits& kCountedLinearCrossEntropyTraits =
    kLinearCrossEntropyTraitsOf<&CountedCrossEntropyArgsOf>;

inline constexpr RowPlace<CrossEntropyRow> kCrossEntropyPlaces[] = {
    {kCrossEntropyExtraIds, &CrossEntropyRow::first_extra},
    {kCrossEntropyTopEntries, &CrossEntropyRow::first_top_entry, &CrossEntropyRow::top_logprobs},
    {kCrossEntropyExtraEntries, &CrossEntropyRow::first_extra_entry, &CrossEntropyRow::extra_count},
    {kCrossEntropySupportIds, &CrossEntropyRow::first_support},
};

// The rows of one job and their list: see job_rows.h.
struct CrossEntropyRows {
  absl::InlinedVector<CrossEntropyRow, 1> rows;
  std::vector<int32_t> extra_ids;
  std::vector<int32_t> support_ids;
  bool skip_ignored = false;  // the job is one of the counted ops

  static constexpr auto Columns() {
    return std::tuple(RowColumn(&CrossEntropyRows::rows, kCrossEntropyInRows, kCrossEntropyPlaces),
                      Column(&CrossEntropyRows::extra_ids, kCrossEntropyInExtraIds),
                      Column(&CrossEntropyRows::support_ids, kCrossEntropyInSupportIds));
  }
  void FillHints(engine::JobSpec* spec) const {
    for (const CrossEntropyRow& row : rows) {
      spec->max_row_entries = std::max(spec->max_row_entries, row.top_logprobs);
      spec->wanted |= static_cast<uint32_t>(row.want);
      if (skip_ignored && AsksForNothing(row)) continue;
      if (skip_ignored) ++spec->counts[kCrossEntropyCounted];
      spec->wanted |= IsWhole(row) ? kAnyWhole : kAnySupport;
    }
  }
  // For CheckCrossEntropy.
  CrossEntropyRequest Request(int64_t vocab) const {
    return {.vocab = vocab, .params = rows, .extra_ids = extra_ids, .support_ids = support_ids};
  }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_CROSS_ENTROPY_H_
