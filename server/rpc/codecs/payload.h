// The place of a request's rows, in its message or in a lease.
#ifndef LOGITD_SERVER_RPC_CODECS_PAYLOAD_H_
#define LOGITD_SERVER_RPC_CODECS_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "server/arena/leases.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Rows one after another, in a message or in shared memory.
struct Payload {
  ByteRange range;  // in the message; of an arena only its size counts
  int64_t rows = 0;
  size_t row_bytes = 0;
  // The place of rows that are not in the message: row r lies at `arena_offset` + r *
  // `arena_stride`.
  std::shared_ptr<const arena::Arena> arena = nullptr;
  int64_t arena_offset = 0;
  int64_t arena_stride = 0;
  // For OpCodec::copied_inputs: the name in errors, and true where rows begin at 16-byte borders in
  // the slab, as those of hidden states do.
  std::string_view field = {};
  bool padded = false;
};

// Copies row r of `payload`, which lies in `message` unless it is shared, to dst + r * row_stride.
// Does not write between rows.
void CopyRows(Pieces message, const Payload& payload, std::byte* dst, size_t row_stride);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_PAYLOAD_H_
