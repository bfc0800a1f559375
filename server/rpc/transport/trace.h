// Names that a caller gives to its call, so that it can be found in logs.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_TRACE_H_
#define LOGITD_SERVER_RPC_TRANSPORT_TRACE_H_

#include <grpcpp/server_context.h>

#include <string>

namespace logitd::rpc {

inline constexpr char kRequestId[] = "x-request-id";
inline constexpr char kTraceparent[] = "traceparent";

// server.proto has the metadata's meaning. Empty: the call has none, or a malformed one.
struct Trace {
  std::string request_id;
  std::string traceparent;
};

// Reads both, and sends them back in the call's trailing metadata. Once for a call, before anything
// ends it.
Trace ReadAndEchoTrace(grpc::CallbackServerContext* context);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_TRACE_H_
