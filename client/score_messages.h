// A sequence to score as the messages it goes in, and its answers.
#ifndef LOGITD_CLIENT_SCORE_MESSAGES_H_
#define LOGITD_CLIENT_SCORE_MESSAGES_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "logitd/v1/server.pb.h"

namespace logitd::client {

// Cuts a sequence into messages of whole rows, encodes them over the caller's memory, and puts the
// answers together. A stream of it begins after the last answer there is. The request outlives it.
// Not thread-safe.
class ScoreMessages {
 public:
  // Bytes of a message. A row that is larger than `about` goes alone.
  struct Sizes {
    int64_t about;     // of the payload
    int64_t most = 0;  // of all its fields; 0: no limit but the server's
  };

  // INVALID_ARGUMENT: sizes that disagree, or one row that no message carries.
  static absl::StatusOr<ScoreMessages> Plan(
      const ScoreRequest& request, const v1::Limits& limits, Sizes sizes,
      const std::function<bool(const ScoreProgress&)>& progress);

  // Cuts what is not answered yet under other limits, with the errors of Plan. Between streams.
  absl::Status Replan(const v1::Limits& limits);

  // Before a stream: what is answered is behind it.
  void Begin() { first_row_ = taken_rows_; }

  // Of the stream that has begun.
  int size() const;

  // Message `i` of it; the first has all that later ones inherit, the offset and the totals.
  absl::StatusOr<grpc::ByteBuffer> Encode(int i, const std::shared_ptr<const void>& owner) const;

  // Takes answer `i` of it; they come in order. INTERNAL: it is not what was asked for. CANCELLED:
  // `progress` has had enough.
  absl::Status Take(int i, grpc::ByteBuffer* answer);

  int64_t taken_rows() const { return taken_rows_; }

  // After the last answer. Once.
  ScoreResult Finish() { return std::move(result_); }

 private:
  ScoreMessages(const ScoreRequest& request, int64_t row_bytes, Sizes sizes,
                const std::function<bool(const ScoreProgress&)>& progress);
  v1::ScoreRequest ParametersOf(int64_t row, int64_t rows) const;

  const ScoreRequest* request_;
  int64_t row_bytes_;
  Sizes sizes_;
  int64_t rows_ = 0;  // of a message, but the last
  std::function<bool(const ScoreProgress&)> progress_;
  std::vector<int64_t> first_extra_;  // of each row, where those are row by row
  int64_t first_row_ = 0;
  int64_t taken_rows_ = 0;
  ScoreResult result_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_SCORE_MESSAGES_H_
