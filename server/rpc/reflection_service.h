// grpc.reflection.v1 and v1alpha: the descriptors that this program is linked with.
#ifndef LOGITD_SERVER_RPC_REFLECTION_SERVICE_H_
#define LOGITD_SERVER_RPC_REFLECTION_SERVICE_H_

#include <string>
#include <vector>

#include "server/rpc/registry.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Serves both versions. `services`: the full names of all services. `environment` outlives the
// registry.
void RegisterReflection(std::vector<std::string> services, const CallEnvironment& environment,
                        Registry* registry);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_REFLECTION_SERVICE_H_
