// Which object serves a call of which path.
#ifndef LOGITD_SERVER_RPC_REGISTRY_H_
#define LOGITD_SERVER_RPC_REGISTRY_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/http2/stream.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

// Filled before the server starts; then any thread may look.
class Registry {
 public:
  // Makes the call of a stream, which Start has not seen.
  using Make = std::function<std::shared_ptr<ServerCall>(http2::Stream* stream)>;

  // `unknown`: what a caller of another path is told.
  explicit Registry(std::string unknown = "unknown service or method")
      : unknown_(std::move(unknown)) {}

  // `path`: "/logitd.v1.Sampler/TopK".
  void Add(std::string path, Make make) { methods_[std::move(path)] = std::move(make); }
  // Starts the call of a stream whose header list is there. Null: the stream has been ended,
  // because it is no gRPC call, must be refused, or nobody serves its path.
  std::shared_ptr<ServerCall> Start(http2::Stream* stream, const CallTracker& tracker) const;

 private:
  const std::string unknown_;
  absl::flat_hash_map<std::string, Make> methods_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_REGISTRY_H_
