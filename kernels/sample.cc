#include "kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

// Values are numbers, ids are tokens, and none is named twice: the sum would depend on their order.
absl::Status CheckBias(size_t row, absl::Span<const SampleBias> bias, int64_t vocab) {
  std::vector<int32_t> ids(bias.size());
  for (size_t i = 0; i < bias.size(); ++i) {
    ids[i] = bias[i].id;
    if (!std::isnan(bias[i].value)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("logit_bias: got nan at row %d, allowed numbers and infinities", row));
  }
  LOGITD_RETURN_IF_ERROR(CheckIds("logit_bias", row, ids, vocab));
  if (!std::is_sorted(ids.begin(), ids.end())) std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice == ids.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "logit_bias: got token %d twice at row %d, allowed one bias for a token", *twice, row));
}

// Rows may share a list, which is then checked once.
bool SameSlice(const SampleRequest& request, size_t r, int64_t SampleRow::*first,
               int32_t SampleRow::*count) {
  if (r == 0) return false;
  const SampleRow& row = request.params[r];
  const SampleRow& before = request.params[r - 1];
  return row.*first == before.*first && row.*count == before.*count;
}

absl::Status CheckHistory(const SampleRequest& request, size_t r) {
  const SampleRow& row = request.params[r];
  if (SameSlice(request, r, &SampleRow::first_history, &SampleRow::history_count)) {
    return absl::OkStatus();
  }
  LOGITD_RETURN_IF_ERROR(CheckSlice("history", r, row.first_history, row.history_count, kMaxHistory,
                                    request.history.size()));
  return CheckIds("history", r, Slice(request.history, row.first_history, row.history_count),
                  request.vocab);
}

absl::Status CheckBiases(const SampleRequest& request, size_t r) {
  const SampleRow& row = request.params[r];
  if (SameSlice(request, r, &SampleRow::first_bias, &SampleRow::bias_count)) {
    return absl::OkStatus();
  }
  LOGITD_RETURN_IF_ERROR(CheckSlice("logit_bias", r, row.first_bias, row.bias_count, request.vocab,
                                    request.bias.size()));
  return CheckBias(r, Slice(request.bias, row.first_bias, row.bias_count), request.vocab);
}

absl::Status CheckLists(const SampleRequest& request, size_t r) {
  const SampleRow& row = request.params[r];
  const int64_t vocab = request.vocab;
  LOGITD_RETURN_IF_ERROR(CheckHistory(request, r));
  LOGITD_RETURN_IF_ERROR(CheckInt("prompt_tokens", r, row.prompt_tokens, 0, row.history_count));
  LOGITD_RETURN_IF_ERROR(CheckBiases(request, r));
  if (row.watermark_width > 0 && row.draws > 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "draws: got %d at row %d, allowed 0..1 with a watermark: all would be the same token",
        row.draws, r));
  }
  LOGITD_RETURN_IF_ERROR(CheckSlice("extra_ids", r, row.first_extra, row.extra_count, kMaxExtraIds,
                                    request.extra_ids.size()));
  LOGITD_RETURN_IF_ERROR(
      CheckIds("extra_ids", r, Slice(request.extra_ids, row.first_extra, row.extra_count), vocab));
  if (row.first_mask_word == -1) return absl::OkStatus();
  return CheckSlice("allowed_tokens", r, row.first_mask_word, MaskWords(vocab), MaskWords(vocab),
                    request.mask_words.size());
}

}  // namespace

absl::Status CheckSample(const SampleRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", request.vocab, 1, kMaxVocab));
  LOGITD_RETURN_IF_ERROR(CheckActive(request.params));
  LOGITD_RETURN_IF_ERROR(CheckParams<SampleRow>(kSampleParams, request.params, request.vocab));
  for (size_t r = 0; r < request.params.size(); ++r) {
    LOGITD_RETURN_IF_ERROR(CheckLists(request, r));
  }
  return absl::OkStatus();
}

}  // namespace logitd
