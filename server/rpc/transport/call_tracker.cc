#include "server/rpc/transport/call_tracker.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/load.h"
#include "server/rpc/transport/call_headers.h"

namespace logitd::rpc {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  // Not context.deadline(), which counts nanoseconds in 64 bits: a deadline 292 years away wraps.
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_REALTIME);
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_REALTIME)) == 0) {
    return absl::InfiniteFuture();
  }
  return absl::FromUnixSeconds(deadline.tv_sec) + absl::Nanoseconds(deadline.tv_nsec);
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

void CallTracker::Drain(absl::Duration receive_timeout) {
  std::vector<std::shared_ptr<DrainedCall>> calls;
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    calls = Drained();
  }
  receive_watch_.Hurry(receive_timeout);
  for (const auto& call : calls) call->OnDrain();
}

void CallTracker::RecheckIdentities() {
  std::vector<std::shared_ptr<DrainedCall>> calls;
  {
    absl::MutexLock lock(&mutex_);
    calls = Drained();
  }
  for (const auto& call : calls) call->OnIdentities();
}

std::vector<std::shared_ptr<DrainedCall>> CallTracker::Drained() const {
  std::vector<std::shared_ptr<DrainedCall>> calls;
  for (const auto& drained : drained_) {
    if (auto call = drained.lock()) calls.push_back(std::move(call));
  }
  return calls;
}

absl::Status CallTracker::MessageLateError() const {
  const std::string timeout = absl::FormatDuration(receive_watch_.timeout());
  {
    absl::MutexLock lock(&mutex_);
    if (draining_) {
      return absl::UnavailableError(absl::StrFormat(
          "the server is draining and did not receive the message within %s", timeout));
    }
  }
  return absl::DeadlineExceededError(
      absl::StrFormat("message not received within %s of being asked for", timeout));
}

grpc::Status CallTracker::EndStatus(const absl::Status& status,
                                    grpc::CallbackServerContext* context) const {
  if (absl::IsResourceExhausted(status)) {
    const absl::Duration delay = engine::RetryDelayOf(status).value_or(retry_delay_);
    context->AddTrailingMetadata(kRetryPushback, absl::StrCat(absl::ToInt64Milliseconds(delay)));
  }
  return ToGrpc(status);
}

}  // namespace logitd::rpc
