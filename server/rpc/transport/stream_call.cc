#include "server/rpc/transport/stream_call.h"

#include <utility>

#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/turn_jobs.h"

namespace logitd::rpc {

// One message. Its job may outlive the stream.
class StreamCall::Item final : public RequestJob, public std::enable_shared_from_this<Item> {
 public:
  explicit Item(std::shared_ptr<StreamCall> stream)
      : RequestJob(stream->environment_, stream->make_codec_()), stream_(std::move(stream)) {}

  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes& times) override {
    if (!status.ok()) {
      Fail();
      return Post(status, {}, times, /*encode_ns=*/0);
    }
    const int64_t begun_ns = age_ns();
    EncodedMessage encoded = Encode(answer, /*receive_ns=*/0, times);
    WriteShared(answer, [item = shared_from_this(), encoded = std::move(encoded), times,
                         encode_ns = age_ns() - begun_ns](const absl::Status& written) mutable {
      item->Post(written, written.ok() ? std::move(encoded) : EncodedMessage(), times, encode_ns);
    });
  }

  // On the loop: the item is done.
  void End(const absl::Status& why, EncodedMessage encoded = {}) {
    if (done) return;
    Count(why.code());
    work_.End(why.ok());
    response = std::move(encoded);
    status = why;
    done = true;
    if (!stream_->over()) stream_->Advance();
  }

  // The work of other calls waits for this one. Without a deadline: a message of a stream is not
  // refused, because that would end the stream.
  void BeginWork(const engine::Caller& caller) {
    environment()
        .load->Begin({.caller = caller, .op = &op(), .bytes = message_bytes}, &work_)
        .IgnoreError();
  }
  void WorkArrived() { work_.Arrived(work_bytes(message_bytes)); }

  bool done = false;
  absl::Status status;
  EncodedMessage response;
  int64_t message_bytes = 0;

 private:
  void Post(const absl::Status& why, EncodedMessage encoded, const engine::JobTimes& times,
            int64_t encode_ns) {
    stream_->loop().Post(
        [item = shared_from_this(), why, encoded = std::move(encoded), times, encode_ns]() mutable {
          item->ReportIfSlow(why.code(), encoded.bytes(), times, encode_ns);
          item->End(why, std::move(encoded));
        });
  }

  void ReportIfSlow(absl::StatusCode code, int64_t sent_bytes, const engine::JobTimes& times,
                    int64_t encode_ns) const {
    const int64_t total_ns = age_ns();
    if (!environment().log->WantsMessage(total_ns)) return;
    environment().log->Write({.method = stream_->method_,
                              .peer = stream_->peer(),
                              .trace = &stream_->trace(),
                              .code = code,
                              .rows = spec().rows(),
                              .received_bytes = message_bytes,
                              .sent_bytes = sent_bytes,
                              .total_ns = total_ns,
                              .job = times,
                              .encode_ns = encode_ns});
  }

  const std::shared_ptr<StreamCall> stream_;
  engine::Load::Work work_;
};

StreamCall::StreamCall(http2::Stream* stream, std::string_view method,
                       const CallEnvironment& environment, const Access& access,
                       MakeCodec make_codec)
    : ServerCall(stream, environment.tracker),
      method_(method),
      environment_(environment),
      access_(access),
      make_codec_(std::move(make_codec)) {
  PayForAnswers();
}

void StreamCall::Begin() {
  environment_.metrics->Add(engine::Gauge::kOpenCalls, 1);
  environment_.metrics->Add(engine::Gauge::kOpenStreams, 1);
  absl::Status status = headers_.Read(*this, environment_, access_);
  if (!status.ok()) return End(status);
  if (headers_.stated_bytes.has_value()) {
    return AskFor(static_cast<size_t>(*headers_.stated_bytes));
  }
  StartReceiveTimer();
}

// ---- receiving

void StreamCall::AskFor(size_t message_bytes) {
  StopReceiveTimer();  // the peer may not send while the message waits
  if (messages_ == 0) asked_ns_ = age_ns();
  const bool whole = Seen().size() >= message_bytes;
  AskForRoom(
      headers_.AskFor(static_cast<int64_t>(message_bytes), whole ? nullptr : shared_from_this()));
}

void StreamCall::AskForRoom(engine::RoomAsk ask) {
  asking_ = true;
  auto entry = environment_.admission->Enter(
      std::move(ask), [self = std::static_pointer_cast<StreamCall>(shared_from_this())](
                          absl::StatusOr<engine::Admission::Ticket> ticket) {
        self->OnLoop([self = self.get(), ticket = std::move(ticket)]() mutable {
          self->Admitted(std::move(ticket));
        });
      });
  waiter_ = entry.waiter;
  if (entry.answer.has_value()) Admitted(*std::move(entry.answer));
}

void StreamCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  waiter_ = 0;
  asking_ = false;
  if (const std::shared_ptr<Item> item = std::exchange(submitting_, nullptr); item != nullptr) {
    if (ticket.ok()) return SubmitWith(item, *std::move(ticket));
    EndInput(ticket.status());
    return item->End(ticket.status());
  }
  if (finished() || input_over_) return;
  if (!ticket.ok()) return EndInput(ticket.status());
  ticket_ = *std::move(ticket);
  if (messages_ == 0) {
    wait_ns_ = age_ns() - asked_ns_;
    environment_.metrics->CountPhase(engine::CallPhase::kAdmission,
                                     static_cast<double>(wait_ns_) * 1e-9);
  }
  if (next_ != nullptr) return ReceiveMessage();
  StartReceiveTimer();
  Grant(static_cast<size_t>(*headers_.stated_bytes));
}

