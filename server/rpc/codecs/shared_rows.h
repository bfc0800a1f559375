// Rows and answers that lie in leased memory: where exactly, and whether they may.
#ifndef LOGITD_SERVER_RPC_CODECS_SHARED_ROWS_H_
#define LOGITD_SERVER_RPC_CODECS_SHARED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/arena/leases.h"
#include "server/rpc/codecs/payload.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// As arena::Leases::Find. Thread-safe.
using FindLease =
    std::function<absl::StatusOr<std::shared_ptr<const arena::Arena>>(std::string_view id)>;

// SharedRows as it is in the message.
struct SharedFields {
  size_t lease_bytes = 0;
  std::string lease;  // its first kLeaseIdBytes
  int64_t offset = 0;
  int64_t row_stride = 0;
};

// As ParseMessage, of a field that is a SharedRows. `parts`: its occurrences.
absl::Status ParseSharedFields(Pieces pieces, absl::Span<const ByteRange> parts,
                               SharedFields* fields);

// Finds payload->rows (1 or more) rows of payload->row_bytes bytes, whose product an int64_t holds,
// in the lease that `parts` name, and completes `payload`. `field` names the SharedRows in errors,
// `element` is the size of a row's elements. Takes the same time whatever the sizes are.
// INVALID_ARGUMENT: they do not lie there. NOT_FOUND: no such lease.
absl::Status LocateRows(std::string_view field, Pieces pieces, absl::Span<const ByteRange> parts,
                        size_t element, const FindLease& find_lease, Payload* payload);

// As above, of fields that are at hand.
absl::Status LocateRows(std::string_view field, const SharedFields& fields, size_t element,
                        const FindLease& find_lease, Payload* payload);

// A place for `bytes` bytes of an answer.
struct SharedOutput {
  std::shared_ptr<const arena::Arena> arena;  // null: the answer goes into the message
  int64_t offset = 0;
  int64_t bytes = 0;
};

// As LocateRows, for rows without space between.
absl::Status LocateOutput(std::string_view field, Pieces pieces, absl::Span<const ByteRange> parts,
                          size_t element, int64_t rows, size_t row_bytes,
                          const FindLease& find_lease, SharedOutput* output);

// INVALID_ARGUMENT: `output` overlaps the memory from the first row of `input`, which is the field
// `field`, to its last.
absl::Status CheckApart(std::string_view field, const Payload& input, const SharedOutput& output);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_SHARED_ROWS_H_
