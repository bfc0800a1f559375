// A unary method that is one job of the engine. An op brings its codec; everything between the
// headers and the answer is here: admission, receiving, the engine, the caller going away, timings.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/admission.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/raw_unary.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

class UnaryCall final : public RawUnaryCall, public RequestJob {
 public:
  UnaryCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
            std::unique_ptr<OpCodec> codec);

  // engine::Job
  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes& times) override;

 private:
  void OnHeaders() override;
  void OnMessage(grpc::ByteBuffer* message) override;
  void OnGone() override;
  void OnFinish(absl::StatusCode code) override;

  std::shared_ptr<UnaryCall> Self();
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);

  const int64_t started_ns_;
  int64_t receive_ns_ = 0;
  // Pays for the message while that is received.
  engine::Admission::Ticket receive_ticket_;

  absl::Mutex mutex_;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool submitted_ ABSL_GUARDED_BY(mutex_) = false;
  engine::Admission::WaiterId waiter_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_UNARY_CALL_H_
