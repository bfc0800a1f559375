#include "kernels/attention_softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

// Elements a tensor may have: its bytes are an int64_t, whatever its type.
constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / 4;

absl::Status CheckShape(const AttentionShape& shape) {
  LOGITD_RETURN_IF_ERROR(CheckRange("keys", shape.keys, 1, kMaxKeys));
  int64_t left = kMaxElements / shape.keys;
  LOGITD_RETURN_IF_ERROR(CheckRange("queries", shape.queries, 1, left));
  left /= shape.queries;
  LOGITD_RETURN_IF_ERROR(CheckRange("heads", shape.heads, 1, left));
  left /= shape.heads;
  LOGITD_RETURN_IF_ERROR(CheckRange("batch", shape.batch, 1, left));
  const int64_t all = shape.batch * shape.heads * shape.queries;
  LOGITD_RETURN_IF_ERROR(CheckRange("first_row", shape.first_row, 0, all - 1));
  return CheckRange("rows", shape.rows, 1, all - shape.first_row);
}

absl::Status CheckTypes(const AttentionSoftmaxRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckDType("dtype", request.dtype));
  LOGITD_RETURN_IF_ERROR(CheckDType("out_dtype", request.out_dtype));
  if (request.out_dtype == request.dtype) return absl::OkStatus();
  // 16-bit probabilities may grow, f32 gradients may shrink.
  const DType wide = request.backward ? request.dtype : request.out_dtype;
  if (wide == DType::kF32) return absl::OkStatus();
  const bool may_grow = !request.backward && request.dtype != DType::kF32;
  return absl::InvalidArgumentError(absl::StrFormat("out_dtype: got %s, allowed %s%s",
                                                    Name(request.out_dtype), Name(request.dtype),
                                                    may_grow ? ", f32" : ""));
}

absl::Status CheckWindow(std::string_view field, int64_t got) {
  if (got >= 0 || got == AttentionWindow::kUnbounded) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: got %d, allowed >= 0, or %d for unbounded",
                                                    field, got, AttentionWindow::kUnbounded));
}

absl::Status CheckMask(const AttentionSoftmaxRequest& request) {
  if (request.mask != MaskKind::kNone && request.mask != MaskKind::kBool &&
      request.mask != MaskKind::kAdditive) {
    return absl::InvalidArgumentError(
        absl::StrFormat("mask: got kind %d, allowed none, bool, "
                        "additive",
                        static_cast<int>(request.mask)));
  }
  if (request.mask == MaskKind::kNone) {
    if (request.mask_bytes == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat(
        "mask: got %d bytes, allowed 0 where its kind is none", request.mask_bytes));
  }
  if (request.backward) {
    return absl::InvalidArgumentError(
        "mask: got one, allowed none for the backward: probs of 0 say what was masked");
  }
  if (request.mask == MaskKind::kAdditive) {
    LOGITD_RETURN_IF_ERROR(CheckDType("mask_dtype", request.mask_dtype));
  }
  const AttentionShape& shape = request.shape;
  const int64_t full[4] = {shape.batch, shape.heads, shape.queries, shape.keys};
  int64_t elements = 1;
  for (int axis = 0; axis < 4; ++axis) {
    const int64_t got = request.mask_shape[axis];
    if (got != full[axis] && (got != 1 || axis == 3)) {
      static constexpr std::string_view kNames[] = {"batch", "heads", "queries", "keys"};
      return absl::InvalidArgumentError(
          absl::StrFormat("mask_shape: got %d for %s, allowed %s%d", got, kNames[axis],
                          axis == 3 || full[axis] == 1 ? "" : "1, ", full[axis]));
    }
    elements *= got;
  }
  const bool bytes = request.mask == MaskKind::kBool;
  const int64_t need = elements * static_cast<int64_t>(bytes ? 1 : SizeOf(request.mask_dtype));
  if (request.mask_bytes == need) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "mask: got %d bytes, but %d x %d x %d x %d x %s is %d bytes", request.mask_bytes,
      request.mask_shape[0], request.mask_shape[1], request.mask_shape[2], request.mask_shape[3],
      bytes ? "bool" : Name(request.mask_dtype), need));
}

absl::Status CheckSinks(const AttentionSoftmaxRequest& request) {
  const int64_t count = static_cast<int64_t>(request.sinks.size());
  if (count != 0 && count != request.shape.heads) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sinks: got %d values, allowed 0 or %d "
                        "(heads)",
                        count, request.shape.heads));
  }
  for (int64_t h = 0; h < count; ++h) {
    const float sink = request.sinks[h];
    if (std::isfinite(sink) || (std::isinf(sink) && sink < 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("sinks: got %g at head %d, allowed finite or -inf", sink, h));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAttentionSoftmax(const AttentionSoftmaxRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckTypes(request));
  LOGITD_RETURN_IF_ERROR(CheckShape(request.shape));
  LOGITD_RETURN_IF_ERROR(CheckPayload({.field = request.backward ? "probs" : "scores",
                                       .bytes = request.payload_bytes,
                                       .rows = request.shape.rows,
                                       .cols_name = "keys",
                                       .cols = request.shape.keys,
                                       .dtype = request.dtype}));
  if (!std::isfinite(request.scale)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("scale: got %g, allowed finite", request.scale));
  }
  LOGITD_RETURN_IF_ERROR(CheckWindow("window_left", request.window.left));
  LOGITD_RETURN_IF_ERROR(CheckWindow("window_right", request.window.right));
  LOGITD_RETURN_IF_ERROR(CheckMask(request));
  return CheckSinks(request);
}

}  // namespace logitd
