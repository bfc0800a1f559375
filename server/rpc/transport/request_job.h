// One message of one op, from its bytes to its answer: the part of a call that is a job of the
// engine. Unary calls and streams share it.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_REQUEST_JOB_H_
#define LOGITD_SERVER_RPC_TRANSPORT_REQUEST_JOB_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/arena/leases.h"
#include "server/arena/writer.h"
#include "server/door/door_metrics.h"
#include "server/door/identities.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "server/engine/load.h"
#include "server/engine/metrics.h"
#include "server/engine/places.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/call_headers.h"
#include "server/rpc/transport/server_call.h"
#include "server/rpc/wire/encoded_message.h"

namespace logitd::rpc {

class CallLog;

class TurnJobs;

// The parts of a server that its calls share. Outlives the calls.
struct CallEnvironment {
  engine::Admission* admission;
  engine::Engine* engine;
  engine::Heads* heads;
  engine::Metrics* metrics;
  engine::Load* load;
  door::DoorMetrics* door_metrics;     // null: none
  const door::Identities* identities;  // null: everybody may call everything
  CallTracker* tracker;
  const CallLog* log;
  const arena::Leases* leases;  // null: the server leases no memory
  arena::Writer* writer;        // null like `leases`
  TurnJobs* turn_jobs;
  engine::Places* places;  // null: streams copy from slabs and leases only
  int64_t max_payload_bytes;
};

// One thread at a time uses it, in the order of the methods, except Drop and dropped.
class RequestJob : public engine::Job {
 public:
  // Its time starts here.
  RequestJob(const CallEnvironment& environment, std::unique_ptr<OpCodec> codec);

  // Checks the size of a message. INVALID_ARGUMENT, counted: it is larger than any may be, or than
  // the call has stated.
  absl::Status CheckMessageSize(int64_t bytes, const CallHeaders& headers) const;

  // Memory for a message of `bytes` bytes, which begins with `seen`. Its payload is aligned as far
  // as `seen` shows where it begins.
  static MessageMemory TakeMemory(size_t bytes, absl::Span<const std::byte> seen,
                                  engine::Places* places);

  // Reads and checks the message. If the status is not OK, the request was counted as refused and
  // must not be submitted.
  absl::Status Take(MessageMemory message, const CallHeaders& headers);

  // The room that the message needs from here on, or its answer if that is more.
  int64_t needed_bytes() const;

  // An upper bound of the answer's bytes. After Take.
  int64_t max_answer_bytes() const { return codec_->answer_bytes(); }

  // Bytes by which the work of a message of `message_bytes` is estimated. Rows in a lease count
  // too, although they are not in the message.
  int64_t work_bytes(int64_t message_bytes) const {
    return std::max(message_bytes, spec_.size.payload_bytes);
  }

  // Pays for the message, then for the answer: a ticket of needed_bytes(). The job gives back the
  // bytes it no longer needs.
  void SetTicket(engine::Admission::Ticket ticket) { ticket_ = std::move(ticket); }

  // For TurnJobs, which submits the job next. False: Drop came before, and it must not.
  bool BeginSubmit();
  // Gives the job to the engine, for a ring. `self` owns the job. Does nothing after Drop. `alone`:
  // by Engine::SubmitAlone, with EndedAlone as its `ended`.
  void Submit(std::shared_ptr<RequestJob> self, bool alone = false);

  // The caller has gone: cancels the job. Any thread, at any time.
  void Drop();
  bool dropped() const { return dropped_; }

  // engine::Job
  const engine::JobSpec& spec() const override { return spec_; }
  void CopyRowsTo(std::byte* dst, size_t row_stride) override;
  absl::Span<const engine::RowsPlace> places() const override { return places_; }
  std::byte* answer_place() const override { return answer_place_; }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override;

  // The response message. A large answer is sent from the slab that holds it, which then stays with
  // the ticket until the message is sent.
  EncodedMessage Encode(const engine::JobAnswer& answer, int64_t receive_ns,
                        const engine::JobTimes& times);
  // Writes the part of the answer that goes to a lease, if there is one, then runs `next`: with OK,
  // or with the error that the request ends with. `next` runs in this call, or on the lease's own
  // thread, and keeps this alive.
  void WriteShared(const engine::JobAnswer& answer,
                   absl::AnyInvocable<void(const absl::Status&)> next);

  // Encode's message is the next to be sent. See OpCodec.
  void Conclude(EncodedMessage* message) { codec_->Conclude(message); }

  // First in a Done whose status is not OK: gives the message and its room back.
  void Fail();

  // The op of the message; before Take, the usual one of the method.
  const engine::OpTraits& op() const { return codec_->op(); }

  // Counts the request in the metrics. Once, when its status is known.
  void Count(absl::StatusCode code) const;

 protected:
  int64_t age_ns() const;
  int64_t max_message_bytes() const { return environment_.admission->options().max_request_bytes; }
  const CallEnvironment& environment() const { return environment_; }
  virtual void EndedAlone() {}

 private:
  absl::Status CheckFits() const;
  bool IsPlaced(const Payload& payload, size_t row_stride) const;
  engine::RowsPlace PlaceOf(const Payload& payload) const;
  absl::Status FindPlaces();
  void FindAnswerPlace();
  void FreeMessage();
  void HoldAtMost(int64_t bytes);
  Pieces pieces() const { return {&piece_, 1}; }

  const CallEnvironment environment_;
  const std::unique_ptr<OpCodec> codec_;
  const int64_t started_ns_;
  engine::JobSpec spec_;
  MessageMemory message_;
  Piece piece_;                     // all of `message_`
  bool placed_in_message_ = false;  // streams copy rows from `message_`
  // Of the payload and of copied_inputs, as far as streams copy them, and of the answer; and the
  // arenas they lie in.
  absl::InlinedVector<engine::RowsPlace, 3> places_;
  std::byte* answer_place_ = nullptr;
  absl::InlinedVector<std::shared_ptr<const arena::Arena>, 2> placed_in_;
  engine::Admission::Ticket ticket_;
  std::atomic<bool> submitted_ = false;
  std::atomic<bool> dropped_ = false;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_REQUEST_JOB_H_
