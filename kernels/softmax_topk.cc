#include "kernels/softmax_topk.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

bool IsKnown(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

absl::Status CheckCount(std::string_view field, size_t count, int64_t rows, bool may_be_empty) {
  if (count == 1 || count == static_cast<size_t>(rows) || (count == 0 && may_be_empty)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat("%s: got %d values, allowed %s1 or %d (rows)",
                                                    field, count, may_be_empty ? "0, " : "", rows));
}

// " at row 3" where there is a value per row, nothing where one value stands for all.
std::string AtRow(size_t count, size_t i) {
  return count == 1 ? std::string() : absl::StrFormat(" at row %d", i);
}

}  // namespace

absl::Status CheckSoftmaxTopK(const SoftmaxTopKRequest& request) {
  if (!IsKnown(request.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype: got %d, allowed f32, f16, bf16", static_cast<int>(request.dtype)));
  }
  if (request.vocab < 1 || request.vocab > kMaxVocab) {
    return absl::InvalidArgumentError(
        absl::StrFormat("vocab: got %d, allowed 1..%d", request.vocab, kMaxVocab));
  }
  const int64_t row_bytes = request.vocab * static_cast<int64_t>(SizeOf(request.dtype));
  const int64_t max_rows = std::numeric_limits<int64_t>::max() / row_bytes;
  if (request.rows < 1 || request.rows > max_rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: got %d, allowed 1..%d", request.rows, max_rows));
  }
  const int64_t need = request.rows * row_bytes;
  if (request.payload_bytes != need) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "logits: got %d bytes, but rows %d x vocab %d x %s is %d bytes", request.payload_bytes,
        request.rows, request.vocab, Name(request.dtype), need));
  }
  LOGITD_RETURN_IF_ERROR(CheckCount("k", request.k.size(), request.rows, /*may_be_empty=*/false));
  LOGITD_RETURN_IF_ERROR(CheckCount("temperature", request.temperature.size(), request.rows,
                                    /*may_be_empty=*/true));
  for (size_t i = 0; i < request.k.size(); ++i) {
    if (request.k[i] >= 1 && request.k[i] <= request.vocab) continue;
    return absl::InvalidArgumentError(absl::StrFormat("k: got %d%s, allowed 1..%d", request.k[i],
                                                      AtRow(request.k.size(), i), request.vocab));
  }
  for (size_t i = 0; i < request.temperature.size(); ++i) {
    const float t = request.temperature[i];
    if (std::isfinite(t) && t > 0) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "temperature: got %g%s, allowed finite and > 0", t, AtRow(request.temperature.size(), i)));
  }
  return absl::OkStatus();
}

}  // namespace logitd
