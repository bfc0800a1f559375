// logitctl sample and logitctl generate.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/output.h"
#include "client/cli/sampling_params.h"
#include "client/client.h"
#include "client/language_model.h"

namespace logitd::cli {
namespace {

// Prints text that comes in pieces. A piece may end inside a character: whole characters are
// printed, the rest waits for the next piece.
class LiveText {
 public:
  void Show(absl::string_view bytes) {
    held_.append(bytes.data(), bytes.size());
    size_t whole = held_.size();
    for (size_t back = 1; back <= 3 && back <= held_.size(); ++back) {
      const auto byte = static_cast<unsigned char>(held_[held_.size() - back]);
      if ((byte & 0xc0) == 0x80) continue;
      const size_t length = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
      if (length > back) whole = held_.size() - back;
      break;
    }
    Print(absl::string_view(held_).substr(0, whole));
    held_.erase(0, whole);
  }
  void End() {
    Print(held_);
    held_.clear();
  }

 private:
  std::string held_;
};

}  // namespace

int RunSample(const Session& session, const SampleFlags& flags) {
  const bool text = !flags.input.is_file();
  absl::StatusOr<Input> input = text ? LoadPrompt(flags.input) : LoadFile(flags.input);
  if (!input.ok()) return BadInput(input.status());
  absl::StatusOr<v1::Head> head = v1::Head();
  if (text) {
    head = FindHead(session, flags.input.head, *input->model);
  } else if (!flags.input.head.empty()) {
    head = session.client().GetHead(flags.input.head);
  }
  if (!head.ok()) return NoHead(session, head.status());
  if (text) {
    client::LanguageModel::State state = input->model->InitialState();
    input->SetRow(ReadTokens(*input->model, &state, input->tokens), *head);
  }
  absl::StatusOr<v1::SampleRequest> params = MakeParams<v1::SampleRequest>(
      flags.sampling, flags.input.head.empty() ? input->width : head->vocab());
  if (!params.ok()) return BadInput(params.status());
  SpreadSeeds(flags.sampling, input->rows, &*params);
  if (params->history().empty()) {
    params->mutable_history()->Add(input->tokens.begin(), input->tokens.end());
  }
  client::SampleRequest request;
  if (absl::Status moved = input->MoveToArena(flags.input, flags.input.ring); !moved.ok()) {
    return NoArena(session, moved);
  }
  request.params = *std::move(params);
  input->Fill(&request);
  const absl::StatusOr<client::SampleResult> result =
      input->ring == nullptr ? session.client().Sample(request) : input->ring->Sample(request);
  if (!result.ok()) return session.CallFailed(result.status());
  const v1::SampleResponse& a = result->answer;
  return session.Show(SampleOutput{
      .result = &*result,
      .text = input->TextOf({a.tokens().data(), static_cast<size_t>(a.tokens_size())}),
      .top_text = input->TextOf({a.top_ids().data(), static_cast<size_t>(a.top_ids_size())})});
}

namespace {

// The parameters of a text that begins with `prompt`.
absl::StatusOr<v1::SampleRequest> GenerateParams(const GenerateFlags& flags, const Input& input) {
  const client::LanguageModel& model = *input.model;
  absl::StatusOr<v1::SampleRequest> params =
      MakeParams<v1::SampleRequest>(flags.sampling, model.vocab_size());
  if (!params.ok()) return params;
  // The token that begins a text does not occur inside one.
  const auto& biased = params->logit_bias_ids();
  if (std::find(biased.begin(), biased.end(), model.bos_token_id()) == biased.end()) {
    params->clear_logit_bias_count();
    params->add_logit_bias_ids(model.bos_token_id());
    params->add_logit_bias(-std::numeric_limits<float>::infinity());
  }
  params->clear_history_count();
  params->mutable_history()->Add(input.tokens.begin(), input.tokens.end());
  return params;
}

// Prints the tokens of one logitctl generate as they come.
class GeneratePrinter {
 public:
  GeneratePrinter(const Session& session, const GenerateFlags& flags)
      : json_(session.json()),
        details_(!json_ && flags.details),
        live_(!json_ && !flags.details),
        prompt_(flags.input.text) {
    if (live_) Print(prompt_);
    if (details_) Print(TokenLineHead());
  }

  void Token(int place, const client::SampleResult& result, const client::LanguageModel& model) {
    const v1::SampleResponse& answer = result.answer;
    const std::string& bytes = model.TokenBytes(answer.tokens(0));
    generated_.Add(result, bytes);
    if (live_) text_.Show(bytes);
    if (!details_) return;
    std::vector<std::string> top;
    for (int32_t id : answer.top_ids()) top.push_back(model.TokenBytes(id));
    Print(TokenLine(place, result, bytes, top));
  }

  // Before an error, so that it begins a line.
  void Break() {
    if (live_) Print("\n");
  }

  void End() {
    if (live_) text_.End();
    Break();
    Print(json_ ? GeneratedJson(generated_, prompt_) : GeneratedLine(generated_));
  }

 private:
  const bool json_;
  const bool details_;
  const bool live_;
  const std::string prompt_;
  LiveText text_;
  Generated generated_;
};

}  // namespace

int RunGenerate(const Session& session, const GenerateFlags& flags) {
  absl::StatusOr<Input> input = LoadPrompt(flags.input);
  if (!input.ok()) return BadInput(input.status());
  client::SampleRequest request;
  absl::StatusOr<v1::SampleRequest> params = GenerateParams(flags, *input);
  if (!params.ok()) return BadInput(params.status());
  request.params = *std::move(params);
  // Calls are retried, streams are not: this call waits for a server that is not there yet.
  if (const absl::Status there = session.client().Info().status(); !there.ok()) {
    return session.CallFailed(there);
  }
  const client::LanguageModel& model = *input->model;
  const absl::StatusOr<v1::Head> head = FindHead(session, flags.input.head, model);
  if (!head.ok()) return NoHead(session, head.status());

  client::LanguageModel::State state = model.InitialState();
  std::vector<float> hidden = ReadTokens(model, &state, input->tokens);
  GeneratePrinter printer(session, flags);
  const std::unique_ptr<client::SampleStream> stream = session.client().OpenSampleStream();
  for (int place = 0; place < flags.tokens; ++place) {
    input->SetRow(hidden, *head);
    if (absl::Status moved = input->MoveToArena(flags.input); !moved.ok()) {
      return NoArena(session, moved);
    }
    input->Fill(&request);
    request.params.clear_position();
    request.params.add_position(static_cast<uint64_t>(place));
    const absl::Status sent = stream->Write(request);
    absl::StatusOr<client::SampleResult> result = stream->Read();
    if (result.ok() && !sent.ok()) result = sent;
    if (!result.ok()) {
      printer.Break();
      return session.CallFailed(result.status());
    }
    const v1::RowStatus status = result->answer.status(0);
    if (status != v1::ROW_STATUS_OK) {
      printer.Break();
      Complain(absl::StrFormat("no token at position %d: %s", place, v1::RowStatus_Name(status)));
      return kExitCallFailed;
    }
    printer.Token(place, *result, model);
    const int32_t token = result->answer.tokens(0);
    request.params.add_history(token);
    hidden = model.Step(state, token);
  }
  printer.End();
  return kExitOk;
}

}  // namespace logitd::cli
