// What every kind of call of one server shares.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CALL_TRACKER_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CALL_TRACKER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/rpc/transport/watchdog.h"

namespace logitd::rpc {

grpc::Status ToGrpc(const absl::Status& status);
absl::Time DeadlineOf(const grpc::CallbackServerContext& context);  // InfiniteFuture: none

// A call that a drain must end, because it may otherwise stay open.
class DrainedCall {
 public:
  virtual ~DrainedCall() = default;
  virtual void OnDrain() = 0;
  // The identities have changed: end, if the caller may not call any longer.
  virtual void OnIdentities() {}
};

// Counts the calls that are alive and knows their time limits. Thread-safe. Outlives its calls.
class CallTracker {
 public:
  // `peer_timeout` starts when a message is asked for, and starts again when an answer is sent.
  // `retry_delay`: what a caller that gets RESOURCE_EXHAUSTED is told to wait, where the status
  // itself does not say (engine::WithRetryDelay).
  CallTracker(absl::Duration peer_timeout, absl::Duration retry_delay)
      : retry_delay_(retry_delay), receive_watch_(peer_timeout), peer_watch_(peer_timeout) {}

  int alive() const;

  // A call is alive from Add to Remove.
  void Add();
  void Remove();
  // The same for a call that is told to drain: at once if the server drains already. The tracker
  // compares owners, not addresses: the object may be gone at Remove, and its address used again.
  void Add(const std::weak_ptr<DrainedCall>& call);
  void Remove(const std::weak_ptr<DrainedCall>& call);
  // A message that is being received has at most `receive_timeout` from here on.
  void Drain(absl::Duration receive_timeout);

  // The identities have changed.
  void RecheckIdentities();

  Watchdog& receive_watch() { return receive_watch_; }  // of messages
  Watchdog& peer_watch() { return peer_watch_; }        // of answers
  // For a call whose message did not come in time: DEADLINE_EXCEEDED, or UNAVAILABLE in a drain.
  absl::Status MessageLateError() const;
  // `status` as the transport ends a call with it. RESOURCE_EXHAUSTED adds the trailing metadata
  // `grpc-retry-pushback-ms`, which tells the caller when to retry.
  grpc::Status EndStatus(const absl::Status& status, grpc::CallbackServerContext* context) const;

 private:
  const absl::Duration retry_delay_;
  std::vector<std::shared_ptr<DrainedCall>> Drained() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  int alive_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::weak_ptr<DrainedCall>, std::owner_less<>> drained_ ABSL_GUARDED_BY(mutex_);
  Watchdog receive_watch_;
  Watchdog peer_watch_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CALL_TRACKER_H_
