#include "server/rpc/transport/server_call.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/base/clock.h"
#include "server/rpc/transport/call_headers.h"

namespace logitd::rpc {

absl::Status TruncatedError() {
  return absl::UnimplementedError(
      "request: got the end of the call before a whole message (none, or it was truncated), "
      "allowed exactly one");
}

namespace {

// A grpc-timeout: up to eight digits and a unit. InfiniteDuration: there is none. A malformed one
// is refused.
absl::Status ReadTimeout(std::string_view text, absl::Duration* timeout) {
  *timeout = absl::InfiniteDuration();
  if (text.data() == nullptr) return absl::OkStatus();
  constexpr size_t kDigits = 8;
  int64_t number = 0;
  bool ok = text.size() >= 2 && text.size() <= kDigits + 1;
  for (size_t i = 0; ok && i + 1 < text.size(); ++i) {
    ok = text[i] >= '0' && text[i] <= '9';
    number = 10 * number + (text[i] - '0');
  }
  constexpr std::pair<char, absl::Duration> kUnits[] = {
      {'H', absl::Hours(1)},        {'M', absl::Minutes(1)},      {'S', absl::Seconds(1)},
      {'m', absl::Milliseconds(1)}, {'u', absl::Microseconds(1)}, {'n', absl::Nanoseconds(1)}};
  const auto* const unit = std::find_if(std::begin(kUnits), std::end(kUnits), [&](const auto& of) {
    return ok && of.first == text.back();
  });
  if (unit == std::end(kUnits)) {
    return absl::InvalidArgumentError(
        "grpc-timeout: got a malformed value, allowed 1 to 8 digits and one of H, M, S, m, u, n");
  }
  *timeout = number * unit->second;
  return absl::OkStatus();
}

// gRPC demands INTERNAL for a message that is marked and has no encoding.
absl::Status CompressedError(std::string_view encoding) {
  if (encoding.empty() || encoding == "identity") {
    return absl::InternalError(
        "request: got a message marked as compressed without a grpc-encoding that compresses, "
        "allowed are messages that are not marked");
  }
  return absl::UnimplementedError(
      "request: got a message marked as compressed, allowed are messages that are not compressed");
}

// gRPC's text of a status: bytes outside of printable ASCII, and '%', as %XX.
std::string PercentEncode(std::string_view text) {
  std::string encoded;
  for (const char c : text) {
    if (c >= ' ' && c <= '~' && c != '%') {
      encoded.push_back(c);
    } else {
      absl::StrAppendFormat(&encoded, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

using Fields = absl::InlinedVector<http2::Field, 8>;

// The trailers of a status. The fields refer to its own strings.
struct Trailers {
  std::string code;
  std::string message;
  std::string pushback;
  Fields fields;

  Trailers(const absl::Status& status, const CallTracker& tracker, const Trace* trace) {
    code = absl::StrCat(static_cast<int>(status.code()));
    fields.push_back({"grpc-status", code});
    if (!status.message().empty()) {
      message = PercentEncode({status.message().data(), status.message().size()});
      fields.push_back({"grpc-message", message});
    }
    if (absl::IsResourceExhausted(status)) {
      pushback = absl::StrCat(absl::ToInt64Milliseconds(tracker.RetryDelay(status)));
      fields.push_back({kRetryPushback, pushback});
    }
    if (absl::IsUnimplemented(status)) fields.push_back({"grpc-accept-encoding", "identity"});
    if (trace == nullptr) return;
    if (!trace->request_id.empty()) fields.push_back({kRequestId, trace->request_id});
    if (!trace->traceparent.empty()) fields.push_back({kTraceparent, trace->traceparent});
  }
};

}  // namespace

void EndStream(http2::Stream* stream, const absl::Status& status, const CallTracker& tracker,
               const Trace* trace) {
  const Trailers trailers(status, tracker, trace);
  Fields fields = {{":status", "200"}, {"content-type", kContentType}};
  fields.insert(fields.end(), trailers.fields.begin(), trailers.fields.end());
  stream->End(fields);
}

ServerCall::ServerCall(http2::Stream* stream, CallTracker* tracker)
    : stream_(stream),
      loop_(&stream->connection().loop()),
      tracker_(tracker),
      connection_(stream->connection().weak_from_this()),
      connection_id_(stream->connection().peer().id),
      peer_(stream->connection().peer().name),
      started_ns_(MonotonicNanos()),
      granted_(stream->granted()),
      deadline_timer_([this] {
        if (!finished_) OnCancelled(absl::DeadlineExceededError("the deadline has passed"));
      }),
      receive_timer_([this] { OnCancelled(tracker_->LateStatus()); }) {}

ServerCall::~ServerCall() = default;

void ServerCall::Start() {
  tracker_->Enter(this);
  trace_ = ReadTrace(metadata());
  absl::Duration timeout;
  if (absl::Status status = ReadTimeout(metadata().Find("grpc-timeout"), &timeout); !status.ok()) {
    return End(status);
  }
  deadline_ = timeout == absl::InfiniteDuration() ? absl::InfiniteFuture() : SteadyNow() + timeout;
  if (timeout < absl::Hours(24 * 365)) {
    loop_->timers().Set(&deadline_timer_, loop_->now_ns() + absl::ToInt64Nanoseconds(timeout));
  }
  began_ = true;
  Begin();
}

int64_t ServerCall::age_ns() const { return MonotonicNanos() - started_ns_; }

void ServerCall::OnDrain(absl::Duration) {
  if (receiving_) StartReceiveTimer();
}

void ServerCall::OnLoop(absl::AnyInvocable<void()> work) {
  loop_->Post([self = shared_from_this(), work = std::move(work)]() mutable {
    if (!self->over()) work();
  });
}

std::optional<int64_t> ServerCall::connection_bytes() const {
  const auto connection = connection_.lock();
  if (connection == nullptr || loop_->IsLate()) return std::nullopt;
  return connection->account().received.load(std::memory_order_relaxed);
}

void ServerCall::OnTooSlow(const absl::Status& why) {
  OnLoop([this, why] { EndInput(why); });
}

// ---- receiving

void ServerCall::Grant(size_t bytes) {
  constexpr int64_t kAhead = int64_t{64} << 10;  // so that the next message's start needs no grant
  const int64_t needed = body_bytes_ + static_cast<int64_t>(kPrefixBytes + bytes);
  if (over() || needed + kAhead / 2 <= granted_) return;
  granted_ = needed + kAhead;
  stream_->Grant(granted_);
}

void ServerCall::StartReceiveTimer() {
  receiving_ = true;
  const absl::Duration timeout = tracker_->message_timeout();
  if (timeout == absl::InfiniteDuration()) return;
  loop_->timers().Set(&receive_timer_, loop_->now_ns() + absl::ToInt64Nanoseconds(timeout));
}

void ServerCall::StopReceiveTimer() {
  receiving_ = false;
  receive_timer_.Cancel();
}

void ServerCall::Pause(bool pause) {
  paused_ = pause;
  if (!pause) GoOn();
}

void ServerCall::DropInput() {
  dropping_ = true;
  StopReceiveTimer();
  memory_ = {};
  std::vector<std::byte>().swap(seen_);
  if (!over()) stream_->ReleaseEarly();
}

void ServerCall::Receive(MessageMemory memory) {
  memory_ = std::move(memory);
  have_ = 0;
  state_ = State::kReceiving;
  if (!receiving_) StartReceiveTimer();
  GoOn();
}

void ServerCall::ReceiveWhole() {
  state_ = State::kWhole;
  if (!receiving_) StartReceiveTimer();
}

absl::Span<std::byte> ServerCall::Room(size_t) {
  if (state_ != State::kReceiving || finished_ || dropping_) return {};
  return memory_.bytes.subspan(have_);
}

void ServerCall::GoOn() {
  if (taking_) return;
  const std::vector<std::byte> seen = std::move(seen_);
  seen_.clear();
  if (!over()) stream_->ReleaseEarly();
  Absorb(seen);
}

void ServerCall::OnBody(absl::Span<const std::byte> bytes) {
  if (dropping_) return;
  if (state_ == State::kReceiving && bytes.data() == memory_.bytes.data() + have_) {
    have_ += bytes.size();  // it was received where it belongs
    if (have_ == memory_.bytes.size()) EndMessage();
    return;
  }
  Absorb(bytes);
}

void ServerCall::Absorb(absl::Span<const std::byte> bytes) {
  taking_ = true;
  while (!finished_ && !over() && !dropping_) {
    if (state_ == State::kReceiving) {
      const auto run = bytes.first(std::min(memory_.bytes.size() - have_, bytes.size()));
      std::copy(run.begin(), run.end(), memory_.bytes.begin() + static_cast<ptrdiff_t>(have_));
      bytes.remove_prefix(run.size());
      have_ += run.size();
      if (have_ < memory_.bytes.size()) break;
      EndMessage();
    } else if (state_ == State::kWhole && seen_.empty() && bytes.size() >= message_bytes_) {
      memory_.bytes = {const_cast<std::byte*>(bytes.data()), message_bytes_};
      bytes.remove_prefix(message_bytes_);
      EndMessage();
    } else if (state_ == State::kPrefix && !paused_ && !bytes.empty()) {
      TakePrefix(&bytes);
      if (prefix_bytes_ < kPrefixBytes || finished_) continue;
      prefix_bytes_ = 0;
      state_ = State::kWaiting;
      at_hand_ = bytes;
      OnMessageSize(message_bytes_);
    } else {
      break;
    }
  }
  taking_ = false;
  if (finished_ || over() || dropping_) return;
  if (!bytes.empty() && !Keep(bytes)) return;
  if (state_ == State::kWhole && seen_.size() >= message_bytes_) return GoOn();
  if (half_closed_ && seen_.empty() && !told_half_close_ && state_ == State::kPrefix && !paused_) {
    told_half_close_ = true;
    if (prefix_bytes_ > 0) return End(TruncatedError());
    OnHalfClose();
  } else if (half_closed_ &&
             (state_ == State::kWhole || (state_ == State::kReceiving && seen_.empty()))) {
    End(TruncatedError());
  }
}

// Appends to `seen_`, whose memory is counted. False: the call has ended.
bool ServerCall::Keep(absl::Span<const std::byte> bytes) {
  const size_t needed = seen_.size() + bytes.size();
  if (needed > seen_.capacity()) {
    const size_t capacity = std::max(needed, 2 * seen_.capacity());
    if (!stream_->HoldEarly(static_cast<int64_t>(capacity - seen_.capacity()))) {
      tracker_->CountRefused(engine::Refusal::kEarlyBytes);
      End(absl::ResourceExhaustedError(
          "the connection holds as many bytes of calls that wait as it may; retry later"));
      return false;
    }
    seen_.reserve(capacity);
  }
  seen_.insert(seen_.end(), bytes.begin(), bytes.end());
  return true;
}

void ServerCall::TakePrefix(absl::Span<const std::byte>* bytes) {
  const size_t run = std::min(kPrefixBytes - prefix_bytes_, bytes->size());
  std::memcpy(prefix_.data() + prefix_bytes_, bytes->data(), run);
  bytes->remove_prefix(run);
  prefix_bytes_ += run;
  if (prefix_bytes_ < kPrefixBytes) return;
  if (prefix_[0] != std::byte{0}) return End(CompressedError(metadata().Find("grpc-encoding")));
  message_bytes_ = 0;
  for (size_t i = 1; i < kPrefixBytes; ++i) {
    message_bytes_ = message_bytes_ << 8 | std::to_integer<size_t>(prefix_[i]);
  }
}

void ServerCall::EndMessage() {
  state_ = State::kPrefix;
  StopReceiveTimer();
  body_bytes_ += static_cast<int64_t>(kPrefixBytes + memory_.bytes.size());
  received_bytes_ += static_cast<int64_t>(memory_.bytes.size());
  stream_->CountMessage();
  OnMessage(std::exchange(memory_, {}));
}

void ServerCall::OnEnd() {
  half_closed_ = true;
  if (!taking_) GoOn();
}

// ---- answering

void ServerCall::Write(EncodedMessage message) {
  if (over() || finished_) return;
  if (!std::exchange(head_sent_, true)) {
    const http2::Field fields[] = {{":status", "200"}, {"content-type", kContentType}};
    stream_->Respond(fields);
  }
  sent_bytes_ += message.bytes();
  auto parts = message.Release();
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].ends_message = i + 1 == parts.size();
    if (pays_) parts[i].payer = std::max(parts[i].payer, http2::Payer::kOwner);
    stream_->Send(std::move(parts[i]));
  }
}

void ServerCall::Finish(const absl::Status& status, EncodedMessage message) {
  if (over() || finished_) return;
  if (!message.empty()) Write(std::move(message));
  finished_ = true;
  deadline_timer_.Cancel();
  DropInput();
  if (!head_sent_) return EndStream(stream_, status, *tracker_, &trace_);
  stream_->End(Trailers(status, *tracker_, &trace_).fields);
}

void ServerCall::OnClosed(http2::Closed why) {
  const std::shared_ptr<ServerCall> self = shared_from_this();
  deadline_timer_.Cancel();
  StopReceiveTimer();
  const bool cancelled = why != http2::Closed::kEnded;
  stream_ = nullptr;
  if (cancelled) OnCancelled(absl::CancelledError("call cancelled"));
  finished_ = true;
  OnOver();
  tracker_->Leave(this);
}

}  // namespace logitd::rpc
