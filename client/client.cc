#include "client/client.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "client/attention_messages.h"
#include "client/codec.h"
#include "client/score_messages.h"
#include "logitd/v1/heads.grpc.pb.h"

namespace logitd::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kTopKMethod[] = "/logitd.v1.Sampler/TopK";
constexpr char kSampleMethod[] = "/logitd.v1.Sampler/Sample";
constexpr char kVerifyMethod[] = "/logitd.v1.Sampler/Verify";
constexpr char kSampleStreamMethod[] = "/logitd.v1.Sampler/SampleStream";
constexpr char kScoreMethod[] = "/logitd.v1.Scorer/Score";
constexpr char kScoreStreamMethod[] = "/logitd.v1.Scorer/ScoreStream";
// [backward]
constexpr const char* kAttentionMethods[] = {"/logitd.v1.Attention/Softmax",
                                             "/logitd.v1.Attention/SoftmaxBackward"};
constexpr const char* kAttentionStreamMethods[] = {"/logitd.v1.Attention/SoftmaxStream",
                                                   "/logitd.v1.Attention/SoftmaxBackwardStream"};
constexpr char kUnloadHeadMethod[] = "/logitd.v1.Heads/Unload";
constexpr char kListHeadsMethod[] = "/logitd.v1.Heads/List";
constexpr char kGetHeadMethod[] = "/logitd.v1.Heads/Get";
constexpr char kInfoMethod[] = "/logitd.v1.Server/GetInfo";
constexpr char kHealthCheckMethod[] = "/grpc.health.v1.Health/Check";
constexpr char kHealthWatchMethod[] = "/grpc.health.v1.Health/Watch";
constexpr char kPushbackKey[] = "grpc-retry-pushback-ms";

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// A message that is too large for a transport, the server's or ours, stays so; gRPC has the same
// code for that as for a server that is full.
bool IsRetryable(const absl::Status& status) {
  return absl::IsUnavailable(status) ||
         (absl::IsResourceExhausted(status) &&
          !absl::StrContains(status.message(), "message larger than max ("));
}

// Signals, through the end of its life, that gRPC holds no slice of the caller's memory any more.
struct ReleaseSignal {
  explicit ReleaseSignal(std::shared_ptr<absl::Notification> released)
      : released(std::move(released)) {}
  ~ReleaseSignal() { released->Notify(); }
  std::shared_ptr<absl::Notification> released;
};

// One unary call on a completion queue of its own: the calling thread does the socket's work
// itself, which saves the two thread hops of the callback API.
struct Attempt {
  absl::Status status;
  grpc::ByteBuffer response;
  std::optional<int64_t> pushback_ms;
  absl::Duration round_trip;
  bool progressed = false;  // another one goes on from where it came to
  bool hung_up = false;     // the status is CANCELLED, and it was not us
};

// What the server says of trying again, if anything.
std::optional<int64_t> PushbackOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto it = trailers.find(kPushbackKey);
  if (it == trailers.end()) return std::nullopt;
  int64_t ms = -1;  // not a number: not to be tried again, as gRPC's own retries have it
  if (!absl::SimpleAtoi(absl::string_view(it->second.data(), it->second.size()), &ms)) ms = -1;
  return ms;
}

// Waits for `released` and keeps polling meanwhile: with no poller the pending write would not
// move.
void WaitForRelease(absl::Notification& released, grpc::CompletionQueue& cq) {
  while (!released.WaitForNotificationWithTimeout(absl::Microseconds(200))) {
    void* tag;
    bool ok;
    cq.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + std::chrono::milliseconds(1));
  }
}

// Of a backoff. Seeded where it is needed, and once a thread: on some machines the seed takes
// longer (30 us) than the client's whole share of a call.
double Jitter() {
  thread_local std::minstd_rand random(std::random_device{}());
  return std::uniform_real_distribution<double>(0.5, 1.0)(random);
}

