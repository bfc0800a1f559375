// Calls that come through rings: the ops, admission, quotas, batches and errors of the RPCs of the
// same names.
#ifndef LOGITD_SERVER_RPC_RING_SERVICE_H_
#define LOGITD_SERVER_RPC_RING_SERVICE_H_

#include "server/arena/ring.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// The function with which rings serve their calls. The objects of `environment` outlive the rings and
// their calls.
arena::ServeRing MakeRingService(const CallEnvironment& environment);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_RING_SERVICE_H_
