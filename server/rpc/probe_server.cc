#include "server/rpc/probe_server.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace logitd::rpc {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);  // for a message, and between calls

http2::ServerOptions Options() {
  http2::ServerOptions options = {.max_connections = ProbeServer::kMaxConnections,
                                  .max_held_bytes = ProbeServer::kMaxBytes};
  options.limits.max_streams = 16;
  options.limits.max_early_bytes = int64_t{64} << 10;
  options.times.preface = options.times.send = options.times.max_idle = kPatience;
  return options;
}

}  // namespace

ProbeServer::ProbeServer(const CallEnvironment& environment, HealthService* health)
    : tracker_(kPatience, /*retry_delay=*/absl::Seconds(1), /*loops=*/1),
      environment_(environment),
      server_(Options(), this) {
  environment_.tracker = &tracker_;
  health->Register(environment_, &registry_);
}

absl::Status ProbeServer::Start(const std::string& address, std::optional<mode_t> socket_mode) {
  const absl::Status status = server_.Listen({address}, socket_mode);
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat("--probe-listen: ", status.message()));
  }
  server_.Start();
  return absl::OkStatus();
}

}  // namespace logitd::rpc
