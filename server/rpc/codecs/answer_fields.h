// The fields of answers: arrays from the slab, statuses of rows, timings.
#ifndef LOGITD_SERVER_RPC_CODECS_ANSWER_FIELDS_H_
#define LOGITD_SERVER_RPC_CODECS_ANSWER_FIELDS_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/types.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/wire/writer.h"

namespace logitd::rpc {

// Upper bounds, from which the size of an answer is computed.
inline constexpr size_t kMaxLengthHead = 2 * kMaxVarintSize;
inline constexpr size_t kMaxStatusBytes = 1 + sizeof(int32_t);  // of a row, by WriteStatus
inline constexpr size_t kMaxTimingsBytes = 8 * (1 + kMaxVarintSize);
inline constexpr size_t kMaxFixedBytes =
    3 * kMaxLengthHead + kMaxTimingsBytes +  // of the heads of WriteStatus and WriteTimings
    2 * kMaxVarintSize;                      // of the version of an output head

// The bytes of an answer with all output arrays of `spec`, written by any function of this file,
// and four counts for each row. A RowStatus takes less in the answer than in its array, which makes
// room for larger counts.
inline int64_t MaxAnswerBytes(const engine::JobSpec& spec) {
  constexpr size_t kMaxCountBytes = 2;  // below 2^14
  const size_t heads = (spec.key.op->outputs.size() + 4) * kMaxLengthHead;
  return spec.size.answer_bytes +
         static_cast<int64_t>(4 * kMaxCountBytes * spec.rows() + heads + kMaxFixedBytes);
}

// A packed field of fixed-width values. No values: no field.
template <typename T>
void WriteArray(WireWriter& writer, uint32_t number, absl::Span<const T> values) {
  if (values.empty()) return;
  writer.LengthHead(number, values.size() * sizeof(T));
  writer.Raw(values.data(), values.size() * sizeof(T));
}

// Two packed fields: the codes of RowStatus values, and their positions.
void WriteStatus(WireWriter& writer, uint32_t code_number, uint32_t position_number,
                 absl::Span<const RowStatus> status);

// A logitd.v1.Timings.
void WriteTimings(WireWriter& writer, uint32_t number, const CallTimes& times);

// A packed field of varints, one for each of `items`: value(item), never negative.
template <typename Items, typename Value>
void WriteVarints(WireWriter& writer, uint32_t number, const Items& items, Value value) {
  size_t bytes = 0;
  for (const auto& item : items) bytes += VarintSize(static_cast<uint64_t>(value(item)));
  if (bytes == 0) return;
  writer.LengthHead(number, bytes);
  for (const auto& item : items) writer.Varint(static_cast<uint64_t>(value(item)));
}

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_ANSWER_FIELDS_H_
