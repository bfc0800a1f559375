// logitctl score.
#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/output.h"
#include "client/cli/output_file.h"
#include "client/cli/plot.h"
#include "client/client.h"
#include "client/language_model.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

constexpr absl::Duration kNoBarFor = absl::Milliseconds(400);

// Rows and targets of --logits or --hidden.
absl::StatusOr<Input> LoadScoredFile(const ScoreFlags& flags) {
  if (flags.targets.empty()) {
    return absl::InvalidArgumentError(
        "--targets is missing; with --logits or --hidden it names a file of the rows' token ids");
  }
  absl::StatusOr<Input> input = LoadFile(flags.input);
  if (!input.ok()) return input;
  absl::StatusOr<std::vector<int32_t>> targets = LoadTargets(flags.targets, input->rows);
  if (!targets.ok()) return targets.status();
  input->tokens = *std::move(targets);
  return input;
}

// The rows of a text are all computed before the first is sent; this bounds their memory.
constexpr int64_t kMaxComputedBytes = int64_t{1} << 30;

// At most: the states of a head may have 16 bits.
int64_t ComputedRowBytes(const client::LanguageModel& model, const std::string& head) {
  return static_cast<int64_t>(sizeof(float)) *
         (head.empty() ? model.vocab_size() : model.hidden_dim());
}

// The model, and the tokens of --text or --text-file, which are the targets.
absl::StatusOr<Input> LoadText(const ScoreFlags& flags) {
  if (!flags.targets.empty()) {
    return absl::InvalidArgumentError(
        "--targets next to a text; allowed with --logits or --hidden (a text is its own targets)");
  }
  InputFlags prompt = flags.input;
  if (!prompt.text_file.empty()) {
    std::ifstream in(prompt.text_file, std::ios::binary);
    std::ostringstream all;  // fails for a directory, where an iterator throws
    if (!(all << in.rdbuf())) {
      return absl::NotFoundError(
          absl::StrFormat("--text-file: %s cannot be read, or is empty", prompt.text_file));
    }
    prompt.text = std::move(all).str();
  }
  absl::StatusOr<Input> input = LoadPrompt(prompt);
  if (!input.ok()) return input;
  if (input->tokens.empty()) {
    return absl::InvalidArgumentError("text: got no token, allowed 1 or more");
  }
  const auto tokens = static_cast<int64_t>(input->tokens.size());
  const int64_t most = kMaxComputedBytes / ComputedRowBytes(*input->model, prompt.head);
  if (tokens > most) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "text: got %d tokens, allowed 1..%d%s", tokens, most,
        prompt.head.empty() ? ", because all their logits are kept; more with --head" : ""));
  }
  return input;
}

// Row i is the model's state before token i: hidden states for the head, or the model's own logits.
// After a newline comes bos, which is not scored: the model was trained on one paragraph per line.
void RunModel(const v1::Head& head, Input* input) {
  const client::LanguageModel& model = *input->model;
  const auto rows = static_cast<int64_t>(input->tokens.size());
  std::string computed;
  computed.reserve(static_cast<size_t>(rows * ComputedRowBytes(model, head.name())));
  Progress progress("reading", kNoBarFor);
  client::LanguageModel::State state = model.InitialState();
  std::vector<float> hidden = model.Step(state, model.bos_token_id());
  for (int64_t row = 0; row < rows; ++row) {
    input->SetRow(hidden, head);
    computed += input->computed;
    const int32_t token = input->tokens[static_cast<size_t>(row)];
    hidden = model.Step(state, token);
    if (model.TokenBytes(token).back() == '\n') hidden = model.Step(state, model.bos_token_id());
    progress.Show(row + 1, rows, absl::StrFormat("%d of %d tokens", row + 1, rows));
  }
  input->computed = std::move(computed);
  input->payload = input->computed;
  input->rows = rows;
}

absl::StatusOr<client::ScoreResult> Score(const Session& session,
                                          const client::ScoreRequest& request) {
  Progress progress("scoring", kNoBarFor);
  return session.client().ScoreStream(request, [&](const client::ScoreProgress& now) {
    progress.Show(now.rows, now.total_rows,
                  absl::StrFormat("%d of %d rows, perplexity %.4g", now.rows, now.total_rows,
                                  now.totals.perplexity()));
    return true;
  });
}

}  // namespace

int RunScore(const Session& session, const ScoreFlags& flags) {
  if (!flags.out.empty()) {
    absl::Status good = client::CheckSavable(flags.out, v1::DTYPE_F32);
    if (good.ok()) good = CheckWritable("--out", flags.out);
    if (!good.ok()) return BadInput(good);
  }
  if (!flags.plot.empty()) {
    if (absl::Status good = CheckWritable("--plot", flags.plot); !good.ok()) return BadInput(good);
  }
  client::ScoreRequest request;
  if (absl::Status good = Apply(flags.params, &request.params); !good.ok()) return BadInput(good);
  const bool file = flags.input.is_file();
  absl::StatusOr<Input> input = file ? LoadScoredFile(flags) : LoadText(flags);
  if (!input.ok()) return BadInput(input.status());
  if (!file) {
    const absl::StatusOr<v1::Head> head = FindHead(session, flags.input.head, *input->model);
    if (!head.ok()) return NoHead(session, head.status());
    RunModel(*head, &*input);
  }
  if (absl::Status moved = input->MoveToArena(flags.input); !moved.ok()) {
    return NoArena(session, moved);
  }
  input->Fill(&request);
  request.params.mutable_targets()->Add(input->tokens.begin(), input->tokens.end());
  const absl::StatusOr<client::ScoreResult> result = Score(session, request);
  if (!result.ok()) return session.CallFailed(result.status());
  const v1::ScoreResponse& answer = result->answer;
  // First, so that a file that cannot be written does not lose the answer.
  session.Show(ScoreOutput{.result = &*result,
                           .targets = input->tokens,
                           .text = input->TextOf(input->tokens),
                           .top_text = input->TextOf({answer.top_ids().data(),
                                                      static_cast<size_t>(answer.top_ids_size())}),
                           .totals = flags.totals});
  const absl::Span<const float> losses(answer.losses().data(),
                                       static_cast<size_t>(answer.losses_size()));
  absl::Status saved;
  if (!flags.out.empty()) {
    saved = client::SaveTensor(
        flags.out, v1::DTYPE_F32, {answer.losses_size()},
        {reinterpret_cast<const char*>(losses.data()), losses.size() * sizeof(float)});
  }
  if (saved.ok() && !flags.plot.empty()) {
    saved = PlotLosses(flags.plot, losses, answer.totals().loss_mean());
  }
  return saved.ok() ? kExitOk : OutputFileLost(saved);
}

}  // namespace logitd::cli
