#include "kernels/checks.h"

#include <limits>

#include "absl/strings/str_format.h"

namespace logitd {
namespace {

bool IsKnown(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace

absl::Status CheckLogits(const LogitsShape& shape) {
  if (!IsKnown(shape.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype: got %d, allowed f32, f16, bf16", static_cast<int>(shape.dtype)));
  }
  if (shape.vocab < 1 || shape.vocab > kMaxVocab) {
    return absl::InvalidArgumentError(
        absl::StrFormat("vocab: got %d, allowed 1..%d", shape.vocab, kMaxVocab));
  }
  const int64_t row_bytes = shape.vocab * static_cast<int64_t>(SizeOf(shape.dtype));
  const int64_t max_rows = std::numeric_limits<int64_t>::max() / row_bytes;
  if (shape.rows < 1 || shape.rows > max_rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: got %d, allowed 1..%d", shape.rows, max_rows));
  }
  const int64_t need = shape.rows * row_bytes;
  if (shape.payload_bytes != need) {
    return absl::InvalidArgumentError(
        absl::StrFormat("logits: got %d bytes, but rows %d x vocab %d x %s is %d bytes",
                        shape.payload_bytes, shape.rows, shape.vocab, Name(shape.dtype), need));
  }
  return absl::OkStatus();
}

}  // namespace logitd
