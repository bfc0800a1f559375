// How the messages of a method become jobs of an op, and answers.
#ifndef LOGITD_SERVER_RPC_CODECS_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/arena/leases.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/payload.h"
#include "server/rpc/wire/encoded_message.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// As logitd.v1.Timings.
struct CallTimes {
  int64_t receive_ns = 0;
  int64_t total_ns = 0;
  engine::JobTimes job;
};

// Bytes of an answer, and where in a lease they go.
struct SharedAnswer {
  std::shared_ptr<const arena::Arena> arena;
  int64_t offset = 0;
  absl::Span<const std::byte> bytes;  // as long-lived as the job's answer
};

// A place in a lease for a part of an answer.
struct SharedPlace {
  std::shared_ptr<const arena::Arena> arena;  // null: there is none
  int64_t offset = 0;
  int64_t bytes = 0;
};

// proto <-> job for one call of one op. Used by one thread at a time, in the order of the methods.
class OpCodec {
 public:
  virtual ~OpCodec() = default;

  // The op of the message; before Parse, the method's usual one.
  virtual const engine::OpTraits& op() const = 0;

  // Reads the small fields, locates the payload, checks everything that the op requires, and fills
  // `spec` except its deadline. `max_rows`: no list may have more values. INVALID_ARGUMENT
  // naming field, value and what is allowed.
  virtual absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) = 0;

  // An upper bound of the answer's bytes. After Parse.
  virtual int64_t answer_bytes() const = 0;

  // Bytes copied out of the message and kept until WriteInputs. After Parse.
  virtual int64_t list_bytes() const { return 0; }

  // The place of the payload: in the pieces that Parse read, or in a lease.
  virtual Payload payload() const = 0;

  // The payload has been copied: from here on its place is not needed.
  virtual void PayloadCopied() {}

  // Only of an exclusive op: where the first of op().inputs are, in their order, in the message or
  // in a lease. They are copied with the payload, their rows one after another unless they are
  // padded; WriteInputs writes the others.
  virtual absl::Span<const Payload> copied_inputs() const { return {}; }

  // As engine::Job.
  virtual void WriteInputs(absl::Span<std::byte* const> inputs,
                           const engine::AxisCounts& first) = 0;

  // The message, from the job's own slice of each output array. With `answer.keep` it may refer to
  // them.
  virtual EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) = 0;

  // The place in a lease where the first output goes. After Parse.
  virtual SharedPlace shared_place() const { return {}; }

  // The part of the answer that goes to a lease, which Encode leaves out. It must be there before
  // the message is sent. Without an arena: there is none.
  virtual SharedAnswer shared_answer(const engine::JobAnswer& answer) const { return {}; }

  // Called when `answer`, which Encode made, is the next to be sent on its stream, after the calls
  // for all messages before it. May add to the answer, within answer_bytes().
  virtual void Conclude(EncodedMessage* answer) {}
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_CODEC_H_
