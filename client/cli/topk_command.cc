// logitctl topk.
#include <cmath>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/output.h"
#include "client/client.h"
#include "client/messages/plan.h"

namespace logitd::cli {
namespace {

absl::Status CheckParams(const v1::TopKRequest& params, int64_t vocab) {
  for (int32_t k : params.k()) {
    if (k >= 1 && k <= vocab) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("--k: got %d, allowed 1..%d (the vocabulary)", k, vocab));
  }
  for (float temperature : params.temperature()) {
    if (std::isfinite(temperature) && temperature > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("--temperature: got %g, allowed finite, above 0", temperature));
  }
  return absl::OkStatus();
}

}  // namespace

int RunTopK(const Session& session, const TopKFlags& flags) {
  client::TopKRequest request;
  if (absl::Status good = Apply(flags.params, &request.params); !good.ok()) return BadInput(good);
  const bool text = !flags.input.is_file();
  absl::StatusOr<Input> input = text ? LoadPrompt(flags.input) : LoadFile(flags.input);
  if (!input.ok()) return BadInput(input.status());
  const int64_t vocab = text ? input->model->vocab_size() : input->width;
  if (absl::Status good = CheckParams(request.params, vocab); !good.ok()) return BadInput(good);
  const absl::StatusOr<v1::GetInfoResponse> info = session.client().Info();
  if (!info.ok()) return session.CallFailed(info.status());
  if (text) {
    const absl::StatusOr<v1::Head> head = FindHead(session, flags.input.head, *input->model);
    if (!head.ok()) return NoHead(session, head.status());
    client::LanguageModel::State state = input->model->InitialState();
    input->SetRow(ReadTokens(*input->model, &state, input->tokens), *head);
  }
  if (absl::Status moved = input->MoveToArena(flags.input, flags.input.ring); !moved.ok()) {
    return NoArena(session, moved);
  }
  input->Fill(&request);
  const absl::StatusOr<std::vector<client::TopKRequest>> parts =
      client::CutTopK(request, info->limits());
  if (!parts.ok()) return BadInput(parts.status());
  TopKOutput output;
  for (const client::TopKRequest& part : *parts) {
    absl::StatusOr<client::TopKResult> result =
        input->ring == nullptr ? session.client().TopK(part) : input->ring->TopK(part);
    if (!result.ok()) return session.CallFailed(result.status());
    client::AppendRows(*std::move(result), &output.result);
  }
  const auto& indices = output.result.answer.indices();
  output.text = input->TextOf({indices.data(), static_cast<size_t>(indices.size())});
  return session.Show(output);
}

}  // namespace logitd::cli
