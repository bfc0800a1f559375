// What an op brings to its calls.
#ifndef LOGITD_SERVER_RPC_CODECS_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_CODEC_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/rpc/transport/copier.h"
#include "server/rpc/wire/reader.h"

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

  // The op of the message; until that is parsed, the method's usual one.
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

  // Of an op that is alone: where inputs lie that are copied with the payload, as they are. In the
  // order of op().inputs, the first of them; the others are for WriteInputs.
  virtual absl::Span<const ByteRange> copied_inputs() const { return {}; }

  // As engine::Job.
  virtual void WriteInputs(absl::Span<std::byte* const> inputs,
                           const engine::AxisCounts& first) = 0;

  // The message, from the job's own slice of each output array. With `answer.keep` it may refer to
  // them.
  virtual grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) = 0;

  // `answer`, which Encode gave, is the next to be sent: those of all messages before it on the
  // same stream have been through here. May add to it, within answer_bytes().
  virtual void Conclude(grpc::ByteBuffer* answer) {}
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_CODEC_H_
