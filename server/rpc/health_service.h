// grpc.health.v1.Health, and a server for it only.
#ifndef LOGITD_SERVER_RPC_HEALTH_SERVICE_H_
#define LOGITD_SERVER_RPC_HEALTH_SERVICE_H_

#include <sys/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/http2/server.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/plain_call.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Anybody may ask. Thread-safe.
class HealthService {
 public:
  // `environment` outlives this.
  explicit HealthService(const CallEnvironment& environment) : environment_(environment) {}

  // This outlives the registry.
  void Register(Registry* registry);

  // The empty name is the whole server. New names only before the server starts: a watch of an
  // unknown name never learns of it.
  void Set(const std::string& service, bool serving);
  // nullopt: it was never set.
  std::optional<bool> Get(const std::string& service) const;

 private:
  class WatchCall;

  const CallEnvironment& environment_;
  mutable absl::Mutex mutex_;
  std::map<std::string, bool> serving_ ABSL_GUARDED_BY(mutex_);
  std::map<const WatchCall*, std::weak_ptr<ServerCall>> watches_ ABSL_GUARDED_BY(mutex_);
};

// A server for probes only. It has a loop, connections and limits of its own, all small, and no
// TLS: nothing that peers of the other server hold or do keeps a probe from its answer. Methods
// from one thread.
class ProbeServer final : private http2::ServerEvents {
 public:
  static constexpr int64_t kMaxConnections = 64;

  // `loop`: the number of its loop, which `tracker` knows. Both arguments outlive it.
  ProbeServer(const CallTracker& tracker, int loop, HealthService* health);

  // Serves from here on. UNAVAILABLE names the address that it cannot listen on.
  absl::Status Listen(absl::Span<const std::string> addresses, std::optional<mode_t> socket_mode);
  const std::vector<std::string>& listening() const { return server_.listening(); }
  void Shutdown() { server_.Shutdown(); }

 private:
  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override {
    return registry_.Start(stream, tracker_);
  }

  const CallTracker& tracker_;
  Registry registry_{"only grpc.health.v1.Health is served here"};
  http2::Server server_;  // ends first: its loop uses the others
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_HEALTH_SERVICE_H_
