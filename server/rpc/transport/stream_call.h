// A bidirectional stream whose messages are jobs of the engine, each as a unary call of its own
// would be, answered in their order.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/admission.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/raw_unary.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/watchdog.h"

namespace logitd::rpc {

// Flow control: at most kMaxInFlight messages are here without having been answered; further ones
// stay unread, at the peer. Before each read the admission is asked for room: for the first message
// as much as any may need, then as much as the largest of the stream so far; a larger one waits for
// the rest of its room before it goes on. So an idle stream holds what its last messages took, not
// what they might.
//
// The first status that is not OK, of a message or of the admission, ends the stream, after the
// answers to all messages before it. While the server drains an idle stream ends with UNAVAILABLE,
// a busy one when what was read is answered.
//
// The object lives until the transport is done with it and its jobs are. Thread-safe.
class StreamCall final : public DrainedCall,
                         public std::enable_shared_from_this<StreamCall>,
                         private grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  static constexpr size_t kMaxInFlight = 4;
  using MakeCodec = std::function<std::unique_ptr<OpCodec>()>;
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  StreamCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
             MakeCodec make_codec);
  ~StreamCall() override;

  // On headers. The reactor is the transport's until OnDone.
  Reactor* Start();

  void OnDrain() override;

 private:
  class Item;

  // Does what can be done now: the next answer, the end, the next read.
  void Advance();
  void AskForRoom();
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);
  void StartOneRead();
  void Submit(const std::shared_ptr<Item>& item);
  // No message is read any more; what is here is answered, and then the stream ends with `status`.
  void EndInput(const absl::Status& status);
  void Enter(std::function<void(absl::StatusOr<engine::Admission::Ticket>)> ready);
  void FinishNow(const absl::Status& status);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  grpc::CallbackServerContext* const context_;
  const CallEnvironment environment_;
  const MakeCodec make_codec_;
  const absl::Time deadline_;
  std::shared_ptr<StreamCall> self_;  // until OnDone
  grpc::ByteBuffer in_;               // the transport's between StartRead and OnReadDone
  engine::Admission::Ticket ticket_;  // of the read under way; touched by whoever has `reading_`
  Watchdog::Entry read_watch_;        // the first message
  Watchdog::Entry write_watch_;

  absl::Mutex mutex_;
  std::deque<std::shared_ptr<Item>> items_ ABSL_GUARDED_BY(mutex_);  // not answered, in order
  int64_t largest_ ABSL_GUARDED_BY(mutex_) = 0;   // that any message needed; 0: none came
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // from asking for room to the job's submission
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool input_over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  // Threads inside StartRead or StartWrite: nothing may start after the transport's Finish.
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
  engine::Admission::WaiterId waiter_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_
