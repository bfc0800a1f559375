// Lets the door refuse calls like one that the load has just refused.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_TURNED_AWAY_H_
#define LOGITD_SERVER_RPC_TRANSPORT_TURNED_AWAY_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/engine/load.h"
#include "server/engine/metrics.h"
#include "server/rpc/transport/call_headers.h"

namespace logitd::rpc {

class CallLog;

// Calls that the door refuses count, and are logged, as if they had come here. Thread-safe.
class TurnedAway : public std::enable_shared_from_this<TurnedAway> {
 public:
  // `metrics` and `log` live until End.
  TurnedAway(engine::Metrics* metrics, const CallLog* log) : metrics_(metrics), log_(log) {}

  // The call was refused with `status`, which stands for the calls that are `alike`. Those of its
  // connection with the same method and identity end in the same way from here on. `op`: the
  // method's; `max_message_bytes`: a call may state no more.
  void Tell(const grpc::CallbackServerContext& context, const CallHeaders& headers,
            std::string_view method, const engine::OpTraits& op, int64_t max_message_bytes,
            const engine::Load::Alike& alike, const absl::Status& status);

  // Nothing is counted or logged from here on: connections outlive the server.
  void End();

 private:
  class Events;

  // `request_id` and `traceparent`: empty if the call has none.
  void Count(const Events& events, const std::string& request_id, const std::string& traceparent);

  absl::Mutex mutex_;
  engine::Metrics* metrics_ ABSL_GUARDED_BY(mutex_);  // null: ended
  const CallLog* log_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_TURNED_AWAY_H_