void StreamCall::OnMessageSize(size_t bytes) {
  const auto item =
      std::make_shared<Item>(std::static_pointer_cast<StreamCall>(shared_from_this()));
  absl::Status status = item->CheckMessageSize(static_cast<int64_t>(bytes), headers_);
  if (!status.ok()) {
    items_.push_back(item);
    EndInput(absl::OkStatus());
    return item->End(status);
  }
  item->message_bytes = static_cast<int64_t>(bytes);
  item->BeginWork(headers_.caller);
  next_ = item;
  if (ticket_.has_value()) return ReceiveMessage();
  if (!asking_) AskFor(bytes);
}

void StreamCall::ReceiveMessage() {
  const auto bytes = static_cast<size_t>(next_->message_bytes);
  Grant(bytes);
  Receive(RequestJob::TakeMemory(bytes, Seen(), environment_.places));
}

void StreamCall::OnMessage(MessageMemory message) {
  engine::Admission::Ticket ticket = *std::exchange(ticket_, std::nullopt);
  const std::shared_ptr<Item> item = std::exchange(next_, nullptr);
  const absl::Status status = item->Take(std::move(message), headers_);
  items_.push_back(item);
  ++messages_;
  if (!status.ok()) {
    EndInput(absl::OkStatus());
    return item->End(status);
  }
  rows_ += item->spec().rows();
  item->WorkArrived();
  const int64_t needed = item->needed_bytes();
  if (needed <= ticket.bytes()) {
    ticket.ShrinkTo(needed);
    return SubmitWith(item, std::move(ticket));
  }
  ticket = {};  // waiting with it, calls could wait for each other
  submitting_ = item;
  Pause(true);
  AskForRoom(headers_.AskAgain(needed));
}

void StreamCall::SubmitWith(const std::shared_ptr<Item>& item, engine::Admission::Ticket ticket) {
  item->SetTicket(std::move(ticket));
  environment_.turn_jobs->Add(loop(), item);
  Advance();
}

void StreamCall::OnHalfClose() { EndInput(absl::OkStatus()); }

void StreamCall::EndInput(const absl::Status& status) {
  if (!std::exchange(input_over_, true)) end_status_ = status;
  DropInput();
  next_.reset();
  ticket_.reset();
  if (submitting_ == nullptr) environment_.admission->Abandon(std::exchange(waiter_, 0));
  Advance();
}

// ---- answering

void StreamCall::Advance() {
  if (finished() || over()) return;
  while (written_ < items_.size() && items_[written_]->done) {
    Item& item = *items_[written_];
    if (!item.status.ok()) {
      if (written_ > 0) return;  // after the answers before it
      return End(item.status);
    }
    ++written_;
    item.Conclude(&item.response);
    Write(std::move(item.response));
    if (finished() || over()) return;
  }
  if (items_.empty() && input_over_) return End(end_status_);
  if (input_over_) return;
  const bool full = items_.size() >= kMaxInFlight || submitting_ != nullptr;
  if (!full) Grant(0);
  Pause(full);
}

void StreamCall::OnWritten() {
  if (written_ == 0) return;
  --written_;
  const std::shared_ptr<Item> answered = std::move(items_.front());
  items_.pop_front();
  Advance();
}

void StreamCall::End(const absl::Status& status) {
  if (finished()) return;
  code_ = status.code();
  headers_.place = nullptr;  // before the peer knows
  next_.reset();
  ticket_.reset();
  Finish(status);
}

void StreamCall::OnCancelled(const absl::Status& why) {
  environment_.admission->Abandon(waiter_);
  const auto items = items_;
  for (const auto& item : items) item->Drop();
  if (!over()) return End(why);
  if (!finished()) code_ = why.code();
}

void StreamCall::OnDrain(absl::Duration receive_timeout) {
  ServerCall::OnDrain(receive_timeout);
  EndInput(engine::DrainingError());
}

void StreamCall::OnIdentities() {
  const absl::Status status =
      CheckStillAuthorized(headers_.authorization, environment_.identities, access_);
  if (!status.ok()) EndInput(status);
}

void StreamCall::OnOver() {
  environment_.admission->Abandon(std::exchange(waiter_, 0));
  items_.clear();
  next_.reset();
  submitting_.reset();
  ticket_.reset();
  headers_.place = nullptr;
  if (!began()) return;  // nothing was counted
  environment_.metrics->Add(engine::Gauge::kOpenStreams, -1);
  environment_.metrics->Add(engine::Gauge::kOpenCalls, -1);
  // A stream may be open for long and is not slow for that: its messages may be.
  if (!environment_.log->WantsStream()) return;
  environment_.log->WriteStream({.method = method_,
                                 .peer = peer(),
                                 .trace = &trace(),
                                 .code = code_,
                                 .messages = messages_,
                                 .rows = rows_,
                                 .received_bytes = received_bytes(),
                                 .sent_bytes = sent_bytes(),
                                 .total_ns = age_ns(),
                                 .wait_ns = wait_ns_});
}

}  // namespace logitd::rpc
