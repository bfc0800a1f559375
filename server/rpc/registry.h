// Which object serves a call of which path.
#ifndef LOGITD_SERVER_RPC_REGISTRY_H_
#define LOGITD_SERVER_RPC_REGISTRY_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/http2/stream.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

// Filled before the server starts; then any thread may look.
class Registry {
 public:
  // Makes the call of a stream, which Start has not seen.
  using Make = std::function<std::shared_ptr<ServerCall>(http2::Stream* stream)>;

  // `path`: "/logitd.v1.Sampler/TopK".
  void Add(std::string path, Make make) { methods_[std::move(path)] = std::move(make); }
  // Starts the call of a stream. Null: the stream has been ended, because it is no call that is served.
  std::shared_ptr<ServerCall> Serve(http2::Stream* stream, const CallTracker& tracker) const {
    if (RefuseIfNoCall(stream, tracker)) return nullptr;
    const std::string_view path = stream->headers().Find(":path");
    const auto it = methods_.find(absl::string_view(path.data(), path.size()));
    if (it == methods_.end()) {
      EndStream(stream, absl::UnimplementedError("unknown service or method"), tracker, nullptr);
      return nullptr;
    }
    std::shared_ptr<ServerCall> call = it->second(stream);
    call->Start();
    return call;
  }

 private:
  absl::flat_hash_map<std::string, Make> methods_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_REGISTRY_H_
