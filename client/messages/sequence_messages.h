// A sequence to score, or to compare with another, as the messages of a stream, and its answers.
#ifndef LOGITD_CLIENT_MESSAGES_SEQUENCE_MESSAGES_H_
#define LOGITD_CLIENT_MESSAGES_SEQUENCE_MESSAGES_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/messages/params.h"
#include "client/transport/transport.h"
#include "logitd/v1/server.pb.h"

namespace logitd::client {

// The methods whose messages are a sequence.
struct ScoreMethod {
  using Request = ScoreRequest;
  using Result = ScoreResult;
  using Progress = ScoreProgress;
  static constexpr char kPath[] = "/logitd.v1.Scorer/ScoreStream";
};
struct DivergenceMethod {
  using Request = DivergenceRequest;
  using Result = DivergenceResult;
  using Progress = DivergenceProgress;
  static constexpr char kPath[] = "/logitd.v1.Scorer/DivergenceStream";
};

// Cuts a sequence into messages of whole rows, encodes them over the caller's memory, and joins the
// answers. Each stream begins after the last answer so far. `request` and `options` outlive it. Not
// thread-safe.
template <typename Method>
class SequenceMessages final : public MessageStream {
 public:
  using Request = typename Method::Request;
  using Result = typename Method::Result;
  using Progress = std::function<bool(const typename Method::Progress&)>;

  // INVALID_ARGUMENT: sizes that disagree, or not even one row fits into a message.
  static absl::StatusOr<std::unique_ptr<SequenceMessages>> Plan(const Request& request,
                                                                const v1::Limits& limits,
                                                                const ClientOptions& options,
                                                                Progress progress);

  // Cuts the rows without an answer again, by other limits. Errors as Plan. Between streams.
  absl::Status Replan(const v1::Limits& limits);

  // Before each stream.
  void Begin() { first_row_ = taken_rows_; }

  // Messages of the stream that has begun.
  int size() const override;
  // The first message of a stream has the offset, the totals and everything that later ones
  // inherit.
  absl::StatusOr<grpc::ByteBuffer> Encode(int i,
                                          const std::shared_ptr<const void>& owner) const override;
  // INTERNAL: the answer does not fit the message. CANCELLED: `progress` returned false.
  absl::Status Take(int i, grpc::ByteBuffer* answer) override;

  int64_t taken_rows() const { return taken_rows_; }

  // After the last answer. Once.
  Result Finish() { return std::move(result_); }

 private:
  struct Rows {
    int64_t first;
    int64_t count;
  };
  SequenceMessages(const Request& request, const ClientOptions& options, Progress progress);
  absl::Status Check() const;
  int64_t FieldBytes() const;
  Rows RowsOf(int i) const;

  const Request& request_;
  const ClientOptions& options_;
  const Progress progress_;
  const ParamCutter params_;
  const int64_t row_bytes_;   // of all inputs, as the server counts them
  int64_t message_rows_ = 0;  // of every message except the last
  int64_t first_row_ = 0;     // of the stream
  int64_t taken_rows_ = 0;    // with an answer
  Result result_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_MESSAGES_SEQUENCE_MESSAGES_H_
