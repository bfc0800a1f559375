// The C++ client of logitd: one channel to one server or several, calls with deadlines and retries,
// and tensors that travel from the caller's memory to the socket without a copy of ours in between.
#ifndef LOGITD_CLIENT_CLIENT_H_
#define LOGITD_CLIENT_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "client/attention.h"
#include "client/options.h"
#include "logitd/v1/heads.pb.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "logitd/v1/server.pb.h"
#include "logitd/v1/types.pb.h"

namespace logitd::client {

class Transport;

// Rows to work on, logits or hidden states, with the parameters of a call.
template <typename Params>
struct LogitsRequest {
  v1::DType dtype = v1::DTYPE_F32;
  int64_t rows = 0;
  int64_t vocab = 0;
  // The logits [rows, vocab], little-endian: one piece, or several that follow each other (e.g. one
  // per row). Not copied. `owner` says how long the bytes must live.
  std::vector<absl::string_view> logits;
  // In place of logits: hidden states [rows, hidden_size] for a head that the server has loaded, in
  // the dtype of its weight, in pieces like logits. `vocab` may then be 0.
  std::string head;
  int64_t hidden_size = 0;
  std::vector<absl::string_view> hidden;
  // Where `logits` or `hidden` lie, if in leased memory: then they are not sent. Outlives the call.
  const Arena* arena = nullptr;
  // Every other field of the message. The fields above override those of `params`. The proto has
  // units, defaults and limits.
  Params params;
  // gRPC may still hold the payload after a call has ended by deadline. With an owner, gRPC shares
  // it and the call returns at once. Without, the call returns only when gRPC has let go, so that
  // stack memory is safe; a peer that neither reads nor closes can then hold the call past its
  // deadline, over TCP for 20 s at most.
  // With an arena it is not used.
  std::shared_ptr<const void> owner;
};
using TopKRequest = LogitsRequest<v1::TopKRequest>;
using SampleRequest = LogitsRequest<v1::SampleRequest>;
using VerifyRequest = LogitsRequest<v1::VerifyRequest>;
using ScoreRequest = LogitsRequest<v1::ScoreRequest>;

// Two inputs per row. The members of LogitsRequest are the first, and these the reference, with as
// many rows of the same vocabulary.
struct DivergenceRequest : LogitsRequest<v1::DivergenceRequest> {
  v1::DType reference_dtype = v1::DTYPE_UNSPECIFIED;  // unspecified: `dtype`
  // This and the next four as without "reference_". A stream, and logits in an arena, need `vocab`
  // also where the first input has a head.
  std::vector<absl::string_view> reference_logits;
  std::string reference_head;
  int64_t reference_hidden_size = 0;
  std::vector<absl::string_view> reference_hidden;
  const Arena* reference_arena = nullptr;
};

// The server's message, whose arrays agree with each other in size, and where rows start in it.
// Where the rows took several messages, their rows are joined, timings and round trips are summed,
// the totals are those of the last message, and batch_rows is the largest.
template <typename Answer>
struct LogitsResult {
  Answer answer;
  // [rows + 1]; the top tokens of row i are entries [top_offsets[i], top_offsets[i + 1]), and its
  // extra ids, its support's tokens and its draws are likewise. Only Sample and Verify have
  // supports, only Sample has draws, and TopK has no extra ids. Divergence has top tokens of both
  // inputs, and none of the others.
  std::vector<int64_t> top_offsets = {0};
  std::vector<int64_t> extra_offsets = {0};
  std::vector<int64_t> support_offsets = {0};
  std::vector<int64_t> draw_offsets = {0};
  std::vector<int64_t> reference_top_offsets = {0};
  int messages = 0;
  absl::Duration
      round_trip;    // this client's clock, last attempt only; of a sequence: the whole call
  int attempts = 0;  // of a sequence: how often a stream was opened

