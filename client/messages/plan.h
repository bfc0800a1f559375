// How requests of many rows are cut into messages: the one place that knows the limits.
#ifndef LOGITD_CLIENT_MESSAGES_PLAN_H_
#define LOGITD_CLIENT_MESSAGES_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/messages/codec.h"
#include "logitd/v1/server.pb.h"

namespace logitd::client {

// Bytes of one message, and of each of its rows.
struct MessageCost {
  // As the server counts them for Limits.max_request_bytes and max_answer_bytes.
  int64_t bytes = 0;
  int64_t row_bytes = 1;
  int64_t answer_bytes = 0;
  int64_t answer_row_bytes = 0;  // 0: the answer does not count
  // All other fields, which only ClientOptions::max_message_bytes counts.
  int64_t field_bytes = 0;
  int64_t field_row_bytes = 0;
};

// What is left in a message for its rows.
struct MessageRoom {
  int64_t bytes;  // for row_bytes; below 0: the shared bytes leave no room
  int64_t rows;
};
MessageRoom RoomOf(const v1::Limits& limits, int64_t max_message_bytes, const MessageCost& cost);

// The rows of one message, 1 or more. INVALID_ARGUMENT: not even one row fits.
absl::StatusOr<int64_t> RowsPerMessage(const v1::Limits& limits, int64_t max_message_bytes,
                                       const MessageCost& cost);

// Bytes [offset, offset + bytes) of pieces that follow each other.
Pieces CutPieces(const Pieces& pieces, int64_t offset, int64_t bytes);

// A request of any number of rows as requests that the server takes, with the parameters of their
// rows. They share the request's payload. INVALID_ARGUMENT: not even one row fits.
absl::StatusOr<std::vector<TopKRequest>> CutTopK(const TopKRequest& request,
                                                 const v1::Limits& limits);

// Appends the rows of `part` to `all`, as LogitsResult says of several messages.
template <typename Answer>
void AppendRows(LogitsResult<Answer> part, LogitsResult<Answer>* all);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_MESSAGES_PLAN_H_
