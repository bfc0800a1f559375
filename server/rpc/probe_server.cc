#include "server/rpc/probe_server.h"

namespace logitd::rpc {
namespace {

http2::ServerOptions Options(int loop) {
  http2::ServerOptions options = {.loops = 1,
                                  .first_loop = loop,
                                  .max_connections = ProbeServer::kMaxConnections,
                                  .max_held_bytes = int64_t{8} << 20};
  options.limits.max_streams = 16;
  options.times.max_idle = absl::Minutes(5);
  return options;
}

}  // namespace

ProbeServer::ProbeServer(const CallTracker& tracker, int loop, HealthService* health)
    : tracker_(tracker), server_(Options(loop), this) {
  health->Register(&registry_);
}

absl::Status ProbeServer::Listen(absl::Span<const std::string> addresses,
                                 std::optional<mode_t> socket_mode) {
  if (absl::Status status = server_.Listen(addresses, socket_mode); !status.ok()) return status;
  server_.Start();
  return absl::OkStatus();
}

}  // namespace logitd::rpc
