#include "server/rpc/transport/stream_call.h"

#include <algorithm>
#include <utility>

#include "server/engine/sync.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/message.h"

namespace logitd::rpc {

// One message. The stream's lock guards its public members.
class StreamCall::Item final : public RequestJob, public std::enable_shared_from_this<Item> {
 public:
  Item(std::shared_ptr<StreamCall> stream, std::unique_ptr<OpCodec> codec)
      : RequestJob(stream->environment_, std::move(codec)), stream_(std::move(stream)) {}

  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes& times) override {
    if (!status.ok()) return Report(status, {}, times, /*encode_ns=*/0);
    const int64_t begun_ns = age_ns();
    grpc::ByteBuffer encoded = Encode(answer, /*receive_ns=*/0, times);
    WriteShared(answer, [item = shared_from_this(), encoded = std::move(encoded), times,
                         encode_ns = age_ns() - begun_ns](const absl::Status& written) mutable {
      item->Report(written, written.ok() ? std::move(encoded) : grpc::ByteBuffer(), times,
                   encode_ns);
    });
  }

  void End(const absl::Status& why, grpc::ByteBuffer encoded = {}) {
    Count(why.code());
    work_.End(why.ok());
    {
      absl::MutexLock lock(&stream_->mutex_);
      response.Swap(&encoded);
      status = why;
      done = true;
    }
    stream_->Advance();
  }

  // The work of other calls waits for this one. Without a deadline: a message of a stream is not
  // refused, because that would end the stream.
  void BeginWork() {
    const int64_t bytes = work_bytes(message_bytes);
    const engine::Load::Call call = {
        .caller = spec().caller, .op = spec().key.op, .bytes = bytes, .received = true};
    if (environment().load->Begin(call, &work_).ok()) work_.Arrived(bytes, spec()).IgnoreError();
  }

  bool done = false;
  absl::Status status;
  grpc::ByteBuffer response;
  int64_t message_bytes = 0;  // constant from Submit on

 private:
  void Report(const absl::Status& why, grpc::ByteBuffer encoded, const engine::JobTimes& times,
              int64_t encode_ns) {
    ReportIfSlow(why.code(), static_cast<int64_t>(encoded.Length()), times, encode_ns);
    End(why, std::move(encoded));
  }

