// An entrance for probes: grpc.health.v1 and nothing else.
#ifndef LOGITD_SERVER_RPC_PROBE_SERVER_H_
#define LOGITD_SERVER_RPC_PROBE_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/http2/server.h"
#include "server/rpc/health_service.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Its loop, its connections and what they hold are its own, with small limits. So it answers whatever
// the other connections do. Without TLS and identities.
class ProbeServer final : private http2::ServerEvents {
 public:
  // Connections, about half of them of one origin; and what they may hold.
  static constexpr int64_t kMaxConnections = 64;
  static constexpr int64_t kMaxBytes = int64_t{4} << 20;

  // `environment` and `health` outlive it.
  ProbeServer(const CallEnvironment& environment, HealthService* health);

  // Once. UNAVAILABLE: it cannot listen on `address`.
  absl::Status Start(const std::string& address, std::optional<mode_t> socket_mode);
  const std::string& listening() const { return server_.listening().front(); }

 private:
  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override {
    return registry_.Serve(stream, tracker_);
  }

  CallTracker tracker_;
  CallEnvironment environment_;
  Registry registry_;
  http2::Server server_;  // ends first: its loop uses the others
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_PROBE_SERVER_H_
