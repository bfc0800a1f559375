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

// Watches the memory of the process from here on. docs/operations.md ("The last guard") says what
// it may have besides `base`, which is ResidentBytes() before the server started. Leases have a
// limit of their own.
std::unique_ptr<MemoryWatch> WatchMemory(const Config& config, const engine::Devices& devices,
                                         int64_t base, const engine::Admission& admission,
                                         const engine::Metrics& metrics,
                                         std::shared_ptr<door::DoorMetrics> door_metrics,
                                         engine::Places* places, rpc::RpcServer* server);

}  // namespace logitd

#endif  // LOGITD_SERVER_WATCH_MEMORY_H_
