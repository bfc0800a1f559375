#include "server/rpc/transport/unary_call.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/message.h"
#include "server/rpc/transport/turned_away.h"

namespace logitd::rpc {

UnaryCall::UnaryCall(grpc::CallbackServerContext* context, std::string_view method,
                     const CallEnvironment& environment, const Access& access,
                     std::unique_ptr<OpCodec> codec)
    : RequestJob(environment, std::move(codec)),
      context_(context),
      method_(method),
      access_(access),
      admission_wait_(environment.admission) {}

UnaryCall::~UnaryCall() {
  // Admitted may start the watch after OnDone.
  environment().tracker->receive_watch().Unwatch(&receive_watch_);
}

RawReactor* UnaryCall::Start() {
  self_ = shared_from_this();
  environment().tracker->Add();
  environment().metrics->Add(engine::Gauge::kOpenCalls, 1);
  trace_ = ReadAndEchoTrace(context_);
  absl::StatusOr<CallHeaders> headers =
      ReadHeaders(*context_, *environment().connections, max_message_bytes());
  if (!headers.ok()) {
    environment().metrics->CountRefused(engine::Refusal::kInvalid, engine::Proof::kNone);
    headers_.connection = environment().connections->Find(context_->peer());
    Finish(headers.status());
    return this;
  }
  headers_ = *headers;
  if (absl::Status status =
          headers_.Authorize(*context_, environment().identities, access_, environment().metrics);
      !status.ok()) {
    Finish(status);
    return this;
  }
  absl::Status in_time;
  int64_t receiving_bytes = 0;
  {
    absl::MutexLock lock(&mutex_);
    in_time = environment().load->Begin({.caller = headers_.caller,
                                         .op = &op(),
                                         .bytes = headers_.stated_bytes,
                                         .deadline = headers_.deadline},
                                        &work_);
    receiving_bytes = work_.expected_bytes();
  }
  if (!in_time.ok()) {
    environment().turned_away->Tell(*context_, headers_, method_, op(), max_message_bytes());
    Finish(in_time);
    return this;
  }
  admission_wait_.Enter({.caller = headers_.caller,
                         .deadline = headers_.deadline,
                         .bytes = headers_.room_bytes(),
                         .receiving_bytes = receiving_bytes,
                         .received_bytes = headers_.ReceivedBytes(),
                         .too_slow =
                             [weak_call = weak_from_this()](const absl::Status& why) {
                               if (auto call = weak_call.lock()) call->TooSlow(why);
                             }},
                        [call = self_](absl::StatusOr<engine::Admission::Ticket> ticket) {
                          call->Admitted(std::move(ticket));
                        });
  return this;
}

void UnaryCall::TooSlow(const absl::Status& why) {
  bool told = false;
  {
    absl::MutexLock lock(&mutex_);
    told = finished_;
  }
  // A peer that does not read its status keeps what it has sent. Then the stream is reset.
  told ? TryCancel() : Finish(why);
}

void UnaryCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (!ticket.ok()) return Finish(ticket.status());
  receive_ticket_ = *std::move(ticket);
  admitted_ns_ = age_ns();
  environment().metrics->CountPhase(engine::CallPhase::kAdmission,
                                    static_cast<double>(admitted_ns_) * 1e-9);
  grant_ = headers_.GrantRead();
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
  if (ok) grant_.Arrived();
  grant_ = {};
  if (!ok) return FinishWithoutMessage();
  have_message_ = true;
  if (absl::Status status = CheckNotCompressed(context_); !status.ok()) return Finish(status);
  grpc::ByteBuffer message;
  message.Swap(&in_);
  if (Read()) Process(&message);
}