  int64_t rows() const { return answer.status_size(); }
  // TopK only.
  absl::Span<const int32_t> RowIndices(int64_t row) const {
    return {answer.indices().data() + top_offsets[row], RowSize(row)};
  }
  absl::Span<const float> RowProbs(int64_t row) const {
    return {answer.probs().data() + top_offsets[row], RowSize(row)};
  }

 private:
  size_t RowSize(int64_t row) const {
    return static_cast<size_t>(top_offsets[row + 1] - top_offsets[row]);
  }
};
using TopKResult = LogitsResult<v1::TopKResponse>;
using SampleResult = LogitsResult<v1::SampleResponse>;
using VerifyResult = LogitsResult<v1::VerifyResponse>;
using ScoreResult = LogitsResult<v1::ScoreResponse>;
using DivergenceResult = LogitsResult<v1::DivergenceResponse>;

// How far a ScoreStream, or a DivergenceStream, is.
template <typename Totals>
struct SequenceProgress {
  int64_t rows = 0;        // with an answer so far
  int64_t total_rows = 0;  // of the request
  Totals totals;           // of the last answer
};
using ScoreProgress = SequenceProgress<v1::ScoreTotals>;
using DivergenceProgress = SequenceProgress<v1::DivergenceTotals>;

// Values of grpc.health.v1.HealthCheckResponse.ServingStatus.
enum class ServingStatus { kUnknown = 0, kServing = 1, kNotServing = 2, kServiceUnknown = 3 };
absl::string_view ServingStatusName(ServingStatus status);  // "SERVING", ...

// A call of SampleStream: requests go out with Write, their answers come back with Read, in order.
// The server takes a few requests at once and leaves further ones unread; Write then blocks until
// Read has taken answers. So a decode loop writes and reads in turn, or keeps a few requests in
// flight. No deadline and no retries. One thread may write while another reads. The destructor
// cancels the call.
class SampleStream {
 public:
  virtual ~SampleStream() = default;

  // Copies the payload of a request without an owner. UNAVAILABLE: the stream has ended; Read has
  // the reason. FAILED_PRECONDITION: after WritesDone.
  virtual absl::Status Write(const SampleRequest& request) = 0;
  virtual void WritesDone() = 0;  // no more requests; answers can still be read

  // The next answer; its round_trip counts from its Write. When the stream has ended: the server's
  // status, or OUT_OF_RANGE after the last answer.
  virtual absl::StatusOr<SampleResult> Read() = 0;
};

// Thread-safe: any method from any thread; concurrent calls share one connection.
//
// Errors are the server's, code and text, with the number of attempts appended where there was more
// than one. UNAVAILABLE and RESOURCE_EXHAUSTED are tried again: after the server's
// `grpc-retry-pushback-ms` where it sent one (negative: no retry), otherwise after an exponential
// backoff with jitter; never past the deadline. Exception: the RESOURCE_EXHAUSTED of gRPC's library
// itself, for a message that is too large for it, is final.
class Client {
 public:
  // INVALID_ARGUMENT: an address, an option or a file of TlsOptions that cannot work. NOT_FOUND:
  // such a file cannot be read. Connects at the first call, not here.
  static absl::StatusOr<std::unique_ptr<Client>> Create(ClientOptions options);
  explicit Client(std::unique_ptr<Transport> transport);  // for tests: Transport is not installed
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  absl::StatusOr<TopKResult> TopK(const TopKRequest& request);
  absl::StatusOr<SampleResult> Sample(const SampleRequest& request);
  absl::StatusOr<VerifyResult> Verify(const VerifyRequest& request);
  absl::StatusOr<ScoreResult> Score(const ScoreRequest& request);

