#include "server/rpc/transport/trace.h"

#include "formats/trace_context.h"

namespace logitd::rpc {

Trace ReadTrace(const http2::HeaderList& metadata) {
  Trace trace;
  int ids = 0;
  int parents = 0;
  for (size_t i = 0; i < metadata.size(); ++i) {
    const http2::Field field = metadata[i];
    if (field.name == kRequestId && ++ids == 1) trace.request_id = field.value;
    if (field.name == kTraceparent && ++parents == 1) trace.traceparent = field.value;
  }
  if (ids != 1 || !formats::IsRequestId(trace.request_id)) trace.request_id.clear();
  if (parents != 1 || !formats::IsTraceparent(trace.traceparent)) trace.traceparent.clear();
  return trace;
}

}  // namespace logitd::rpc
