// A call that came through a ring: one job of the engine, as a unary call's message is.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_RING_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_RING_CALL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/arena/ring.h"
#include "server/engine/admission.h"
#include "server/engine/job.h"
#include "server/engine/load.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/call_headers.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Every path ends in Finish: the first one wins, later ones do nothing. The caller is the user at
// the other end of the ring, with that user's identity where the server has identities; else the
// ring.
class RingCall final : public RequestJob,
                       public arena::RingWork,
                       public std::enable_shared_from_this<RingCall> {
 public:
  // `method`: as in the log, e.g. "/logitd.v1.Sampler/TopK"; outlives the call.
  RingCall(const CallEnvironment& environment, std::shared_ptr<arena::Ring> ring, uint64_t serial,
           std::string_view method, std::unique_ptr<OpCodec> codec);

  // Once. May finish the call before it returns.
  void Start(arena::RingRequest request);

  // arena::RingWork
  void Drop() override;

  // engine::Job
  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes& times) override;

 protected:
  void EndedAlone() override { ring_->PostNow(); }

 private:
  absl::Status Prepare(const arena::RingRequest& request);
  // `alone`: the ring's own thread calls this, and may run the job itself.
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket, bool alone);
  std::string MessageOf(const engine::JobAnswer& answer, const engine::JobTimes& times);
  // `make`: makes the message in its place, later.
  void Finish(const absl::Status& status, std::string message = {},
              const engine::JobTimes& times = {}, arena::Ring::MakeMessage make = nullptr);

  const std::shared_ptr<arena::Ring> ring_;
  const uint64_t serial_;
  const std::string_view method_;
  const std::shared_ptr<const void> alive_;  // counts the call until its reply is in the ring
  CallHeaders headers_;
  uint64_t tag_ = 0;
  int64_t message_bytes_ = 0;

  absl::Mutex mutex_;
  engine::Admission::WaiterId waiter_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  engine::Load::Work work_ ABSL_GUARDED_BY(mutex_);  // until finished
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_RING_CALL_H_
