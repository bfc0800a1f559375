#include "server/rpc/registry.h"

#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace logitd::rpc {
namespace {

// Ends a stream that is no gRPC call, or that must be refused. False: it is one.
bool RefuseIfNoCall(http2::Stream* stream, const CallTracker& tracker) {
  const http2::HeaderList& headers = stream->headers();
  const auto refuse = [&](engine::Refusal reason, const std::string& text) {
    tracker.CountRefused(reason);
    EndStream(stream, absl::ResourceExhaustedError(text), tracker, nullptr);
    return true;
  };
  if (stream->refusal() == http2::Refusal::kHeaderList) {
    return refuse(engine::Refusal::kHeaderList,
                  absl::StrFormat("metadata: got %d bytes, allowed %d", stream->header_list_bytes(),
                                  stream->max_header_list()));
  }
  if (stream->refusal() == http2::Refusal::kMemory) {
    return refuse(engine::Refusal::kConnectionBytes,
                  "connections hold as much memory as they may; retry later");
  }
  if (headers.Find(":method") != "POST") {
    const http2::Field fields[] = {{":status", "405"}, {"allow", "POST"}, {"content-length", "0"}};
    stream->End(fields);
    return true;
  }
  const std::string_view type = headers.Find("content-type");
  if (type.starts_with(kContentType)) {
    const std::string_view rest = type.substr(kContentType.size());
    if (rest.empty() || rest[0] == '+' || rest[0] == ';') return false;
  }
  const http2::Field fields[] = {{":status", "415"}, {"content-length", "0"}};
  stream->End(fields);
  return true;
}

}  // namespace

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