  void ReportIfSlow(absl::StatusCode code, int64_t sent_bytes, const engine::JobTimes& times,
                    int64_t encode_ns) const {
    const int64_t total_ns = age_ns();
    if (!environment().log->WantsMessage(total_ns)) return;
    environment().log->Write({.method = stream_->method_,
                              .peer = stream_->headers_.peer(),
                              .trace = &stream_->trace_,
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

StreamCall::StreamCall(grpc::CallbackServerContext* context, std::string_view method,
                       const CallEnvironment& environment, const Access& access,
                       MakeCodec make_codec)
    : context_(context),
      method_(method),
      started_ns_(engine::MonotonicNanos()),
      environment_(environment),
      access_(access),
      make_codec_(std::move(make_codec)),
      admission_wait_(environment.admission) {}

StreamCall::~StreamCall() {
  environment_.tracker->receive_watch().Unwatch(&read_watch_);
  environment_.tracker->peer_watch().Unwatch(&write_watch_);
}

RawReactor* StreamCall::Start() {
  self_ = shared_from_this();
  environment_.metrics->Add(engine::Gauge::kOpenCalls, 1);
  environment_.metrics->Add(engine::Gauge::kOpenStreams, 1);
  trace_ = ReadAndEchoTrace(context_);
  absl::StatusOr<CallHeaders> headers =
      ReadHeaders(*context_, *environment_.connections, max_message_bytes());
  absl::Status status = headers.status();
  if (status.ok()) {
    headers_ = *headers;
    status = headers_.Authorize(*context_, environment_.identities, access_, environment_.metrics);
  } else {
    environment_.metrics->CountRefused(engine::Refusal::kInvalid, engine::Proof::kNone);
    headers_.connection = environment_.connections->Find(context_->peer());
  }
  environment_.tracker->Add(self_);  // may call OnDrain and OnIdentities, which read the headers
  if (status.ok()) {
    OnIdentities();  // they may have changed before the tracker knew the stream
    Advance();
  } else {
    EndInput(status);
  }
  return this;
}

void StreamCall::Advance() {
  enum class Step { kWrite, kRead, kEnd };
  while (true) {
    Step step;
    std::shared_ptr<Item> item;
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      const bool quiet = !writing_ && starting_ == 0;
      const bool next_is_done = !items_.empty() && items_.front()->done;
      if (gone_) {
        if (!quiet) return;
        status = absl::CancelledError("call cancelled");
        step = Step::kEnd;
      } else if (next_is_done && items_.front()->status.ok() && !writing_) {
        item = items_.front();
        step = Step::kWrite;
      } else if (next_is_done && !items_.front()->status.ok() && quiet) {
        status = items_.front()->status;
        step = Step::kEnd;
      } else if (items_.empty() && input_over_ && quiet) {
        status = end_status_;
        step = Step::kEnd;
      } else if (!reading_ && !input_over_ && items_.size() < kMaxInFlight) {
        step = Step::kRead;
      } else {
        return;
      }
      if (step == Step::kWrite) {
        writing_ = true;
        ++starting_;
      }
      if (step == Step::kRead) reading_ = true;
      if (step == Step::kEnd) {
        finished_ = true;
        code_ = status.code();
      }
    }
    if (step == Step::kEnd) headers_.place = nullptr;  // before the peer knows
    if (step == Step::kEnd) return Finish(environment_.tracker->EndStatus(status, context_));
    if (step == Step::kRead) {
      EnterForRead();
      continue;
    }
    environment_.tracker->peer_watch().Watch(&write_watch_, [weak_stream = weak_from_this()] {
      if (auto stream = weak_stream.lock()) stream->TryCancel();
    });
    item->Conclude(&item->response);
    const auto sent_bytes = static_cast<int64_t>(item->response.Length());
    StartWrite(&item->response);
    absl::MutexLock lock(&mutex_);
    sent_bytes_ += sent_bytes;
    --starting_;
  }
}

void StreamCall::TryCancel() {
  absl::MutexLock lock(&mutex_);
  if (!done_) context_->TryCancel();
}

void StreamCall::EnterForRead() {
  engine::RoomAsk ask = {.caller = headers_.caller, .deadline = headers_.deadline};
  {
    absl::MutexLock lock(&mutex_);
    ask.between_messages = largest_ > 0;
    ask.bytes = largest_ > 0 ? largest_ : headers_.room_bytes();
  }
  if (!ask.between_messages) {
    ask.received_bytes = headers_.ReceivedBytes();
    ask.too_slow = [weak_stream = weak_from_this()](const absl::Status& why) {
      if (auto stream = weak_stream.lock()) stream->TooSlow(why);
    };
  }
  admission_wait_.Enter(std::move(ask), [stream = shared_from_this()](
                                            absl::StatusOr<engine::Admission::Ticket> ticket) {
    stream->Admitted(std::move(ticket));
  });
}

void StreamCall::TooSlow(const absl::Status& why) {
  bool told = false;
  {
    absl::MutexLock lock(&mutex_);
    told = std::exchange(too_slow_, true);
  }
  // A peer that does not read its status keeps what it has sent. Then the stream is reset.
  told ? TryCancel() : EndInput(why);
}

void StreamCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (!ticket.ok()) return EndInput(ticket.status());
  int64_t largest = 0;
  {
    absl::MutexLock lock(&mutex_);
    largest = largest_;
  }
  ticket_ = *std::move(ticket);
  if (largest == 0) {
    const int64_t wait_ns = engine::MonotonicNanos() - started_ns_;
    environment_.metrics->CountPhase(engine::CallPhase::kAdmission,
                                     static_cast<double>(wait_ns) * 1e-9);
    {
      absl::MutexLock lock(&mutex_);
      wait_ns_ = wait_ns;
    }
    environment_.tracker->receive_watch().Watch(&read_watch_, [weak_stream = weak_from_this()] {
      if (auto stream = weak_stream.lock()) {
        stream->EndInput(stream->environment_.tracker->MessageLateError());
      }
    });
  }
  StartOneRead();
}

void StreamCall::StartOneRead() {
  bool over = false;
  {
    absl::MutexLock lock(&mutex_);
    over = finished_ || gone_ || input_over_;
    if (over) {
      reading_ = false;
    } else {
      ++starting_;
    }
  }
  if (over) {
    ticket_ = {};
  } else {
    grant_ = headers_.GrantRead();
    StartRead(&in_);
    absl::MutexLock lock(&mutex_);
    --starting_;
  }
  Advance();
}

void StreamCall::EndInput(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (!input_over_) end_status_ = status;
    input_over_ = true;
  }
  Advance();
}

void StreamCall::OnReadDone(bool ok) {
  environment_.tracker->receive_watch().Unwatch(&read_watch_);
  if (ok) grant_.Arrived();
  grant_ = {};
  engine::Admission::Ticket ticket = std::move(ticket_);
  ticket_ = {};
  bool over = false;
  {
    absl::MutexLock lock(&mutex_);
    over = input_over_ || gone_ || finished_;
  }
  if (!ok || over) return EndInput(absl::OkStatus());
  auto item = std::make_shared<Item>(shared_from_this(), make_codec_());
  grpc::ByteBuffer message;
  message.Swap(&in_);
  const auto message_bytes = static_cast<int64_t>(message.Length());
  item->message_bytes = message_bytes;
  absl::Status status = CheckNotCompressed(context_);
  if (status.ok()) status = item->Take(&message, headers_);
  {
    absl::MutexLock lock(&mutex_);
    items_.push_back(item);
    ++messages_;
    received_bytes_ += message_bytes;
    if (status.ok()) {
      rows_ += item->spec().rows();
      largest_ = std::max(largest_, item->needed_bytes());
    } else {
      input_over_ = true;
      reading_ = false;
    }
  }
  if (!status.ok()) return item->End(status);
  item->BeginWork();
  if (ticket.Received(item->needed_bytes())) {
    item->SetTicket(std::move(ticket));
    return Submit(item);
  }
  admission_wait_.Enter(
      {.caller = headers_.caller,
       .deadline = headers_.deadline,
       .bytes = item->needed_bytes(),
       .received = true},
      [stream = shared_from_this(), item](absl::StatusOr<engine::Admission::Ticket> more) {
        if (!more.ok()) {
          stream->EndInput(more.status());
          return item->End(more.status());
        }
        more->Received(item->needed_bytes());
        item->SetTicket(*std::move(more));
        stream->Submit(item);
      });
}

void StreamCall::Submit(const std::shared_ptr<Item>& item) {
  {
    // OnCancel drops the messages it finds; it did not find this one if it ran before.
    absl::MutexLock lock(&mutex_);
    if (gone_) item->Drop();
  }
  item->Submit(item);
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
  }
  Advance();
}

