// Lets the door ask the load about calls like one that was just refused.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_TURNED_AWAY_H_
#define LOGITD_SERVER_RPC_TRANSPORT_TURNED_AWAY_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/door/turnstile.h"
#include "server/engine/load.h"
#include "server/engine/metrics.h"
#include "server/rpc/transport/call_headers.h"

namespace logitd::rpc {

class CallLog;

// Calls that the door refuses count, and are logged, as if they had come here. Thread-safe.
class TurnedAway : public std::enable_shared_from_this<TurnedAway> {
 public:
  // All of them live until End.
  TurnedAway(engine::Load* load, engine::Metrics* metrics, const CallLog* log)
      : load_(load), metrics_(metrics), log_(log) {}

  // The load refused the call. From here on the door asks it about the calls of this connection with
  // the same method, identity and priority. `op`: the method's; `max_message_bytes`: a call may state
  // no more.
  void Tell(const grpc::CallbackServerContext& context, const CallHeaders& headers,
            std::string_view method, const engine::OpTraits& op, int64_t max_message_bytes);

  // Nothing is refused, counted or logged from here on: connections outlive the server.
  void End();

 private:
  class LoadJudge;

  std::optional<door::Judge::Verdict> Ask(const LoadJudge& judge, const door::Judge::Call& call);
  // `request_id` and `traceparent`: empty if the call has none.
  void Count(const LoadJudge& judge, engine::Refusal reason, const std::string& request_id,
             const std::string& traceparent);

  absl::Mutex mutex_;
  engine::Load* load_ ABSL_GUARDED_BY(mutex_);  // null: ended
  engine::Metrics* metrics_ ABSL_GUARDED_BY(mutex_);
  const CallLog* log_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_TURNED_AWAY_H_
