// Attempts of calls over one channel: deadlines, retries, the release of the caller's memory, and
// the server's limits. It knows messages as bytes only.
#ifndef LOGITD_CLIENT_TRANSPORT_TRANSPORT_H_
#define LOGITD_CLIENT_TRANSPORT_TRANSPORT_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/node_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/options.h"
#include "client/transport/clock.h"
#include "client/transport/payload_hold.h"
#include "client/transport/throttle.h"
#include "logitd/v1/server.pb.h"

namespace logitd::client {

// How one attempt of a call ended.
struct Attempt {
  absl::Status status;
  grpc::ByteBuffer response;           // of a unary call
  std::optional<int64_t> pushback_ms;  // when the server allows the next attempt; negative: never
  absl::Duration round_trip;
  bool progressed = false;           // the next attempt continues where this one stopped
  bool cancelled_by_server = false;  // the status is CANCELLED, and this client did not ask for it
  int attempts = 1;                  // made so far; set by Retry
};

// The messages of one streamed call, and what takes the answers.
class MessageStream {
 public:
  virtual ~MessageStream() = default;

  virtual int size() const = 0;

  // Message `i`, in order. Slices over the caller's memory share `owner`.
  virtual absl::StatusOr<grpc::ByteBuffer> Encode(
      int i, const std::shared_ptr<const void>& owner) const = 0;

  // Answer `i`, in order. An error ends the stream with it.
  virtual absl::Status Take(int i, grpc::ByteBuffer* answer) = 0;
};

absl::Status ToAbsl(const grpc::Status& status);
grpc::ByteBuffer BufferOf(const std::string& bytes);
// False: `buffer` does not hold such a message.
bool ParseMessage(grpc::ByteBuffer* buffer, google::protobuf::MessageLite* message);

// Thread-safe.
class Transport {
 public:
  // `clock` outlives this.
  Transport(ClientOptions options, std::shared_ptr<grpc::Channel> channel,
            Clock& clock = SteadyClock());

  const ClientOptions& options() const { return options_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  grpc::GenericStub& stub() { return stub_; }
  Clock& clock() const { return clock_; }

  // The deadline of a whole call that begins now, as every `deadline` here: of `clock`.
  absl::Time Deadline() const { return clock_.Now() + options_.deadline; }

  // Adds what the server is told about a call besides its message: the deadline, the token, the
  // priority, and the bytes of the message where they are known.
  void Describe(grpc::ClientContext* context, absl::Time deadline,
                std::optional<int64_t> message_bytes) const;

  // INVALID_ARGUMENT: the request is larger than ClientOptions::max_message_bytes.
  absl::Status CheckSize(const grpc::ByteBuffer& request) const;

  // The throttle of a method; null: there is none. Lives as long as this.
  Throttle* ThrottleOf(const char* method);

  // One unary call on a completion queue of its own: the calling thread does the socket's work
  // itself, which saves the two thread hops of the callback API. Clears `request`, so that only
  // gRPC holds its slices. Waits until `hold`, which may be null, is released.
  Attempt Call(const char* method, grpc::ByteBuffer* request, absl::Time deadline,
               PayloadHold* hold = nullptr);

  // One stream of all messages, written as the server takes them while answers are read. The
  // calling thread does all of it. `patience`: how long one answer may take. With the last answer
  // the attempt is OK, however the stream ends. Waits until `hold` is released.
  Attempt Stream(const char* method, MessageStream* messages, absl::Time deadline,
                 absl::Duration patience, PayloadHold* hold);

  // Runs `once(deadline)` until it succeeds, may not be tried again, or time is up. client.h has
  // the rules.
  Attempt Retry(absl::Time deadline, absl::FunctionRef<Attempt(absl::Time deadline)> once);

  // A unary call of small messages, with retries. INTERNAL: the answer is not a `Response`.
  template <typename Response>
  absl::StatusOr<Response> CallSmall(const char* method,
                                     const google::protobuf::MessageLite& request,
                                     absl::Time deadline, int* attempts = nullptr) {
    Response response;
    if (absl::Status s = CallSmall(method, request, deadline, attempts, &response); !s.ok()) {
      return s;
    }
    return response;
  }

  absl::StatusOr<v1::GetInfoResponse> Info(absl::Time deadline);

  // The server's limits. Asked for once, and again by LimitsChanged.
  absl::StatusOr<v1::Limits> Limits(absl::Time deadline);

  // After a refusal under the limits `used`: asks again. True where the server now has other
  // limits, e.g. because it was restarted; `used` then holds them. It does not matter whether the
  // server or this client refused.
  bool LimitsChanged(const absl::Status& refused, v1::Limits* used, absl::Time deadline);

 private:
  absl::Status CallSmall(const char* method, const google::protobuf::MessageLite& request,
                         absl::Time deadline, int* attempts,
                         google::protobuf::MessageLite* response);
  absl::StatusOr<v1::Limits> AskForLimits(absl::Time deadline);
  void Sleep(absl::Duration delay);

  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  Clock& clock_;
  absl::Mutex mutex_;
  std::optional<v1::Limits> limits_ ABSL_GUARDED_BY(mutex_);
  absl::node_hash_map<std::string, Throttle> throttles_ ABSL_GUARDED_BY(mutex_);  // by method
};

// A time of day that is `left` from now, for gRPC.
std::chrono::system_clock::time_point FromNow(absl::Duration left);
// The server's delay before the next attempt, where its trailing metadata has one.
std::optional<int64_t> PushbackOf(const grpc::ClientContext& context);
// Waits until `hold` (may be null) is released, polling `cq` meanwhile: without a poller the
// pending write does not move. Then shuts `cq` down.
void ReleaseAndShutdown(PayloadHold* hold, grpc::CompletionQueue* cq);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TRANSPORT_TRANSPORT_H_
