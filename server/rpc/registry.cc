#include "server/rpc/registry.h"

#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace logitd::rpc {

std::shared_ptr<ServerCall> Registry::Start(http2::Stream* stream,
                                            const CallTracker& tracker) const {
  if (RefuseIfNoCall(stream, tracker)) return nullptr;
  const std::string_view path = stream->headers().Find(":path");
  const auto make = methods_.find(absl::string_view(path.data(), path.size()));
  if (make == methods_.end()) {
    EndStream(stream, absl::UnimplementedError(unknown_), tracker, nullptr);
    return nullptr;
  }
  std::shared_ptr<ServerCall> call = make->second(stream);
  call->Start();
  return call;
}

}  // namespace logitd::rpc
