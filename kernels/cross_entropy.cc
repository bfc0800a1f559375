#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>

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
  const int64_t vocab = request.vocab;
  LOGITD_RETURN_IF_ERROR(CheckInt("active", r, row.active, 1, 1));
  LOGITD_RETURN_IF_ERROR(CheckTarget(r, row.target, vocab));
  LOGITD_RETURN_IF_ERROR(CheckFloat("temperature", r, row.temperature,
                                    std::isfinite(row.temperature) && row.temperature > 0,
                                    "finite and > 0"));
  LOGITD_RETURN_IF_ERROR(CheckFloat("softcap", r, row.softcap,
                                    std::isfinite(row.softcap) && row.softcap >= 0,
                                    "finite and >= 0"));
  LOGITD_RETURN_IF_ERROR(CheckFloat("label_smoothing", r, row.label_smoothing,
                                    row.label_smoothing >= 0 && row.label_smoothing < 1,
                                    ">= 0 and < 1"));
  if (row.smoothing != Smoothing::kTorch && row.smoothing != Smoothing::kMegatron) {
    return absl::InvalidArgumentError(
        absl::StrFormat("smoothing: got %d at row %d, allowed torch, megatron",
                        static_cast<int>(row.smoothing), r));
  }
  LOGITD_RETURN_IF_ERROR(CheckFloat(
      "z_loss", r, row.z_loss, std::isfinite(row.z_loss) && row.z_loss >= 0, "finite and >= 0"));
  LOGITD_RETURN_IF_ERROR(CheckInt("want", r, row.want, 0, kWantRank | kWantEntropy));
  LOGITD_RETURN_IF_ERROR(
      CheckInt("top_logprobs", r, row.top_logprobs, 0, std::min<int64_t>(kMaxTopLogprobs, vocab)));
  LOGITD_RETURN_IF_ERROR(CheckSlice("extra_ids", r, row.first_extra, row.extra_count, kMaxExtraIds,
                                    request.extra_ids.size()));
  return CheckIds("extra_ids", r, Slice(request.extra_ids, row.first_extra, row.extra_count),
                  vocab);
}

}  // namespace

absl::Status CheckCrossEntropy(const CrossEntropyRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", request.vocab, 1, kMaxVocab));
  if (request.params.size() != static_cast<size_t>(request.rows)) {
    return absl::InvalidArgumentError(absl::StrFormat("params: got %d values, allowed %d (rows)",
                                                      request.params.size(), request.rows));
  }
  for (size_t r = 0; r < request.params.size(); ++r) {
    LOGITD_RETURN_IF_ERROR(CheckRow(request, r));
  }
  return absl::OkStatus();
}

}  // namespace logitd
