// Ends the connections of a server from below its transport.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CLOSE_CONNECTIONS_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CLOSE_CONNECTIONS_H_

#include <string>

#include "absl/types/span.h"

namespace logitd::rpc {

// Stops listening on `addresses` ("host:port" or "unix:PATH", as bound) and says no more on the
// connections they took: what was written still goes out, then the peer sees the end. Every gRPC
// client makes that UNAVAILABLE for the calls it has open, and for those it opens before it knows.
//
// Needed because gRPC (1.51) cannot be asked for that: Server::Shutdown first makes it drop new
// calls unseen, and only then tells the peers. To them such a call is CANCELLED, which is not
// theirs to retry. Whoever owns the sockets keeps them, and closes them when it likes. Looks at
// every descriptor of the process; leaves alone what is not bound to one of `addresses`.
void CloseConnections(absl::Span<const std::string> addresses);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CLOSE_CONNECTIONS_H_