absl::Status CheckAddress(const std::string& address) {
  if (absl::StartsWith(address, "unix:") && address.size() > 5) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon != std::string::npos && colon > 0 &&
      absl::SimpleAtoi(absl::string_view(address).substr(colon + 1), &port) && port > 0 &&
      port <= 65535) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("address is \"%s\"; allowed: HOST:PORT or unix:PATH", address));
}

std::string EncodeHealthRequest(const std::string& service) {
  std::string out;
  if (service.empty()) return out;
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.WriteTag(1 << 3 | 2);  // HealthCheckRequest.service
  coded.WriteVarint32(service.size());
  coded.WriteString(service);
  return out;
}

// HealthCheckResponse has one field: status = 1, an enum. A default value is not on the wire.
absl::StatusOr<ServingStatus> DecodeHealthResponse(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.Valid() || !response.DumpToSingleSlice(&slice).ok()) {
    return absl::InternalError("the health answer could not be read");
  }
  if (slice.size() == 0) return ServingStatus::kUnknown;
  google::protobuf::io::CodedInputStream in(slice.begin(), static_cast<int>(slice.size()));
  uint32_t value = 0;
  if (in.ReadTag() != (1 << 3 | 0) || !in.ReadVarint32(&value) || value > 3) {
    return absl::InternalError("the health answer is not a grpc.health.v1.HealthCheckResponse");
  }
  return static_cast<ServingStatus>(value);
}

grpc::ByteBuffer BufferOf(const std::string& bytes) {
  grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES,
              0);  // ours know the server's delay and the caller's deadline
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a Client is a connection
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);          // tensors do not go through a web proxy
  // Calls fail at once between two tries to connect, so these bound how long a server that has come
  // back goes unseen. The "minimum" is how long one try may take.
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 250);
  // Keepalive also sets TCP_USER_TIMEOUT, without which a peer that stopped reading holds our
  // payload for ever.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 60000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
}

}  // namespace

absl::string_view ServingStatusName(ServingStatus status) {
  switch (status) {
    case ServingStatus::kServing:
      return "SERVING";
    case ServingStatus::kNotServing:
      return "NOT_SERVING";
    case ServingStatus::kServiceUnknown:
      return "SERVICE_UNKNOWN";
    case ServingStatus::kUnknown:
      break;
  }
  return "UNKNOWN";
}

namespace {

// Over the typed stream of gRPC's synchronous API, with raw messages on both sides.
class RawSampleStream final : public SampleStream {
 public:
  using Stream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
  using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;

  explicit RawSampleStream(const std::shared_ptr<grpc::Channel>& channel)
      : method_(kSampleStreamMethod, grpc::internal::RpcMethod::BIDI_STREAMING, channel),
        stream_(Factory::Create(channel.get(), method_, &context_)) {}

  ~RawSampleStream() override {
    context_.TryCancel();
    if (!ended_) stream_->Finish();
  }

  absl::Status Write(const SampleRequest& request) override {
    std::shared_ptr<const void> owner = request.owner;
    absl::StatusOr<grpc::ByteBuffer> buffer;
    if (owner != nullptr) {
      buffer = EncodeSampleRequest(request, owner);
    } else {
      auto copy = std::make_shared<std::string>();
      SampleRequest owned = request;
      std::vector<absl::string_view>& payload = request.head.empty() ? owned.logits : owned.hidden;
      for (absl::string_view piece : payload) copy->append(piece.data(), piece.size());
      payload = {*copy};
      buffer = EncodeSampleRequest(owned, copy);
    }
    if (!buffer.ok()) return buffer.status();
    {
      absl::MutexLock lock(&mutex_);
      written_.push_back(Clock::now());
    }
    if (stream_->Write(*buffer)) return absl::OkStatus();
    return absl::UnavailableError("the stream has ended; Read tells why");
  }

  void WritesDone() override { stream_->WritesDone(); }

