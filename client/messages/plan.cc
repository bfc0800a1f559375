#include "client/messages/plan.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"
#include "client/messages/params.h"
#include "client/tensor_file.h"

namespace logitd::client {
namespace {

// Protobuf carries 2 GiB; the small fields fit next to this.
constexpr int64_t kMaxPayload = std::numeric_limits<int32_t>::max() - (int64_t{64} << 20);

// A row of an answer without its lists, at most, as the server counts it.
constexpr int64_t kTopKAnswerRowBytes = 16;

void AppendOffsets(const std::vector<int64_t>& part, std::vector<int64_t>* all) {
  const int64_t base = all->back();
  for (size_t row = 1; row < part.size(); ++row) all->push_back(base + part[row]);
}

}  // namespace

MessageRoom RoomOf(const v1::Limits& limits, int64_t max_message_bytes, const MessageCost& cost) {
  MessageRoom room = {.bytes = kMaxPayload, .rows = std::numeric_limits<int64_t>::max()};
  if (limits.max_request_bytes() > 0) room.bytes = std::min(room.bytes, limits.max_request_bytes());
  room.bytes -= cost.bytes;
  if (limits.max_answer_bytes() > 0 && cost.answer_row_bytes > 0) {
    room.rows = (limits.max_answer_bytes() - cost.answer_bytes) / cost.answer_row_bytes;
  }
  if (max_message_bytes > 0) {
    const int64_t left = max_message_bytes - cost.field_bytes;
    room.bytes = std::min(room.bytes, left);
    if (cost.field_row_bytes > 0) {  // otherwise `bytes` bounds the rows
      room.rows = std::min(room.rows, left / (cost.row_bytes + cost.field_row_bytes));
    }
  }
  return room;
}

absl::StatusOr<int64_t> RowsPerMessage(const v1::Limits& limits, int64_t max_message_bytes,
                                       const MessageCost& cost) {
  const MessageRoom room = RoomOf(limits, max_message_bytes, cost);
  const int64_t rows = std::min(room.rows, room.bytes / cost.row_bytes);
  if (rows < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("one row of %d bytes, and %d of its answer, is more than a message takes: "
                        "max_request_bytes %d, max_answer_bytes %d, max_message_bytes %d",
                        cost.bytes + cost.row_bytes, cost.answer_bytes + cost.answer_row_bytes,
                        limits.max_request_bytes(), limits.max_answer_bytes(), max_message_bytes));
  }
  return limits.max_batch_rows() > 0 ? std::min(rows, limits.max_batch_rows()) : rows;
}

Pieces CutPieces(const Pieces& pieces, int64_t offset, int64_t bytes) {
  Pieces cut;
  for (absl::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size());
    if (offset < size && bytes > 0) {
      cut.push_back(piece.substr(static_cast<size_t>(offset),
                                 static_cast<size_t>(std::min(bytes, size - offset))));
      bytes -= static_cast<int64_t>(cut.back().size());
    }
    offset = std::max<int64_t>(0, offset - size);
  }
  return cut;
}

absl::StatusOr<std::vector<TopKRequest>> CutTopK(const TopKRequest& request,
                                                 const v1::Limits& limits) {
  const auto& k = request.params.k();
  const int64_t width = request.head.empty() ? request.vocab : request.hidden_size;
  const int64_t row_bytes = std::max<int64_t>(1, width) * DTypeSize(request.dtype);
  const absl::StatusOr<int64_t> step = RowsPerMessage(
      limits, /*max_message_bytes=*/0,
      {.row_bytes = row_bytes,
       .answer_row_bytes = kTopKAnswerRowBytes +
                           8 * int64_t{k.empty() ? 0 : *std::max_element(k.begin(), k.end())}});
  if (!step.ok()) return step.status();
  const ParamCutter params(request.params);
  if (absl::Status good = params.Check(request.rows); !good.ok()) return good;
  std::vector<TopKRequest> parts;
  for (int64_t row = 0; row < request.rows; row += *step) {
    TopKRequest& part = parts.emplace_back();
    part.dtype = request.dtype;
    part.rows = std::min(*step, request.rows - row);
    part.vocab = request.vocab;
    part.head = request.head;
    part.hidden_size = request.hidden_size;
    part.owner = request.owner;
    part.arena = request.arena;
    (request.head.empty() ? part.logits : part.hidden) =
        CutPieces(PayloadOf(request), row * row_bytes, part.rows * row_bytes);
    params.Cut(row, part.rows, &part.params);
  }
  return parts;
}

template <typename Answer>
void AppendRows(LogitsResult<Answer> part, LogitsResult<Answer>* all) {
  AddTimings(all->answer.timings(), part.answer.mutable_timings());
  if constexpr (requires { part.answer.totals(); }) {
    if (all->messages > 0) part.answer.set_offset(all->answer.offset());
    all->answer.clear_totals();
  }
  all->answer.MergeFrom(part.answer);
  AppendOffsets(part.top_offsets, &all->top_offsets);
  AppendOffsets(part.extra_offsets, &all->extra_offsets);
  AppendOffsets(part.reference_top_offsets, &all->reference_top_offsets);
  all->messages += part.messages;
  all->round_trip += part.round_trip;
  all->attempts += part.attempts;
}
template void AppendRows(TopKResult, TopKResult*);
template void AppendRows(ScoreResult, ScoreResult*);
template void AppendRows(DivergenceResult, DivergenceResult*);

}  // namespace logitd::client
