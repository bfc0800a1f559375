// Decides whether a caller may call a method.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_AUTHORIZATION_H_
#define LOGITD_SERVER_RPC_TRANSPORT_AUTHORIZATION_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/door/identities.h"
#include "server/engine/caller.h"
#include "server/engine/metrics.h"
#include "server/http2/peer.h"
#include "server/http2/stream.h"

namespace logitd::rpc {

// The metadata with a token.
inline constexpr char kAuthorization[] = "authorization";

// The demands of a method.
struct Access {
  absl::string_view method;        // for errors; lives as long as the server
  std::optional<door::Role> role;  // none: any identity
};

// Who calls.
struct Authorization {
  std::shared_ptr<const door::Identity> identity;  // null: the server has no identities
  engine::Proof proof = engine::Proof::kNone;      // how it was shown
  door::Credentials credentials;                   // that showed it; empty if there is no identity
};

// `metadata`: of the call; null: `peer` is the other end of a ring. `identities` null: everybody
// may call everything. UNAUTHENTICATED: no identity. PERMISSION_DENIED: it lacks the role. Both are
// counted and logged, never with the token.
absl::StatusOr<Authorization> Authorize(const http2::HeaderList* metadata,
                                        const http2::PeerInfo& peer,
                                        const door::Identities* identities, const Access& access,
                                        engine::Metrics* metrics);

// Checks credentials again after the file of identities has changed: they must still give the same
// identity, and the role.
absl::Status CheckStillAuthorized(const Authorization& authorization,
                                  const door::Identities* identities, const Access& access);

// A place for one more call of the identity, as long as the result lives; null where it has no
// limit. RESOURCE_EXHAUSTED, counted: it has as many as it may have.
absl::StatusOr<std::shared_ptr<const void>> TakePlace(const Authorization& authorization,
                                                      engine::Metrics* metrics);

// Charges the rows of a message. RESOURCE_EXHAUSTED with a retry delay, counted: the identity has
// sent as many rows as it may send.
absl::Status TakeRows(const Authorization& authorization, int64_t rows, engine::Metrics* metrics);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_AUTHORIZATION_H_