  absl::StatusOr<SampleResult> Read() override {
    grpc::ByteBuffer message;
    if (!ended_ && stream_->Read(&message)) {
      absl::StatusOr<SampleResult> result = DecodeSampleResponse(&message);
      absl::MutexLock lock(&mutex_);
      if (result.ok() && !written_.empty()) {
        result->round_trip = absl::FromChrono(Clock::now() - written_.front());
        result->attempts = 1;
        written_.pop_front();
      }
      return result;
    }
    if (!ended_) end_status_ = ToAbsl(stream_->Finish());
    ended_ = true;
    if (end_status_.ok()) return absl::OutOfRangeError("the stream has ended");
    return end_status_;
  }

 private:
  grpc::ClientContext context_;
  const grpc::internal::RpcMethod method_;
  const std::unique_ptr<Stream> stream_;
  bool ended_ = false;       // the reader's
  absl::Status end_status_;  // the reader's
  absl::Mutex mutex_;
  std::deque<Clock::time_point> written_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

struct Client::Impl {
  explicit Impl(ClientOptions o)
      : options(std::move(o)), channel(MakeChannel(options.address)), stub(channel) {}

  // Clears `request`, so that gRPC alone holds its slices, and waits for `released`, if any.
  Attempt Call(const char* method, grpc::ByteBuffer* request, absl::Time deadline,
               absl::Notification* released) {
    Attempt attempt;
    grpc::CompletionQueue cq;
    {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(deadline));
      grpc::Status status;
      const Clock::time_point start = Clock::now();
      auto call = stub.PrepareUnaryCall(&context, method, *request, &cq);
      request->Clear();
      call->StartCall();
      call->Finish(&attempt.response, &status, &attempt);
      void* tag;
      bool ok;
      cq.Next(&tag, &ok);
      attempt.round_trip = absl::FromChrono(Clock::now() - start);
      attempt.status = ToAbsl(status);
      if (!status.ok()) attempt.pushback_ms = PushbackOf(context);
    }
    if (released != nullptr) WaitForRelease(*released, cq);
    cq.Shutdown();
    void* tag;
    bool ok;
    while (cq.Next(&tag, &ok)) {
    }
    return attempt;
  }

  // A stream of all messages of a tensor or a sequence, written as the server takes them while
  // answers are read, all by the calling thread. `patience`: how long an answer may take.
  template <typename Messages>
  Attempt Stream(const char* method, Messages* messages, std::shared_ptr<const void> owner,
                 absl::Time deadline, absl::Duration patience, absl::Notification* released) {
    Attempt attempt;
    grpc::CompletionQueue cq;
    {
      grpc::ClientContext context;
      if (deadline < absl::InfiniteFuture()) context.set_deadline(absl::ToChronoTime(deadline));
      const int size = messages->size();
      absl::Time answer_due = absl::Now() + patience;
      const Clock::time_point start = Clock::now();
      auto call = stub.PrepareCall(&context, method, &cq);
      enum Step { kStart, kWrite, kRead, kFinish };
      int steps[] = {kStart, kWrite, kRead, kFinish};
      int sent = 0;
      int taken = 0;
      grpc::ByteBuffer answer;
      grpc::Status status;
      absl::Status wrong;
      int pending = 1;
      const auto write = [&] {
        const bool last = sent + 1 == size;
        const absl::StatusOr<grpc::ByteBuffer> message = messages->Encode(sent++, owner);
        if (!message.ok()) {
          wrong = message.status();
          return context.TryCancel();
        }
        if (last) owner.reset();  // from here on the slices alone share it
        grpc::WriteOptions options;
        if (last) options.set_last_message();
        call->Write(*message, options, &steps[kWrite]);
        ++pending;
      };
      call->StartCall(&steps[kStart]);
      bool finishing = false;
      while (pending > 0) {
        void* tag;
        bool ok;
        if (cq.AsyncNext(&tag, &ok, absl::ToChronoTime(answer_due)) ==
            grpc::CompletionQueue::TIMEOUT) {
          if (wrong.ok() && taken < size) {
            wrong = absl::DeadlineExceededError(
                absl::StrFormat("no answer for %s, after %d of %d messages",
                                absl::FormatDuration(patience), taken, size));
          }
          context.TryCancel();
          answer_due = absl::InfiniteFuture();
          continue;
        }
        --pending;
        const int step = *static_cast<int*>(tag);
        if (step == kFinish) continue;
        if (step == kRead && ok) {
          if (wrong.ok() && taken < size) {
            wrong = messages->Take(taken++, &answer);
          } else if (wrong.ok()) {
            wrong = absl::InternalError("the server sent more answers than there were messages");
          }
          if (!wrong.ok()) context.TryCancel();
          answer_due = absl::Now() + patience;  // after Take, whose time is not the server's
        }
        if (step == kWrite && ok && sent < size) write();
        if (step == kStart && ok) write();
        if (step != kWrite && ok) {
          call->Read(&answer, &steps[kRead]);
          ++pending;
        } else if (step != kWrite && !finishing) {
          call->Finish(&status, &steps[kFinish]);
          ++pending;
          finishing = true;
        }
      }
      owner.reset();
      attempt.round_trip = absl::FromChrono(Clock::now() - start);
      // With all answers here, how the stream ended does not matter any more.
      attempt.status = wrong.ok() && taken < size ? ToAbsl(status) : wrong;
      attempt.hung_up = wrong.ok() && absl::IsCancelled(attempt.status);
      if (attempt.status.ok() && taken < size) {
        attempt.status = absl::InternalError(
            absl::StrFormat("the server sent %d answers to %d messages", taken, size));
      }
      if (!status.ok()) attempt.pushback_ms = PushbackOf(context);
    }
    if (released != nullptr) WaitForRelease(*released, cq);
    cq.Shutdown();
    void* tag;
    bool ok;
    while (cq.Next(&tag, &ok)) {
    }
    return attempt;
  }

