#include "server/rpc/transport/unary_call.h"

#include <utility>

#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/turn_jobs.h"

namespace logitd::rpc {

UnaryCall::UnaryCall(http2::Stream* stream, std::string_view method,
                     const CallEnvironment& environment, const Access& access,
                     std::unique_ptr<OpCodec> codec)
    : ServerCall(stream, environment.tracker),
      RequestJob(environment, std::move(codec)),
      method_(method),
      access_(access),
      admission_wait_(environment.admission),
      done_task_(this) {
  PayForAnswers();
}

void UnaryCall::Begin() {
  environment().metrics->Add(engine::Gauge::kOpenCalls, 1);
  if (absl::Status status = CheckHeaders(); !status.ok()) return End(status);
  if (headers_.stated_bytes.has_value()) return EnterAdmission(*headers_.stated_bytes);
  StartReceiveTimer();
}

absl::Status UnaryCall::CheckHeaders() {
  absl::Status status = headers_.Read(*this, max_message_bytes());
  if (!status.ok()) {
    environment().metrics->CountRefused(engine::Refusal::kInvalid, engine::Proof::kNone);
    return status;
  }
  status = headers_.Authorize(*this, environment().identities, access_, environment().metrics);
  if (!status.ok()) return status;
  if (environment().admission->draining()) {
    environment().metrics->CountRefused(engine::Refusal::kDraining, headers_.caller.proof);
    return engine::DrainingError();
  }
  return environment().load->Begin({.caller = headers_.caller,
                                    .op = &op(),
                                    .bytes = headers_.stated_bytes,
                                    .deadline = headers_.deadline},
                                   &work_);
}

void UnaryCall::EnterAdmission(int64_t bytes) {
  StopReceiveTimer();  // the peer may not send while the call waits
  asked_ns_ = ServerCall::age_ns();
  engine::RoomAsk ask = {.caller = headers_.caller,
                         .deadline = headers_.deadline,
                         .bytes = headers_.RoomFor(bytes),
                         .receiving_bytes = work_.expected_bytes()};
  if (Seen().size() < static_cast<size_t>(bytes)) {
    ask.received_bytes = ReceivedBytesOf(connection());
    ask.too_slow = [weak = weak_from_this()](const absl::Status& why) {
      const auto call = std::static_pointer_cast<UnaryCall>(weak.lock());
      if (call == nullptr) return;
      // A peer that does not read its status keeps what it has sent. Then the stream is reset.
      call->OnLoop([call = call.get(), why] { call->finished() ? call->Reset() : call->End(why); });
    };
  }
  if (auto answer = environment().admission->TryEnter(ask); answer.has_value()) {
    return Admitted(*std::move(answer));
  }
  admission_wait_.Enter(std::move(ask), [self = shared_from_this(),
                                         this](absl::StatusOr<engine::Admission::Ticket> ticket) {
    OnLoop([this, ticket = std::move(ticket)]() mutable { Admitted(std::move(ticket)); });
  });
}

void UnaryCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (finished()) return;
  if (!ticket.ok()) return End(ticket.status());
  ticket_ = *std::move(ticket);
  wait_ns_ = ServerCall::age_ns() - asked_ns_;
  environment().metrics->CountPhase(engine::CallPhase::kAdmission,
                                    static_cast<double>(wait_ns_) * 1e-9);
  StartReceiveTimer();
  if (headers_.stated_bytes.has_value()) Grant(static_cast<size_t>(*headers_.stated_bytes));
  ReceiveIfAdmitted();
}

void UnaryCall::OnMessageSize(size_t bytes) {
  if (have_message_) {  // the code that gRPC's status code table prescribes
    return End(absl::UnimplementedError(
        "request: got a second message on a unary method, allowed exactly one"));
  }
  const auto size = static_cast<int64_t>(bytes);
  if (absl::Status status = CheckMessageSize(size, headers_); !status.ok()) return End(status);
  message_size_ = bytes;
  if (headers_.stated_bytes.has_value()) return ReceiveIfAdmitted();
  EnterAdmission(size);
}

void UnaryCall::ReceiveIfAdmitted() {
  if (!ticket_.has_value() || !message_size_.has_value() || finished()) return;
  Grant(*message_size_);
  Receive(TakeMemory(*message_size_, Seen(), environment().places));
}

