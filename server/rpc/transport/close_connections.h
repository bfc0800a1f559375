// Ends the connections of a gRPC server at their sockets.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CLOSE_CONNECTIONS_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CLOSE_CONNECTIONS_H_

#include <string>

#include "absl/types/span.h"

namespace logitd::rpc {

// Stops listening on `addresses` ("host:port" or "unix:PATH", as bound) and shuts down the sending
// side of their connections: bytes already written still go out, then the peer sees the end. Every
// gRPC client turns that into UNAVAILABLE for its open calls, and for calls it opens before it
// knows.
//
// gRPC (1.51) has no call for this. Server::Shutdown first drops new calls without a look and only
// then tells the peers. Such a call ends as CANCELLED, which callers do not retry. The sockets stay
// open until their owner closes them. Looks at every descriptor of the process, and leaves those
// that are not bound to one of `addresses` as they are.
void CloseConnections(absl::Span<const std::string> addresses);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CLOSE_CONNECTIONS_H_