  // Score of a sequence of any length: cut into messages of whole rows (ClientOptions::
  // score_message_bytes, and the server's limits), which go as a stream. When a stream is lost, a
  // new one continues after the last answer. RetryOptions count the attempts since then, and
  // `deadline` is how long one answer may take. With the last answer the result is complete,
  // however the stream ends.
  //
  // `progress` runs on this thread after every answer; false ends the call with CANCELLED. Nothing
  // is read meanwhile: if it takes longer than the server waits for its answers to be read
  // (--receive-timeout), the stream is lost as above. After an error, a second call can continue
  // where `progress` last stood: with the rows from there on, and its `offset` and `totals` in the
  // parameters.
  //
  // A new stream demands the version of the head that its answers so far are of: a head that was
  // updated meanwhile ends the call with FAILED_PRECONDITION.
  absl::StatusOr<ScoreResult> ScoreStream(
      const ScoreRequest& request,
      const std::function<bool(const ScoreProgress&)>& progress = nullptr);

  // How far two distributions are from each other, row by row; and of a sequence of any length, as
  // ScoreStream with Score. A new stream demands the versions of both heads.
  absl::StatusOr<DivergenceResult> Divergence(const DivergenceRequest& request);
  absl::StatusOr<DivergenceResult> DivergenceStream(
      const DivergenceRequest& request,
      const std::function<bool(const DivergenceProgress&)>& progress = nullptr);

  // Tensors of any size: see ClientOptions::attention_message_bytes. The server's limits are asked
  // for before the first call, and again after a refusal under them, because a restarted server may
  // have others. ScoreStream does the same. A stream that is tried again starts over.
  absl::StatusOr<AttentionResult> AttentionSoftmax(const AttentionSoftmaxRequest& request);
  absl::StatusOr<AttentionResult> AttentionSoftmaxBackward(
      const AttentionSoftmaxBackwardRequest& request);

  // Does not wait for the server; the first Write or Read does. Destroy it before the Client.
  std::unique_ptr<SampleStream> OpenSampleStream();

  // One attempt, no retries. `done` runs once, on a gRPC thread, and must not block. Without an
  // owner of the payload, or an arena: INVALID_ARGUMENT, through `done`, before this returns. Calls
  // in flight must end before the Client does.
  void TopKAsync(const TopKRequest& request, std::function<void(absl::StatusOr<TopKResult>)> done);
  void SampleAsync(const SampleRequest& request,
                   std::function<void(absl::StatusOr<SampleResult>)> done);
  void ScoreAsync(const ScoreRequest& request,
                  std::function<void(absl::StatusOr<ScoreResult>)> done);

  // The server's output heads; heads.proto has fields and errors. During a load, `progress` (may be
  // null) is called now and then, with a total of 0 while the load waits its turn; false cancels
  // the load (CANCELLED). A load has no deadline, because it may take minutes, and one attempt.
  absl::StatusOr<v1::Head> LoadHead(
      const v1::LoadHeadRequest& request,
      const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress = nullptr);
  // By a path, or by rows in an arena, whose place Arena::Find tells; in one message. As LoadHead,
  // except that the total of an update by rows is 0.
  absl::StatusOr<v1::Head> UpdateHead(
      const v1::UpdateHeadRequest& request,
      const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress = nullptr);
  // OK also where a second attempt finds no such head: then the first one unloaded it.
  absl::Status UnloadHead(const std::string& name);
  absl::StatusOr<std::vector<v1::Head>> ListHeads();  // by ascending name
  absl::StatusOr<v1::Head> GetHead(const std::string& name);

  absl::StatusOr<v1::GetInfoResponse> Info();

  // What the server is doing now, for a choice between servers.
  absl::StatusOr<v1::GetLoadResponse> GetLoad();

  // grpc.health.v1.Health/Check. NOT_FOUND: the server does not know the service. "" is the server
  // as a whole.
  absl::StatusOr<ServingStatus> Health(const std::string& service = "");

  // grpc.health.v1.Health/Watch: calls `on_change` with the present status and every later one
  // until it returns false (OK) or the stream ends (the stream's error). No deadline.
  absl::Status WatchHealth(const std::string& service,
                           const std::function<bool(ServingStatus)>& on_change);

  const ClientOptions& options() const;

 private:
  const std::unique_ptr<Transport> transport_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_CLIENT_H_
