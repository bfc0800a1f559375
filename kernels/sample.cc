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
    LOGITD_RETURN_IF_ERROR(CheckFloat("logit_bias", row, bias[i].value, !std::isnan(bias[i].value),
                                      "numbers and infinities"));
  }
  LOGITD_RETURN_IF_ERROR(CheckIds("logit_bias", row, ids, vocab));
  if (!std::is_sorted(ids.begin(), ids.end())) std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice == ids.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "logit_bias: got token %d twice at row %d, allowed one bias for a token", *twice, row));
}

// Rows may share a list: what has been looked at for the row before need not be again.
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

absl::Status CheckRow(const SampleRequest& request, size_t r) {
  const SampleRow& row = request.params[r];
  const int64_t vocab = request.vocab;
  LOGITD_RETURN_IF_ERROR(CheckInt("active", r, row.active, 1, 1));
  LOGITD_RETURN_IF_ERROR(CheckFloat("temperature", r, row.temperature,
                                    std::isfinite(row.temperature) && row.temperature >= 0,
                                    "finite and >= 0"));
  LOGITD_RETURN_IF_ERROR(CheckInt("top_k", r, row.top_k, 0, vocab));
  LOGITD_RETURN_IF_ERROR(
      CheckFloat("top_p", r, row.top_p, row.top_p > 0 && row.top_p <= 1, "> 0 and <= 1"));
  LOGITD_RETURN_IF_ERROR(
      CheckFloat("min_p", r, row.min_p, row.min_p >= 0 && row.min_p <= 1, ">= 0 and <= 1"));
  LOGITD_RETURN_IF_ERROR(CheckFloat("repetition_penalty", r, row.repetition,
                                    std::isfinite(row.repetition) && row.repetition > 0,
                                    "finite and > 0"));
  LOGITD_RETURN_IF_ERROR(
      CheckFloat("presence_penalty", r, row.presence, std::isfinite(row.presence), "finite"));
  LOGITD_RETURN_IF_ERROR(
      CheckFloat("frequency_penalty", r, row.frequency, std::isfinite(row.frequency), "finite"));
  LOGITD_RETURN_IF_ERROR(
      CheckInt("top_logprobs", r, row.top_logprobs, 0, std::min<int64_t>(kMaxTopLogprobs, vocab)));
  if (row.logprob_mode != LogprobMode::kRaw && row.logprob_mode != LogprobMode::kProcessed) {
    return absl::InvalidArgumentError(
        absl::StrFormat("logprob_mode: got %d at row %d, allowed raw, processed",
                        static_cast<int>(row.logprob_mode), r));
  }
  LOGITD_RETURN_IF_ERROR(CheckHistory(request, r));
  LOGITD_RETURN_IF_ERROR(CheckBiases(request, r));
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
  LOGITD_RETURN_IF_ERROR(CheckLogits({.dtype = request.dtype,
                                      .rows = request.rows,
                                      .vocab = request.vocab,
                                      .payload_bytes = request.payload_bytes}));
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
