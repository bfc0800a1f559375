#include "client/cli/commands.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"
#include "client/cli/session.h"
#include "client/client.h"

namespace logitd::cli {
namespace {

using client::Client;
using client::TopKRequest;
using client::TopKResult;

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
  absl::StatusOr<Logits> loaded = LoadLogits(flags.logits, flags.text, flags.model);
  if (!loaded.ok()) return BadInput(loaded.status());
  Logits& logits = *loaded;
  if (flags.k < 1 || flags.k > logits.vocab) {
    Complain(
        absl::StrFormat("--k is %d; allowed: 1 to the vocabulary's %d", flags.k, logits.vocab));
    return kExitBadInput;
  }

  absl::StatusOr<std::unique_ptr<Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) return CallFailed(info.status(), common.address);
  TopKRequest request = {.k = {flags.k}, .temperature = {flags.temperature}};
  TopKOutput output;
  if (!flags.head.empty()) {  // one row: the hidden state after the prompt
    absl::StatusOr<v1::Head> head = FindHead(**client, flags.head, *logits.model);
    if (!head.ok()) return NoHead(head.status(), common.address);
    SetInput(logits, *head, &request);
    absl::StatusOr<TopKResult> result = (*client)->TopK(request);
    if (!result.ok()) return CallFailed(result.status(), common.address);
    Append(*std::move(result), &output);
    output.text = logits.TextOf(output.result.indices);
    Print(common.format == "json" ? TopKJson(output) : TopKTable(output));
    return kExitOk;
  }
  SetInput(logits, v1::Head(), &request);
  const absl::string_view payload = logits.payload;
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
  for (int64_t row = 0; row < rows; row += step) {
    request.rows = std::min(step, rows - row);
    request.logits = {payload.substr(row * row_bytes, request.rows * row_bytes)};
    absl::StatusOr<TopKResult> result = (*client)->TopK(request);
    if (!result.ok()) return CallFailed(result.status(), common.address);
    Append(*std::move(result), &output);
  }
  output.text = logits.TextOf(output.result.indices);
  Print(common.format == "json" ? TopKJson(output) : TopKTable(output));
  return kExitOk;
}

int RunInfo(const CommonFlags& common) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) return CallFailed(info.status(), common.address);
  Print(common.format == "json" ? InfoJson(*info) : InfoTable(*info, common.address));
  return kExitOk;
}

int RunHealth(const CommonFlags& common, const HealthFlags& flags) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
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
