#include "server/rpc/transport/call_headers.h"

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "server/rpc/transport/call_tracker.h"

namespace logitd::rpc {
namespace {

// What a message holds besides its bytes: read buffers, short lists, a small answer.
constexpr int64_t kMessageOverhead = int64_t{16} << 10;

// For the text of an error: a peer may send any length.
constexpr size_t kShownBytes = 32;

std::string Shown(absl::string_view text) { return absl::CHexEscape(text.substr(0, kShownBytes)); }

}  // namespace

absl::Status CallHeaders::Authorize(const grpc::CallbackServerContext& context,
                                    const door::Identities* identities, const Access& access,
                                    engine::Metrics* metrics) {
  return Take(rpc::Authorize(context, connection.get(), identities, access, metrics), metrics);
}

absl::Status CallHeaders::AuthorizeUser(uint32_t uid, const std::string& peer,
                                        const door::Identities* identities, const Access& access,
                                        engine::Metrics* metrics) {
  return Take(rpc::AuthorizeUser(uid, peer, identities, access, metrics), metrics);
}

absl::Status CallHeaders::Take(absl::StatusOr<Authorization> who, engine::Metrics* metrics) {
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

int64_t CallHeaders::room_bytes() const {
  return stated_bytes.has_value() ? *stated_bytes + kMessageOverhead : 0;
}

door::Grant CallHeaders::GrantRead() const {
  constexpr int64_t kAnything = int64_t{1} << 40;
  return door::Grant(connection, stated_bytes.value_or(kAnything));
}

std::function<std::optional<int64_t>()> CallHeaders::ReceivedBytes() const {
  if (connection == nullptr) return nullptr;
  return [connection = connection]() -> std::optional<int64_t> {
    if (connection->HasUnread()) return std::nullopt;
    return connection->received_bytes();
  };
}

absl::Status CallHeaders::CheckMessage(int64_t message_bytes) const {
  if (!stated_bytes.has_value() || message_bytes <= *stated_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d, allowed the size of the message, %d, or more", kPayloadBytes,
                      *stated_bytes, message_bytes));
}

absl::StatusOr<CallHeaders> ReadHeaders(const grpc::CallbackServerContext& context,
                                        const door::Connections& connections,
                                        int64_t max_message_bytes) {
  CallHeaders headers = {.connection = connections.Find(context.peer()),
                         .deadline = DeadlineOf(context)};
  headers.caller.id = headers.connection == nullptr ? 0 : headers.connection->id();
  if (headers.connection != nullptr) headers.connection->CallBegan();
  const auto& metadata = context.client_metadata();
  const auto value_of = [](const auto& entry) {
    return absl::string_view(entry->second.data(), entry->second.size());
  };
  if (const auto it = metadata.find(kPriority); it != metadata.end()) {
    const absl::string_view value = value_of(it);
    if (value == kBatch) {
      headers.caller.priority = engine::Priority::kBatch;
    } else if (value != kInteractive) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: got \"%s\", allowed interactive or batch", kPriority, Shown(value)));
    }
  }
  if (const auto it = metadata.find(kPayloadBytes); it != metadata.end()) {
    int64_t bytes = -1;
    if (!absl::SimpleAtoi(value_of(it), &bytes) || bytes < 0 || bytes > max_message_bytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: got \"%s\", allowed 0..%d", kPayloadBytes, Shown(value_of(it)), max_message_bytes));
    }
    headers.stated_bytes = bytes;
  }
  return headers;
}

}  // namespace logitd::rpc
