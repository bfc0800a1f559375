#include "client/transport/transport.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace logitd::client {
namespace {

// A message that is too large for a transport, the server's or ours, stays too large. gRPC has the
// same code for it as for a full server, which does not reset the stream.
bool IsRetryable(const absl::Status& status) {
  return absl::IsUnavailable(status) ||
         (absl::IsResourceExhausted(status) &&
          !absl::StrContains(status.message(), "message larger than max (") &&
          !absl::StrContains(status.message(), "RST_STREAM"));
}

// Factor of a backoff. Seeded once per thread, at its first use: on some machines the seed takes
// longer (30 us) than the client's whole share of a call.
double Jitter() {
  thread_local std::minstd_rand random(std::random_device{}());
  return std::uniform_real_distribution<double>(0.5, 1.0)(random);
}

}  // namespace

absl::Status ToAbsl(const grpc::Status& status) {
  // A proxy that gets a refusal while it still sends the message cuts the stream. logitd itself
  // never does, and a caller's own cancellation has another text.
  if (status.error_code() == grpc::StatusCode::CANCELLED &&
      absl::StrContains(status.error_message(), "Received RST_STREAM")) {
    return absl::UnavailableError(status.error_message());
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

grpc::ByteBuffer BufferOf(const std::string& bytes) {
  grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

bool ParseMessage(grpc::ByteBuffer* buffer, google::protobuf::MessageLite* message) {
  grpc::ProtoBufferReader reader(buffer);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
}

std::chrono::system_clock::time_point FromNow(absl::Duration left) {
  return absl::ToChronoTime(absl::Now() + left);
}

std::optional<int64_t> PushbackOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto it = trailers.find("grpc-retry-pushback-ms");
  if (it == trailers.end()) return std::nullopt;
  int64_t ms = -1;  // not a number: no retry, as in gRPC's own retries
  if (!absl::SimpleAtoi(absl::string_view(it->second.data(), it->second.size()), &ms)) ms = -1;
  return ms;
}

void ReleaseAndShutdown(PayloadHold* hold, grpc::CompletionQueue* cq) {
  void* tag;
  bool ok;
  if (hold != nullptr) hold->Drop();
  absl::Notification* const released = hold == nullptr ? nullptr : hold->released();
  while (released != nullptr &&
         !released->WaitForNotificationWithTimeout(absl::Microseconds(200))) {
    cq->AsyncNext(&tag, &ok, FromNow(absl::Milliseconds(1)));
  }
  cq->Shutdown();
  while (cq->Next(&tag, &ok)) {
  }
}

Transport::Transport(ClientOptions options, std::shared_ptr<grpc::Channel> channel, Clock& clock)
    : options_(std::move(options)), channel_(std::move(channel)), stub_(channel_), clock_(clock) {}

void Transport::Describe(grpc::ClientContext* context, absl::Time deadline,
                         std::optional<int64_t> message_bytes) const {
  if (deadline < absl::InfiniteFuture()) context->set_deadline(FromNow(deadline - clock_.Now()));
  if (!options_.token.empty()) {
    context->AddMetadata("authorization", absl::StrCat("Bearer ", options_.token));
  }
  if (options_.priority == Priority::kBatch) context->AddMetadata("logitd-priority", "batch");
  if (!options_.request_id.empty()) context->AddMetadata("x-request-id", options_.request_id);
  if (!options_.traceparent.empty()) context->AddMetadata("traceparent", options_.traceparent);
  if (options_.state_sizes && message_bytes.has_value()) {
    context->AddMetadata("logitd-payload-bytes", absl::StrCat(*message_bytes));
  }
}

absl::Status Transport::CheckSize(const grpc::ByteBuffer& request) const {
  const auto bytes = static_cast<int64_t>(request.Length());
  if (options_.max_message_bytes <= 0 || bytes <= options_.max_message_bytes) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("request: got %d bytes, allowed 1..%d (max_message_bytes)", bytes,
                      options_.max_message_bytes));
}

Throttle* Transport::ThrottleOf(const char* method) {
  if (!options_.throttle) return nullptr;
  absl::MutexLock lock(&mutex_);
  return &throttles_.try_emplace(method).first->second;
}

Attempt Transport::Call(const char* method, grpc::ByteBuffer* request, absl::Time deadline,
                        PayloadHold* hold) {
  Attempt attempt;
  Throttle* const throttle = ThrottleOf(method);
  if (throttle != nullptr) attempt.status = throttle->Ask(clock_.Now());
  if (!attempt.status.ok()) {
    request->Clear();
    attempt.pushback_ms = throttle->pushback_ms();
    return attempt;
  }
  grpc::CompletionQueue cq;
  {
    grpc::ClientContext context;
    Describe(&context, deadline, static_cast<int64_t>(request->Length()));
    grpc::Status status;
    const absl::Time start = clock_.Now();
    auto call = stub_.PrepareUnaryCall(&context, method, *request, &cq);
    request->Clear();
    call->StartCall();
    call->Finish(&attempt.response, &status, &attempt);
    void* tag;
    bool ok;
    cq.Next(&tag, &ok);
    attempt.round_trip = clock_.Now() - start;
    attempt.status = ToAbsl(status);
    if (!status.ok()) attempt.pushback_ms = PushbackOf(context);
  }
  if (throttle != nullptr) {
    throttle->Ended(attempt.status, attempt.pushback_ms, clock_.Now());
  }
  ReleaseAndShutdown(hold, &cq);
  return attempt;
}

// The channel works meanwhile: it reconnects only while somebody polls it.
void Transport::Sleep(absl::Duration delay) {
  const absl::Time end = clock_.Now() + delay;
  while (clock_.Now() < end) {
    channel_->WaitForStateChange(channel_->GetState(/*try_to_connect=*/true),
                                 FromNow(clock_.SleepUntil(end)));
  }
}

Attempt Transport::Retry(absl::Time deadline,
                         absl::FunctionRef<Attempt(absl::Time deadline)> once) {
  const int max_attempts = options_.retry.max_attempts;
  absl::Duration backoff = options_.retry.initial_backoff;
  for (int attempts = 1;; ++attempts) {
    Attempt attempt = once(deadline);
    if (attempt.progressed && IsRetryable(attempt.status)) {
      attempts = 1;
      backoff = options_.retry.initial_backoff;
    }
    attempt.attempts = attempts;
    if (attempt.status.ok() || !IsRetryable(attempt.status)) return attempt;
    std::string why;
    if (attempts >= max_attempts) {
      if (max_attempts > 1) why = absl::StrFormat("gave up after %d attempts", max_attempts);
    } else if (attempt.pushback_ms.has_value() && *attempt.pushback_ms < 0) {
      why = "the server asks not to retry";
    } else {
      const absl::Duration delay = attempt.pushback_ms.has_value()
                                       ? absl::Milliseconds(*attempt.pushback_ms)
                                       : backoff * Jitter();
      if (clock_.Now() + delay < deadline) {
        Sleep(delay);
        backoff = std::min(backoff * 2, options_.retry.max_backoff);
        continue;
      }
      why = absl::StrFormat("attempt %d; the next, in %s, would pass the deadline", attempts,
                            absl::FormatDuration(delay));
    }
    if (!why.empty()) {
      attempt.status = absl::Status(attempt.status.code(),
                                    absl::StrCat(attempt.status.message(), " (", why, ")"));
    }
    return attempt;
  }
}

absl::Status Transport::CallSmall(const char* method, const google::protobuf::MessageLite& request,
                                  absl::Time deadline, int* attempts,
                                  google::protobuf::MessageLite* response) {
  Attempt attempt = Retry(deadline, [&](absl::Time end) {
    grpc::ByteBuffer buffer = BufferOf(request.SerializeAsString());
    return Call(method, &buffer, end);
  });
  if (attempts != nullptr) *attempts = attempt.attempts;
  if (attempt.status.ok() && !ParseMessage(&attempt.response, response)) {
    return absl::InternalError(
        absl::StrCat("the server's answer is not a ", response->GetTypeName()));
  }
  return attempt.status;
}

absl::StatusOr<v1::GetInfoResponse> Transport::Info(absl::Time deadline) {
  return CallSmall<v1::GetInfoResponse>("/logitd.v1.Server/GetInfo", v1::GetInfoRequest(),
                                        deadline);
}

absl::StatusOr<v1::Limits> Transport::Limits(absl::Time deadline) {
  {
    absl::MutexLock lock(&mutex_);
    if (limits_.has_value()) return *limits_;
  }
  return AskForLimits(deadline);
}

absl::StatusOr<v1::Limits> Transport::AskForLimits(absl::Time deadline) {
  absl::StatusOr<v1::GetInfoResponse> info = Info(deadline);
  if (!info.ok()) return info.status();
  absl::MutexLock lock(&mutex_);
  limits_ = info->limits();
  return *limits_;
}

bool Transport::LimitsChanged(const absl::Status& refused, v1::Limits* used, absl::Time deadline) {
  if (!absl::IsInvalidArgument(refused) && !absl::IsResourceExhausted(refused)) return false;
  const absl::StatusOr<v1::Limits> now = AskForLimits(deadline);
  if (!now.ok() || now->SerializeAsString() == used->SerializeAsString()) return false;
  *used = *now;
  return true;
}

}  // namespace logitd::client
