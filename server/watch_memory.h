// The watch on the memory of the process.
#ifndef LOGITD_SERVER_WATCH_MEMORY_H_
#define LOGITD_SERVER_WATCH_MEMORY_H_

#include <cstdint>
#include <memory>

#include "server/config.h"
#include "server/door/door_metrics.h"
#include "server/engine/admission.h"
#include "server/engine/devices.h"
#include "server/engine/metrics.h"
#include "server/memory_watch.h"
#include "server/rpc/rpc_server.h"

namespace logitd {

// Watches the memory of the process from here on. What the process may have besides its start is
// what docs/operations.md says: what calls and connections may hold and, on the CPU, memory that
// becomes resident when it is first used. Leases have a limit of their own. `base`: ResidentBytes()
// before the server started.
std::unique_ptr<MemoryWatch> WatchMemory(const Config& config, const engine::Devices& devices,
                                         int64_t base, const engine::Admission& admission,
                                         const engine::Metrics& metrics,
                                         std::shared_ptr<door::DoorMetrics> door_metrics,
                                         engine::Places* places, rpc::RpcServer* server);

}  // namespace logitd

#endif  // LOGITD_SERVER_WATCH_MEMORY_H_
