// A unary method that is one job of the engine: admission, receiving, the job, the end of the call.
// The op brings its codec.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/admission.h"
#include "server/engine/job.h"
#include "server/engine/load.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/call_headers.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

// On its loop, except Done, which posts the answer there. The engine may keep it longer than the
// stream does.
class UnaryCall final : public ServerCall, public RequestJob, private http2::Task {
 public:
  // `method`: as in the log, e.g. "/logitd.v1.Sampler/TopK"; outlives the call.
  UnaryCall(http2::Stream* stream, std::string_view method, const CallEnvironment& environment,
            const Access& access, std::unique_ptr<OpCodec> codec);

  // engine::Job
  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes& times) override;

 private:
  // The result of Done, on its way to the loop. `times`, `encode_ns`: for the log.
  struct Result {
    std::shared_ptr<ServerCall> self;
    absl::Status status;
    EncodedMessage message;
    engine::JobTimes times;
    int64_t encode_ns = 0;
  };
  void Post(Result result);  // once
  void Run() override;       // http2::Task: ends the call with the result

  // ServerCall
  void Begin() override;
  void OnMessageSize(size_t bytes) override;
  void OnMessage(MessageMemory message) override;
  void OnHalfClose() override;
  void OnCancelled(const absl::Status& why) override;
  void End(const absl::Status& status) override { EndWith(status, {}); }
  void OnOver() override;

  // Asks for time and room for a message of `bytes` bytes.
  void AskFor(int64_t bytes);
  void AskForRoom(engine::RoomAsk ask);
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);
  void ReceiveMessage();
  void SubmitWith(engine::Admission::Ticket ticket);
  // Ends the call: with `message` if `status` is OK.
  void EndWith(const absl::Status& status, EncodedMessage message);
  void Report();

  const std::string_view method_;
  const Access access_;
  CallHeaders headers_;
  engine::Admission::WaiterId waiter_ = 0;
  engine::Load::Work work_;                          // until the call ends
  std::optional<engine::Admission::Ticket> ticket_;  // pays while the message is received
  std::optional<size_t> message_size_;
  bool have_message_ = false;
  Result result_;
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
  // For the log, in nanoseconds of the call's age.
  int64_t asked_ns_ = 0;    // for room
  int64_t wait_ns_ = 0;     // from then until it was admitted
  int64_t receive_ns_ = 0;  // when the message was there
  int64_t ended_ns_ = 0;
  engine::JobTimes times_;
  int64_t encode_ns_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_
