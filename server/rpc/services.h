// The services, one per proto file.
#ifndef LOGITD_SERVER_RPC_SERVICES_H_
#define LOGITD_SERVER_RPC_SERVICES_H_

#include <string>
#include <vector>

#include "logitd/v1/server.pb.h"
#include "server/arena/ring.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// The `environment` of each function outlives the registry, or the rings and their calls.

// The methods of ops::kOps. Returns the names of the services.
std::vector<std::string> RegisterOps(const CallEnvironment& environment, Registry* registry);

// logitd.v1.Server. `info` is what GetInfo answers, except `draining`, `device`, and which devices
// are lost.
void RegisterServer(v1::GetInfoResponse info, const CallEnvironment& environment,
                    Registry* registry);

// grpc.reflection.v1 and v1alpha: the descriptors that this program is linked with. `services`: the
// full names of all other services.
void RegisterReflection(std::vector<std::string> services, const CallEnvironment& environment,
                        Registry* registry);

// What rings serve their calls with: the ops, admission, quotas, batches and errors of the RPCs of
// the same names.
arena::ServeRing MakeRingService(const CallEnvironment& environment);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_SERVICES_H_
