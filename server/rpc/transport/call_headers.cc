#include "server/rpc/transport/call_headers.h"

#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "kernels/status_macros.h"
#include "server/http2/connection.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {
namespace {

// Memory of a message besides its bytes: its object, short lists, a small answer.
constexpr int64_t kMessageOverhead = int64_t{16} << 10;

// For the text of an error: a peer may send any length.
constexpr size_t kShownBytes = 32;

std::string Shown(std::string_view text) {
  text = text.substr(0, kShownBytes);
  return absl::CHexEscape({text.data(), text.size()});
}

}  // namespace

absl::Status CallHeaders::Accept(absl::StatusOr<Authorization> who, engine::Metrics* metrics) {
  if (!who.ok()) return who.status();
  authorization = *std::move(who);
  const door::Identity* const identity = authorization.identity.get();
  if (identity == nullptr) return absl::OkStatus();
  caller.id = identity->id;
  caller.weight = identity->weight;
  caller.max_held_bytes = identity->max_held_bytes;
  caller.proof = authorization.proof;
  auto taken = TakePlace(authorization, metrics);
  if (taken.ok()) place = *std::move(taken);
  return taken.status();
}

engine::RoomAsk CallHeaders::AskFor(int64_t message_bytes,
                                    std::shared_ptr<engine::Sender> sender) const {
  return {.caller = caller,
          .deadline = deadline,
          .bytes = message_bytes + kMessageOverhead,
          .sender = std::move(sender)};
}

engine::RoomAsk CallHeaders::AskAgain(int64_t bytes) const {
  return {.caller = caller, .deadline = deadline, .bytes = bytes, .again = true};
}

absl::Status CallHeaders::CheckMessage(int64_t message_bytes) const {
  if (!stated_bytes.has_value() || message_bytes <= *stated_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d, allowed the size of the message, %d, or more", kPayloadBytes,
                      *stated_bytes, message_bytes));
}

absl::Status CallHeaders::Read(ServerCall& call, const CallEnvironment& environment,
                               const Access& access) {
  engine::Metrics* const metrics = environment.metrics;
  deadline = call.deadline();
  const http2::PeerInfo& peer = call.connection().peer();
  caller.id = peer.id;
  const absl::Status status =
      ReadMetadata(call.metadata(), environment.admission->options().max_request_bytes);
  if (!status.ok()) {
    metrics->CountRefused(engine::Refusal::kInvalid, engine::Proof::kNone);
    return status;
  }
  LOGITD_RETURN_IF_ERROR(
      Accept(Authorize(&call.metadata(), peer, environment.identities, access, metrics), metrics));
  if (!environment.admission->draining()) return absl::OkStatus();
  metrics->CountRefused(engine::Refusal::kDraining, caller.proof);
  return engine::DrainingError();
}

absl::Status CallHeaders::ReadMetadata(const http2::HeaderList& metadata,
                                       int64_t max_message_bytes) {
  if (const std::string_view value = metadata.Find(kPriority); value.data() != nullptr) {
    if (value == kBatch) {
      caller.priority = engine::Priority::kBatch;
    } else if (value != kInteractive) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: got \"%s\", allowed interactive or batch", kPriority, Shown(value)));
    }
  }
  if (const std::string_view value = metadata.Find(kPayloadBytes); value.data() != nullptr) {
    int64_t bytes = -1;
    if (!absl::SimpleAtoi(absl::string_view(value.data(), value.size()), &bytes) || bytes < 0 ||
        bytes > max_message_bytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: got \"%s\", allowed 0..%d", kPayloadBytes, Shown(value), max_message_bytes));
    }
    stated_bytes = bytes;
  }
  return absl::OkStatus();
}

}  // namespace logitd::rpc
