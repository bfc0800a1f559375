#include "server/rpc/transport/call_tracker.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/load.h"

namespace logitd::rpc {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  return deadline == std::chrono::system_clock::time_point::max() ? absl::InfiniteFuture()
                                                                  : absl::FromChrono(deadline);
}

int CallTracker::alive() const {
  absl::MutexLock lock(&mutex_);
  return alive_;
}

void CallTracker::Add() {
  absl::MutexLock lock(&mutex_);
  ++alive_;
}

void CallTracker::Remove() {
  absl::MutexLock lock(&mutex_);
  --alive_;
}

void CallTracker::Add(const std::weak_ptr<DrainedCall>& call) {
  bool draining = false;
  {
    absl::MutexLock lock(&mutex_);
    ++alive_;
    drained_.insert(call);
    draining = draining_;
  }
  if (!draining) return;
  if (auto drained = call.lock()) drained->OnDrain();
}

void CallTracker::Remove(const std::weak_ptr<DrainedCall>& call) {
  absl::MutexLock lock(&mutex_);
  --alive_;
  drained_.erase(call);
}

void CallTracker::Drain() {
  std::vector<std::shared_ptr<DrainedCall>> calls;
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    for (const auto& drained : drained_) {
      if (auto call = drained.lock()) calls.push_back(std::move(call));
    }
  }
  for (const auto& call : calls) call->OnDrain();
}

absl::Status CallTracker::MessageLateError() const {
  return absl::DeadlineExceededError(
      absl::StrFormat("message not received within %s of being asked for",
                      absl::FormatDuration(peer_watch_.timeout())));
}

grpc::Status CallTracker::EndStatus(const absl::Status& status,
                                    grpc::CallbackServerContext* context) const {
  if (absl::IsResourceExhausted(status)) {
    const absl::Duration delay = engine::RetryDelayOf(status).value_or(retry_delay_);
    context->AddTrailingMetadata("grpc-retry-pushback-ms",
                                 absl::StrCat(absl::ToInt64Milliseconds(delay)));
  }
  return ToGrpc(status);
}

}  // namespace logitd::rpc
