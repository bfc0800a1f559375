#include "server/rpc/health_service.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "grpc/health/v1/health.pb.h"

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

}  // namespace

// Sends the status of one service when it begins, and whenever it changes.
class HealthService::WatchCall final : public PlainCall {
 public:
  WatchCall(http2::Stream* stream, HealthService* health)
      : PlainCall(stream, health->environment_, kWatch), health_(health) {}

  // On the loop.
  void Look() {
    if (!service_.has_value() || finished()) return;
    const auto status = StatusOf(health_->Get(*service_));
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
    service_ = request.service();
    {
      absl::MutexLock lock(&health_->mutex_);
      health_->watches_.emplace(this, weak_from_this());
    }
    Look();
  }
  int64_t kept_bytes() const override { return static_cast<int64_t>(service_->capacity()); }
  void OnGone() override { health_->Forget(this); }

  HealthService* const health_;
  std::optional<std::string> service_;
  std::optional<HealthCheckResponse::ServingStatus> sent_;
};

void HealthService::Register(Registry* registry) {
  check_ = UnaryPlainCall::Parsed<HealthCheckRequest, HealthCheckResponse>(
      [this](const HealthCheckRequest& request, HealthCheckResponse* response) {
        const std::optional<bool> serving = Get(request.service());
        if (!serving.has_value()) return absl::NotFoundError("service: got an unknown name");
        response->set_status(StatusOf(serving));
        return absl::OkStatus();
      });
  registry->Add(std::string(kCheck.path), [this](http2::Stream* stream) {
    return std::make_shared<UnaryPlainCall>(stream, environment_, kCheck, check_);
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

void HealthService::Forget(const WatchCall* call) {
  absl::MutexLock lock(&mutex_);
  watches_.erase(call);
}

}  // namespace logitd::rpc
