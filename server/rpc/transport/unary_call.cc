#include "server/rpc/transport/unary_call.h"

#include <utility>

namespace logitd::rpc {
UnaryCall::UnaryCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
                     std::unique_ptr<OpCodec> codec)
    : RawUnaryCall(context, environment.tracker),
      RequestJob(environment, std::move(codec)),
      started_ns_(NowNs()) {}

std::shared_ptr<UnaryCall> UnaryCall::Self() {
  return std::static_pointer_cast<UnaryCall>(shared_from_this());
}

void UnaryCall::OnHeaders() {
  const engine::Admission::WaiterId waiter = environment().admission->Enter(
      deadline(), [call = Self()](absl::StatusOr<engine::Admission::Ticket> ticket) {
        call->Admitted(std::move(ticket));
      });
  if (waiter == 0) return;
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    waiter_ = waiter;
    gone = gone_;
  }
  if (gone) environment().admission->Abandon(waiter);
}

void UnaryCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (!ticket.ok()) {
    Finish(ticket.status(), {}, environment().admission->options().retry_delay);
    return;
  }
  receive_ticket_ = *std::move(ticket);
  Receive();
}

void UnaryCall::OnMessage(grpc::ByteBuffer* message) {
  receive_ns_ = NowNs() - started_ns_;
  if (absl::Status status = Take(message, deadline()); !status.ok()) {
    Finish(status);
    return;
  }
  SetTicket(std::move(receive_ticket_));
  {
    absl::MutexLock lock(&mutex_);
    if (gone_) return;
    submitted_ = true;
  }
  environment().engine->Submit(Self());
  // OnGone came while Submit ran, and may have asked the engine for a job it did not know yet.
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    gone = gone_;
  }
  if (gone) environment().engine->Cancel(*this);
}

void UnaryCall::OnGone() {
  engine::Admission::WaiterId waiter = 0;
  bool submitted = false;
  {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
    waiter = waiter_;
    submitted = submitted_;
  }
  if (waiter != 0) environment().admission->Abandon(waiter);
  if (submitted) environment().engine->Cancel(*this);
}

void UnaryCall::OnFinish(absl::StatusCode code) {
  environment().metrics->CountRequest(codec().op().name, code,
                                      static_cast<double>(NowNs() - started_ns_) * 1e-9);
}

void UnaryCall::Done(const absl::Status& status, const engine::JobAnswer& answer,
                     const engine::JobTimes& times) {
  if (!status.ok()) {
    Finish(status, {}, environment().admission->options().retry_delay);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    if (gone_) return;  // nobody to encode for
  }
  grpc::ByteBuffer encoded =
      codec().Encode(WithTicket(answer),
                     {.receive_ns = receive_ns_, .total_ns = NowNs() - started_ns_, .job = times});
  codec().Conclude(&encoded);
  Finish(status, encoded);
}

}  // namespace logitd::rpc
