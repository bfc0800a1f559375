// Registers methods whose handlers run on a call's headers, before its message is read, and get the
// message as raw slices.
//
// gRPC's own unary handlers run when the whole message is in memory. Here a call can be refused, or
// kept waiting while HTTP/2 flow control holds its bytes at the peer, for the price of its headers.
// On the wire a unary method stays unary: stubs in any language work unchanged, and reflection
// serves its descriptor.
//
// The server side registers the method's full name as a bidirectional stream of ByteBuffers. That
// needs names from grpc::internal (gRPC 1.51), all of them in raw_service.cc. If gRPC removes them,
// the generated `WithRawCallbackMethod_<Method>` does everything here except refusal on headers.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_RAW_SERVICE_H_
#define LOGITD_SERVER_RPC_TRANSPORT_RAW_SERVICE_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace logitd::rpc {

using RawReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// A service with raw methods. Register it with a ServerBuilder.
class RawService : public grpc::Service {
 protected:
  // `method`: e.g. "/logitd.v1.Sampler/TopK". `start` runs on the headers of every call. Call this
  // before the service is registered.
  void AddRawMethod(const std::string& method,
                    std::function<RawReactor*(grpc::CallbackServerContext*)> start);

 private:
  // The transport keeps pointers to the names.
  std::vector<std::unique_ptr<std::string>> names_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_RAW_SERVICE_H_
