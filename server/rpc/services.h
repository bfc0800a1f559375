// The services, one per proto file.
#ifndef LOGITD_SERVER_RPC_SERVICES_H_
#define LOGITD_SERVER_RPC_SERVICES_H_

#include <string>
#include <vector>

#include "logitd/v1/server.pb.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/plain_call.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Finds what requests of a server refer to. The objects of `environment` outlive it.
Finders FindersOf(const CallEnvironment& environment);

// The methods of ops::kOps. `environment` outlives the registry. Returns the names of the services.
std::vector<std::string> RegisterOps(const CallEnvironment& environment, Registry* registry);

// logitd.v1.Server
class ServerService {
 public:
  // `info` is what GetInfo answers, except `draining`, `device`, and which devices are lost. The
  // objects of `environment` outlive this.
  ServerService(v1::GetInfoResponse info, const CallEnvironment& environment);

  void Register(Registry* registry);

 private:
  v1::GetInfoResponse Info() const;

  const v1::GetInfoResponse info_;
  const CallEnvironment& environment_;
  UnaryPlainCall::Serve get_info_;
  UnaryPlainCall::Serve get_load_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_SERVICES_H_
