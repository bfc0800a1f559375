#include "kernels/softmax_topk.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

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
  LOGITD_RETURN_IF_ERROR(CheckLogits({.dtype = request.dtype,
                                      .rows = request.rows,
                                      .vocab = request.vocab,
                                      .payload_bytes = request.payload_bytes}));
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