  // A unary call of small messages, with retries.
  template <typename Response, typename Request>
  absl::StatusOr<Response> CallSmall(const char* method, const Request& request, absl::Time end,
                                     int* attempts_out = nullptr) {
    int attempts = 0;
    Attempt attempt = CallWithRetries(
        [&](absl::Time deadline) {
          grpc::ByteBuffer buffer = BufferOf(request.SerializeAsString());
          return Call(method, &buffer, deadline, nullptr);
        },
        &attempts, end);
    if (attempts_out != nullptr) *attempts_out = attempts;
    if (!attempt.status.ok()) return attempt.status;
    Response response;
    grpc::ProtoBufferReader reader(&attempt.response);
    if (!reader.status().ok() || !response.ParseFromZeroCopyStream(&reader)) {
      return absl::InternalError(
          absl::StrCat("the server's answer is not a ", Response::descriptor()->full_name()));
    }
    return response;
  }

  absl::StatusOr<v1::GetInfoResponse> Info(absl::Time end) {
    return CallSmall<v1::GetInfoResponse>(kInfoMethod, v1::GetInfoRequest(), end);
  }

  // Of the server, asked for once, and by LimitsChanged.
  absl::StatusOr<v1::Limits> Limits(absl::Time end) {
    {
      absl::MutexLock lock(&mutex);
      if (limits.has_value()) return *limits;
    }
    return AskForLimits(end);
  }

  absl::StatusOr<v1::Limits> AskForLimits(absl::Time end) {
    absl::StatusOr<v1::GetInfoResponse> info = Info(end);
    if (!info.ok()) return info.status();
    absl::MutexLock lock(&mutex);
    limits = info->limits();
    return *limits;
  }

  // Whether what was refused under the limits `used` may go under others, which it then has: those
  // of a server that was started anew. Who refused it, the server or we, does not matter, nor in
  // which words.
  bool LimitsChanged(const absl::Status& refused, v1::Limits* used, absl::Time end) {
    if (!absl::IsInvalidArgument(refused) && !absl::IsResourceExhausted(refused)) return false;
    const absl::StatusOr<v1::Limits> now = AskForLimits(end);
    if (!now.ok() || now->SerializeAsString() == used->SerializeAsString()) return false;
    *used = *now;
    return true;
  }

