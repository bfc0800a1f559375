#include "client/cli/commands.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"
#include "client/client.h"
#include "client/language_model.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

using client::Client;
using client::TopKRequest;
using client::TopKResult;

void Print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void Complain(absl::string_view text, absl::string_view hint = "") {
  absl::FPrintF(stderr, "logitctl: %s\n", text);
  if (!hint.empty()) absl::FPrintF(stderr, "  hint: %s\n", hint);
}

// Of a call that the server or the way to it failed.
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

absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonFlags& common) {
  client::ClientOptions options;
  options.address = common.address;
  options.deadline = absl::Seconds(common.deadline_s);
  options.retry.max_attempts = common.max_attempts;
  return Client::Create(std::move(options));
}

// The rows one request may carry by the server's limits; a limit of 0 is none. 0: not even one.
int64_t RowsPerRequest(const v1::Limits& limits, int64_t row_bytes, int k) {
  const int64_t answer_row_bytes = int64_t{k} * 8 + 16;
  int64_t rows = std::numeric_limits<int32_t>::max() / row_bytes;  // protobuf carries 2 GiB
  if (limits.max_batch_rows() > 0) rows = std::min(rows, limits.max_batch_rows());
  if (limits.max_request_bytes() > 0) {
    rows = std::min(rows, limits.max_request_bytes() / row_bytes);
  }
  if (limits.max_answer_bytes() > 0) {
    rows = std::min(rows, limits.max_answer_bytes() / answer_row_bytes);
  }
  return rows;
}

}  // namespace

int RunTopK(const CommonFlags& common, const TopKFlags& flags) {
  if (!std::isfinite(flags.temperature) || flags.temperature <= 0) {
    Complain(absl::StrFormat("--temperature is %g; allowed: finite, above 0", flags.temperature));
    return kExitBadInput;
  }
  std::unique_ptr<client::LanguageModel> model;
  client::FileTensor tensor;    // keeps a file mapped
  std::vector<float> computed;  // of a prompt
  TopKRequest request = {.k = {flags.k}, .temperature = {flags.temperature}};
  absl::string_view payload;
  if (!flags.logits.empty()) {
    absl::StatusOr<client::FileTensor> loaded = client::LoadMatrix(flags.logits);
    if (!loaded.ok()) {
      Complain(loaded.status().message());
      return kExitBadInput;
    }
    tensor = *std::move(loaded);
    request.dtype = tensor.dtype;
    request.rows = tensor.shape[0];
    request.vocab = tensor.shape[1];
    payload = tensor.bytes;
  } else {
    absl::StatusOr<client::LanguageModel> loaded = client::LanguageModel::Load(flags.model);
    if (!loaded.ok()) {
      Complain(loaded.status().message(),
               "--model names a directory with config.json, vocab.json "
               "and model.safetensors");
      return kExitBadInput;
    }
    model = std::make_unique<client::LanguageModel>(*std::move(loaded));
    client::LanguageModel::State state = model->InitialState();
    std::vector<float> hidden = model->Step(state, model->bos_token_id());
    for (int32_t token : model->Tokenize(flags.text)) hidden = model->Step(state, token);
    computed = model->Logits(hidden);
    request.dtype = v1::DTYPE_F32;
    request.rows = 1;
    request.vocab = model->vocab_size();
    payload = {reinterpret_cast<const char*>(computed.data()), computed.size() * sizeof(float)};
  }
  if (flags.k < 1 || flags.k > request.vocab) {
    Complain(
        absl::StrFormat("--k is %d; allowed: 1 to the vocabulary's %d", flags.k, request.vocab));
    return kExitBadInput;
  }

  absl::StatusOr<std::unique_ptr<Client>> client = Connect(common);
  if (!client.ok()) {
    Complain(client.status().message());
    return kExitBadInput;
  }
  absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) return CallFailed(info.status(), common.address);
  const int64_t rows = request.rows;
  const int64_t row_bytes = request.vocab * client::DTypeSize(request.dtype);
  const int64_t step = RowsPerRequest(info->limits(), row_bytes, flags.k);
  if (step == 0) {
    Complain(absl::StrFormat(
        "one row of %d bytes and --k %d is more than the server takes: max_request_bytes %d, "
        "max_answer_bytes %d",
        row_bytes, flags.k, info->limits().max_request_bytes(), info->limits().max_answer_bytes()));
    return kExitBadInput;
  }
  TopKOutput output;
  for (int64_t row = 0; row < rows; row += step) {
    request.rows = std::min(step, rows - row);
    request.logits = {payload.substr(row * row_bytes, request.rows * row_bytes)};
    absl::StatusOr<TopKResult> result = (*client)->TopK(request);
    if (!result.ok()) return CallFailed(result.status(), common.address);
    Append(*std::move(result), &output);
  }
  if (model != nullptr) {
    for (int32_t token : output.result.indices) {
      const bool known = token >= 0 && token < model->vocab_size();
      output.text.push_back(known ? model->TokenBytes(token) : "");
    }
  }
  Print(common.format == "json" ? TopKJson(output) : TopKTable(output));
  return kExitOk;
}

int RunInfo(const CommonFlags& common) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(common);
  if (!client.ok()) {
    Complain(client.status().message());
    return kExitBadInput;
  }
  absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) return CallFailed(info.status(), common.address);
  Print(common.format == "json" ? InfoJson(*info) : InfoTable(*info, common.address));
  return kExitOk;
}

int RunHealth(const CommonFlags& common, const HealthFlags& flags) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(common);
  if (!client.ok()) {
    Complain(client.status().message());
    return kExitBadInput;
  }
  auto print = [&](client::ServingStatus status) {
    const std::string name(client::ServingStatusName(status));
    Print(common.format == "json" ? absl::StrFormat("{\"status\":\"%s\"}\n", name) : name + "\n");
    return true;
  };
  if (flags.watch) {
    const absl::Status ended = (*client)->WatchHealth(flags.service, print);
    // The watch ends with the server: however politely it leaves, nobody serves there any more.
    if (ended.ok() || absl::IsCancelled(ended)) {
      Complain("the server has ended the watch");
      return kExitUnavailable;
    }
    return CallFailed(ended, common.address);
  }
  absl::StatusOr<client::ServingStatus> status = (*client)->Health(flags.service);
  if (!status.ok()) return CallFailed(status.status(), common.address);
  print(*status);
  return *status == client::ServingStatus::kServing ? kExitOk : kExitUnavailable;
}

}  // namespace logitd::cli
