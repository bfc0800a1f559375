// The services, one per proto file.
#ifndef LOGITD_SERVER_RPC_SERVICES_H_
#define LOGITD_SERVER_RPC_SERVICES_H_

#include <string_view>

#include "logitd/v1/server.grpc.pb.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/transport/raw_service.h"
#include "server/rpc/transport/unary_call.h"

namespace logitd::rpc {

// What requests of a server refer to. The objects of `environment` outlive it.
Finders FindersOf(const CallEnvironment& environment);

// A service of ops::kOps: all its methods.
class OpService final : public RawService {
 public:
  OpService(std::string_view service, const CallEnvironment& environment);
};

// The generated service, with raw messages, so that a malformed one is refused with a text.
using RawServer = v1::Server::WithRawCallbackMethod_GetInfo<
    v1::Server::WithRawCallbackMethod_GetLoad<v1::Server::Service>>;

// logitd.v1.Server
class ServerService final : public RawServer {
 public:
  // `info` is what GetInfo answers, except `draining`, `device`, and which devices are lost. The objects of `environment` outlive this.
  ServerService(v1::GetInfoResponse info, const CallEnvironment& environment);

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetLoad(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;

 private:
  const v1::GetInfoResponse info_;
  const CallEnvironment environment_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_SERVICES_H_
