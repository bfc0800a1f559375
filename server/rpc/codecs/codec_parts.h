// What the codecs of several methods share: words of types.proto, in and out.
#ifndef LOGITD_SERVER_RPC_CODECS_CODEC_PARTS_H_
#define LOGITD_SERVER_RPC_CODECS_CODEC_PARTS_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/types.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/wire/reader.h"
#include "server/rpc/wire/writer.h"

namespace logitd::rpc {

// `wire`: a logitd.v1.DType. INVALID_ARGUMENT naming `field` and what is allowed.
absl::Status ReadDType(int32_t wire, DType* dtype, std::string_view field = "dtype");

// Upper bounds, to size an answer by.
inline constexpr size_t kMaxLengthHead = 2 * kMaxVarintSize;
inline constexpr size_t kMaxStatusBytes = 1 + sizeof(int32_t);  // of a row, by WriteStatus
inline constexpr size_t kMaxTimingsBytes = 8 * (1 + kMaxVarintSize);
inline constexpr size_t kMaxFixedBytes =
    3 * kMaxLengthHead + kMaxTimingsBytes;  // of the heads below

// A packed field of fixed-width values, copied as they are. Empty: nothing.
void WriteArray(WireWriter& writer, uint32_t number, absl::Span<const std::byte> values);

// Two packed fields: the codes of RowStatus values, and their positions.
void WriteStatus(WireWriter& writer, uint32_t code_number, uint32_t position_number,
                 absl::Span<const std::byte> status);

// A logitd.v1.Timings.
void WriteTimings(WireWriter& writer, uint32_t number, const CallTimes& times);

// A packed field of `count` varints, value(0) and so on, none negative.
template <typename Value>
void WriteVarints(WireWriter& writer, uint32_t number, int64_t count, Value value) {
  size_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += VarintSize(static_cast<uint64_t>(value(i)));
  if (bytes == 0) return;
  writer.LengthHead(number, bytes);
  for (int64_t i = 0; i < count; ++i) writer.Varint(static_cast<uint64_t>(value(i)));
}

// INVALID_ARGUMENT where a parameter has neither one value for all rows, one a row, nor none.
template <typename List>
absl::Status CheckCount(std::string_view name, const List& values, int64_t rows) {
  const auto size = static_cast<int64_t>(values.size());
  if (size <= 1 || size == rows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d values, allowed none, 1 or %d (rows)", name, size, rows));
}

// A row's value of such a parameter.
template <typename List, typename T>
T ValueAt(const List& values, int64_t row, T otherwise) {
  if (values.empty()) return otherwise;
  return static_cast<T>(values[values.size() == 1 ? 0 : static_cast<size_t>(row)]);
}

// Of one kind, over all rows: a list that all rows share must not multiply without bound.
inline constexpr int64_t kMaxListedValues = int64_t{1} << 24;

// Cuts a list of `size` values into the rows' own, or gives it whole to every row. `name`_count:
// none, one, or one a row. INVALID_ARGUMENT: counts that do not add up, or too many values.
template <typename Row>
absl::Status CutList(std::string_view name, const Int32List& counts, size_t size,
                     absl::Span<Row> rows, int64_t Row::*first, int32_t Row::*count) {
  const auto total = static_cast<int64_t>(size);
  const auto row_count = static_cast<int64_t>(rows.size());
  if (absl::Status status = CheckCount(absl::StrFormat("%s_count", name), counts, row_count);
      !status.ok()) {
    return status;
  }
  const bool shared = counts.size() <= 1;
  int64_t next = 0;
  for (int64_t r = 0; r < row_count; ++r) {
    const int64_t own = ValueAt(counts, r, total);
    if (own < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s_count: got %d at row %d, allowed 0 or more", name, own, r));
    }
    // A row's count has 32 bits; what is too long for those is too long for all.
    rows[r].*first = next;
    rows[r].*count = static_cast<int32_t>(std::min(own, kMaxListedValues + 1));
    if (!shared || r + 1 == row_count) next += own;
  }
  if (next != total) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s_count: adds up to %d, but %s has %d values: allowed is their number",
                        name, next, name, total));
  }
  const int64_t listed = shared ? total * row_count : total;
  if (listed > kMaxListedValues) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d values over all rows, allowed 0..%d", name, listed, kMaxListedValues));
  }
  return absl::OkStatus();
}

// Copies a list to where it is used next, and gives its memory back.
template <typename List>
void MoveOut(List& list, std::byte* to) {
  const size_t bytes = list.size() * sizeof(list[0]);
  if (bytes > 0) std::memcpy(to, list.data(), bytes);
  List().swap(list);
}

// A message of at most `max_bytes`, in one slice: packed fixed-width fields, nearly all of an
// answer, are copied into it from the slab as they are.
template <typename Write>
grpc::ByteBuffer WriteMessage(int64_t max_bytes, Write write) {
  grpc::Slice slice(static_cast<size_t>(max_bytes));
  auto* const begin = const_cast<uint8_t*>(slice.begin());
  WireWriter writer(begin);
  write(writer);
  const grpc::Slice used = slice.sub(0, static_cast<size_t>(writer.at() - begin));
  return grpc::ByteBuffer(&used, 1);
}

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_CODEC_PARTS_H_
