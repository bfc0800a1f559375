// The calls of one server that are not over.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CALL_TRACKER_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CALL_TRACKER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/metrics.h"

namespace logitd::rpc {

class ServerCall;

// Outlives its calls. The methods say who may call them.
class CallTracker {
 public:
  // `peer_timeout`: for a message, from when it is asked for. `retry_delay`: what a caller that
  // gets RESOURCE_EXHAUSTED is told to wait, where the status itself does not say.
  // `metrics`: null: none; otherwise it outlives this.
  CallTracker(absl::Duration peer_timeout, absl::Duration retry_delay, int loops,
              engine::Metrics* metrics = nullptr);

  // Any thread. A call of a ring is alive from Add to Remove; others that count, from Enter to
  // Leave.
  int alive() const;
  void Add() { of_rings_.fetch_add(1, std::memory_order_relaxed); }
  void Remove() { of_rings_.fetch_sub(1, std::memory_order_relaxed); }

  // On the loop of the call.
  void Enter(ServerCall* call);
  void Leave(ServerCall* call);
  // On loop number `loop`: all its calls.
  void ForEach(int loop, absl::FunctionRef<void(ServerCall*)> use);

  // Any thread. From here on a message has at most `receive_timeout`.
  void BeginDrain(absl::Duration receive_timeout);
  absl::Duration message_timeout() const;
  // For a call whose message did not come in time: DEADLINE_EXCEEDED, or UNAVAILABLE in a drain.
  absl::Status LateStatus() const;
  // The time to wait that a caller is told with `status`, a RESOURCE_EXHAUSTED.
  absl::Duration RetryDelay(const absl::Status& status) const;
  // A call was refused before its caller was known.
  void CountRefused(engine::Refusal reason) const;

 private:
  const absl::Duration peer_timeout_;
  const absl::Duration retry_delay_;
  engine::Metrics* const metrics_;
  std::atomic<int> of_rings_ = 0;
  std::atomic<bool> draining_ = false;
  std::atomic<int64_t> drain_ns_ = 0;
  struct alignas(64) Lane {
    ServerCall* first = nullptr;  // the list of its calls
    std::atomic<int> alive = 0;   // those that count
  };
  std::vector<Lane> lanes_;  // by loop
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CALL_TRACKER_H_
