// A bidirectional stream. Every message is a job of the engine, as a unary call's message is.
// Answers go out in the order of the messages.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/admission.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/admission_wait.h"
#include "server/rpc/transport/call_headers.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/raw_service.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/trace.h"
#include "server/rpc/transport/watchdog.h"

namespace logitd::rpc {

// Flow control: the server holds at most kMaxInFlight messages without an answer; further ones stay
// unread at the peer. Before each read the stream asks the admission for room: for the first
// message the size that the peer states, or the most that any message may need; later what the
// largest message of the stream needed so far. The admission may take the room of a later read back
// while other calls wait, because an idle stream may never send. A message that is larger than its
// room waits for room again before it goes on.
//
// The first status that is not OK, of a message or of the admission, ends the stream after the
// answers to all earlier messages. While the server drains, an idle stream ends with UNAVAILABLE,
// and a busy one ends when the messages it has read are answered.
//
// The object lives until the transport and the jobs are done with it. Thread-safe.
class StreamCall final : public DrainedCall,
                         public std::enable_shared_from_this<StreamCall>,
                         private RawReactor {
 public:
  static constexpr size_t kMaxInFlight = 4;
  using MakeCodec = std::function<std::unique_ptr<OpCodec>()>;

  // `method`: as in the log; outlives the call.
  StreamCall(grpc::CallbackServerContext* context, std::string_view method,
             const CallEnvironment& environment, const Access& access, MakeCodec make_codec);
  ~StreamCall() override;

  // On headers. The reactor belongs to the transport until OnDone.
  RawReactor* Start();

  void OnDrain() override;
  void OnIdentities() override;

 private:
  class Item;

  // Starts everything that can start now: the next answer, the end, the next read.
  void Advance();
  // Asks for room for the next message.
  void EnterForRead();
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);
  // The first message comes too slowly while other calls wait for room.
  void TooSlow(const absl::Status& why);
  void StartOneRead();
  void Submit(const std::shared_ptr<Item>& item);
  // Reads no more messages. The stream ends with `status` after the answers to those it has read.
  void EndInput(const absl::Status& status);
  void TryCancel();
  // Writes the line of the log. From OnDone.
  void Report();
  int64_t max_message_bytes() const { return environment_.admission->options().max_request_bytes; }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  grpc::CallbackServerContext* const context_;
  const std::string_view method_;
  const int64_t started_ns_;
  const CallEnvironment environment_;
  const Access access_;
  const MakeCodec make_codec_;
  std::shared_ptr<StreamCall> self_;  // until OnDone
  AdmissionWait admission_wait_;
  CallHeaders headers_;
  Trace trace_;
  grpc::ByteBuffer in_;               // the transport writes it between StartRead and OnReadDone
  engine::Admission::Ticket ticket_;  // pays for the read that `reading_` marks
  door::Grant grant_;                 // for the read that the transport has
  Watchdog::Entry read_watch_;        // for the first message only
  Watchdog::Entry write_watch_;

  absl::Mutex mutex_;
  std::deque<std::shared_ptr<Item>> items_ ABSL_GUARDED_BY(mutex_);  // unanswered, in order
  int64_t largest_ ABSL_GUARDED_BY(mutex_) = 0;   // most bytes a message needed; 0: none came
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // from asking for room to the job's submission
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool input_over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  bool too_slow_ ABSL_GUARDED_BY(mutex_) = false;
  // For the log.
  absl::StatusCode code_ ABSL_GUARDED_BY(mutex_) = absl::StatusCode::kUnknown;
  int64_t wait_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // of the first message
  int64_t messages_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t rows_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t received_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Threads inside StartRead or StartWrite: nothing may start after the transport's Finish.
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_
