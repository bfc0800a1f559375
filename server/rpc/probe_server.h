// A server for probes only: grpc.health.v1, whatever the load.
#ifndef LOGITD_SERVER_RPC_PROBE_SERVER_H_
#define LOGITD_SERVER_RPC_PROBE_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/http2/server.h"
#include "server/rpc/health_service.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/call_tracker.h"

namespace logitd::rpc {

// It has a loop, connections and limits of its own, all small, and no TLS: nothing that peers of the
// other server hold or do keeps a probe from its answer. Methods from one thread.
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

#endif  // LOGITD_SERVER_RPC_PROBE_SERVER_H_