  template <typename Request>
  absl::StatusOr<AttentionResult> Attention(const Request& request) {
    const absl::Time end = Deadline();
    absl::StatusOr<v1::Limits> of_server = Limits(end);
    if (!of_server.ok()) return of_server.status();
    absl::StatusOr<AttentionResult> result = Attention(request, *of_server, end);
    if (!LimitsChanged(result.status(), &*of_server, end)) return result;
    return Attention(request, *of_server, end);
  }

  template <typename Request>
  absl::StatusOr<AttentionResult> Attention(const Request& request, const v1::Limits& of_server,
                                            absl::Time end) {
    absl::StatusOr<AttentionMessages> messages = AttentionMessages::Plan(
        request, of_server,
        {.about = options.attention_message_bytes, .most = options.max_message_bytes});
    if (!messages.ok()) return messages.status();
    const size_t backward = messages->backward() ? 1 : 0;
    auto once = [&](absl::Time deadline) {
      messages->Begin();
      std::shared_ptr<const void> owner = request.owner;
      std::shared_ptr<absl::Notification> released;
      if (owner == nullptr) {
        released = std::make_shared<absl::Notification>();
        owner = std::make_shared<ReleaseSignal>(released);
      }
      if (messages->size() > 1) {
        return Stream(kAttentionStreamMethods[backward], &*messages, std::move(owner), deadline,
                      absl::InfiniteDuration(), released.get());
      }
      grpc::ByteBuffer message = messages->Encode(0, owner);
      owner.reset();
      Attempt attempt = Call(kAttentionMethods[backward], &message, deadline, released.get());
      if (attempt.status.ok()) attempt.status = messages->Take(0, &attempt.response);
      return attempt;
    };
    int attempts = 0;
    Attempt attempt = CallWithRetries(once, &attempts, end);
    if (!attempt.status.ok()) return attempt.status;
    AttentionResult result = messages->Finish();
    result.round_trip = attempt.round_trip;
    result.attempts = attempts;
    return result;
  }

  absl::StatusOr<ScoreResult> ScoreSequence(
      const ScoreRequest& request, const std::function<bool(const ScoreProgress&)>& progress) {
    const Clock::time_point start = Clock::now();
    absl::StatusOr<v1::Limits> of_server = Limits(Deadline());
    if (!of_server.ok()) return of_server.status();
    const auto plan = [&] {
      return ScoreMessages::Plan(
          request, *of_server,
          {.about = options.score_message_bytes, .most = options.max_message_bytes}, progress);
    };
    absl::StatusOr<ScoreMessages> messages = plan();
    if (LimitsChanged(messages.status(), &*of_server, Deadline())) messages = plan();
    if (!messages.ok()) return messages.status();
    int streams = 0;
    auto once = [&](absl::Time deadline) {
      messages->Begin();
      ++streams;
      const int64_t before = messages->taken_rows();
      std::shared_ptr<const void> owner = request.owner;
      std::shared_ptr<absl::Notification> released;
      if (owner == nullptr) {
        released = std::make_shared<absl::Notification>();
        owner = std::make_shared<ReleaseSignal>(released);
      }
      Attempt attempt = Stream(kScoreStreamMethod, &*messages, std::move(owner), deadline,
                               options.deadline, released.get());
      attempt.progressed = messages->taken_rows() > before;
      // So a server ends a stream whose answers were not taken in time: `progress` kept us.
      if (attempt.hung_up) {
        attempt.status = absl::UnavailableError(
            absl::StrCat("the server gave the stream up: ", attempt.status.message()));
      }
      return attempt;
    };
    int attempts = 0;
    Attempt attempt = CallWithRetries(once, &attempts, absl::InfiniteFuture());
    int64_t replanned_at = -1;  // not twice at one row
    while (messages->taken_rows() > replanned_at &&
           LimitsChanged(attempt.status, &*of_server, Deadline())) {
      replanned_at = messages->taken_rows();
      attempt.status = messages->Replan(*of_server);
      if (attempt.status.ok()) attempt = CallWithRetries(once, &attempts, absl::InfiniteFuture());
    }
    if (!attempt.status.ok()) return attempt.status;
    ScoreResult result = messages->Finish();
    result.round_trip = absl::FromChrono(Clock::now() - start);
    result.attempts = streams;
    return result;
  }

