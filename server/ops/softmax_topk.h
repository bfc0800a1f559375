// softmax_topk and linear_topk in the engine.
#ifndef LOGITD_SERVER_OPS_SOFTMAX_TOPK_H_
#define LOGITD_SERVER_OPS_SOFTMAX_TOPK_H_

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kernels/softmax_topk.h"
#include "server/engine/job.h"

namespace logitd::ops {

enum SoftmaxTopKAxis : size_t { kTopKRows = engine::kRowAxis, kTopKEntries };

inline constexpr engine::Input<SoftmaxTopKRow> kTopKInRows{0, kTopKRows};

inline constexpr engine::Output<float> kTopKLogsumexp{0, kTopKRows};
inline constexpr engine::Output<RowStatus> kTopKStatus{1, kTopKRows};
inline constexpr engine::Output<int32_t> kTopKIndices{2, kTopKEntries};
inline constexpr engine::Output<float> kTopKProbs{3, kTopKEntries};

extern const engine::OpTraits kSoftmaxTopKTraits;
extern const engine::OpTraits kLinearTopKTraits;

// The rows of one job.
struct SoftmaxTopKRows {
  absl::InlinedVector<SoftmaxTopKRow, 1> rows;

  // Gives each row its place among the answers. Fills `spec`, except its deadline. The rows have
  // passed CheckSoftmaxTopK.
  void FillSpec(const engine::BatchKey& key, engine::JobSpec* spec);

  // As engine::Job::WriteInputs.
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) const;

  // In memory now.
  int64_t bytes() const { return static_cast<int64_t>(rows.size() * sizeof(SoftmaxTopKRow)); }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_SOFTMAX_TOPK_H_