void UnaryCall::OnMessage(MessageMemory message) {
  have_message_ = true;
  receive_ns_ = ServerCall::age_ns();
  environment().metrics->CountPhase(engine::CallPhase::kReceive,
                                    static_cast<double>(receive_ns_ - wait_ns_) * 1e-9);
  const auto bytes = static_cast<int64_t>(message.bytes.size());
  absl::Status status = Take(std::move(message), headers_);
  if (status.ok()) status = work_.Arrived(work_bytes(bytes), spec());
  if (!status.ok()) return End(status);
  if (ticket_->Received(needed_bytes())) return SubmitWith(*std::move(ticket_));
  // The answer needs more than the message.
  admission_wait_.Enter(
      {.caller = headers_.caller,
       .deadline = headers_.deadline,
       .bytes = needed_bytes(),
       .received = true},
      [self = shared_from_this(), this](absl::StatusOr<engine::Admission::Ticket> ticket) {
        OnLoop([this, ticket = std::move(ticket)]() mutable {
          if (finished()) return;
          if (!ticket.ok()) return End(ticket.status());
          ticket->Received(needed_bytes());
          SubmitWith(*std::move(ticket));
        });
      });
}

void UnaryCall::SubmitWith(engine::Admission::Ticket ticket) {
  SetTicket(std::move(ticket));
  environment().turn_jobs->Add(loop(), std::static_pointer_cast<UnaryCall>(shared_from_this()));
}

void UnaryCall::OnHalfClose() {
  if (!have_message_) End(TruncatedError());
}

void UnaryCall::Done(const absl::Status& status, const engine::JobAnswer& answer,
                     const engine::JobTimes& times) {
  if (!status.ok()) {
    Fail();
    return done_task_.Post(shared_from_this(), status, {}, times);
  }
  if (dropped()) return;
  const int64_t begun_ns = ServerCall::age_ns();
  EncodedMessage message = Encode(answer, receive_ns_, times);
  Conclude(&message);
  const int64_t encode_ns = ServerCall::age_ns() - begun_ns;
  WriteShared(answer, [this, self = shared_from_this(), message = std::move(message), times,
                       encode_ns](const absl::Status& written) mutable {
    done_task_.Post(std::move(self), written, std::move(message), times, encode_ns);
  });
}

void UnaryCall::DoneTask::Post(std::shared_ptr<ServerCall> self, absl::Status status,
                               EncodedMessage message, const engine::JobTimes& times,
                               int64_t encode_ns) {
  self_ = std::move(self);
  status_ = std::move(status);
  message_ = std::move(message);
  times_ = times;
  encode_ns_ = encode_ns;
  if (call_->loop().IsCurrent()) return Run();
  call_->loop().Post(this);
}

void UnaryCall::DoneTask::Run() {
  const std::shared_ptr<ServerCall> self = std::move(self_);
  call_->times_ = times_;
  call_->encode_ns_ = encode_ns_;
  call_->EndWith(status_, status_.ok() ? std::move(message_) : EncodedMessage());
}

void UnaryCall::EndWith(const absl::Status& status, EncodedMessage message) {
  if (finished()) return;
  code_ = status.code();
  ended_ns_ = ServerCall::age_ns();
  headers_.place = nullptr;  // before the peer knows, and sends its next call
  work_.End(status.ok());
  Count(code_);
  Finish(status, std::move(message));
}

void UnaryCall::OnCancelled(const absl::Status& why) {
  admission_wait_.Abandon();
  Drop();
  if (over() && !finished()) {  // nobody sees a status
    code_ = why.code();
    work_.End(/*complete=*/false);
    headers_.place = nullptr;
    ended_ns_ = ServerCall::age_ns();
    Count(code_);
  } else {
    End(why);
  }
}

void UnaryCall::OnOver() {
  Report();
  if (began()) environment().metrics->Add(engine::Gauge::kOpenCalls, -1);
}

void UnaryCall::Report() {
  const int64_t total_ns = ServerCall::age_ns();
  const int64_t send_ns = total_ns - ended_ns_;
  if (code_ == absl::StatusCode::kOk) {
    environment().metrics->CountPhase(engine::CallPhase::kSend,
                                      static_cast<double>(send_ns) * 1e-9);
  }
  if (!environment().log->Wants(total_ns)) return;
  environment().log->Write({.method = method_,
                            .peer = peer(),
                            .trace = &trace(),
                            .code = code_,
                            .messages = have_message_ ? 1 : 0,
                            .rows = spec().rows(),
                            .received_bytes = received_bytes(),
                            .sent_bytes = sent_bytes(),
                            .total_ns = total_ns,
                            .wait_ns = wait_ns_,
                            .receive_ns = have_message_ ? receive_ns_ - wait_ns_ : 0,
                            .job = times_,
                            .encode_ns = encode_ns_,
                            .send_ns = send_ns});
}

}  // namespace logitd::rpc
