#include "kernels/verify.h"

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

// The coin of a draft with probabilities decides whether it is accepted, so no filter may use it,
// and the token is not the one that a watermark gives.
absl::Status CheckCoin(const SampleRow& row, const VerifyDraft& draft, size_t r) {
  if (draft.kind == DraftKind::kGreedy) return absl::OkStatus();
  if (row.watermark_width > 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("watermark_width: got %d at row %d, allowed 0 with a draft of kind list or "
                        "dense",
                        row.watermark_width, r));
  }
  if (row.xtc_probability == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("xtc_probability: got %g at row %d, allowed 0 with a draft of kind list or "
                      "dense",
                      row.xtc_probability, r));
}

absl::Status CheckDraws(absl::Span<const SampleRow> rows) {
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].draws == 0) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "draws: got %d at row %d, allowed 0: a sequence has one token at a row", rows[r].draws, r));
  }
  return absl::OkStatus();
}

// `block`: the draft's sequence has block verification.
absl::Status CheckDraft(const VerifyRequest& request, size_t r, bool block) {
  const VerifyDraft& draft = request.drafts[r];
  const int64_t vocab = request.sample.vocab;
  if (draft.token < 0 || draft.token >= vocab) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "drafts: got token %d at row %d, allowed 0..%d", draft.token, r, vocab - 1));
  }
  LOGITD_RETURN_IF_ERROR(CheckCoin(request.sample.params[r], draft, r));
  switch (draft.kind) {
    case DraftKind::kGreedy:
      if (!block) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrFormat(
          "draft_kind: got greedy at row %d, allowed list, dense with block_verification", r));
    case DraftKind::kDense:
      return CheckSlice("draft_probs", r, draft.first_prob, vocab, vocab,
                        request.draft_probs.size());
    case DraftKind::kList:
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("draft_kind: got %d at row %d, allowed greedy, list, dense",
                          static_cast<int>(draft.kind), r));
  }
  LOGITD_RETURN_IF_ERROR(CheckInt("draft_count", r, draft.count, 1, vocab));
  LOGITD_RETURN_IF_ERROR(CheckSlice("draft_probs", r, draft.first_prob, draft.count, vocab,
                                    request.draft_probs.size()));
  LOGITD_RETURN_IF_ERROR(
      CheckSlice("draft_ids", r, draft.first_id, draft.count, vocab, request.draft_ids.size()));
  bool has_token = false;
  int32_t least = 0;
  for (int32_t id : request.draft_ids.subspan(draft.first_id, draft.count)) {
    if (id < least || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrFormat("draft_ids: got token %d at row %d, allowed ascending, here %d..%d", id,
                          r, least, vocab - 1));
    }
    least = id + 1;
    has_token |= id == draft.token;
  }
  if (has_token) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("drafts: got token %d at row %d, allowed one of its %d draft_ids",
                      draft.token, r, draft.count));
}

}  // namespace

absl::Status CheckVerify(const VerifyRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckSample(request.sample));
  LOGITD_RETURN_IF_ERROR(CheckDraws(request.sample.params));
  const auto rows = static_cast<int64_t>(request.sample.params.size());
  if (request.drafts.size() != request.sample.params.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("drafts: got %d values, allowed %d (rows)", request.drafts.size(), rows));
  }
  int64_t next = 0;
  for (size_t s = 0; s < request.sequences.size(); ++s) {
    const VerifySequence& sequence = request.sequences[s];
    const int64_t left = rows - next;
    if (sequence.first_row != next || sequence.rows < 1 || sequence.rows > left) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "sequences: got rows [%d, %d + %d) at sequence %d, allowed from row %d, 1..%d of them",
          sequence.first_row, sequence.first_row, sequence.rows, s, next, left));
    }
    for (int64_t r = next; r + 1 < next + sequence.rows; ++r) {
      LOGITD_RETURN_IF_ERROR(CheckDraft(request, static_cast<size_t>(r), sequence.block != 0));
    }
    next += sequence.rows;
  }
  if (next == rows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("sequences: got %d rows, allowed %d (rows)", next, rows));
}

}  // namespace logitd
