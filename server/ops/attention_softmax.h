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

inline constexpr auto kAttentionInputs = engine::ArraysOf(kAttentionInMask, kAttentionInSinks);
inline constexpr auto kAttentionOutputs =
    engine::ArraysOf(kAttentionProbs, kAttentionLogsumexp, kAttentionStatus);
inline constexpr auto kAttentionBackwardInputs = engine::ArraysOf(
    kAttentionBackwardInDProbs, kAttentionBackwardInLogsumexp, kAttentionBackwardInSinks);
inline constexpr auto kAttentionBackwardOutputs =
    engine::ArraysOf(kAttentionBackwardDScores, kAttentionBackwardDSinks, kAttentionBackwardStatus);

inline constexpr engine::OpTraits kAttentionSoftmaxTraits = {.name = "attention_softmax",
                                                             .inputs = kAttentionInputs,
                                                             .outputs = kAttentionOutputs,
                                                             .exclusive_batch = true};

inline constexpr engine::OpTraits kAttentionSoftmaxBackwardTraits = {
    .name = "attention_softmax_backward",
    .inputs = kAttentionBackwardInputs,
    .outputs = kAttentionBackwardOutputs,
    .exclusive_batch = true};

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
  void FillSpec(engine::JobSpec* spec) const {
    spec->key = {.op = &op(), .dtype = dtype, .row_elements = shape.keys};
    spec->counts[kAttentionRows] = shape.rows;
    spec->counts[kAttentionOutBytes] = out_bytes();
    spec->counts[kAttentionSinks] = sinks;
    spec->counts[kAttentionLogsumexps] =
        (backward ? sinks > 0 : want_logsumexp) ? shape.rows : int64_t{0};
    spec->counts[kAttentionMaskBytes] = mask_bytes;
    spec->counts[kAttentionDProbBytes] =
        backward ? shape.rows * shape.keys * static_cast<int64_t>(SizeOf(dtype)) : 0;
    spec->in_place = out_dtype == dtype;
    // The gradients of the sinks are sums over the call's rows.
    spec->whole = backward && sinks > 0;
    spec->call = this;
    spec->size = engine::SizeOfJob(*spec);
  }

  absl::Status Enqueue(Stream& stream, const engine::BatchView& batch) const override {
    const MutableTensorView out = {
        .data = RowsAt(batch.Out(backward ? kAttentionBackwardDScores : kAttentionProbs), out_dtype,
                       batch),
        .dtype = out_dtype,
        .rows = batch.rows(),
        .cols = batch.row_elements,
        .row_stride = batch.row_elements};
    return backward ? EnqueueBackward(stream, batch, out) : EnqueueForward(stream, batch, out);
  }

 private:
  // The rows of the slice.
  AttentionShape ShapeOf(const engine::BatchView& batch) const {
    AttentionShape slice = shape;
    slice.first_row += batch.first_row;
    slice.rows = batch.rows();
    return slice;
  }

  // The slice's first row in an array of one byte an element.
  template <typename Byte>
  static Byte* RowsAt(Byte* array, DType dtype, const engine::BatchView& batch) {
    return array + batch.first_row * batch.row_elements * static_cast<int64_t>(SizeOf(dtype));
  }

  absl::Status EnqueueForward(Stream& stream, const engine::BatchView& batch,
                              MutableTensorView out) const {
    AttentionMask with_data = mask;
    with_data.data = batch.In(kAttentionInMask);
    float* logsumexp = batch.Out(kAttentionLogsumexp);
    if (logsumexp != nullptr) logsumexp += batch.first_row;
    return stream.Run(AttentionSoftmaxArgs{.shape = ShapeOf(batch),
                                           .scores = batch.Payload(),
                                           .scale = scale,
                                           .window = window,
                                           .mask = with_data,
                                           .sinks = batch.In(kAttentionInSinks),
                                           .probs = out,
                                           .logsumexp = logsumexp,
                                           .status = batch.Out(kAttentionStatus)});
  }

  absl::Status EnqueueBackward(Stream& stream, const engine::BatchView& batch,
                               MutableTensorView out) const {
    TensorView d_probs = batch.Payload();
    d_probs.data = RowsAt(batch.In(kAttentionBackwardInDProbs), batch.dtype, batch);
    return stream.Run(
        AttentionSoftmaxBackwardArgs{.shape = ShapeOf(batch),
                                     .probs = batch.Payload(),
                                     .d_probs = d_probs,
                                     .scale = scale,
                                     .window = window,
                                     .d_scores = out,
                                     .sinks = batch.In(kAttentionBackwardInSinks),
                                     .logsumexp = batch.In(kAttentionBackwardInLogsumexp),
                                     .d_sinks = batch.Out(kAttentionBackwardDSinks),
                                     .status = batch.Out(kAttentionBackwardStatus)});
  }
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_ATTENTION_SOFTMAX_H_
