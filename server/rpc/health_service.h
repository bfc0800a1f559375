// grpc.health.v1.Health
#ifndef LOGITD_SERVER_RPC_HEALTH_SERVICE_H_
#define LOGITD_SERVER_RPC_HEALTH_SERVICE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/plain_call.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Anybody may ask. Thread-safe.
class HealthService {
 public:
  // `environment` outlives this.
  explicit HealthService(const CallEnvironment& environment);

  // This outlives the registry.
  void Register(Registry* registry);

  // The empty name is the whole server. New names only before the server starts: a watch of an unknown
  // name never learns of it.
  void Set(const std::string& service, bool serving);
  // nullopt: it was never set.
  std::optional<bool> Get(const std::string& service) const;

 private:
  class WatchCall;

  // `serving`: in `serving_`; null: nullopt.
  std::optional<bool> Read(const bool* serving) const;

  const CallEnvironment& environment_;
  const UnaryPlainCall::Serve check_;
  mutable absl::Mutex mutex_;
  std::map<std::string, bool> serving_ ABSL_GUARDED_BY(mutex_);
  std::map<const WatchCall*, std::weak_ptr<ServerCall>> watches_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_HEALTH_SERVICE_H_
