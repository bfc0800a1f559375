#include "kernels/cross_entropy.h"

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

absl::Status CheckTarget(size_t r, int32_t target, int64_t vocab) {
  if (target == kIgnoredTarget || (target >= 0 && target < vocab)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("target: got %d at row %d, allowed 0..%d, or %d for a row not counted",
                      target, r, vocab - 1, kIgnoredTarget));
}

absl::Status CheckRow(const CrossEntropyRequest& request, size_t r) {
  const CrossEntropyRow& row = request.params[r];
  LOGITD_RETURN_IF_ERROR(CheckTarget(r, row.target, request.vocab));
  LOGITD_RETURN_IF_ERROR(CheckInt("want", r, row.want, 0, kWantRank | kWantEntropy));
  LOGITD_RETURN_IF_ERROR(CheckSlice("extra_ids", r, row.first_extra, row.extra_count, kMaxExtraIds,
                                    request.extra_ids.size()));
  return CheckIds("extra_ids", r, Slice(request.extra_ids, row.first_extra, row.extra_count),
                  request.vocab);
}

}  // namespace

absl::Status CheckCrossEntropy(const CrossEntropyRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", request.vocab, 1, kMaxVocab));
  LOGITD_RETURN_IF_ERROR(CheckActive(request.params));
  LOGITD_RETURN_IF_ERROR(
      CheckParams<CrossEntropyRow>(kCrossEntropyParams, request.params, request.vocab));
  for (size_t r = 0; r < request.params.size(); ++r) {
    LOGITD_RETURN_IF_ERROR(CheckRow(request, r));
  }
  return absl::OkStatus();
}

}  // namespace logitd
