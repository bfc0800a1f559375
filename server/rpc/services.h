// The services, one per proto file.
#ifndef LOGITD_SERVER_RPC_SERVICES_H_
#define LOGITD_SERVER_RPC_SERVICES_H_

#include <string_view>

#include "logitd/v1/server.grpc.pb.h"
#include "server/engine/admission.h"
#include "server/rpc/transport/raw_service.h"
#include "server/rpc/transport/unary_call.h"

namespace logitd::rpc {

// A service of ops::kOps: all its methods.
class OpService final : public RawService {
 public:
  OpService(std::string_view service, const CallEnvironment& environment);
};

// logitd.v1.Server. Its message is raw so that a malformed one is refused with a text.
class ServerService final : public v1::Server::WithRawCallbackMethod_GetInfo<v1::Server::Service> {
 public:
  // `info` is what GetInfo answers, except `draining`.
  ServerService(v1::GetInfoResponse info, const CallEnvironment& environment);

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;

 private:
  const v1::GetInfoResponse info_;
  const CallEnvironment environment_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_SERVICES_H_
