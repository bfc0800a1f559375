// logitctl sample and logitctl generate.
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "client/cli/session.h"
#include "client/client.h"
#include "client/language_model.h"

namespace logitd::cli {
namespace {

absl::StatusOr<v1::SampleRequest> LoadParams(const std::string& file) {
  v1::SampleRequest params;
  if (file.empty()) return params;
  std::ifstream in(file, std::ios::binary);
  const std::string json{std::istreambuf_iterator<char>(in), {}};
  if (!in.good() && json.empty()) {
    return absl::NotFoundError(absl::StrFormat("--params: %s cannot be read", file));
  }
  const auto status = google::protobuf::util::JsonStringToMessage(json, &params);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--params: %s is not a logitd.v1.SampleRequest in JSON: %s", file, status.ToString()));
  }
  if (params.dtype() != 0 || params.rows() != 0 || params.vocab() != 0 || !params.head().empty() ||
      params.hidden_size() != 0 || params.input_case() != v1::SampleRequest::INPUT_NOT_SET) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--params: %s has dtype, rows, vocab, logits, head, hidden_size or hidden; allowed: "
        "parameters, for those come from --logits, --hidden or --text",
        file));
  }
  return params;
}

// A flag wins over the file, for all rows.
template <typename T, typename Field>
void Override(const std::optional<T>& flag, Field* field) {
  if (!flag.has_value()) return;
  field->Clear();
  field->Add(*flag);
}

absl::StatusOr<v1::SampleRequest> MakeParams(const SamplingFlags& flags, int64_t vocab) {
  absl::StatusOr<v1::SampleRequest> loaded = LoadParams(flags.params);
  if (!loaded.ok()) return loaded;
  v1::SampleRequest& params = *loaded;
  Override(flags.seed, params.mutable_seed());
  Override(flags.temperature, params.mutable_temperature());
  Override(flags.top_k, params.mutable_top_k());
  Override(flags.top_p, params.mutable_top_p());
  Override(flags.min_p, params.mutable_min_p());
  Override(flags.repetition_penalty, params.mutable_repetition_penalty());
  Override(flags.presence_penalty, params.mutable_presence_penalty());
  Override(flags.frequency_penalty, params.mutable_frequency_penalty());
  Override(flags.top_logprobs, params.mutable_top_logprobs());
  if (!flags.logit_bias.empty()) {
    params.clear_logit_bias_count();
    params.clear_logit_bias_ids();
    params.clear_logit_bias();
    for (const std::string& pair : flags.logit_bias) {
      const std::vector<std::string> sides = absl::StrSplit(pair, '=');
      int32_t id = 0;
      float value = 0;
      if (sides.size() != 2 || !absl::SimpleAtoi(sides[0], &id) ||
          !absl::SimpleAtof(sides[1], &value)) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "--logit-bias is \"%s\"; allowed: ID=VALUE, like 17=-2.5 or 17=-inf", pair));
      }
      params.add_logit_bias_ids(id);
      params.add_logit_bias(value);
    }
  }
  if (!flags.allow.empty()) {
    std::string mask(static_cast<size_t>((vocab + 31) / 32 * 4), '\0');
    for (int32_t id : flags.allow) {
      if (id < 0 || id >= vocab) {
        return absl::InvalidArgumentError(
            absl::StrFormat("--allow has token %d; allowed: 0..%d", id, vocab - 1));
      }
      mask[static_cast<size_t>(id) / 8] |= static_cast<char>(1 << id % 8);
    }
    params.set_allowed_tokens(mask);
    params.clear_allowed_tokens_mask();
  }
  if (params.seed().empty()) params.add_seed(0);
  return loaded;
}

void Append(const std::vector<int32_t>& from, google::protobuf::RepeatedField<int32_t>* to) {
  to->Add(from.begin(), from.end());
}

// Where text is followed by more of it, a character may be cut in two: prints the whole ones, and
// keeps the rest for the next token.
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