void UnaryCall::Process(grpc::ByteBuffer* message) {
  receive_ns_ = age_ns();
  environment().metrics->CountPhase(engine::CallPhase::kReceive,
                                    static_cast<double>(receive_ns_ - admitted_ns_) * 1e-9);
  const auto bytes = static_cast<int64_t>(message->Length());
  received_bytes_ = bytes;
  if (absl::Status status = Take(message, headers_); !status.ok()) return Finish(status);
  if (absl::Status status = CheckInTime(work_bytes(bytes)); !status.ok()) return Finish(status);
  if (receive_ticket_.Received(needed_bytes())) {
    SetTicket(std::move(receive_ticket_));
    return Submit(shared_from_this());
  }
  // The answer needs more than the size that was stated for the message.
  admission_wait_.Enter({.caller = headers_.caller,
                         .deadline = headers_.deadline,
                         .bytes = needed_bytes(),
                         .received = true},
                        [call = self_](absl::StatusOr<engine::Admission::Ticket> ticket) {
                          if (!ticket.ok()) return call->Finish(ticket.status());
                          ticket->Received(call->needed_bytes());
                          call->SetTicket(*std::move(ticket));
                          call->Submit(call);
                        });
}

absl::Status UnaryCall::CheckInTime(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  return work_.Arrived(bytes, spec());
}

void UnaryCall::Done(const absl::Status& status, const engine::JobAnswer& answer,
                     const engine::JobTimes& times) {
  if (!status.ok()) return Finish(status, {}, {.times = times});
  if (dropped()) return;
  const int64_t begun_ns = age_ns();
  grpc::ByteBuffer response = Encode(answer, receive_ns_, times);
  Conclude(&response);
  const RanJob ran = {.times = times, .encode_ns = age_ns() - begun_ns};
  WriteShared(answer, [call = shared_from_this(), response = std::move(response),
                       ran](const absl::Status& written) mutable {
    call->Finish(written, written.ok() ? std::move(response) : grpc::ByteBuffer(), ran);
  });
}

void UnaryCall::Finish(const absl::Status& status, grpc::ByteBuffer response, const RanJob& ran) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    finished_ns_ = age_ns();
    ran_ = ran;
    sent_bytes_ = static_cast<int64_t>(response.Length());
    headers_.place = nullptr;  // before the peer knows, and sends its next call
    work_.End(status.ok());
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
    finished_ns_ = age_ns();
    headers_.place = nullptr;
    work_.End(/*complete=*/false);
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

void UnaryCall::Report(absl::StatusCode code) {
  const int64_t total_ns = age_ns();
  const bool wanted = environment().log->Wants(total_ns);
  if (code != absl::StatusCode::kOk && !wanted) return;
  absl::MutexLock lock(&mutex_);
  const int64_t send_ns = total_ns - finished_ns_;
  if (code == absl::StatusCode::kOk) {
    environment().metrics->CountPhase(engine::CallPhase::kSend,
                                      static_cast<double>(send_ns) * 1e-9);
  }
  if (!wanted) return;
  const bool received = received_bytes_ > 0;
  environment().log->Write({.method = method_,
                            .peer = headers_.peer(),
                            .trace = &trace_,
                            .code = code,
                            .messages = received ? 1 : 0,
                            .rows = spec().rows(),
                            .received_bytes = received_bytes_,
                            .sent_bytes = sent_bytes_,
                            .total_ns = total_ns,
                            .wait_ns = admitted_ns_,
                            .receive_ns = received ? receive_ns_ - admitted_ns_ : 0,
                            .job = ran_.times,
                            .encode_ns = ran_.encode_ns,
                            .send_ns = send_ns});
}

void UnaryCall::OnDone() {
  bool no_message = false;
  absl::StatusCode code;
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
    no_message = no_message_;
    code = static_cast<absl::StatusCode>(status_.error_code());
  }
  if (no_message) {
    code = dropped() ? absl::StatusCode::kCancelled : absl::StatusCode::kUnimplemented;
    Count(code);
  }
  Report(code);
  environment().metrics->Add(engine::Gauge::kOpenCalls, -1);
  CallTracker* const tracker = environment().tracker;
  tracker->peer_watch().Unwatch(&peer_watch_);
  self_.reset();  // may delete this
  tracker->Remove();
}

}  // namespace logitd::rpc
