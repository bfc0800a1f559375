// What a call says about itself on its headers.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/door/connection.h"
#include "server/engine/caller.h"
#include "server/rpc/transport/authorization.h"

namespace logitd::rpc {

// The metadata; server.proto has its meaning.
inline constexpr char kPriority[] = "logitd-priority";
inline constexpr char kInteractive[] = "interactive";
inline constexpr char kBatch[] = "batch";
inline constexpr char kPayloadBytes[] = "logitd-payload-bytes";
inline constexpr char kRetryPushback[] = "grpc-retry-pushback-ms";  // of an answer

struct CallHeaders {
  std::shared_ptr<door::Connection> connection;  // null: not one of the door's
  engine::Caller caller;                         // an identity, or else a connection
  Authorization authorization;
  std::shared_ptr<CallPlace> place;  // among the identity's calls; null: it has no limit
  absl::Time deadline = absl::InfiniteFuture();
  // The size of the request message, or of a stream's largest message.
  std::optional<int64_t> stated_bytes;

  // Fills `authorization`, `place` and `caller`. Errors as of Authorize and TakePlace.
  absl::Status Authorize(const grpc::CallbackServerContext& context,
                         const door::Identities* identities, const Access& access,
                         engine::Metrics* metrics);
  // The same for the user at the other end of a ring. `peer`: for the log.
  absl::Status AuthorizeUser(uint32_t uid, const std::string& peer,
                             const door::Identities* identities, const Access& access,
                             engine::Metrics* metrics);
  // The door's name of the peer; empty: not one of its connections.
  std::string peer() const { return connection == nullptr ? "" : connection->peer(); }

  // What one read may bring: the size that the call states, or anything. gRPC refuses a message that
  // is too large with a status, which a cut connection would not give.
  door::Grant GrantRead() const;
  // How far the connection is, as RoomAsk::received_bytes.
  std::function<std::optional<int64_t>()> ReceivedBytes() const;
  // The room for the message, in the admission's sense: 0 where the size is not stated.
  int64_t room_bytes() const;
  // INVALID_ARGUMENT: the message is larger than stated.
  absl::Status CheckMessage(int64_t message_bytes) const;

 private:
  absl::Status Take(absl::StatusOr<Authorization> who, engine::Metrics* metrics);
};

// INVALID_ARGUMENT names the metadata, what it has and what is allowed. A stated size may be up to
// `max_message_bytes`.
absl::StatusOr<CallHeaders> ReadHeaders(const grpc::CallbackServerContext& context,
                                        const door::Connections& connections,
                                        int64_t max_message_bytes);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_
