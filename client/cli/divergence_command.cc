// logitctl divergence.
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/output.h"
#include "client/cli/output_file.h"
#include "client/client.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

constexpr absl::Duration kNoBarFor = absl::Milliseconds(400);

absl::StatusOr<client::DivergenceResult> Compare(const Session& session,
                                                 const client::DivergenceRequest& request) {
  Progress progress("comparing", kNoBarFor);
  return session.client().DivergenceStream(request, [&](const client::DivergenceProgress& now) {
    progress.Show(
        now.rows, now.total_rows,
        absl::StrFormat("%d of %d rows, forward %.4g, reverse %.4g", now.rows, now.total_rows,
                        now.totals.forward_kl_mean(), now.totals.reverse_kl_mean()));
    return true;
  });
}

// Both divergences of every row.
absl::Status Save(const std::string& file, const v1::DivergenceResponse& answer) {
  std::vector<float> values;
  for (int row = 0; row < answer.forward_kl_size(); ++row) {
    values.push_back(answer.forward_kl(row));
    values.push_back(answer.reverse_kl(row));
  }
  return client::SaveTensor(
      file, v1::DTYPE_F32, {answer.forward_kl_size(), 2},
      {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}

}  // namespace

int RunDivergence(const Session& session, const DivergenceFlags& flags) {
  if (!flags.out.empty()) {
    absl::Status good = client::CheckSavable(flags.out, v1::DTYPE_F32);
    if (good.ok()) good = CheckWritable("--out", flags.out);
    if (!good.ok()) return BadInput(good);
  }
  client::DivergenceRequest request;
  if (absl::Status good = Apply(flags.params, &request.params); !good.ok()) return BadInput(good);
  absl::StatusOr<Input> input = LoadFile(flags.input, "--", /*takes_text=*/false);
  if (!input.ok()) return BadInput(input.status());
  absl::StatusOr<Input> reference = LoadFile(flags.reference, "--reference-", /*takes_text=*/false);
  if (!reference.ok()) return BadInput(reference.status());
  if (reference->rows != input->rows) {
    return BadInput(absl::InvalidArgumentError(absl::StrFormat(
        "--reference-logits or --reference-hidden: got %d rows, allowed %d, as the other has",
        reference->rows, input->rows)));
  }
  if (!flags.targets.empty()) {
    const absl::StatusOr<std::vector<int32_t>> targets = LoadTargets(flags.targets, input->rows);
    if (!targets.ok()) return BadInput(targets.status());
    request.params.mutable_targets()->Add(targets->begin(), targets->end());
  }
  for (Input* moved : {&*input, &*reference}) {
    if (absl::Status status = moved->MoveToArena(flags.input); !status.ok()) {
      return NoArena(session, status);
    }
  }
  input->Fill(&request);
  request.reference_dtype = reference->dtype;
  request.reference_head = reference->head;
  request.reference_arena = reference->arena.get();
  if (reference->head_version != 0)
    request.params.set_reference_head_version(reference->head_version);
  if (reference->head.empty()) {
    request.reference_logits = {reference->payload};
    if (request.vocab == 0) request.vocab = reference->width;
  } else {
    request.reference_hidden_size = reference->width;
    request.reference_hidden = {reference->payload};
  }
  if (input->head.empty() && reference->head.empty() && reference->width != input->width) {
    return BadInput(absl::InvalidArgumentError(
        absl::StrFormat("--reference-logits: got rows of %d logits, allowed %d, as --logits has",
                        reference->width, input->width)));
  }
  const absl::StatusOr<client::DivergenceResult> result = Compare(session, request);
  if (!result.ok()) return session.CallFailed(result.status());
  // First, so that a file that cannot be written does not lose the answer.
  session.Show(DivergenceOutput{.result = &*result, .totals = flags.totals});
  const absl::Status saved = flags.out.empty() ? absl::OkStatus() : Save(flags.out, result->answer);
  return saved.ok() ? kExitOk : OutputFileLost(saved);
}

}  // namespace logitd::cli
