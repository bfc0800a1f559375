// A call's statements about itself, in its headers.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/caller.h"
#include "server/http2/connection.h"
#include "server/rpc/transport/authorization.h"

namespace logitd::rpc {

// The metadata; server.proto has its meaning.
inline constexpr char kPriority[] = "logitd-priority";
inline constexpr char kInteractive[] = "interactive";
inline constexpr char kBatch[] = "batch";
inline constexpr char kPayloadBytes[] = "logitd-payload-bytes";
inline constexpr char kRetryPushback[] = "grpc-retry-pushback-ms";  // of an answer

class ServerCall;

struct CallHeaders {
  engine::Caller caller;  // an identity, or else a connection
  Authorization authorization;
  std::shared_ptr<CallPlace> place;  // among the identity's calls; null: it has no limit
  absl::Time deadline = absl::InfiniteFuture();
  // The size of the request message, or of a stream's largest message.
  std::optional<int64_t> stated_bytes;

  // Fills `caller`, `deadline` and `stated_bytes`. INVALID_ARGUMENT names the metadata, what it has
  // and what is allowed. A stated size may be up to `max_message_bytes`.
  absl::Status Read(ServerCall& call, int64_t max_message_bytes);
  // Fills `authorization`, `place` and `caller`. Errors as of Authorize and TakePlace.
  absl::Status Authorize(ServerCall& call, const door::Identities* identities, const Access& access,
                         engine::Metrics* metrics);
  // Authorizes the user at the other end of a ring. `peer`: for the log.
  absl::Status AuthorizeUser(uint32_t uid, const std::string& peer,
                             const door::Identities* identities, const Access& access,
                             engine::Metrics* metrics);

  // The room to ask the admission for, for a message of so many bytes.
  static int64_t RoomFor(int64_t message_bytes);
  // INVALID_ARGUMENT: the message is larger than stated.
  absl::Status CheckMessage(int64_t message_bytes) const;

 private:
  absl::Status Take(absl::StatusOr<Authorization> who, engine::Metrics* metrics);
};

// A function for engine::RoomAsk::received_bytes, which counts what the connection has received.
std::function<std::optional<int64_t>()> ReceivedBytesOf(http2::Connection& connection);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_
