// Transport::Stream: one attempt of a streamed call, driven by its completion queue.
#include "absl/strings/str_format.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

class StreamAttempt {
 public:
  StreamAttempt(const Transport& transport, MessageStream* messages, absl::Time deadline,
                absl::Duration patience, PayloadHold* hold, grpc::CompletionQueue* cq)
      : clock_(transport.clock()), messages_(messages), patience_(patience), hold_(hold), cq_(cq) {
    transport.Describe(&context_, deadline, /*message_bytes=*/std::nullopt);
  }

  Attempt Run(grpc::GenericStub* stub, const char* method) {
    const absl::Time start = clock_.Now();
    answer_due_ = start + patience_;
    call_ = stub->PrepareCall(&context_, method, cq_);
    call_->StartCall(&steps_[kStart]);
    pending_ = 1;
    while (pending_ > 0) {
      void* tag;
      bool ok;
      if (cq_->AsyncNext(&tag, &ok, FromNow(clock_.SleepUntil(answer_due_))) ==
          grpc::CompletionQueue::TIMEOUT) {
        if (clock_.Now() >= answer_due_) GiveUp();
        continue;
      }
      --pending_;
      OnStep(*static_cast<Step*>(tag), ok);
    }
    return Result(clock_.Now() - start);
  }

 private:
  enum Step { kStart, kWrite, kRead, kFinish };

  void OnStep(Step step, bool ok) {
    if (step == kFinish) return;
    if (step == kWrite) {
      if (ok && sent_ < size_) Write();
      return;
    }
    if (step == kRead && ok) TakeAnswer();
    if (!ok) {  // the stream did not start, or has ended
      call_->Finish(&status_, &steps_[kFinish]);
      ++pending_;
      return;
    }
    if (step == kStart) Write();
    call_->Read(&answer_, &steps_[kRead]);
    ++pending_;
  }

  void Write() {
    const bool last = sent_ + 1 == size_;
    const absl::StatusOr<grpc::ByteBuffer> message = messages_->Encode(sent_++, hold_->owner());
    if (!message.ok()) {
      fault_ = message.status();
      return context_.TryCancel();
    }
    grpc::WriteOptions options;
    if (last) {
      hold_->Drop();
      options.set_last_message();
    }
    call_->Write(*message, options, &steps_[kWrite]);
    ++pending_;
  }

  void TakeAnswer() {
    if (fault_.ok()) {
      fault_ = taken_ < size_
                   ? messages_->Take(taken_++, &answer_)
                   : absl::InternalError("the server sent more answers than there were messages");
    }
    if (!fault_.ok()) context_.TryCancel();
    answer_due_ = clock_.Now() + patience_;  // Take's own time does not count against the server
  }

  // An answer took longer than `patience_`.
  void GiveUp() {
    if (fault_.ok() && taken_ < size_) {
      fault_ = absl::DeadlineExceededError(
          absl::StrFormat("no answer for %s, after %d of %d messages",
                          absl::FormatDuration(patience_), taken_, size_));
    }
    context_.TryCancel();
    answer_due_ = absl::InfiniteFuture();
  }

  Attempt Result(absl::Duration round_trip) const {
    Attempt attempt;
    attempt.round_trip = round_trip;
    if (!status_.ok()) attempt.pushback_ms = PushbackOf(context_);
    attempt.status = fault_;
    if (!fault_.ok() || taken_ == size_) return attempt;
    attempt.status = ToAbsl(status_);
    attempt.cancelled_by_server = absl::IsCancelled(attempt.status);
    if (attempt.status.ok()) {
      attempt.status = absl::InternalError(
          absl::StrFormat("the server sent %d answers to %d messages", taken_, size_));
    }
    return attempt;
  }

  Clock& clock_;
  MessageStream* const messages_;
  const absl::Duration patience_;
  PayloadHold* const hold_;
  grpc::CompletionQueue* const cq_;
  const int size_ = messages_->size();
  Step steps_[4] = {kStart, kWrite, kRead, kFinish};  // tags
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  absl::Time answer_due_;
  int pending_ = 0;  // operations whose tag has not come back
  int sent_ = 0;
  int taken_ = 0;
  grpc::ByteBuffer answer_;
  grpc::Status status_;  // how the server ended the stream
  absl::Status fault_;   // why this client ended it
};

}  // namespace

Attempt Transport::Stream(const char* method, MessageStream* messages, absl::Time deadline,
                          absl::Duration patience, PayloadHold* hold) {
  grpc::CompletionQueue cq;
  Attempt attempt;
  {  // the call ends before the wait for its slices
    StreamAttempt stream(*this, messages, deadline, patience, hold, &cq);
    attempt = stream.Run(&stub_, method);
  }
  ReleaseAndShutdown(hold, &cq);
  return attempt;
}

}  // namespace logitd::client