  // Meanwhile the channel works: what it lost comes back only while somebody polls it.
  void Sleep(absl::Duration delay) {
    const Clock::time_point start = Clock::now();
    absl::Duration left = delay;
    while (left > absl::ZeroDuration()) {
      channel->WaitForStateChange(channel->GetState(/*try_to_connect=*/true),
                                  absl::ToChronoTime(absl::Now() + left));
      left = delay - absl::FromChrono(Clock::now() - start);
    }
  }

  // Of a whole call that begins now.
  absl::Time Deadline() const { return absl::Now() + options.deadline; }

  // Runs `once(deadline)` until it succeeds, may not be tried again, or time is up.
  template <typename Once>
  Attempt CallWithRetries(Once once, int* attempts, absl::Time deadline) {
    const int max_attempts = options.retry.max_attempts;
    absl::Duration backoff = options.retry.initial_backoff;
    for (*attempts = 1;; ++*attempts) {
      Attempt attempt = once(deadline);
      if (attempt.status.ok() || !IsRetryable(attempt.status)) return attempt;
      if (attempt.progressed) {
        *attempts = 1;
        backoff = options.retry.initial_backoff;
      }
      std::string why;
      if (*attempts >= max_attempts) {
        if (max_attempts > 1) why = absl::StrFormat("gave up after %d attempts", max_attempts);
      } else if (attempt.pushback_ms.has_value() && *attempt.pushback_ms < 0) {
        why = "the server asks not to retry";
      } else {
        const absl::Duration delay = attempt.pushback_ms.has_value()
                                         ? absl::Milliseconds(*attempt.pushback_ms)
                                         : backoff * Jitter();
        if (absl::Now() + delay < deadline) {
          Sleep(delay);
          backoff = std::min(backoff * 2, options.retry.max_backoff);
          continue;
        }
        why = absl::StrFormat("attempt %d; the next, in %s, would pass the deadline", *attempts,
                              absl::FormatDuration(delay));
      }
      if (!why.empty()) {
        attempt.status = absl::Status(attempt.status.code(),
                                      absl::StrCat(attempt.status.message(), " (", why, ")"));
      }
      return attempt;
    }
  }

  // A unary call with retries, whose payload stays the caller's.
  template <typename Request, typename Result>
  absl::StatusOr<Result> CallWithLogits(const char* method, const Request& request,
                                        absl::StatusOr<grpc::ByteBuffer> (*encode)(
                                            const Request&, const std::shared_ptr<const void>&),
                                        absl::StatusOr<Result> (*decode)(grpc::ByteBuffer*)) {
    auto once = [&](absl::Time deadline) {
      std::shared_ptr<const void> owner = request.owner;
      std::shared_ptr<absl::Notification> released;
      if (owner == nullptr) {
        released = std::make_shared<absl::Notification>();
        owner = std::make_shared<ReleaseSignal>(released);
      }
      absl::StatusOr<grpc::ByteBuffer> buffer = encode(request, owner);
      owner.reset();  // from here on the slices alone share it
      if (buffer.ok()) {
        if (absl::Status size = CheckSize(*buffer); !size.ok()) buffer = size;
      }
      if (!buffer.ok()) return Attempt{.status = buffer.status()};
      return Call(method, &*buffer, deadline, released.get());
    };
    int attempts = 0;
    Attempt attempt = CallWithRetries(once, &attempts, Deadline());
    if (!attempt.status.ok()) return attempt.status;
    absl::StatusOr<Result> result = decode(&attempt.response);
    if (result.ok()) {
      result->round_trip = attempt.round_trip;
      result->attempts = attempts;
    }
    return result;
  }

  absl::Status CheckSize(const grpc::ByteBuffer& request) const {
    if (options.max_message_bytes > 0 &&
        static_cast<int64_t>(request.Length()) > options.max_message_bytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("request of %d bytes, max_message_bytes is %d", request.Length(),
                          options.max_message_bytes));
    }
    return absl::OkStatus();
  }

