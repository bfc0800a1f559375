#include "kernels/cross_entropy.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

absl::Status NotWithSupport(size_t r, std::string_view other, double value) {
  return absl::InvalidArgumentError(
      absl::StrFormat("support_ids: got some at row %d, allowed none with %s %g", r, other, value));
}

// The support of row r, whose other parameters are right. `sorted` is that of the row before, which
// may be the same list, and becomes this row's.
absl::Status CheckSupport(const CrossEntropyRequest& request, size_t r,
                          std::vector<int32_t>* sorted) {
  const CrossEntropyRow& row = request.params[r];
  LOGITD_RETURN_IF_ERROR(CheckSlice("support_ids", r, row.first_support, row.support_count,
                                    std::min<int64_t>(kMaxSupport, request.vocab),
                                    request.support_ids.size()));
  if (row.support_count == 0) return absl::OkStatus();
  const bool same = r > 0 && row.first_support == request.params[r - 1].first_support &&
                    row.support_count == request.params[r - 1].support_count;
  if (!same) {
    const auto ids = Slice(request.support_ids, row.first_support, row.support_count);
    LOGITD_RETURN_IF_ERROR(CheckIds("support_ids", r, ids, request.vocab));
    sorted->assign(ids.begin(), ids.end());
    std::sort(sorted->begin(), sorted->end());
    const auto twice = std::adjacent_find(sorted->begin(), sorted->end());
    if (twice != sorted->end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "support_ids: got token %d twice at row %d, allowed each once", *twice, r));
    }
  }
  if (row.target != kIgnoredTarget &&
      !std::binary_search(sorted->begin(), sorted->end(), row.target)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("target: got %d at row %d, allowed one of its %d support_ids", row.target,
                        r, row.support_count));
  }
  if (row.label_smoothing != 0)
    return NotWithSupport(r, "label_smoothing, which is", row.label_smoothing);
  if (row.z_loss != 0) return NotWithSupport(r, "z_loss, which is", row.z_loss);
  if ((row.want & kWantRank) != 0) return NotWithSupport(r, "want_rank, which is", 1);
  if (row.top_logprobs != 0) return NotWithSupport(r, "top_logprobs, which is", row.top_logprobs);
  if (row.extra_count != 0)
    return NotWithSupport(r, "extra_ids, of which there are", row.extra_count);
  return absl::OkStatus();
}

absl::Status CheckRow(const CrossEntropyRequest& request, size_t r, std::vector<int32_t>* sorted) {
  const CrossEntropyRow& row = request.params[r];
  LOGITD_RETURN_IF_ERROR(CheckTarget(r, row.target, request.vocab));
  LOGITD_RETURN_IF_ERROR(CheckInt("want", r, row.want, 0, kWantRank | kWantEntropy));
  LOGITD_RETURN_IF_ERROR(CheckSlice("extra_ids", r, row.first_extra, row.extra_count, kMaxExtraIds,
                                    request.extra_ids.size()));
  LOGITD_RETURN_IF_ERROR(CheckIds(
      "extra_ids", r, Slice(request.extra_ids, row.first_extra, row.extra_count), request.vocab));
  return CheckSupport(request, r, sorted);
}

}  // namespace

absl::Status CheckTarget(size_t r, int32_t target, int64_t vocab) {
  if (target == kIgnoredTarget || (target >= 0 && target < vocab)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("target: got %d at row %d, allowed 0..%d, or %d for a row not counted",
                      target, r, vocab - 1, kIgnoredTarget));
}

absl::Status CheckCrossEntropy(const CrossEntropyRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", request.vocab, 1, kMaxVocab));
  LOGITD_RETURN_IF_ERROR(CheckActive(request.params));
  LOGITD_RETURN_IF_ERROR(
      CheckParams<CrossEntropyRow>(kCrossEntropyParams, request.params, request.vocab));
  std::vector<int32_t> sorted;  // the support of the last row
  for (size_t r = 0; r < request.params.size(); ++r) {
    LOGITD_RETURN_IF_ERROR(CheckRow(request, r, &sorted));
  }
  return absl::OkStatus();
}

}  // namespace logitd
