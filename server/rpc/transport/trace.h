// Names that a caller gives to its call, so that it can be found in logs.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_TRACE_H_
#define LOGITD_SERVER_RPC_TRANSPORT_TRACE_H_

#include <string>

#include "server/http2/stream.h"

namespace logitd::rpc {

inline constexpr char kRequestId[] = "x-request-id";
inline constexpr char kTraceparent[] = "traceparent";

// server.proto has the metadata's meaning. Empty: the call has none, or a malformed one.
struct Trace {
  std::string request_id;
  std::string traceparent;
};

// The names in the call's metadata. They are sent back in the trailing metadata.
Trace ReadTrace(const http2::HeaderList& metadata);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_TRACE_H_
