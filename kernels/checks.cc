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

absl::Status CheckInt(std::string_view field, size_t row, int64_t got, int64_t least,
                      int64_t most) {
  if (got >= least && got <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d at row %d, allowed %d..%d", field, got, row, least, most));
}

absl::Status CheckSlice(std::string_view field, size_t row, int64_t first, int64_t count,
                        int64_t most, size_t size) {
  if (count < 0 || count > most) {  // the text is made only where it is wanted
    return CheckInt(absl::StrFormat("%s count", field), row, count, 0, most);
  }
  const int64_t total = static_cast<int64_t>(size);
  if (count == 0 || (first >= 0 && first <= total - count)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got entries [%d, %d + %d) at row %d, allowed inside the %d sent", field,
                      first, first, count, row, total));
}

absl::Status CheckIds(std::string_view field, size_t row, absl::Span<const int32_t> ids,
                      int64_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got token %d at row %d, entry %d, allowed 0..%d", field, ids[i], row, i, vocab - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckPayload(const Payload& payload) {
  const auto& [field, bytes, rows, cols_name, cols, dtype] = payload;
  const int64_t row_bytes = cols * static_cast<int64_t>(SizeOf(dtype));
  const int64_t max_rows = std::numeric_limits<int64_t>::max() / row_bytes;
  LOGITD_RETURN_IF_ERROR(CheckRange("rows", rows, 1, max_rows));
  if (bytes == rows * row_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d bytes, but rows %d x %s %d x %s is %d bytes", field, bytes, rows,
                      cols_name, cols, Name(dtype), rows * row_bytes));
}

absl::Status CheckLogits(const LogitsShape& shape) {
  LOGITD_RETURN_IF_ERROR(CheckDType("dtype", shape.dtype));
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", shape.vocab, 1, kMaxVocab));
  return CheckPayload({.field = "logits",
                       .bytes = shape.payload_bytes,
                       .rows = shape.rows,
                       .cols_name = "vocab",
                       .cols = shape.vocab,
                       .dtype = shape.dtype});
}

}  // namespace logitd
