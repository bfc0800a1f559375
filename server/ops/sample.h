// sample and linear_sample in the engine.
#ifndef LOGITD_SERVER_OPS_SAMPLE_H_
#define LOGITD_SERVER_OPS_SAMPLE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kernels/sample.h"
#include "server/engine/job.h"

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
inline constexpr auto kSampleOutputs =
    engine::ArraysOf(kSampleTokens, kSampleLogprobs, kSampleRanks, kSampleLogsumexp, kSampleStatus,
                     kSampleTopIds, kSampleTopLogprobs, kSampleExtraLogprobs);

extern const engine::OpTraits kSampleTraits;
extern const engine::OpTraits kLinearSampleTraits;

// The arguments of a batch of sample; of verify, those for its rows.
SampleArgs SampleArgsOf(const engine::BatchView& batch);

// The rows of one job with their lists. Places count from the job's own first elements.
struct SampleRows {
  absl::InlinedVector<SampleRow, 1> rows;
  std::vector<int32_t> history;
  std::vector<SampleBias> bias;
  std::vector<int32_t> extra_ids;
  std::vector<uint32_t> mask_words;

  // For CheckSample.
  SampleRequest Request(int64_t vocab) const;

  // Gives each row its places among the answers. Fills `spec`, except its deadline. The rows have
  // passed CheckSample.
  void FillSpec(const engine::BatchKey& key, engine::JobSpec* spec);

  // As engine::Job::WriteInputs. Frees the lists.
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first);

  // In memory now.
  int64_t bytes() const;
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_SAMPLE_H_