  const ClientOptions options;
  const std::shared_ptr<grpc::Channel> channel;
  grpc::GenericStub stub;
  absl::Mutex mutex;
  std::optional<v1::Limits> limits ABSL_GUARDED_BY(mutex);
};

absl::StatusOr<std::unique_ptr<Client>> Client::Create(ClientOptions options) {
  if (absl::Status status = CheckAddress(options.address); !status.ok()) return status;
  if (options.retry.max_attempts < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "retry.max_attempts is %d; allowed: 1 or more", options.retry.max_attempts));
  }
  if (options.deadline <= absl::ZeroDuration() || options.deadline > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(absl::StrFormat("deadline is %s; allowed: above 0, to a year",
                                                      absl::FormatDuration(options.deadline)));
  }
  return std::unique_ptr<Client>(new Client(std::make_unique<Impl>(std::move(options))));
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;
const ClientOptions& Client::options() const { return impl_->options; }

absl::StatusOr<TopKResult> Client::TopK(const TopKRequest& request) {
  return impl_->CallWithLogits(kTopKMethod, request, EncodeTopKRequest, DecodeTopKResponse);
}

absl::StatusOr<SampleResult> Client::Sample(const SampleRequest& request) {
  return impl_->CallWithLogits(kSampleMethod, request, EncodeSampleRequest, DecodeSampleResponse);
}

std::unique_ptr<SampleStream> Client::OpenSampleStream() {
  return std::make_unique<RawSampleStream>(impl_->channel);
}

absl::StatusOr<VerifyResult> Client::Verify(const VerifyRequest& request) {
  return impl_->CallWithLogits(kVerifyMethod, request, EncodeVerifyRequest, DecodeVerifyResponse);
}

absl::StatusOr<ScoreResult> Client::Score(const ScoreRequest& request) {
  return impl_->CallWithLogits(kScoreMethod, request, EncodeScoreRequest, DecodeScoreResponse);
}

absl::StatusOr<ScoreResult> Client::ScoreStream(
    const ScoreRequest& request, const std::function<bool(const ScoreProgress&)>& progress) {
  return impl_->ScoreSequence(request, progress);
}

absl::StatusOr<AttentionResult> Client::AttentionSoftmax(const AttentionSoftmaxRequest& request) {
  return impl_->Attention(request);
}

absl::StatusOr<AttentionResult> Client::AttentionSoftmaxBackward(
    const AttentionSoftmaxBackwardRequest& request) {
  return impl_->Attention(request);
}

void Client::TopKAsync(const TopKRequest& request,
                       std::function<void(absl::StatusOr<TopKResult>)> done) {
  if (request.owner == nullptr) {
    done(absl::InvalidArgumentError("TopKAsync needs the payload's owner"));
    return;
  }
  absl::StatusOr<grpc::ByteBuffer> buffer = EncodeTopKRequest(request, request.owner);
  if (buffer.ok()) {
    if (absl::Status size = impl_->CheckSize(*buffer); !size.ok()) buffer = size;
  }
  if (!buffer.ok()) {
    done(buffer.status());
    return;
  }
  struct Call {
    grpc::ClientContext context;
    grpc::ByteBuffer request;
    grpc::ByteBuffer response;
    Clock::time_point start;
    std::function<void(absl::StatusOr<TopKResult>)> done;
  };
  auto call = std::make_shared<Call>();
  call->request.Swap(&*buffer);
  call->start = Clock::now();
  call->done = std::move(done);
  call->context.set_deadline(absl::ToChronoTime(absl::Now() + impl_->options.deadline));
  impl_->stub.UnaryCall(&call->context, kTopKMethod, {}, &call->request, &call->response,
                        [call](const grpc::Status& status) {
                          const absl::Duration round_trip =
                              absl::FromChrono(Clock::now() - call->start);
                          if (!status.ok()) {
                            call->done(ToAbsl(status));
                            return;
                          }
                          absl::StatusOr<TopKResult> result = DecodeTopKResponse(&call->response);
                          if (result.ok()) {
                            result->round_trip = round_trip;
                            result->attempts = 1;
                          }
                          call->done(std::move(result));
                        });
}

