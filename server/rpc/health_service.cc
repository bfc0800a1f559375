#include "server/rpc/health_service.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "grpc/health/v1/health.pb.h"
#include "kernels/status_macros.h"

namespace logitd::rpc {
namespace {

using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;

constexpr PlainMethod kCheck = {.path = "/grpc.health.v1.Health/Check", .open = true};
constexpr PlainMethod kWatch = {.path = "/grpc.health.v1.Health/Watch", .open = true};

HealthCheckResponse::ServingStatus StatusOf(std::optional<bool> serving) {
  if (!serving.has_value()) return HealthCheckResponse::SERVICE_UNKNOWN;
  return *serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

http2::ServerOptions OptionsOfProbes(int loop) {
  http2::ServerOptions options = {.loops = 1,
                                  .first_loop = loop,
                                  .max_connections = ProbeServer::kMaxConnections,
                                  .max_held_bytes = int64_t{8} << 20};
  options.limits.max_streams = 16;
  options.times.max_idle = absl::Minutes(5);
  return options;
}

}  // namespace

// Sends the status of one service when it begins, and whenever it changes.
class HealthService::WatchCall final : public PlainCall {
 public:
  WatchCall(http2::Stream* stream, HealthService* health)
      : PlainCall(stream, health->environment_, kWatch), health_(health) {}

  // On the loop.
  void Look() {
    if (!asked_ || finished()) return;
    const auto status = StatusOf(service_.has_value() ? health_->Get(*service_) : std::nullopt);
    if (status == sent_) return;
    sent_ = status;
    HealthCheckResponse response;
    response.set_status(status);
    Send(response);
  }

 private:
  void OnRequest(std::string_view message) override {
    HealthCheckRequest request;
    if (absl::Status status = Parse(message, &request); !status.ok()) return End(status);
    asked_ = true;
    if (health_->Get(request.service()).has_value()) service_ = request.service();
    {
      absl::MutexLock lock(&health_->mutex_);
      health_->watches_.emplace(this, weak_from_this());
    }
    Look();
  }
  void OnOver() override {
    {
      absl::MutexLock lock(&health_->mutex_);
      health_->watches_.erase(this);
    }
    PlainCall::OnOver();
  }

  HealthService* const health_;
  bool asked_ = false;
  std::optional<std::string> service_;  // nullopt: an unknown one, whose name is not kept
  std::optional<HealthCheckResponse::ServingStatus> sent_;
};

void HealthService::Register(Registry* registry) {
  AddUnary<HealthCheckRequest, HealthCheckResponse>(
      kCheck, environment_, registry,
      [this](const HealthCheckRequest& request, HealthCheckResponse* response) {
        const std::optional<bool> serving = Get(request.service());
        if (!serving.has_value()) return absl::NotFoundError("service: got an unknown name");
        response->set_status(StatusOf(serving));
        return absl::OkStatus();
      });
  registry->Add(std::string(kWatch.path), [this](http2::Stream* stream) {
    return std::make_shared<WatchCall>(stream, this);
  });
}

void HealthService::Set(const std::string& service, bool serving) {
  std::vector<std::shared_ptr<ServerCall>> watches;
  {
    absl::MutexLock lock(&mutex_);
    const auto [at, added] = serving_.emplace(service, serving);
    if (!added && at->second == serving) return;
    at->second = serving;
    for (const auto& [_, watch] : watches_) {
      if (auto call = watch.lock()) watches.push_back(std::move(call));
    }
  }
  for (const auto& call : watches) {
    auto* const watch = static_cast<WatchCall*>(call.get());
    call->OnLoop([watch] { watch->Look(); });
  }
}

std::optional<bool> HealthService::Get(const std::string& service) const {
  absl::MutexLock lock(&mutex_);
  const auto at = serving_.find(service);
  return at == serving_.end() ? std::nullopt : std::optional<bool>(at->second);
}

ProbeServer::ProbeServer(const CallTracker& tracker, int loop, HealthService* health)
    : tracker_(tracker), server_(OptionsOfProbes(loop), this) {
  health->Register(&registry_);
}

absl::Status ProbeServer::Listen(absl::Span<const std::string> addresses,
                                 std::optional<mode_t> socket_mode) {
  LOGITD_RETURN_IF_ERROR(server_.Listen(addresses, socket_mode));
  server_.Start();
  return absl::OkStatus();
}

}  // namespace logitd::rpc
