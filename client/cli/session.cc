#include "client/cli/session.h"

#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "formats/half.h"

namespace logitd::cli {

void Print(absl::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void Complain(absl::string_view text, absl::string_view hint) {
  absl::FPrintF(stderr, "logitctl: %s\n", text);
  if (!hint.empty()) absl::FPrintF(stderr, "  hint: %s\n", hint);
}

int CallFailed(const absl::Status& status, const std::string& address) {
  const std::string text =
      absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      Complain(text, absl::StrCat("is logitd running at ", address,
                                  "? --addr or $LOGITD_ADDR names another place"));
      return kExitUnavailable;
    case absl::StatusCode::kResourceExhausted:
      Complain(text,
               "the server is full; more --max-attempts or a longer --deadline waits for room");
      return kExitCallFailed;
    case absl::StatusCode::kDeadlineExceeded:
      Complain(text, "a longer --deadline gives the call more time");
      return kExitCallFailed;
    case absl::StatusCode::kUnimplemented:
      Complain(text, absl::StrCat("is it logitd that listens at ", address, "?"));
      return kExitCallFailed;
    default:
      Complain(text);
      return kExitCallFailed;
  }
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommonFlags& common) {
  client::ClientOptions options;
  options.address = common.address;
  options.deadline = absl::Seconds(common.deadline_s);
  options.retry.max_attempts = common.max_attempts;
  return client::Client::Create(std::move(options));
}

int BadInput(const absl::Status& status) {
  Complain(status.message());
  return kExitBadInput;
}

int NoHead(const absl::Status& status, const std::string& address) {
  return absl::IsInvalidArgument(status) ? BadInput(status) : CallFailed(status, address);
}

absl::StatusOr<client::LanguageModel> LoadModel(const std::string& directory) {
  absl::StatusOr<client::LanguageModel> model = client::LanguageModel::Load(directory);
  if (model.ok()) return model;
  return absl::Status(
      model.status().code(),
      absl::StrCat(model.status().message(),
                   "\n  hint: --model names a directory with config.json, vocab.json and "
                   "model.safetensors"));
}

std::vector<std::string> TextOf(const client::LanguageModel* model,
                                absl::Span<const int32_t> tokens) {
  std::vector<std::string> text;
  if (model == nullptr) return text;
  for (int32_t token : tokens) {
    const bool known = token >= 0 && token < model->vocab_size();
    text.push_back(known ? model->TokenBytes(token) : "");
  }
  return text;
}

absl::StatusOr<Logits> LoadLogits(const std::string& file, const std::string& text,
                                  const std::string& model) {
  Logits logits;
  if (!file.empty()) {
    absl::StatusOr<client::FileTensor> loaded = client::LoadMatrix(file);
    if (!loaded.ok()) return loaded.status();
    logits.tensor = *std::move(loaded);
    logits.dtype = logits.tensor.dtype;
    logits.rows = logits.tensor.shape[0];
    logits.vocab = logits.tensor.shape[1];
    logits.payload = logits.tensor.bytes;
    return logits;
  }
  absl::StatusOr<client::LanguageModel> loaded = LoadModel(model);
  if (!loaded.ok()) return loaded.status();
  logits.model = std::make_unique<client::LanguageModel>(*std::move(loaded));
  client::LanguageModel::State state = logits.model->InitialState();
  std::vector<float> hidden = logits.model->Step(state, logits.model->bos_token_id());
  logits.prompt = logits.model->Tokenize(text);
  for (int32_t token : logits.prompt) hidden = logits.model->Step(state, token);
  logits.computed = logits.model->Logits(hidden);
  logits.hidden = std::move(hidden);
  logits.rows = 1;
  logits.vocab = logits.model->vocab_size();
  logits.payload = {reinterpret_cast<const char*>(logits.computed.data()),
                    logits.computed.size() * sizeof(float)};
  return logits;
}

std::string ToDType(absl::Span<const float> values, v1::DType dtype) {
  std::string bytes(values.size() * static_cast<size_t>(client::DTypeSize(dtype)), '\0');
  if (dtype == v1::DTYPE_F32) {
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half =
        dtype == v1::DTYPE_F16 ? formats::FloatToF16(values[i]) : formats::FloatToBF16(values[i]);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

absl::StatusOr<v1::Head> FindHead(client::Client& client, const std::string& name,
                                  const client::LanguageModel& model) {
  if (name.empty()) return v1::Head();
  absl::StatusOr<v1::Head> head = client.GetHead(name);
  if (!head.ok()) return head;
  if (head->hidden() == model.hidden_dim() && head->vocab() == model.vocab_size()) return head;
  return absl::InvalidArgumentError(
      absl::StrFormat("--head %s is of %d tokens by %d; the model of --model has %d by %d", name,
                      head->vocab(), head->hidden(), model.vocab_size(), model.hidden_dim()));
}

}  // namespace logitd::cli
