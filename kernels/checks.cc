#include "kernels/checks.h"

#include <limits>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"

namespace logitd {

absl::Status CheckDType(std::string_view field, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d, allowed f32, f16, bf16", field, static_cast<int>(dtype)));
}

absl::Status CheckRange(std::string_view field, int64_t got, int64_t least, int64_t most) {
  if (got >= least && got <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d, allowed %d..%d", field, got, least, most));
}

absl::Status CheckLogits(const LogitsShape& shape) {
  LOGITD_RETURN_IF_ERROR(CheckDType("dtype", shape.dtype));
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", shape.vocab, 1, kMaxVocab));
  const int64_t row_bytes = shape.vocab * static_cast<int64_t>(SizeOf(shape.dtype));
  const int64_t max_rows = std::numeric_limits<int64_t>::max() / row_bytes;
  LOGITD_RETURN_IF_ERROR(CheckRange("rows", shape.rows, 1, max_rows));
  const int64_t need = shape.rows * row_bytes;
  if (shape.payload_bytes != need) {
    return absl::InvalidArgumentError(
        absl::StrFormat("logits: got %d bytes, but rows %d x vocab %d x %s is %d bytes",
                        shape.payload_bytes, shape.rows, shape.vocab, Name(shape.dtype), need));
  }
  return absl::OkStatus();
}

}  // namespace logitd
