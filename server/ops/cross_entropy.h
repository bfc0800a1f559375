// cross_entropy and linear_cross_entropy in the engine.
#ifndef LOGITD_SERVER_OPS_CROSS_ENTROPY_H_
#define LOGITD_SERVER_OPS_CROSS_ENTROPY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kernels/cross_entropy.h"
#include "server/engine/job.h"

namespace logitd::ops {

enum CrossEntropyAxis : size_t {
  kCrossEntropyRows = engine::kRowAxis,
  kCrossEntropyExtraIds,
  kCrossEntropyTopEntries,
  kCrossEntropyExtraEntries
};

inline constexpr engine::Input<CrossEntropyRow> kCrossEntropyInRows{0, kCrossEntropyRows};
inline constexpr engine::Input<int32_t> kCrossEntropyInExtraIds{1, kCrossEntropyExtraIds};

inline constexpr engine::Output<float> kCrossEntropyLosses{0, kCrossEntropyRows};
inline constexpr engine::Output<float> kCrossEntropyTargetLogprobs{1, kCrossEntropyRows};
inline constexpr engine::Output<int32_t> kCrossEntropyRanks{2, kCrossEntropyRows};
inline constexpr engine::Output<float> kCrossEntropyLogsumexp{3, kCrossEntropyRows};
inline constexpr engine::Output<RowStatus> kCrossEntropyStatus{4, kCrossEntropyRows};
inline constexpr engine::Output<float> kCrossEntropyEntropies{5, kCrossEntropyRows};
inline constexpr engine::Output<int32_t> kCrossEntropyTopIds{6, kCrossEntropyTopEntries};
inline constexpr engine::Output<float> kCrossEntropyTopLogprobs{7, kCrossEntropyTopEntries};
inline constexpr engine::Output<float> kCrossEntropyExtraLogprobs{8, kCrossEntropyExtraEntries};

extern const engine::OpTraits kCrossEntropyTraits;
extern const engine::OpTraits kLinearCrossEntropyTraits;

// The rows of one job with their list. Places count from the job's own first elements.
struct CrossEntropyRows {
  absl::InlinedVector<CrossEntropyRow, 1> rows;
  std::vector<int32_t> extra_ids;

  // For CheckCrossEntropy.
  CrossEntropyRequest Request(int64_t vocab) const;

  // Gives each row its places among the answers. Fills `spec`, except its deadline. The rows have
  // passed CheckCrossEntropy.
  void FillSpec(const engine::BatchKey& key, engine::JobSpec* spec);

  // As engine::Job::WriteInputs. Frees the list.
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first);

  // In memory now.
  int64_t bytes() const;
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_CROSS_ENTROPY_H_
