#include "server/rpc/transport/trace.h"

#include <iterator>

#include "formats/trace_context.h"

namespace logitd::rpc {
namespace {

// The value if the call has exactly one and it is well-formed.
std::string Read(const grpc::CallbackServerContext& context, const char* name,
                 bool (*well_formed)(std::string_view)) {
  const auto [first, end] = context.client_metadata().equal_range(name);
  if (first == end || std::next(first) != end) return "";
  const std::string_view value(first->second.data(), first->second.size());
  return well_formed(value) ? std::string(value) : "";
}

}  // namespace

Trace ReadAndEchoTrace(grpc::CallbackServerContext* context) {
  Trace trace = {.request_id = Read(*context, kRequestId, &formats::IsRequestId),
                 .traceparent = Read(*context, kTraceparent, &formats::IsTraceparent)};
  if (!trace.request_id.empty()) context->AddTrailingMetadata(kRequestId, trace.request_id);
  if (!trace.traceparent.empty()) context->AddTrailingMetadata(kTraceparent, trace.traceparent);
  return trace;
}

}  // namespace logitd::rpc
