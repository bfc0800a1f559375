#include "server/rpc/transport/stream_call.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::rpc {

// One message on its way. `done` and what follows it are the stream's, under its lock.
class StreamCall::Item final : public RequestJob {
 public:
  Item(std::shared_ptr<StreamCall> stream, std::unique_ptr<OpCodec> codec)
      : RequestJob(stream->environment_, std::move(codec)), stream_(std::move(stream)) {}

  absl::Status Take(grpc::ByteBuffer* message) {
    return RequestJob::Take(message, stream_->deadline_);
  }
  using RequestJob::codec;
  using RequestJob::needed_bytes;
  using RequestJob::SetTicket;

  void Done(const absl::Status& status, const engine::JobAnswer& given,
            const engine::JobTimes& times) override {
    grpc::ByteBuffer encoded;
    if (status.ok()) {
      encoded =
          codec().Encode(WithTicket(given), {.total_ns = NowNs() - started_ns_, .job = times});
    }
    End(status, &encoded);
  }

  void End(const absl::Status& status, grpc::ByteBuffer* encoded) {
    environment().metrics->CountRequest(codec().op().name, status.code(),
                                        static_cast<double>(NowNs() - started_ns_) * 1e-9);
    {
      absl::MutexLock lock(&stream_->mutex_);
      answer.Swap(encoded);
      why = status;
      done = true;
    }
    stream_->Advance();
  }

  bool done = false;
  bool submitted = false;
  absl::Status why;
  grpc::ByteBuffer answer;

 private:
  const std::shared_ptr<StreamCall> stream_;
  const int64_t started_ns_ = NowNs();
};

StreamCall::StreamCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
                       MakeCodec make_codec)
    : context_(context),
      environment_(environment),
      make_codec_(std::move(make_codec)),
      deadline_(DeadlineOf(*context)) {}

StreamCall::~StreamCall() {
  environment_.tracker->peer_watch().Unwatch(&read_watch_);
  environment_.tracker->peer_watch().Unwatch(&write_watch_);
}

StreamCall::Reactor* StreamCall::Start() {
  self_ = shared_from_this();
  environment_.tracker->Add(self_);
  Advance();
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
      if (gone_) {
        if (!quiet) return;
        status = absl::CancelledError("call cancelled");
        step = Step::kEnd;
      } else if (!items_.empty() && items_.front()->done && items_.front()->why.ok() && !writing_) {
        item = items_.front();
        step = Step::kWrite;
      } else if (!items_.empty() && items_.front()->done && !items_.front()->why.ok() && quiet) {
        status = items_.front()->why;
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
      if (step == Step::kEnd) finished_ = true;
    }
    if (step == Step::kEnd) return FinishNow(status);
    if (step == Step::kRead) {
      AskForRoom();
      continue;
    }
    environment_.tracker->peer_watch().Watch(&write_watch_, [stream = weak_from_this()] {
      if (auto alive = stream.lock()) {
        absl::MutexLock lock(&alive->mutex_);
        if (!alive->done_) alive->context_->TryCancel();
      }
    });
    item->codec().Conclude(&item->answer);
    StartWrite(&item->answer);
    absl::MutexLock lock(&mutex_);
    --starting_;
  }
}

void StreamCall::Enter(std::function<void(absl::StatusOr<engine::Admission::Ticket>)> ready) {
  const engine::Admission::WaiterId waiter =
      environment_.admission->Enter(deadline_, std::move(ready));
  if (waiter == 0) return;
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    waiter_ = waiter;
    gone = gone_;
  }
  if (gone) environment_.admission->Abandon(waiter);
}

void StreamCall::AskForRoom() {
  Enter([stream = shared_from_this()](absl::StatusOr<engine::Admission::Ticket> ticket) {
    stream->Admitted(std::move(ticket));
  });
}

void StreamCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (!ticket.ok()) return EndInput(ticket.status());
  int64_t largest = 0;
  {
    absl::MutexLock lock(&mutex_);
    largest = largest_;
  }
  ticket_ = *std::move(ticket);
  if (largest > 0 && largest < ticket_.bytes()) ticket_.ShrinkTo(largest);
  if (largest == 0) {
    const absl::Duration timeout = environment_.tracker->peer_watch().timeout();
    environment_.tracker->peer_watch().Watch(&read_watch_, [stream = weak_from_this(), timeout] {
      if (auto alive = stream.lock()) {
        alive->EndInput(absl::DeadlineExceededError(absl::StrFormat(
            "message not received within %s of being asked for", absl::FormatDuration(timeout))));
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
    if (!over) ++starting_;
    if (over) reading_ = false;
  }
  if (!over) {
    StartRead(&in_);
    absl::MutexLock lock(&mutex_);
    --starting_;
  } else {
    ticket_ = {};
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
  environment_.tracker->peer_watch().Unwatch(&read_watch_);
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
  const absl::Status status = item->Take(&message);
  {
    absl::MutexLock lock(&mutex_);
    items_.push_back(item);
    if (!status.ok()) input_over_ = true;
    if (status.ok()) largest_ = std::max(largest_, item->needed_bytes());
  }
  if (!status.ok()) {
    {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
    }
    return item->End(status, &message);
  }
  if (item->needed_bytes() <= ticket.bytes()) {
    item->SetTicket(std::move(ticket));
    return Submit(item);
  }
  ticket = {};
  Enter([stream = shared_from_this(), item](absl::StatusOr<engine::Admission::Ticket> more) {
    if (!more.ok()) {
      stream->EndInput(more.status());
      grpc::ByteBuffer nothing;
      return item->End(more.status(), &nothing);
    }
    item->SetTicket(*std::move(more));
    stream->Submit(item);
  });
}

void StreamCall::Submit(const std::shared_ptr<Item>& item) {
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    gone = gone_;
    item->submitted = !gone;
  }
  if (!gone) {
    environment_.engine->Submit(item);
    // OnCancel came while Submit ran, and may have asked the engine for a job it did not know yet.
    absl::MutexLock lock(&mutex_);
    gone = gone_;
    reading_ = false;
  }
  if (gone) environment_.engine->Cancel(*item);
  Advance();
}

void StreamCall::OnWriteDone(bool ok) {
  environment_.tracker->peer_watch().Unwatch(&write_watch_);
  std::shared_ptr<Item> answered;  // gives its room back outside the lock
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
  std::vector<std::shared_ptr<Item>> submitted;
  engine::Admission::WaiterId waiter = 0;
  {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
    waiter = waiter_;
    for (const auto& item : items_) {
      if (item->submitted && !item->done) submitted.push_back(item);
    }
  }
  if (waiter != 0) environment_.admission->Abandon(waiter);
  for (const auto& item : submitted) environment_.engine->Cancel(*item);
  Advance();
}

void StreamCall::OnDrain() {
  {
    absl::MutexLock lock(&mutex_);
    if (input_over_) return;
    input_over_ = true;
    end_status_ = absl::UnavailableError("the server is draining");
    // A read under way is not waited for; Finish ends it.
  }
  Advance();
}

void StreamCall::FinishNow(const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) {
    context_->AddTrailingMetadata(
        "grpc-retry-pushback-ms",
        absl::StrCat(absl::ToInt64Milliseconds(environment_.admission->options().retry_delay)));
  }
  Finish(ToGrpc(status));
}

void StreamCall::OnDone() {
  std::deque<std::shared_ptr<Item>> items;
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
    items.swap(items_);
  }
  items.clear();  // their room goes to others, who are told without our lock
  CallTracker* const tracker = environment_.tracker;
  const std::weak_ptr<DrainedCall> call = self_;
  self_.reset();  // may delete this
  tracker->Remove(call);
}

}  // namespace logitd::rpc
