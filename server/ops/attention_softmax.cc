#include "server/ops/attention_softmax.h"

namespace logitd::ops {
namespace {

constexpr auto kInputs = engine::ArraysOf(kAttentionInMask, kAttentionInSinks);
constexpr auto kOutputs = engine::ArraysOf(kAttentionProbs, kAttentionLogsumexp, kAttentionStatus);
constexpr auto kBackwardInputs = engine::ArraysOf(
    kAttentionBackwardInDProbs, kAttentionBackwardInLogsumexp, kAttentionBackwardInSinks);
constexpr auto kBackwardOutputs =
    engine::ArraysOf(kAttentionBackwardDScores, kAttentionBackwardDSinks, kAttentionBackwardStatus);

absl::Status EnqueueForward(Stream& stream, const engine::BatchView& batch,
                            const AttentionCall& call, MutableTensorView out) {
  AttentionMask mask = call.mask;
  mask.data = batch.In(kAttentionInMask);
  return stream.AttentionSoftmax({.shape = call.shape,
                                  .scores = batch.Payload(),
                                  .scale = call.scale,
                                  .window = call.window,
                                  .mask = mask,
                                  .sinks = batch.In(kAttentionInSinks),
                                  .probs = out,
                                  .logsumexp = batch.Out(kAttentionLogsumexp),
                                  .status = batch.Out(kAttentionStatus)});
}

absl::Status EnqueueBackward(Stream& stream, const engine::BatchView& batch,
                             const AttentionCall& call, MutableTensorView out) {
  TensorView d_probs = batch.Payload();
  d_probs.data = batch.In(kAttentionBackwardInDProbs);
  return stream.AttentionSoftmaxBackward({.shape = call.shape,
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
  spec->call = this;
  spec->size = engine::SizeOfJob(*spec);
}

absl::Status AttentionCall::Enqueue(Stream& stream, const engine::BatchView& batch) const {
  const MutableTensorView out = {
      .data = batch.Out(backward ? kAttentionBackwardDScores : kAttentionProbs),
      .dtype = out_dtype,
      .rows = batch.rows(),
      .cols = batch.row_elements,
      .row_stride = batch.row_elements};
  return backward ? EnqueueBackward(stream, batch, *this, out)
                  : EnqueueForward(stream, batch, *this, out);
}

}  // namespace logitd::ops