absl::StatusOr<v1::Head> Client::LoadHead(
    const v1::LoadHeadRequest& request,
    const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress) {
  grpc::ClientContext context;
  const auto stub = v1::Heads::NewStub(impl_->channel);
  const auto reader = stub->Load(&context, request);
  v1::LoadHeadResponse message;
  bool stopped = false;
  while (!stopped && reader->Read(&message)) {
    stopped = progress != nullptr && !progress(message.done_bytes(), message.total_bytes());
  }
  if (stopped) context.TryCancel();
  const absl::Status status = ToAbsl(reader->Finish());
  if (!status.ok()) return status;
  if (stopped) return absl::CancelledError("given up as the load ended: the head may be there");
  if (!message.has_head()) return absl::InternalError("the server's last answer has no head");
  return message.head();
}

absl::Status Client::UnloadHead(const std::string& name) {
  v1::UnloadHeadRequest request;
  request.set_name(name);
  int attempts = 0;
  const absl::Status status = impl_
                                  ->CallSmall<v1::UnloadHeadResponse>(kUnloadHeadMethod, request,
                                                                      impl_->Deadline(), &attempts)
                                  .status();
  // The answer that was lost may have been the one that did it.
  return attempts > 1 && absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::vector<v1::Head>> Client::ListHeads() {
  const absl::StatusOr<v1::ListHeadsResponse> list = impl_->CallSmall<v1::ListHeadsResponse>(
      kListHeadsMethod, v1::ListHeadsRequest(), impl_->Deadline());
  if (!list.ok()) return list.status();
  return std::vector<v1::Head>(list->heads().begin(), list->heads().end());
}

absl::StatusOr<v1::Head> Client::GetHead(const std::string& name) {
  v1::GetHeadRequest request;
  request.set_name(name);
  const absl::StatusOr<v1::GetHeadResponse> got =
      impl_->CallSmall<v1::GetHeadResponse>(kGetHeadMethod, request, impl_->Deadline());
  if (!got.ok()) return got.status();
  return got->head();
}

absl::StatusOr<v1::GetInfoResponse> Client::Info() { return impl_->Info(impl_->Deadline()); }

absl::StatusOr<ServingStatus> Client::Health(const std::string& service) {
  int attempts = 0;
  Attempt attempt = impl_->CallWithRetries(
      [&](absl::Time deadline) {
        grpc::ByteBuffer request = BufferOf(EncodeHealthRequest(service));
        return impl_->Call(kHealthCheckMethod, &request, deadline, nullptr);
      },
      &attempts, impl_->Deadline());
  if (!attempt.status.ok()) return attempt.status;
  return DecodeHealthResponse(attempt.response);
}

absl::Status Client::WatchHealth(const std::string& service,
                                 const std::function<bool(ServingStatus)>& on_change) {
  grpc::CompletionQueue cq;
  grpc::ClientContext context;
  auto wait = [&cq] {
    void* tag;
    bool ok = false;
    return cq.Next(&tag, &ok) && ok;
  };
  absl::Status result;
  bool stopped = false;
  auto stream = impl_->stub.PrepareCall(&context, kHealthWatchMethod, &cq);
  stream->StartCall(nullptr);
  if (wait()) {
    stream->WriteLast(BufferOf(EncodeHealthRequest(service)), grpc::WriteOptions(), nullptr);
    bool more = wait();
    while (more && !stopped) {
      grpc::ByteBuffer message;
      stream->Read(&message, nullptr);
      more = wait();
      if (!more) break;
      absl::StatusOr<ServingStatus> status = DecodeHealthResponse(message);
      if (!status.ok()) result = status.status();
      stopped = !status.ok() || !on_change(*status);
    }
  }
  if (stopped) context.TryCancel();
  grpc::Status status;
  stream->Finish(&status, nullptr);
  wait();
  cq.Shutdown();
  while (wait()) {
  }
  return stopped ? result : ToAbsl(status);
}

}  // namespace logitd::client
