#include "server/rpc/codecs/payload.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/types/span.h"

namespace logitd::rpc {
namespace {

constexpr size_t kRowsPerRead = 256;

void CopyFromArena(const Payload& payload, std::byte* dst, size_t row_stride) {
  const auto arena_stride = static_cast<size_t>(payload.arena_stride);
  const bool together = arena_stride == payload.row_bytes;
  if (together && row_stride == payload.row_bytes) {
    const absl::Span<std::byte> all(dst, payload.range.bytes);
    payload.arena->Read(payload.arena_offset, {&all, 1});
    return;
  }
  // One read for as many rows as lie together there.
  std::array<absl::Span<std::byte>, kRowsPerRead> rows;
  const auto total = static_cast<size_t>(payload.rows);
  for (size_t row = 0; row < total;) {
    const size_t count = together ? std::min(kRowsPerRead, total - row) : 1;
    for (size_t i = 0; i < count; ++i) rows[i] = {dst + (row + i) * row_stride, payload.row_bytes};
    payload.arena->Read(payload.arena_offset + static_cast<int64_t>(row * arena_stride),
                        absl::MakeConstSpan(rows.data(), count));
    row += count;
  }
}

}  // namespace

void CopyRows(Pieces message, const Payload& payload, std::byte* dst, size_t row_stride) {
  if (payload.arena != nullptr) return CopyFromArena(payload, dst, row_stride);
  if (row_stride == payload.row_bytes) return CopyRange(message, payload.range, dst);
  WireReader reader(message.subspan(payload.range.piece));
  reader.Skip(payload.range.offset);
  for (int64_t row = 0; row < payload.rows; ++row) {
    reader.Read(dst + static_cast<size_t>(row) * row_stride, payload.row_bytes);
  }
}

}  // namespace logitd::rpc
