#include "server/rpc/transport/unary_call.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/message.h"

namespace logitd::rpc {

UnaryCall::UnaryCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
                     std::unique_ptr<OpCodec> codec)
    : RequestJob(environment, std::move(codec)),
      context_(context),
      admission_wait_(environment.admission) {}

UnaryCall::~UnaryCall() {
  // Admitted may start the watch after OnDone.
  environment().tracker->receive_watch().Unwatch(&receive_watch_);
}

RawReactor* UnaryCall::Start() {
  self_ = shared_from_this();
  environment().tracker->Add();
  admission_wait_.Enter(DeadlineOf(*context_),
                        [call = self_](absl::StatusOr<engine::Admission::Ticket> ticket) {
                          call->Admitted(std::move(ticket));
                        });
  return this;
}

void UnaryCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (!ticket.ok()) return Finish(ticket.status());
  receive_ticket_ = *std::move(ticket);
  environment().tracker->receive_watch().Watch(&receive_watch_, [weak_call = weak_from_this()] {
    if (auto call = weak_call.lock()) {
      call->Finish(call->environment().tracker->MessageLateError());
    }
  });
  Read();
}

bool UnaryCall::Read() {
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
  if (end) SendEnd();
  return !end;
}

// Reads the one message, then looks for the end of the stream while the job runs. A generated stub
// sends both at once. A peer that sends a second message gets the code that gRPC's status code
// table prescribes.
void UnaryCall::OnReadDone(bool ok) {
  if (have_message_) {
    if (ok) {
      Finish(absl::UnimplementedError(
          "request: got a second message on a unary method, allowed exactly one"));
    }
    return;
  }
  environment().tracker->receive_watch().Unwatch(&receive_watch_);
  if (!ok) return FinishWithoutMessage();
  have_message_ = true;
  if (absl::Status status = CheckNotCompressed(context_); !status.ok()) return Finish(status);
  grpc::ByteBuffer message;
  message.Swap(&in_);
  if (Read()) Process(&message);
}

void UnaryCall::Process(grpc::ByteBuffer* message) {
  receive_ns_ = age_ns();
  if (absl::Status status = Take(message, DeadlineOf(*context_)); !status.ok()) {
    return Finish(status);
  }
  SetTicket(std::move(receive_ticket_));
  Submit(shared_from_this());
}

void UnaryCall::Done(const absl::Status& status, const engine::JobAnswer& answer,
                     const engine::JobTimes& times) {
  if (!status.ok()) return Finish(status);
  if (dropped()) return;
  grpc::ByteBuffer response = Encode(answer, receive_ns_, times);
  Conclude(&response);
  Finish(status, std::move(response));
}

void UnaryCall::Finish(const absl::Status& status, grpc::ByteBuffer response) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    status_ = environment().tracker->EndStatus(status, context_);
    out_.Swap(&response);
  }
  Count(status.code());
  bool end = false;
  {
    absl::MutexLock lock(&mutex_);
    may_end_ = true;
    end = ClaimEnd();
  }
  if (end) SendEnd();
}

// The peer half-closed without a message, or the call is gone and no peer sees this status. OnDone
// knows which, and counts it.
void UnaryCall::FinishWithoutMessage() {
  bool end = false;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = no_message_ = may_end_ = true;
    status_ = ToGrpc(NoMessageError());
    end = ClaimEnd();
  }
  if (end) SendEnd();
}

bool UnaryCall::ClaimEnd() {
  if (ended_ || !may_end_ || starting_reads_ > 0) return false;
  ended_ = true;
  return true;
}

void UnaryCall::SendEnd() {
  if (status_.ok()) {
    // Started before the write: the call may be over right after it.
    environment().tracker->peer_watch().Watch(&peer_watch_, [weak_call = weak_from_this()] {
      if (auto call = weak_call.lock()) call->TryCancel();
    });
    StartWriteAndFinish(&out_, grpc::WriteOptions(), status_);
  } else {
    RawReactor::Finish(status_);
  }
}

void UnaryCall::TryCancel() {
  absl::MutexLock lock(&mutex_);
  if (!done_) context_->TryCancel();
}

void UnaryCall::OnCancel() {
  Finish(absl::CancelledError("call cancelled"));
  admission_wait_.Abandon();
  Drop();
}

void UnaryCall::OnDone() {
  bool no_message = false;
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
    no_message = no_message_;
  }
  if (no_message) {
    Count(dropped() ? absl::StatusCode::kCancelled : absl::StatusCode::kUnimplemented);
  }
  CallTracker* const tracker = environment().tracker;
  tracker->peer_watch().Unwatch(&peer_watch_);
  self_.reset();  // may delete this
  tracker->Remove();
}

}  // namespace logitd::rpc
