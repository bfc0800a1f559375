// A call's statements about itself, in its headers, and what follows from them.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/admission.h"
#include "server/engine/caller.h"
#include "server/http2/stream.h"
#include "server/rpc/transport/authorization.h"

namespace logitd::rpc {

// The metadata; server.proto has its meaning.
inline constexpr char kPriority[] = "logitd-priority";
inline constexpr char kInteractive[] = "interactive";
inline constexpr char kBatch[] = "batch";
inline constexpr char kPayloadBytes[] = "logitd-payload-bytes";
inline constexpr char kRetryPushback[] = "grpc-retry-pushback-ms";  // of an answer

struct CallEnvironment;
class ServerCall;

struct CallHeaders {
  engine::Caller caller;  // an identity, or else a connection
  Authorization authorization;
  std::shared_ptr<const void> place;  // among the identity's calls; null: it has no limit
  absl::Time deadline = absl::InfiniteFuture();
  // The size of the request message, or of a stream's largest message.
  std::optional<int64_t> stated_bytes;

  // Fills everything, and decides whether the call is let in. INVALID_ARGUMENT names the metadata,
  // what it has and what is allowed; UNAVAILABLE: the server drains; else errors of Authorize and
  // Accept. All are counted.
  absl::Status Read(ServerCall& call, const CallEnvironment& environment, const Access& access);
  // Fills `authorization`, `place` and `caller` from the answer of Authorize. Errors:
  // its own and TakePlace's.
  absl::Status Accept(absl::StatusOr<Authorization> who, engine::Metrics* metrics);

  // A request for room for a message of so many bytes. `sender`: null if the message is there.
  engine::RoomAsk AskFor(int64_t message_bytes, std::shared_ptr<engine::Sender> sender) const;
  // The request of a call whose message is there, and whose answer needs `bytes` of room.
  engine::RoomAsk AskAgain(int64_t bytes) const;
  // INVALID_ARGUMENT: the message is larger than stated.
  absl::Status CheckMessage(int64_t message_bytes) const;

 private:
  absl::Status ReadMetadata(const http2::HeaderList& metadata, int64_t max_message_bytes);
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CALL_HEADERS_H_
