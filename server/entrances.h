// The doors and ports that the server opens for clients and operators, as the flags say.
#ifndef LOGITD_SERVER_ENTRANCES_H_
#define LOGITD_SERVER_ENTRANCES_H_

#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/arena/arena_server.h"
#include "server/arena/leases.h"
#include "server/config.h"
#include "server/door/door_metrics.h"
#include "server/door/identities.h"
#include "server/door/tls_context.h"
#include "server/door/watched_files.h"
#include "server/metrics_server.h"

namespace logitd {

// How many connections may be open, of what descriptors leases leave. A lease has two, its memory
// and its connection, and its ring two more: a copy of the connection, and the event that wakes its
// thread.
absl::StatusOr<int64_t> MaxConnections(const Config& config);

// The files that say who may come in, as they are now.
struct Door {
  std::shared_ptr<door::TlsSource> tls;          // null: no TLS
  std::unique_ptr<door::Identities> identities;  // null: everybody may call everything
};

// Fills `door` and `files`. `on_identities` runs after each change of the identities.
absl::Status OpenDoor(const Config& config, const std::shared_ptr<door::DoorMetrics>& metrics,
                      std::function<void()> on_identities, Door* door,
                      std::unique_ptr<door::WatchedFiles>* files);

// The first address for which clients may not load and unload heads; "" if there is none.
std::string RemoteListen(const Config& config);

// --head-root with its links resolved; "" if there is none.
absl::StatusOr<std::string> ResolveHeadRoot(const Config& config);

// Null if --metrics-listen is off.
absl::StatusOr<std::unique_ptr<MetricsServer>> ServeMetrics(const Config& config,
                                                            std::function<std::string()> page);

// Null without --arena-listen. `identities` may be null.
absl::StatusOr<std::unique_ptr<arena::ArenaServer>> ServeArenas(
    const Config& config, const door::Identities* identities, arena::Leases* leases,
    std::shared_ptr<prometheus::Registry> registry);

}  // namespace logitd

#endif  // LOGITD_SERVER_ENTRANCES_H_