int RunSample(const CommonFlags& common, const SampleFlags& flags) {
  const bool states = !flags.hidden.empty();
  if (states && flags.head.empty()) {
    return BadInput(absl::InvalidArgumentError(
        "--head is missing; with --hidden it names a head that the server has loaded"));
  }
  // A file of hidden states is read as one of logits is.
  absl::StatusOr<Logits> loaded =
      LoadLogits(states ? flags.hidden : flags.logits, flags.text, flags.model);
  if (!loaded.ok()) return BadInput(loaded.status());
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  absl::StatusOr<v1::Head> head = v1::Head();
  if (states) head = (*client)->GetHead(flags.head);
  if (loaded->model != nullptr) head = FindHead(**client, flags.head, *loaded->model);
  if (!head.ok()) return NoHead(head.status(), common.address);
  absl::StatusOr<v1::SampleRequest> params =
      MakeParams(flags.sampling, flags.head.empty() ? loaded->vocab : head->vocab());
  if (!params.ok()) return BadInput(params.status());
  Override(flags.position, params->mutable_position());
  if (!flags.history.empty()) {
    params->clear_history_count();
    params->clear_history();
    Append(flags.history, params->mutable_history());
  } else if (params->history().empty()) {
    Append(loaded->prompt, params->mutable_history());
  }
  if (!flags.extra_ids.empty()) {
    params->clear_extra_count();
    params->clear_extra_ids();
    Append(flags.extra_ids, params->mutable_extra_ids());
  }
  if (!flags.logprob_mode.empty()) {
    params->clear_logprob_mode();
    params->add_logprob_mode(flags.logprob_mode == "raw" ? v1::LOGPROB_MODE_RAW
                                                         : v1::LOGPROB_MODE_PROCESSED);
  }
  client::SampleRequest request;
  if (states) {
    request = {.dtype = loaded->dtype,
               .rows = loaded->rows,
               .head = flags.head,
               .hidden_size = loaded->tensor.shape[1],
               .hidden = {loaded->payload}};
  } else {
    SetInput(*loaded, *head, &request);
  }
  request.params = *std::move(params);
  const absl::StatusOr<client::SampleResult> result = (*client)->Sample(request);
  if (!result.ok()) return CallFailed(result.status(), common.address);
  const v1::SampleResponse& answer = result->answer;
  const SampleOutput output = {
      .result = &*result,
      .text = loaded->TextOf({answer.tokens().data(), static_cast<size_t>(answer.tokens_size())}),
      .top_text =
          loaded->TextOf({answer.top_ids().data(), static_cast<size_t>(answer.top_ids_size())})};
  Print(common.format == "json" ? SampleJson(output) : SampleTable(output));
  return kExitOk;
}

int RunGenerate(const CommonFlags& common, const GenerateFlags& flags) {
  absl::StatusOr<client::LanguageModel> model = LoadModel(flags.model);
  if (!model.ok()) return BadInput(model.status());
  absl::StatusOr<v1::SampleRequest> params = MakeParams(flags.sampling, model->vocab_size());
  if (!params.ok()) return BadInput(params.status());
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());

  // Calls are retried, streams are not: a server that is not there yet is waited for here.
  if (const absl::Status there = (*client)->Info().status(); !there.ok()) {
    return CallFailed(there, common.address);
  }
  const absl::StatusOr<v1::Head> head = FindHead(**client, flags.head, *model);
  if (!head.ok()) return NoHead(head.status(), common.address);
  client::LanguageModel::State state = model->InitialState();
  const std::vector<int32_t> prompt = model->Tokenize(flags.text);
  Logits loaded = {.rows = 1, .vocab = model->vocab_size()};
  loaded.hidden = model->Step(state, model->bos_token_id());
  for (int32_t token : prompt) loaded.hidden = model->Step(state, token);
  client::SampleRequest request;
  request.params = *std::move(params);
  // What begins a text does not go on with one.
  const auto& biased = request.params.logit_bias_ids();
  if (std::find(biased.begin(), biased.end(), model->bos_token_id()) == biased.end()) {
    request.params.clear_logit_bias_count();
    request.params.add_logit_bias_ids(model->bos_token_id());
    request.params.add_logit_bias(-std::numeric_limits<float>::infinity());
  }
  request.params.clear_history_count();
  Append(prompt, request.params.mutable_history());

  const bool json = common.format == "json";
  const bool live = !json && !flags.details;
  if (live) Print(flags.text);
  if (!json && flags.details) Print(TokenLineHead());
  LiveText text;
  Generated generated;
  const std::unique_ptr<client::SampleStream> stream = (*client)->OpenSampleStream();
  for (int i = 0; i < flags.tokens; ++i) {
    if (flags.head.empty()) {
      loaded.computed = model->Logits(loaded.hidden);
      loaded.payload = {reinterpret_cast<const char*>(loaded.computed.data()),
                        loaded.computed.size() * sizeof(float)};
    }
    SetInput(loaded, *head, &request);
    request.params.clear_position();
    request.params.add_position(static_cast<uint64_t>(i));
    absl::Status sent = stream->Write(request);
    absl::StatusOr<client::SampleResult> result = stream->Read();
    if (result.ok() && !sent.ok()) result = sent;
    if (!result.ok()) {
      if (live) Print("\n");
      return CallFailed(result.status(), common.address);
    }
    const v1::SampleResponse& answer = result->answer;
    if (answer.status(0) != v1::ROW_STATUS_OK) {
      if (live) Print("\n");
      Complain(
          absl::StrFormat("no token at position %d: %s", i, v1::RowStatus_Name(answer.status(0))));
      return kExitCallFailed;
    }
    const int32_t token = answer.tokens(0);
    generated.Add(*result, model->TokenBytes(token));
    if (live) text.Show(model->TokenBytes(token));
    if (!json && flags.details) {
      std::vector<std::string> top;
      for (int32_t id : answer.top_ids()) top.push_back(model->TokenBytes(id));
      Print(TokenLine(i, *result, model->TokenBytes(token), top));
    }
    request.params.add_history(token);
    loaded.hidden = model->Step(state, token);
  }
  if (live) {
    text.End();
    Print("\n");
  }
  Print(json ? GeneratedJson(generated, flags.text) : GeneratedLine(generated));
  return kExitOk;
}

}  // namespace logitd::cli
