// attention_softmax and its backward in the engine. Both are exclusive: a job is one batch, with
// the shape, the mask and the other parameters of its call.
#ifndef LOGITD_SERVER_OPS_ATTENTION_SOFTMAX_H_
#define LOGITD_SERVER_OPS_ATTENTION_SOFTMAX_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention_softmax.h"
#include "server/engine/job.h"

namespace logitd::ops {

enum AttentionAxis : size_t {
  kAttentionRows = engine::kRowAxis,
  kAttentionOutBytes,    // of probs or d_scores
  kAttentionSinks,       // heads, or 0
  kAttentionLogsumexps,  // rows, or 0
  kAttentionMaskBytes,   // forward
  kAttentionDProbBytes,  // backward
};

// Forward. The large output comes first, because it may be written over the payload.
inline constexpr engine::Input<std::byte> kAttentionInMask{0, kAttentionMaskBytes};
inline constexpr engine::Input<float> kAttentionInSinks{1, kAttentionSinks};

inline constexpr engine::Output<std::byte> kAttentionProbs{0, kAttentionOutBytes};
inline constexpr engine::Output<float> kAttentionLogsumexp{1, kAttentionLogsumexps};
inline constexpr engine::Output<RowStatus> kAttentionStatus{2, kAttentionRows};

// Backward.
inline constexpr engine::Input<std::byte> kAttentionBackwardInDProbs{0, kAttentionDProbBytes};
inline constexpr engine::Input<float> kAttentionBackwardInLogsumexp{1, kAttentionLogsumexps};
inline constexpr engine::Input<float> kAttentionBackwardInSinks{2, kAttentionSinks};

inline constexpr engine::Output<std::byte> kAttentionBackwardDScores{0, kAttentionOutBytes};
inline constexpr engine::Output<double> kAttentionBackwardDSinks{1, kAttentionSinks};
inline constexpr engine::Output<RowStatus> kAttentionBackwardStatus{2, kAttentionRows};

extern const engine::OpTraits kAttentionSoftmaxTraits;
extern const engine::OpTraits kAttentionSoftmaxBackwardTraits;

// What a job asks for, except its arrays. The call has passed CheckAttentionSoftmax.
struct AttentionCall final : engine::ExclusiveCall {
  bool backward = false;
  DType dtype = DType::kF32;  // of the scores; backward: of probs and d_probs
  DType out_dtype = DType::kF32;
  AttentionShape shape;
  float scale = 1.0f;
  AttentionWindow window;
  AttentionMask mask;  // `data` is not set
  int64_t mask_bytes = 0;
  int64_t sinks = 0;            // heads, or 0
  bool want_logsumexp = false;  // forward

  const engine::OpTraits& op() const {
    return backward ? kAttentionSoftmaxBackwardTraits : kAttentionSoftmaxTraits;
  }

  // Bytes of probs or d_scores.
  int64_t out_bytes() const {
    return shape.rows * shape.keys * static_cast<int64_t>(SizeOf(out_dtype));
  }

  // Fills all of `spec` except the deadline. `spec` refers to this.
  void FillSpec(engine::JobSpec* spec) const;

  absl::Status Enqueue(Stream& stream, const engine::BatchView& batch) const override;
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_ATTENTION_SOFTMAX_H_
