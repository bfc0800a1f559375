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
      access_(access) {
  PayForAnswers();
}

void UnaryCall::Begin() {
  environment().metrics->Add(engine::Gauge::kOpenCalls, 1);
  if (absl::Status status = headers_.Read(*this, environment(), access_); !status.ok()) {
    return End(status);
  }
  if (headers_.stated_bytes.has_value()) return AskFor(*headers_.stated_bytes);
  StartReceiveTimer();
}

void UnaryCall::AskFor(int64_t bytes) {
  const absl::Status status = environment().load->Begin(
      {.caller = headers_.caller, .op = &op(), .bytes = bytes, .deadline = headers_.deadline},
      &work_);
  if (!status.ok()) return End(status);
  StopReceiveTimer();  // the peer may not send while the call waits
  asked_ns_ = ServerCall::age_ns();
  const bool whole = Seen().size() >= static_cast<size_t>(bytes);
  AskForRoom(headers_.AskFor(bytes, whole ? nullptr : shared_from_this()));
}

void UnaryCall::AskForRoom(engine::RoomAsk ask) {
  auto entry = environment().admission->Enter(
      std::move(ask), [self = std::static_pointer_cast<UnaryCall>(shared_from_this())](
                          absl::StatusOr<engine::Admission::Ticket> ticket) {
        self->OnLoop([self = self.get(), ticket = std::move(ticket)]() mutable {
          self->Admitted(std::move(ticket));
        });
      });
  waiter_ = entry.waiter;
  if (entry.answer.has_value()) Admitted(*std::move(entry.answer));
}

void UnaryCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  waiter_ = 0;
  if (finished()) return;
  if (!ticket.ok()) return End(ticket.status());
  if (have_message_) return SubmitWith(*std::move(ticket));
  ticket_ = *std::move(ticket);
  wait_ns_ = ServerCall::age_ns() - asked_ns_;
  environment().metrics->CountPhase(engine::CallPhase::kAdmission,
                                    static_cast<double>(wait_ns_) * 1e-9);
  if (message_size_.has_value()) return ReceiveMessage();
  StartReceiveTimer();
  Grant(static_cast<size_t>(*headers_.stated_bytes));
}

void UnaryCall::OnMessageSize(size_t bytes) {
  if (have_message_) {  // the code that gRPC's status code table prescribes
    return End(absl::UnimplementedError(
        "request: got a second message on a unary method, allowed exactly one"));
  }
  const auto size = static_cast<int64_t>(bytes);
  if (absl::Status status = CheckMessageSize(size, headers_); !status.ok()) return End(status);
  message_size_ = bytes;
  if (!headers_.stated_bytes.has_value()) return AskFor(size);
  if (ticket_.has_value()) ReceiveMessage();
}

void UnaryCall::ReceiveMessage() {
  Grant(*message_size_);
  Receive(TakeMemory(*message_size_, Seen(), environment().places));
}

void UnaryCall::OnMessage(MessageMemory message) {
  have_message_ = true;
  receive_ns_ = ServerCall::age_ns();
  environment().metrics->CountPhase(engine::CallPhase::kReceive,
                                    static_cast<double>(receive_ns_ - wait_ns_) * 1e-9);
  const auto bytes = static_cast<int64_t>(message.bytes.size());
  const absl::Status status = Take(std::move(message), headers_);
  if (!status.ok()) return End(status);
  work_.Arrived(work_bytes(bytes));
  engine::Admission::Ticket ticket = *std::exchange(ticket_, std::nullopt);
  if (needed_bytes() <= ticket.bytes()) {
    ticket.ShrinkTo(needed_bytes());
    return SubmitWith(std::move(ticket));
  }
  ticket = {};  // waiting with it, calls could wait for each other
  AskForRoom(headers_.AskAgain(needed_bytes()));
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
    return Post({.self = shared_from_this(), .status = status, .times = times});
  }
  if (dropped()) return;
  const int64_t begun_ns = ServerCall::age_ns();
  EncodedMessage message = Encode(answer, receive_ns_, times);
  Conclude(&message);
  const int64_t encode_ns = ServerCall::age_ns() - begun_ns;
  WriteShared(answer, [this, self = shared_from_this(), message = std::move(message), times,
                       encode_ns](const absl::Status& written) mutable {
    Post({std::move(self), written, std::move(message), times, encode_ns});
  });
}

void UnaryCall::Post(Result result) {
  result_ = std::move(result);
  if (loop().IsCurrent()) return Run();
  loop().Post(this);
}

void UnaryCall::Run() {
  Result result = std::move(result_);
  times_ = result.times;
  encode_ns_ = result.encode_ns;
  EndWith(result.status, result.status.ok() ? std::move(result.message) : EncodedMessage());
}

void UnaryCall::EndWith(const absl::Status& status, EncodedMessage message) {
  if (finished()) return;
  code_ = status.code();
  ended_ns_ = ServerCall::age_ns();
  headers_.place = nullptr;  // before the peer knows, and sends its next call
  work_.End(status.ok());
  environment().admission->Abandon(std::exchange(waiter_, 0));
  ticket_.reset();
  Count(code_);
  Finish(status, std::move(message));
}

void UnaryCall::OnCancelled(const absl::Status& why) {
  environment().admission->Abandon(std::exchange(waiter_, 0));
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
