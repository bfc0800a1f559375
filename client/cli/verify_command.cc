// logitctl verify.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/output.h"
#include "client/cli/sampling_params.h"
#include "client/client.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

// Puts token ids in the place of those that are there: those of a file, or the ids themselves.
absl::Status SetIds(const std::string& flag, const std::string& file,
                    const std::vector<int32_t>& ids, google::protobuf::RepeatedField<int32_t>* to) {
  absl::StatusOr<std::vector<int32_t>> all = ids;
  if (!file.empty()) all = LoadIds(flag, file);
  if (!all.ok()) return all.status();
  if (!file.empty() || !all->empty()) to->Assign(all->begin(), all->end());
  return absl::OkStatus();
}

// How many drafts are of kind LIST.
int64_t ListedDrafts(const v1::VerifyRequest& params) {
  const auto& kinds = params.draft_kind();
  if (kinds.size() == 1 && kinds[0] == v1::DRAFT_KIND_LIST) return params.drafts_size();
  return std::count(kinds.begin(), kinds.end(), v1::DRAFT_KIND_LIST);
}

// Reads the ids and probabilities that drafts were drawn from.
absl::Status SetDistributions(const VerifyFlags& flags, v1::VerifyRequest* params) {
  absl::Status good = SetIds("--draft-ids", flags.draft_ids, {}, params->mutable_draft_ids());
  if (!good.ok()) return good;
  if (!flags.draft_count.empty()) {
    params->mutable_draft_count()->Assign(flags.draft_count.begin(), flags.draft_count.end());
  } else if (!flags.draft_ids.empty()) {
    const int64_t drafts = ListedDrafts(*params), ids = params->draft_ids_size();
    if (drafts == 0 || ids % drafts != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--draft-ids: got %d ids for %d drafts of kind list, allowed as many for "
                          "each draft, or --draft-count",
                          ids, drafts));
    }
    params->clear_draft_count();
    params->add_draft_count(static_cast<int32_t>(ids / drafts));
  }
  if (flags.draft_probs.empty()) return absl::OkStatus();
  const absl::StatusOr<client::FileTensor> probs = client::LoadTensor(flags.draft_probs);
  if (!probs.ok()) return probs.status();
  if (probs->dtype != v1::DTYPE_F32) {
    return absl::InvalidArgumentError(absl::StrFormat("--draft-probs: %s: got %s, allowed f32",
                                                      flags.draft_probs,
                                                      client::DTypeShortName(probs->dtype)));
  }
  params->set_draft_probs(std::string(probs->bytes));
  return absl::OkStatus();
}

// Sets the sequences and their drafts.
absl::Status SetDrafts(const VerifyFlags& flags, int64_t rows, v1::VerifyRequest* params) {
  if (!flags.sequence_rows.empty()) {
    params->mutable_sequence_rows()->Assign(flags.sequence_rows.begin(), flags.sequence_rows.end());
  }
  if (params->sequence_rows().empty()) params->add_sequence_rows(static_cast<int32_t>(rows));
  absl::Status good = SetIds("--drafts", flags.drafts, flags.ids, params->mutable_drafts());
  if (!good.ok()) return good;
  if (!flags.draft_kind.empty()) params->clear_draft_kind();
  for (const std::string& word : flags.draft_kind) {
    v1::DraftKind kind = v1::DRAFT_KIND_GREEDY;
    v1::DraftKind_Parse(absl::StrCat("DRAFT_KIND_", absl::AsciiStrToUpper(word)), &kind);
    params->add_draft_kind(kind);
  }
  if (flags.block_verification) params->set_block_verification(true);
  return SetDistributions(flags, params);
}

}  // namespace

int RunVerify(const Session& session, const VerifyFlags& flags) {
  absl::StatusOr<Input> input = LoadFile(flags.input, "--", /*takes_text=*/false);
  if (!input.ok()) return BadInput(input.status());
  int64_t vocab = input->width;
  if (!flags.input.head.empty()) {
    const absl::StatusOr<v1::Head> head = session.client().GetHead(flags.input.head);
    if (!head.ok()) return session.CallFailed(head.status());
    vocab = head->vocab();
  }
  absl::StatusOr<v1::VerifyRequest> params = MakeParams<v1::VerifyRequest>(flags.sampling, vocab);
  if (!params.ok()) return BadInput(params.status());
  SpreadSeeds(flags.sampling, input->rows, &*params);
  if (absl::Status good = SetDrafts(flags, input->rows, &*params); !good.ok())
    return BadInput(good);
  if (absl::Status moved = input->MoveToArena(flags.input); !moved.ok()) {
    return NoArena(session, moved);
  }
  client::VerifyRequest request;
  request.params = *std::move(params);
  input->Fill(&request);
  const absl::StatusOr<client::VerifyResult> result = session.client().Verify(request);
  if (!result.ok()) return session.CallFailed(result.status());
  return session.Show(VerifyOutput{.result = &*result, .asked = &request.params});
}

}  // namespace logitd::cli
