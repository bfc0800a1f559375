#include "server/ops/attention_softmax.h"

namespace logitd::ops {
namespace {

constexpr auto kInputs = engine::ArraysOf(kAttentionInMask, kAttentionInSinks);
constexpr auto kOutputs = engine::ArraysOf(kAttentionProbs, kAttentionLogsumexp, kAttentionStatus);
constexpr auto kBackwardInputs = engine::ArraysOf(
    kAttentionBackwardInDProbs, kAttentionBackwardInLogsumexp, kAttentionBackwardInSinks);
constexpr auto kBackwardOutputs =
    engine::ArraysOf(kAttentionBackwardDScores, kAttentionBackwardDSinks, kAttentionBackwardStatus);

// The rows of the slice.
AttentionShape ShapeOf(const engine::BatchView& batch, const AttentionCall& call) {
  AttentionShape shape = call.shape;
  shape.first_row += batch.first_row;
  shape.rows = batch.rows();
  return shape;
}

// Where the slice's first row starts in an array of one byte an element.
template <typename Byte>
Byte* RowsAt(Byte* array, DType dtype, const engine::BatchView& batch) {
  return array + batch.first_row * batch.row_elements * static_cast<int64_t>(SizeOf(dtype));
}

absl::Status EnqueueForward(Stream& stream, const engine::BatchView& batch,
                            const AttentionCall& call, MutableTensorView out) {
  AttentionMask mask = call.mask;
  mask.data = batch.In(kAttentionInMask);
  float* logsumexp = batch.Out(kAttentionLogsumexp);
  if (logsumexp != nullptr) logsumexp += batch.first_row;
  return stream.AttentionSoftmax({.shape = ShapeOf(batch, call),
                                  .scores = batch.Payload(),
                                  .scale = call.scale,
                                  .window = call.window,
                                  .mask = mask,
                                  .sinks = batch.In(kAttentionInSinks),
                                  .probs = out,
                                  .logsumexp = logsumexp,
                                  .status = batch.Out(kAttentionStatus)});
}

absl::Status EnqueueBackward(Stream& stream, const engine::BatchView& batch,
                             const AttentionCall& call, MutableTensorView out) {
  TensorView d_probs = batch.Payload();
  d_probs.data = RowsAt(batch.In(kAttentionBackwardInDProbs), batch.dtype, batch);
  return stream.AttentionSoftmaxBackward({.shape = ShapeOf(batch, call),
                                          .probs = batch.Payload(),
                                          .d_probs = d_probs,
                                          .scale = call.scale,
                                          .window = call.window,
                                          .d_scores = out,
                                          .sinks = batch.In(kAttentionBackwardInSinks),
                                          .logsumexp = batch.In(kAttentionBackwardInLogsumexp),
                                          .d_sinks = batch.Out(kAttentionBackwardDSinks),
                                          .status = batch.Out(kAttentionBackwardStatus)});
}

}  // namespace

const engine::OpTraits kAttentionSoftmaxTraits = {
    .name = "attention_softmax", .inputs = kInputs, .outputs = kOutputs, .exclusive_batch = true};

const engine::OpTraits kAttentionSoftmaxBackwardTraits = {.name = "attention_softmax_backward",
                                                          .inputs = kBackwardInputs,
                                                          .outputs = kBackwardOutputs,
                                                          .exclusive_batch = true};

void AttentionCall::FillSpec(engine::JobSpec* spec) const {
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
  spec->whole = backward && sinks > 0;  // the gradients of the sinks are sums over the call's rows
  spec->call = this;
  spec->size = engine::SizeOfJob(*spec);
}

absl::Status AttentionCall::Enqueue(Stream& stream, const engine::BatchView& batch) const {
  const MutableTensorView out = {
      .data = RowsAt(batch.Out(backward ? kAttentionBackwardDScores : kAttentionProbs), out_dtype,
                     batch),
      .dtype = out_dtype,
      .rows = batch.rows(),
      .cols = batch.row_elements,
      .row_stride = batch.row_elements};
  return backward ? EnqueueBackward(stream, batch, *this, out)
                  : EnqueueForward(stream, batch, *this, out);
}

}  // namespace logitd::ops
