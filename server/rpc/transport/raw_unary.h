// Serves a unary method from its headers on: the handler runs before the message is read, and gets
// it as raw slices.
//
// gRPC's own unary handlers run when the whole message is in memory. Here a call can be refused, or
// kept waiting with its bytes held at the peer by HTTP/2 flow control, for the price of its
// headers. On the wire it stays a unary method: stubs in any language work unchanged, and
// reflection serves its descriptor.
//
// How: the server side registers the method's full name as a bidirectional stream of ByteBuffers.
// That takes names from grpc::internal (gRPC 1.51), all of them in raw_unary.cc. Should they go
// away, the generated `WithRawCallbackMethod_<Method>` does everything here but refuse on headers.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_RAW_UNARY_H_
#define LOGITD_SERVER_RPC_TRANSPORT_RAW_UNARY_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/rpc/transport/watchdog.h"

namespace logitd::rpc {

// A call that stays when the server drains unless it is told.
class DrainedCall {
 public:
  virtual ~DrainedCall() = default;
  virtual void OnDrain() = 0;
};

// What calls of one server share: how many are alive, and how long a peer may take to send its
// message. Thread-safe. Outlives its calls.
class CallTracker {
 public:
  // `peer_timeout` runs from the moment a message is asked for, and anew from the moment an answer
  // is sent.
  explicit CallTracker(absl::Duration peer_timeout) : peer_watch_(peer_timeout) {}

  int alive() const;
  // True: no call was alive at some moment before `deadline`.
  bool WaitNone(absl::Time deadline) const;

  // A call is alive from Add to Remove, and is told to drain, at once if the server does already.
  // Known by who owns it, which stays its own when the object is gone; an address would not.
  void Add(const std::weak_ptr<DrainedCall>& call);
  void Remove(const std::weak_ptr<DrainedCall>& call);
  void Drain();

  Watchdog& peer_watch() { return peer_watch_; }

 private:
  friend class RawUnaryCall;

  mutable absl::Mutex mutex_;
  int alive_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::weak_ptr<DrainedCall>, std::owner_less<>> drained_ ABSL_GUARDED_BY(mutex_);
  Watchdog peer_watch_;
};

// One call. Subclasses are made by a factory on headers and see, in this order: OnHeaders, then
// after Receive() OnMessage, unless OnGone comes first. Every path ends in Finish; the first one
// wins, later ones do nothing. Once OnGone has run the call is finished already. The object lives
// until the transport is done with it and nobody else holds it.
//
// Receive and Finish are thread-safe. OnHeaders and OnMessage do not overlap; OnGone may run beside
// either.
class RawUnaryCall : public std::enable_shared_from_this<RawUnaryCall>,
                     private grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  RawUnaryCall(grpc::CallbackServerContext* context, CallTracker* tracker);
  ~RawUnaryCall() override;

  // Asks for the message. Once.
  void Receive();

  // Ends the call: with `response` if `status` is OK, otherwise without a message.
  // RESOURCE_EXHAUSTED tells the caller when to come back (`grpc-retry-pushback-ms`) if
  // `retry_delay` is positive.
  void Finish(const absl::Status& status, grpc::ByteBuffer response = {},
              absl::Duration retry_delay = absl::ZeroDuration());

  absl::Time deadline() const;  // InfiniteFuture if the caller set none

 protected:
  virtual void OnHeaders() = 0;
  // The one message, to be emptied or left. May Finish.
  virtual void OnMessage(grpc::ByteBuffer* message) = 0;
  // The peer has gone, the deadline has passed or the server is shutting down.
  virtual void OnGone() = 0;
  // Once, when the status is known; where the call ended without a message, with its end.
  virtual void OnFinish(absl::StatusCode code) = 0;

 private:
  friend class RawUnaryService;

  void Start();
  // Starts a read unless the call is finished. False: it is, and nothing is left to do.
  bool Read();
  // True for the one caller that is to run FinishNow.
  bool ClaimEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishNow();
  void FinishWithoutMessage();
  void TryCancel();
  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  grpc::CallbackServerContext* const context_;
  CallTracker* const tracker_;
  std::shared_ptr<RawUnaryCall> self_;  // until OnDone
  Watchdog::Entry peer_watch_;
  bool have_message_ = false;  // touched by OnReadDone alone
  grpc::ByteBuffer in_;        // the transport writes it between StartRead and OnReadDone

  absl::Mutex mutex_;
  // Threads inside StartRead. More than one when the message is there before the first StartRead
  // returns. The last of them ends a call that was finished meanwhile: no read may start after the
  // transport's Finish.
  int starting_reads_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool may_end_ ABSL_GUARDED_BY(mutex_) = false;  // finished, and told to OnFinish
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;    // given to the transport
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;    // OnCancel has run
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;  // finished by FinishWithoutMessage
  // Set by the winner of Finish, read by whoever then calls FinishNow.
  grpc::Status status_;
  grpc::ByteBuffer out_;
};

// A service whose methods are raw. Register it with a ServerBuilder.
class RawUnaryService : public grpc::Service {
 public:
  using Factory = std::function<std::shared_ptr<RawUnaryCall>(grpc::CallbackServerContext*)>;

 protected:
  // `method`: e.g. "/logitd.v1.Sampler/TopK". Before the service is registered.
  void AddRawUnary(const std::string& method, Factory factory);

  // A bidirectional stream of raw messages.
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
  void AddRawStream(const std::string& method,
                    std::function<Reactor*(grpc::CallbackServerContext*)> start);

 private:
  // The transport keeps pointers to the names.
  std::vector<std::unique_ptr<std::string>> names_;
};

grpc::Status ToGrpc(const absl::Status& status);
absl::Time DeadlineOf(const grpc::CallbackServerContext& context);  // InfiniteFuture: none

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_RAW_UNARY_H_
