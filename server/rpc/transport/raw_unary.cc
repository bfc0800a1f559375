#include "server/rpc/transport/raw_unary.h"

#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/server_context.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::rpc {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

int CallTracker::alive() const {
  absl::MutexLock lock(&mutex_);
  return alive_;
}

bool CallTracker::WaitNone(absl::Time deadline) const {
  absl::MutexLock lock(&mutex_);
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return alive_ == 0; };
  return mutex_.AwaitWithDeadline(absl::Condition(&none), deadline);
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

RawUnaryCall::RawUnaryCall(grpc::CallbackServerContext* context, CallTracker* tracker)
    : context_(context), tracker_(tracker) {}

RawUnaryCall::~RawUnaryCall() {
  // A Receive that came after OnDone has been watched in vain.
  tracker_->peer_watch_.Unwatch(&peer_watch_);
}

absl::Time RawUnaryCall::deadline() const { return DeadlineOf(*context_); }

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  return deadline == std::chrono::system_clock::time_point::max() ? absl::InfiniteFuture()
                                                                  : absl::FromChrono(deadline);
}

void RawUnaryCall::Start() {
  self_ = shared_from_this();
  {
    absl::MutexLock lock(&tracker_->mutex_);
    ++tracker_->alive_;
  }
  OnHeaders();
}

bool RawUnaryCall::Read() {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return false;
    ++starting_reads_;
  }
  StartRead(&in_);
  bool end = false;
  {
    absl::MutexLock lock(&mutex_);
    --starting_reads_;
    end = ClaimEnd();
  }
  if (end) FinishNow();
  return !end;
}

bool RawUnaryCall::ClaimEnd() {
  if (ended_ || !may_end_ || starting_reads_ > 0) return false;
  ended_ = true;
  return true;
}

void RawUnaryCall::Receive() {
  tracker_->peer_watch_.Watch(
      &peer_watch_, [call = weak_from_this(), timeout = tracker_->peer_watch_.timeout()] {
        if (auto alive = call.lock()) {
          alive->Finish(absl::DeadlineExceededError(absl::StrFormat(
              "message not received within %s of being asked for", absl::FormatDuration(timeout))));
        }
      });
  Read();
}

void RawUnaryCall::Finish(const absl::Status& status, grpc::ByteBuffer response,
                          absl::Duration retry_delay) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    status_ = ToGrpc(status);
    out_.Swap(&response);
    if (absl::IsResourceExhausted(status) && retry_delay > absl::ZeroDuration()) {
      context_->AddTrailingMetadata("grpc-retry-pushback-ms",
                                    absl::StrCat(absl::ToInt64Milliseconds(retry_delay)));
    }
  }
  OnFinish(status.code());
  bool end = false;
  {
    absl::MutexLock lock(&mutex_);
    may_end_ = true;
    end = ClaimEnd();
  }
  if (end) FinishNow();
}

void RawUnaryCall::FinishNow() {
  if (status_.ok()) {
    // Started before the write: afterwards the call may be over.
    tracker_->peer_watch_.Watch(&peer_watch_, [call = weak_from_this()] {
      if (auto alive = call.lock()) alive->TryCancel();
    });
    StartWriteAndFinish(&out_, grpc::WriteOptions(), status_);
  } else {
    ServerBidiReactor::Finish(status_);
  }
}

// Half-closed without a message; or the call is gone, and then nobody sees this status. Which, is
// known at the call's end.
void RawUnaryCall::FinishWithoutMessage() {
  bool end = false;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = silent_ = may_end_ = true;
    status_ = ToGrpc(
        absl::UnimplementedError("no request message on a unary method: exactly one is required"));
    end = ClaimEnd();
  }
  if (end) FinishNow();
}

// Reads the one message, then looks for the end of the stream behind it while the message is being
// worked on. An honest unary stub sends both at once; a peer that sends a second message gets what
// the gRPC status code table prescribes.
void RawUnaryCall::OnReadDone(bool ok) {
  if (have_message_) {
    if (ok) {
      Finish(absl::UnimplementedError(
          "a second request message on a unary method: exactly one is allowed"));
    }
    return;
  }
  tracker_->peer_watch_.Unwatch(&peer_watch_);
  if (!ok) {
    FinishWithoutMessage();
    return;
  }
  have_message_ = true;
  grpc::ByteBuffer message;
  message.Swap(&in_);
  if (!Read()) return;
  OnMessage(&message);
}

void RawUnaryCall::OnCancel() {
  {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
  }
  Finish(absl::CancelledError("call cancelled"));
  OnGone();
}

void RawUnaryCall::TryCancel() {
  absl::MutexLock lock(&mutex_);
  if (!done_) context_->TryCancel();
}

void RawUnaryCall::OnDone() {
  bool silent = false;
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
    silent = silent_;
    gone = gone_;
  }
  if (silent) OnFinish(gone ? absl::StatusCode::kCancelled : absl::StatusCode::kUnimplemented);
  tracker_->peer_watch_.Unwatch(&peer_watch_);
  CallTracker* const tracker = tracker_;
  self_.reset();  // may delete this
  absl::MutexLock lock(&tracker->mutex_);
  --tracker->alive_;
}

void RawUnaryService::AddRawUnary(const std::string& method, Factory factory) {
  AddRawStream(method,
               [factory = std::move(factory)](grpc::CallbackServerContext* context) -> Reactor* {
                 std::shared_ptr<RawUnaryCall> call = factory(context);
                 call->Start();
                 return call.get();
               });
}

void RawUnaryService::AddRawStream(const std::string& method,
                                   std::function<Reactor*(grpc::CallbackServerContext*)> start) {
  names_.push_back(std::make_unique<std::string>(method));
  AddMethod(new grpc::internal::RpcServiceMethod(
      names_.back()->c_str(), grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
  MarkMethodRawCallback(static_cast<int>(names_.size()) - 1,
                        new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>(
                            std::move(start)));
}

}  // namespace logitd::rpc
