// What the codecs of several methods share: words of types.proto, in and out.
#ifndef LOGITD_SERVER_RPC_CODEC_PARTS_H_
#define LOGITD_SERVER_RPC_CODEC_PARTS_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/types.h"
#include "server/rpc/codec.h"
#include "server/rpc/encode.h"

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

#endif  // LOGITD_SERVER_RPC_CODEC_PARTS_H_
