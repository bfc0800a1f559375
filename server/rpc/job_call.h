// A unary method that is one job of the engine. An op brings its codec; everything between the
// headers and the answer is here: admission, receiving, the engine, the caller going away, timings.
#ifndef LOGITD_SERVER_RPC_JOB_CALL_H_
#define LOGITD_SERVER_RPC_JOB_CALL_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/metrics.h"
#include "server/rpc/copier.h"
#include "server/rpc/message.h"
#include "server/rpc/raw_unary.h"

namespace logitd::rpc {

// As logitd.v1.Timings.
struct CallTimes {
  int64_t receive_ns = 0;
  int64_t total_ns = 0;
  engine::JobTimes job;
};

// proto <-> job for one call of one op. Used by one thread at a time, in the order of the methods.
class OpCodec {
 public:
  virtual ~OpCodec() = default;

  // The op of the method.
  virtual const engine::OpTraits& op() const = 0;

  // Reads the small fields, locates the payload, checks everything the op asks for, and fills
  // `spec` but for its deadline. `max_rows`: no list may have more values. INVALID_ARGUMENT naming
  // field, value and what is allowed.
  virtual absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) = 0;

  // Of the answer, once parsed; never less than Encode's.
  virtual int64_t answer_bytes() const = 0;

  // Of what it has copied out of the message and keeps until WriteInputs, once parsed.
  virtual int64_t list_bytes() const { return 0; }

  // Where the payload lies in the pieces Parse saw.
  virtual Payload payload() const = 0;

  // As engine::Job.
  virtual void WriteInputs(absl::Span<std::byte* const> inputs,
                           const engine::AxisCounts& first) = 0;

  // The answer, from the job's own slice of each output array.
  virtual grpc::ByteBuffer Encode(absl::Span<const absl::Span<const std::byte>> outputs,
                                  const CallTimes& times) = 0;
};

// What every call of a server shares. Outlives the calls.
struct CallEnvironment {
  engine::Admission* admission;
  engine::Engine* engine;
  engine::Metrics* metrics;
  CallTracker* tracker;
  Copier* copier;
  int64_t max_payload_bytes;
};

class JobCall final : public RawUnaryCall, public engine::Job {
 public:
  JobCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
          std::unique_ptr<OpCodec> codec);

  // engine::Job
  const engine::JobSpec& spec() const override { return spec_; }
  void CopyPayload(std::byte* dst, size_t row_stride) override;
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;
  void Done(const absl::Status& status, absl::Span<const absl::Span<const std::byte>> outputs,
            const engine::JobTimes& times) override;

 private:
  void OnHeaders() override;
  void OnMessage(grpc::ByteBuffer* message) override;
  void OnGone() override;
  void OnFinish(absl::StatusCode code) override;

  std::shared_ptr<JobCall> Self();
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);

  absl::Status CheckFits() const;
  void HoldAtMost(int64_t bytes);

  const CallEnvironment environment_;
  const std::unique_ptr<OpCodec> codec_;
  const int64_t started_ns_;
  int64_t receive_ns_ = 0;
  engine::JobSpec spec_;
  Message message_;
  // Pays for the message, then for the answer, until the transport is done with the call.
  engine::Admission::Ticket ticket_;

  absl::Mutex mutex_;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool submitted_ ABSL_GUARDED_BY(mutex_) = false;
  engine::Admission::WaiterId waiter_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_JOB_CALL_H_
