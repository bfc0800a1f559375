// The services, one per proto file.
#ifndef LOGITD_SERVER_RPC_SERVICES_H_
#define LOGITD_SERVER_RPC_SERVICES_H_

#include "logitd/v1/server.grpc.pb.h"
#include "server/engine/admission.h"
#include "server/rpc/transport/raw_service.h"
#include "server/rpc/transport/unary_call.h"

namespace logitd::rpc {

// logitd.v1.Sampler
class SamplerService final : public RawService {
 public:
  explicit SamplerService(const CallEnvironment& environment);
};

// logitd.v1.Scorer
class ScorerService final : public RawService {
 public:
  explicit ScorerService(const CallEnvironment& environment);
};

// logitd.v1.Attention
class AttentionService final : public RawService {
 public:
  explicit AttentionService(const CallEnvironment& environment);
};

// logitd.v1.Server
class ServerService final : public v1::Server::CallbackService {
 public:
  // `info` is what GetInfo answers, but for `draining`, which `admission` knows.
  ServerService(v1::GetInfoResponse info, const engine::Admission* admission);

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const v1::GetInfoRequest* request,
                                    v1::GetInfoResponse* response) override;

 private:
  const v1::GetInfoResponse info_;
  const engine::Admission* const admission_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_SERVICES_H_
