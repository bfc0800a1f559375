// A unary method that is one job of the engine: admission, receiving, the job, the end of the call.
// The op brings its codec.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/admission.h"
#include "server/engine/job.h"
#include "server/engine/load.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/admission_wait.h"
#include "server/rpc/transport/call_headers.h"
#include "server/rpc/transport/raw_service.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/trace.h"
#include "server/rpc/transport/watchdog.h"

namespace logitd::rpc {

// What a job took, for the log.
struct RanJob {
  engine::JobTimes times;
  int64_t encode_ns = 0;
};

// Every path ends in Finish: the first one wins, later ones do nothing. The object lives until the
// transport and the engine are done with it.
class UnaryCall final : public RequestJob,
                        public std::enable_shared_from_this<UnaryCall>,
                        private RawReactor {
 public:
  // `method`: as in the log, e.g. "/logitd.v1.Sampler/TopK"; outlives the call.
  UnaryCall(grpc::CallbackServerContext* context, std::string_view method,
            const CallEnvironment& environment, const Access& access,
            std::unique_ptr<OpCodec> codec);
  ~UnaryCall() override;

  // On headers. The reactor belongs to the transport until OnDone.
  RawReactor* Start();

  // engine::Job
  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes& times) override;

 private:
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);
  // The message comes too slowly while other calls wait for room.
  void TooSlow(const absl::Status& why);
  // Starts a read unless the call is finished. False: it is finished.
  bool Read();
  void Process(grpc::ByteBuffer* message);
  // Whether the call can still meet its deadline, now that its message is there.
  absl::Status CheckInTime(int64_t bytes);
  // Ends the call: with `response` if `status` is OK, otherwise without a message. Thread-safe.
  void Finish(const absl::Status& status, grpc::ByteBuffer response = {}, const RanJob& ran = {});
  void FinishWithoutMessage();
  // True for the one caller that must run SendEnd.
  bool ClaimEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendEnd();
  // Writes the line of the log and counts the time of sending. From OnDone.
  void Report(absl::StatusCode code);
  void TryCancel();
  int64_t max_message_bytes() const { return environment().admission->options().max_request_bytes; }

  void OnReadDone(bool ok) override;
  // The peer has gone, the deadline has passed or the server is shutting down.
  void OnCancel() override;
  void OnDone() override;

  grpc::CallbackServerContext* const context_;
  const std::string_view method_;
  const Access access_;
  std::shared_ptr<UnaryCall> self_;  // until OnDone
  AdmissionWait admission_wait_;
  CallHeaders headers_;
  Trace trace_;
  Watchdog::Entry receive_watch_;
  Watchdog::Entry peer_watch_;
  bool have_message_ = false;             // used only by OnReadDone
  std::atomic<int64_t> admitted_ns_ = 0;  // the call's age; Admitted may run after OnDone
  int64_t receive_ns_ = 0;                // its age when the message was there
  int64_t received_bytes_ = 0;
  engine::Admission::Ticket receive_ticket_;  // pays while the message is received
  door::Grant grant_;                         // for as long
  grpc::ByteBuffer in_;  // the transport writes it between StartRead and OnReadDone

  absl::Mutex mutex_;
  // Threads inside StartRead. More than one if the message is there before the first StartRead
  // returns. The last of them ends a call that was finished meanwhile: no read may start after the
  // transport's Finish.
  int starting_reads_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;    // the status is known
  bool may_end_ ABSL_GUARDED_BY(mutex_) = false;     // finished, and counted if it has to be by now
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;       // given to the transport
  bool done_ ABSL_GUARDED_BY(mutex_) = false;        // OnDone has run
  bool no_message_ ABSL_GUARDED_BY(mutex_) = false;  // finished by FinishWithoutMessage
  engine::Load::Work work_ ABSL_GUARDED_BY(mutex_);  // until finished
  RanJob ran_ ABSL_GUARDED_BY(mutex_);
  int64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t finished_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // the call's age
  // Set by the Finish that wins, read by SendEnd.
  grpc::Status status_;
  grpc::ByteBuffer out_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_
