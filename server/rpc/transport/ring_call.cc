#include "server/rpc/transport/ring_call.h"

#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "server/engine/batch.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"

namespace logitd::rpc {
namespace {

// Counts an open call for as long as it lives.
std::shared_ptr<const void> CountAlive(const CallEnvironment& environment) {
  environment.tracker->Add();
  environment.metrics->Add(engine::Gauge::kOpenCalls, 1);
  return std::shared_ptr<const void>(
      static_cast<const void*>(environment.tracker),
      [tracker = environment.tracker, metrics = environment.metrics](const void*) {
        metrics->Add(engine::Gauge::kOpenCalls, -1);
        tracker->Remove();
      });
}

// The arrays of an answer, copied.
class AnswerCopy {
 public:
  explicit AnswerCopy(const engine::JobAnswer& answer) {
    size_t bytes = 0;
    for (const absl::Span<const std::byte> array : answer.outputs) {
      bytes += engine::AlignUp(array.size());
    }
    bytes_ = std::make_unique<std::byte[]>(bytes);
    std::byte* at = bytes_.get();
    for (const absl::Span<const std::byte> array : answer.outputs) {
      if (!array.empty()) std::memcpy(at, array.data(), array.size());
      arrays_.emplace_back(at, array.size());
      at += engine::AlignUp(array.size());
    }
  }
  engine::JobAnswer answer() const { return {.outputs = arrays_}; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  absl::InlinedVector<absl::Span<const std::byte>, engine::kMaxArrays> arrays_;
};

std::string PeerOf(const arena::Ring& ring) { return absl::StrCat("ring:pid ", ring.user().pid); }

}  // namespace

RingCall::RingCall(const CallEnvironment& environment, std::shared_ptr<arena::Ring> ring,
                   uint64_t serial, std::string_view method, std::unique_ptr<OpCodec> codec)
    : RequestJob(environment, std::move(codec)),
      ring_(std::move(ring)),
      serial_(serial),
      method_(method),
      alive_(CountAlive(environment)) {}

void RingCall::Start(arena::RingRequest request) {
  tag_ = request.tag;
  if (absl::Status status = Prepare(request); !status.ok()) return Finish(status);
  auto entry = environment().admission->Enter(
      {.caller = headers_.caller, .deadline = headers_.deadline, .bytes = needed_bytes()},
      [call = shared_from_this()](absl::StatusOr<engine::Admission::Ticket> ticket) {
        call->Admitted(std::move(ticket), /*alone=*/false);
      });
  if (entry.answer.has_value()) return Admitted(*std::move(entry.answer), request.alone);
  {
    absl::MutexLock lock(&mutex_);
    waiter_ = entry.waiter;
    if (!finished_) return;
  }
  environment().admission->Abandon(entry.waiter);  // Drop came before
}

// Finds out who calls, what the call asks for, and if it can end in time.
absl::Status RingCall::Prepare(const arena::RingRequest& request) {
  headers_.caller.id = ring_->id();
  if (request.is_batch) headers_.caller.priority = engine::Priority::kBatch;
  headers_.deadline = environment().admission->options().clock->Now() + request.timeout;
  const std::string_view name = method_.substr(method_.rfind('/') + 1);
  engine::Metrics* const metrics = environment().metrics;
  LOGITD_RETURN_IF_ERROR(headers_.Accept(
      Authorize(/*metadata=*/nullptr, {.name = PeerOf(*ring_), .uid = ring_->user().uid},
                environment().identities,
                {.method = {name.data(), name.size()}, .role = door::Role::kInfer}, metrics),
      metrics));
  message_bytes_ = static_cast<int64_t>(request.message.size());
  const auto message = std::make_shared<std::string>(request.message);
  const MessageMemory memory = {
      .bytes = {reinterpret_cast<std::byte*>(message->data()), message->size()}, .keep = message};
  LOGITD_RETURN_IF_ERROR(Take(memory, headers_));
  if (max_answer_bytes() > static_cast<int64_t>(ring_->max_message_bytes())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ring: got a request whose answer may have %d bytes, allowed %d; ask over gRPC, or open a "
        "ring with larger answers",
        max_answer_bytes(), ring_->max_message_bytes()));
  }
  absl::MutexLock lock(&mutex_);
  const int64_t bytes = work_bytes(message_bytes_);  // with the rows in the lease
  LOGITD_RETURN_IF_ERROR(environment().load->Begin(
      {.caller = headers_.caller, .op = &op(), .bytes = bytes, .deadline = headers_.deadline},
      &work_));
  work_.Arrived(bytes);
  return absl::OkStatus();
}

void RingCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket, bool alone) {
  if (!ticket.ok()) return Finish(ticket.status());
  SetTicket(*std::move(ticket));
  Submit(shared_from_this(), alone);
}

void RingCall::Drop() {
  Finish(absl::CancelledError("the ring has ended"));
  engine::Admission::WaiterId waiter = 0;
  {
    absl::MutexLock lock(&mutex_);
    waiter = waiter_;
  }
  environment().admission->Abandon(waiter);
  RequestJob::Drop();
}

void RingCall::Done(const absl::Status& status, const engine::JobAnswer& answer,
                    const engine::JobTimes& times) {
  if (!status.ok()) return Finish(status, {}, times);
  if (dropped()) return;
  if (ring_->IsOwnThread() || environment().log->Wants(age_ns())) {
    return Finish(status, MessageOf(answer, times), times);
  }
  // Another job of the batch waits for this one's end.
  Finish(status, {}, times,
         [this, copy = AnswerCopy(answer), times] { return MessageOf(copy.answer(), times); });
}

std::string RingCall::MessageOf(const engine::JobAnswer& answer, const engine::JobTimes& times) {
  EncodedMessage response = Encode(answer, /*receive_ns=*/0, times);
  Conclude(&response);
  return response.ToString();
}

void RingCall::Finish(const absl::Status& status, std::string message,
                      const engine::JobTimes& times, arena::Ring::MakeMessage make) {
  const bool made = make == nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    headers_.place = nullptr;  // before the peer knows, and sends its next call
    work_.End(status.ok());
  }
  Count(status.code());
  const auto sent_bytes = static_cast<int64_t>(message.size());
  arena::RingReply reply = {.tag = tag_, .status = status, .message = std::move(message)};
  if (absl::IsResourceExhausted(status)) {
    reply.retry_after =
        engine::RetryDelayOf(status).value_or(environment().admission->options().retry_delay);
  }
  // The ring's thread ends the call: its end takes locks, for which the other calls of a batch
  // would wait.
  ring_->Complete(serial_, std::move(reply), shared_from_this(), std::move(make));
  if (made && environment().log->Wants(age_ns())) {
    static const Trace kNoTrace;
    environment().log->Write({.method = method_,
                              .peer = PeerOf(*ring_),
                              .trace = &kNoTrace,
                              .code = status.code(),
                              .rows = spec().rows(),
                              .received_bytes = message_bytes_,
                              .sent_bytes = sent_bytes,
                              .total_ns = age_ns(),
                              .job = times});
  }
}

}  // namespace logitd::rpc
