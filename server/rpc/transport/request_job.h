// One message of one op, from its slices to its answer: the part of a call that is a job of the
// engine, whatever kind of call it is.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_REQUEST_JOB_H_
#define LOGITD_SERVER_RPC_TRANSPORT_REQUEST_JOB_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "server/engine/metrics.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/copier.h"
#include "server/rpc/transport/message.h"

namespace logitd::rpc {

class CallTracker;

// What every call of a server shares. Outlives the calls.
struct CallEnvironment {
  engine::Admission* admission;
  engine::Engine* engine;
  engine::Heads* heads;
  engine::Metrics* metrics;
  CallTracker* tracker;
  Copier* copier;
  int64_t max_payload_bytes;
};

// Of a clock that never goes back.
int64_t NowNs();

// Used by one thread at a time, in the order of the methods.
class RequestJob : public engine::Job {
 public:
  RequestJob(const CallEnvironment& environment, std::unique_ptr<OpCodec> codec);

  // engine::Job
  const engine::JobSpec& spec() const override { return spec_; }
  void CopyPayload(std::byte* dst, size_t row_stride) override;
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;

 protected:
  // Reads and checks the message, which is empty afterwards. Not OK: it is not to be submitted, and
  // has been counted as refused.
  absl::Status Take(grpc::ByteBuffer* message, absl::Time deadline);

  // What the message holds from here on, or its answer, whichever is more.
  int64_t needed_bytes() const;

  // `answer`, whose `keep` now keeps the ticket as well; without it, where it is less than a slab
  // is worth.
  engine::JobAnswer WithTicket(const engine::JobAnswer& answer);

  // Pays for the message, then for the answer. The job gives back what it does not need any more.
  void SetTicket(engine::Admission::Ticket ticket);
  const engine::Admission::Ticket& ticket() const { return ticket_; }

  const CallEnvironment& environment() const { return environment_; }
  OpCodec& codec() const { return *codec_; }

 private:
  absl::Status CheckFits() const;
  void HoldAtMost(int64_t bytes);

  const CallEnvironment environment_;
  const std::unique_ptr<OpCodec> codec_;
  engine::JobSpec spec_;
  Message message_;
  engine::Admission::Ticket ticket_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_REQUEST_JOB_H_