void StreamCall::OnWriteDone(bool ok) {
  environment_.tracker->peer_watch().Unwatch(&write_watch_);
  std::shared_ptr<Item> answered;  // gives its room back after the lock
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    answered = std::move(items_.front());
    items_.pop_front();
    if (!ok) gone_ = true;
  }
  answered.reset();
  Advance();
}

void StreamCall::OnCancel() {
  std::deque<std::shared_ptr<Item>> items;
  {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
    items = items_;
  }
  admission_wait_.Abandon();
  for (const auto& item : items) item->Drop();
  Advance();
}

void StreamCall::OnDrain() {
  {
    absl::MutexLock lock(&mutex_);
    if (input_over_) return;
    input_over_ = true;
    end_status_ = engine::DrainingError();
    // Finish ends a read that is under way.
  }
  Advance();
}

void StreamCall::Report() {
  // A stream may be open for long and is not slow for that: its messages may be.
  if (!environment_.log->WantsStream()) return;
  absl::MutexLock lock(&mutex_);
  environment_.log->WriteStream({.method = method_,
                                 .peer = headers_.peer(),
                                 .trace = &trace_,
                                 .code = code_,
                                 .messages = messages_,
                                 .rows = rows_,
                                 .received_bytes = received_bytes_,
                                 .sent_bytes = sent_bytes_,
                                 .total_ns = engine::MonotonicNanos() - started_ns_,
                                 .wait_ns = wait_ns_});
}

void StreamCall::OnIdentities() {
  const absl::Status status =
      CheckStillAuthorized(headers_.authorization, environment_.identities, access_);
  if (!status.ok()) EndInput(status);
}

void StreamCall::OnDone() {
  std::deque<std::shared_ptr<Item>> items;
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
    items.swap(items_);
  }
  items.clear();  // not under the lock: the room they give back lets other calls run
  Report();
  environment_.metrics->Add(engine::Gauge::kOpenStreams, -1);
  environment_.metrics->Add(engine::Gauge::kOpenCalls, -1);
  CallTracker* const tracker = environment_.tracker;
  const std::weak_ptr<DrainedCall> call = self_;
  self_.reset();  // may delete this
  tracker->Remove(call);
}

}  // namespace logitd::rpc
