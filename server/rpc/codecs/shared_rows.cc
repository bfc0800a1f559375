#include "server/rpc/codecs/shared_rows.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/types.pb.h"
#include "server/rpc/codecs/field_table.h"

namespace logitd::rpc {
namespace {

// One occurrence of a SharedRows.
struct SharedPart {
  ByteRange lease = {.piece = kNoPiece};  // in the part
  int64_t offset = 0;
  int64_t row_stride = 0;

  static constexpr size_t kNoPiece = std::numeric_limits<size_t>::max();
};

constexpr NamedField<SharedPart> kSharedFields[] = {
    {"shared.lease", &SharedPart::lease},
    {"shared.offset", &SharedPart::offset},
    {"shared.row_stride", &SharedPart::row_stride},
};

absl::StatusOr<std::shared_ptr<const arena::Arena>> FindArena(std::string_view field,
                                                              const SharedFields& fields,
                                                              const FindLease& find_lease) {
  if (find_lease == nullptr) {
    return absl::NotFoundError(absl::StrFormat(
        "%s: got rows in a lease, allowed only where the server has --arena-listen", field));
  }
  if (fields.lease_bytes != kLeaseIdBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("%s.lease: got %d bytes, allowed %d", field,
                                                      fields.lease_bytes, kLeaseIdBytes));
  }
  return find_lease(fields.lease);
}

}  // namespace

absl::Status ParseSharedFields(Pieces pieces, absl::Span<const ByteRange> parts,
                               SharedFields* fields) {
  static const auto* const table =
      new auto(FieldTable<SharedPart>(v1::SharedRows::descriptor()).Add(kSharedFields));
  for (const ByteRange& range : parts) {
    const std::vector<Piece> own = PiecesOf(pieces, range);
    SharedPart part = {.offset = fields->offset, .row_stride = fields->row_stride};
    // None of the fields is a list.
    LOGITD_RETURN_IF_ERROR(ParseMessage<SharedPart>(own, *table, /*max_list=*/1, &part));
    fields->offset = part.offset;
    fields->row_stride = part.row_stride;
    if (part.lease.piece == SharedPart::kNoPiece) continue;
    fields->lease_bytes = part.lease.bytes;
    part.lease.bytes = std::min(part.lease.bytes, kLeaseIdBytes);
    fields->lease.resize(part.lease.bytes);
    CopyRange(own, part.lease, fields->lease.data());
  }
  return absl::OkStatus();
}

absl::Status LocateRows(std::string_view field, Pieces pieces, absl::Span<const ByteRange> parts,
                        size_t element, const FindLease& find_lease, Payload* payload) {
  SharedFields fields;
  LOGITD_RETURN_IF_ERROR(ParseSharedFields(pieces, parts, &fields));
  return LocateRows(field, fields, element, find_lease, payload);
}

absl::Status LocateRows(std::string_view field, const SharedFields& fields, size_t element_bytes,
                        const FindLease& find_lease, Payload* payload) {
  absl::StatusOr<std::shared_ptr<const arena::Arena>> arena = FindArena(field, fields, find_lease);
  if (!arena.ok()) return arena.status();
  const int64_t total = (*arena)->bytes();
  const auto element = static_cast<int64_t>(element_bytes);
  const auto row_bytes = static_cast<int64_t>(payload->row_bytes);
  const int64_t stride = fields.row_stride == 0 ? row_bytes : fields.row_stride;
  if (stride < row_bytes || stride % element != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s.row_stride: got %d, allowed 0, or a multiple of %d from %d, the bytes of a row", field,
        fields.row_stride, element, row_bytes));
  }
  // By division: the product of rows and stride may be beyond 64 bits.
  const int64_t rows = payload->rows;
  if (row_bytes > total || (total - row_bytes) / stride < rows - 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: got %d rows of %d bytes at distances of %d, allowed what fits into "
                        "the %d bytes of the lease",
                        field, rows, row_bytes, stride, total));
  }
  const int64_t last = total - row_bytes - (rows - 1) * stride;
  if (fields.offset < 0 || fields.offset > last || fields.offset % element != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s.offset: got %d, allowed a multiple of %d from 0 to %d: %d rows of %d bytes in a "
        "lease of %d",
        field, fields.offset, element, last, rows, stride, total));
  }
  payload->range = {.bytes = static_cast<size_t>(rows) * payload->row_bytes};
  payload->arena = *std::move(arena);
  payload->arena_offset = fields.offset;
  payload->arena_stride = stride;
  return absl::OkStatus();
}

absl::Status LocateOutput(std::string_view field, Pieces pieces, absl::Span<const ByteRange> parts,
                          size_t element, int64_t rows, size_t row_bytes,
                          const FindLease& find_lease, SharedOutput* output) {
  SharedFields fields;
  LOGITD_RETURN_IF_ERROR(ParseSharedFields(pieces, parts, &fields));
  if (fields.row_stride != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s.row_stride: got %d, allowed 0: rows of an answer have no space between",
                        field, fields.row_stride));
  }
  Payload place = {.rows = rows, .row_bytes = row_bytes};
  LOGITD_RETURN_IF_ERROR(LocateRows(field, pieces, parts, element, find_lease, &place));
  *output = {.arena = std::move(place.arena),
             .offset = place.arena_offset,
             .bytes = static_cast<int64_t>(place.range.bytes)};
  return absl::OkStatus();
}

absl::Status CheckApart(std::string_view field, const Payload& input, const SharedOutput& output) {
  if (input.arena == nullptr || input.arena != output.arena) return absl::OkStatus();
  const int64_t input_end = input.arena_offset + (input.rows - 1) * input.arena_stride +
                            static_cast<int64_t>(input.row_bytes);
  const int64_t output_end = output.offset + output.bytes;
  if (output.offset >= input_end || output_end <= input.arena_offset) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("shared_output: got bytes %d to %d of the lease, where %s has %d to %d, "
                      "allowed a place apart "
                      "from the input",
                      output.offset, output_end - 1, field, input.arena_offset, input_end - 1));
}

}  // namespace logitd::rpc
