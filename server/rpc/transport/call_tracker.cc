#include "server/rpc/transport/call_tracker.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "server/engine/load.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

CallTracker::CallTracker(absl::Duration peer_timeout, absl::Duration retry_delay, int loops,
                         engine::Metrics* metrics)
    : peer_timeout_(peer_timeout),
      retry_delay_(retry_delay),
      metrics_(metrics),
      lanes_(static_cast<size_t>(loops)) {}

int CallTracker::alive() const {
  int alive = of_rings_.load(std::memory_order_relaxed);
  for (const Lane& lane : lanes_) alive += lane.alive.load(std::memory_order_relaxed);
  return alive;
}

void CallTracker::CountRefused(engine::Refusal reason) const {
  if (metrics_ != nullptr) metrics_->CountRefused(reason, engine::Proof::kNone);
}

void CallTracker::Enter(ServerCall* call) {
  Lane& lane = lanes_[static_cast<size_t>(call->loop_->index())];
  if (call->counts()) lane.alive.fetch_add(1, std::memory_order_relaxed);
  call->next_ = lane.first;
  if (lane.first != nullptr) lane.first->previous_ = call;
  lane.first = call;
}

void CallTracker::Leave(ServerCall* call) {
  Lane& lane = lanes_[static_cast<size_t>(call->loop_->index())];
  if (call->next_ != nullptr) call->next_->previous_ = call->previous_;
  (call->previous_ != nullptr ? call->previous_->next_ : lane.first) = call->next_;
  if (call->counts()) lane.alive.fetch_sub(1, std::memory_order_relaxed);
}

void CallTracker::ForEach(int loop, absl::FunctionRef<void(ServerCall*)> use) {
  std::vector<std::shared_ptr<ServerCall>> calls;  // `use` may end any of them
  for (ServerCall* call = lanes_[static_cast<size_t>(loop)].first; call != nullptr;
       call = call->next_) {
    calls.push_back(call->shared_from_this());
  }
  for (const auto& call : calls) use(call.get());
}

void CallTracker::BeginDrain(absl::Duration receive_timeout) {
  drain_ns_ = absl::ToInt64Nanoseconds(receive_timeout);
  draining_ = true;
}

absl::Duration CallTracker::message_timeout() const {
  return draining_ ? std::min(peer_timeout_, absl::Nanoseconds(drain_ns_.load())) : peer_timeout_;
}

absl::Status CallTracker::LateStatus() const {
  const std::string timeout = absl::FormatDuration(message_timeout());
  if (draining_) {
    return absl::UnavailableError(absl::StrFormat(
        "the server is draining and did not receive the message within %s", timeout));
  }
  return absl::DeadlineExceededError(
      absl::StrFormat("message not received within %s of being asked for", timeout));
}

absl::Duration CallTracker::RetryDelay(const absl::Status& status) const {
  return engine::RetryDelayOf(status).value_or(retry_delay_);
}

}  // namespace logitd::rpc
