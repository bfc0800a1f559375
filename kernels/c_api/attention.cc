// attention_softmax and its backward.
#include <cstdint>

#include "kernels/attention_softmax.h"
#include "kernels/c_api/fields.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd::c_api {
namespace {

absl::Status ReadShape(const logitd_attention_shape& from, const TensorView& tensor,
                       AttentionSoftmaxRequest& to) {
  to.shape = {.batch = from.batch,
              .heads = from.heads,
              .queries = from.queries,
              .keys = from.keys,
              .rows = tensor.rows};
  to.dtype = tensor.dtype;
  to.scale = from.scale;
  to.window = {.left = from.window_left, .right = from.window_right};
  to.payload_bytes = tensor.rows * tensor.cols * static_cast<int64_t>(SizeOf(tensor.dtype));
  return absl::OkStatus();
}

absl::Status CheckRequest(AttentionSoftmaxRequest& request, DType out) {
  request.out_dtype = out;
  LOGITD_RETURN_IF_ERROR(CheckAttentionSoftmax(request));
  const AttentionShape& shape = request.shape;
  const int64_t rows = shape.batch * shape.heads * shape.queries;
  return CheckRange("rows", shape.rows, rows, rows);
}

// The mask of an op; the request learns its kind and its shape.
absl::Status ReadMask(const logitd_mask& from, AttentionSoftmaxRequest& request,
                      AttentionMask& to) {
  to = {.kind = static_cast<MaskKind>(from.kind),
        .dtype = static_cast<DType>(from.dtype),
        .data = from.data,
        .batch_stride = from.batch_stride,
        .head_stride = from.head_stride,
        .query_stride = from.query_stride};
  LOGITD_RETURN_IF_ERROR(CheckRange("mask kind", from.kind, 0, 2));
  if (to.kind == MaskKind::kNone) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(CheckPointer("mask", from.data));
  LOGITD_RETURN_IF_ERROR(CheckRange("mask dtype", from.dtype, LOGITD_F32, LOGITD_BF16));
  constexpr int64_t kMost = int64_t{1} << 40;
  for (const int64_t stride : {from.batch_stride, from.head_stride, from.query_stride})
    LOGITD_RETURN_IF_ERROR(CheckRange("mask stride", stride, 0, kMost));
  // The strides say how it is laid out: as far as the check goes, it is one row for all queries.
  request.mask = to.kind;
  request.mask_dtype = to.dtype;
  request.mask_shape[3] = request.shape.keys;
  request.mask_bytes = request.shape.keys *
                       (to.kind == MaskKind::kBool ? 1 : static_cast<int64_t>(SizeOf(to.dtype)));
  return absl::OkStatus();
}

absl::Status Run(Device& device, const logitd_call& call, const logitd_attention_softmax& op) {
  AttentionSoftmaxArgs args = {.scale = op.shape.scale, .sinks = op.sinks};
  AttentionSoftmaxRequest request;
  LOGITD_RETURN_IF_ERROR(ReadTensor("scores", op.scores, args.scores));
  LOGITD_RETURN_IF_ERROR(ReadShape(op.shape, args.scores, request));
  LOGITD_RETURN_IF_ERROR(ReadMask(op.mask, request, args.mask));
  LOGITD_RETURN_IF_ERROR(
      ReadOutput("probs", op.probs, args.scores.rows, args.scores.cols, args.probs));
  LOGITD_RETURN_IF_ERROR(CheckRequest(request, args.probs.dtype));
  LOGITD_RETURN_IF_ERROR(CheckPointer("status", op.status));
  args.shape = request.shape;
  args.window = request.window;
  args.logsumexp = op.logsumexp;
  args.status = reinterpret_cast<RowStatus*>(op.status);
  LOGITD_RETURN_IF_ERROR(device.Begin(call, 0));
  return device.Run(&args);
}

absl::Status Run(Device& device, const logitd_call& call,
                 const logitd_attention_softmax_backward& op) {
  AttentionSoftmaxBackwardArgs args = {.scale = op.shape.scale};
  AttentionSoftmaxRequest request = {.backward = true};
  LOGITD_RETURN_IF_ERROR(ReadTensor("probs", op.probs, args.probs));
  LOGITD_RETURN_IF_ERROR(ReadShape(op.shape, args.probs, request));
  MutableTensorView d_probs;
  LOGITD_RETURN_IF_ERROR(ReadOutput("d_probs", op.d_probs, args.probs.rows, args.probs.cols,
                                    args.probs.dtype, /*or_f32=*/false, d_probs));
  args.d_probs = d_probs;
  LOGITD_RETURN_IF_ERROR(
      ReadOutput("d_scores", op.d_scores, args.probs.rows, args.probs.cols, args.d_scores));
  LOGITD_RETURN_IF_ERROR(CheckRequest(request, args.d_scores.dtype));
  LOGITD_RETURN_IF_ERROR(CheckPointer("status", op.status));
  if (op.sinks != nullptr) {
    LOGITD_RETURN_IF_ERROR(CheckPointer("logsumexp", op.logsumexp));
    LOGITD_RETURN_IF_ERROR(CheckPointer("d_sinks", op.d_sinks));
    args.sinks = op.sinks;
    args.logsumexp = op.logsumexp;
    args.d_sinks = op.d_sinks;
  }
  args.shape = request.shape;
  args.window = request.window;
  args.status = reinterpret_cast<RowStatus*>(op.status);
  LOGITD_RETURN_IF_ERROR(device.Begin(call, 0));
  return device.Run(&args);
}

}  // namespace
}  // namespace logitd::c_api

using logitd::c_api::Enter;

int32_t logitd_run_attention_softmax(logitd_context* context, const logitd_call* call,
                                     const logitd_attention_softmax* op) {
  return Enter<logitd_attention_softmax, logitd::c_api::Run>(context, call, op);
}

int32_t logitd_run_attention_softmax_backward(logitd_context* context, const logitd_call* call,
                                              const logitd_attention_softmax_backward* op) {
  return Enter<logitd_attention_softmax_backward, logitd::c_api::Run>(context, call, op);
}
