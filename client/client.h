// The C++ client of logitd: one channel to one server, calls with deadlines and retries, and
// tensors that travel from the caller's memory to the socket without a copy of ours in between.
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
#include "client/attention.h"
#include "logitd/v1/heads.pb.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "logitd/v1/server.pb.h"
#include "logitd/v1/types.pb.h"

namespace logitd::client {

struct RetryOptions {
  int max_attempts = 4;  // tries in all, the first included; 1 or more
  absl::Duration initial_backoff = absl::Milliseconds(20);
  absl::Duration max_backoff = absl::Seconds(1);
};

struct ClientOptions {
  std::string address = "127.0.0.1:7450";       // HOST:PORT or unix:PATH
  absl::Duration deadline = absl::Seconds(30);  // of a whole call, all attempts and waits included
  RetryOptions retry;
  int64_t max_message_bytes = 0;  // larger requests are refused here, unsent; 0: no limit of ours
  // Attention: larger tensors go as a stream of messages of about this size, of which the server
  // works on some while others travel.
  int64_t attention_message_bytes = int64_t{8} << 20;
  int64_t score_message_bytes = int64_t{4} << 20;  // ScoreStream: of the payload, about; 4096 rows
                                                   // at most
};

struct TopKRequest {
  v1::DType dtype = v1::DTYPE_F32;
  int64_t rows = 0;
  int64_t vocab = 0;
  // The logits [rows, vocab], little-endian: one piece, or several that follow each other (e.g. one
  // a row). Not copied. Who keeps the bytes alive, and how long: see `owner`.
  std::vector<absl::string_view> logits;
  // In place of logits: hidden states [rows, hidden_size] for a head that the server has loaded, in
  // the dtype of its weight. Pieces as those of logits, which are then not looked at; `vocab` may
  // be 0.
  std::string head;
  int64_t hidden_size = 0;
  std::vector<absl::string_view> hidden;
  std::vector<int32_t> k;          // one for all rows, or one a row; 1..vocab
  std::vector<float> temperature;  // one for all rows, or one a row; finite, > 0; empty means 1
  // gRPC may still hold the payload after a call has ended by deadline. With an owner, gRPC shares
  // it and the call returns at once. Without, TopK returns only when gRPC has let go, so that stack
  // memory is safe; a peer that neither reads nor closes can then hold the call past its deadline,
  // over TCP for 20 s at most.
  std::shared_ptr<const void> owner;
};

struct TopKResult {
  std::vector<int32_t> k;        // [rows], entries of each row
  std::vector<int64_t> offsets;  // [rows + 1], row i's entries are [offsets[i], offsets[i + 1])
  std::vector<int32_t> indices;  // [sum k], most probable first, equal logits by ascending id
  std::vector<float> probs;      // [sum k], of the full softmax
  std::vector<float> logsumexp;  // [rows], natural log, of logits / temperature
  std::vector<v1::RowStatus> status;     // [rows]
  std::vector<int32_t> status_position;  // [rows], lowest NaN's token id, else -1
  v1::Timings timings;                   // the server's clocks
  absl::Duration round_trip;             // this client's clock, last attempt alone
  int attempts = 0;

  int64_t rows() const { return static_cast<int64_t>(k.size()); }
  absl::Span<const int32_t> RowIndices(int64_t row) const {
    return absl::MakeConstSpan(indices).subspan(offsets[row], k[row]);
  }
  absl::Span<const float> RowProbs(int64_t row) const {
    return absl::MakeConstSpan(probs).subspan(offsets[row], k[row]);
  }
};

// Logits, or hidden states, with the parameters of Sample, Verify or Score.
template <typename Params>
struct LogitsRequest {
  v1::DType dtype = v1::DTYPE_F32;
  int64_t rows = 0;
  int64_t vocab = 0;
  std::vector<absl::string_view> logits;  // as in TopKRequest; and so is `owner`
  std::string head;                       // these three too; Verify takes logits alone
  int64_t hidden_size = 0;
  std::vector<absl::string_view> hidden;
  // Every field of the message but those above; theirs here are not looked at. The proto has units,
  // defaults and limits.
  Params params;
  std::shared_ptr<const void> owner;
};
using SampleRequest = LogitsRequest<v1::SampleRequest>;
using VerifyRequest = LogitsRequest<v1::VerifyRequest>;
using ScoreRequest = LogitsRequest<v1::ScoreRequest>;

// The server's message, whose arrays agree with each other in size, and where rows start in it.
template <typename Answer>
struct SampledResult {
  Answer answer;
  std::vector<int64_t> top_offsets;  // [rows + 1], row i's are [top_offsets[i], top_offsets[i + 1])
  std::vector<int64_t> extra_offsets;  // [rows + 1], likewise
  absl::Duration round_trip;           // this client's clock, last attempt alone
  int attempts = 0;

  int64_t rows() const { return answer.tokens_size(); }
};
using SampleResult = SampledResult<v1::SampleResponse>;
using VerifyResult = SampledResult<v1::VerifyResponse>;

struct ScoreResult {
  // The server's message, as above. Of several messages: rows joined, the last one's totals; of the
  // timings the phases summed, and the largest batch.
  v1::ScoreResponse answer;
  std::vector<int64_t> top_offsets;
  std::vector<int64_t> extra_offsets;
  int messages = 0;
  absl::Duration round_trip;  // this client's clock; of several messages: all of it, waits included
  int attempts = 0;           // of one message; of a stream how often it was opened

  int64_t rows() const { return answer.losses_size(); }
};

// How far a ScoreStream is.
struct ScoreProgress {
  int64_t rows = 0;        // of the request, scored
  int64_t total_rows = 0;  // of the request
  v1::ScoreTotals totals;  // as the last answer had them
};

// Values of grpc.health.v1.HealthCheckResponse.ServingStatus.
enum class ServingStatus { kUnknown = 0, kServing = 1, kNotServing = 2, kServiceUnknown = 3 };
absl::string_view ServingStatusName(ServingStatus status);  // "SERVING", ...

// A call of SampleStream: requests go out with Write, their answers come back with Read, in order.
// The server takes a few requests at once and leaves further ones unread, so that Write then blocks
// until Read has taken answers: a decode loop writes and reads in turn, or keeps a few under way.
// No deadline and no retries. One thread may write while another reads. Ended and cancelled when
// destroyed.
class SampleStream {
 public:
  virtual ~SampleStream() = default;

  // Copies the payload of a request without an owner. UNAVAILABLE: the stream has ended, and Read
  // tells why.
  virtual absl::Status Write(const SampleRequest& request) = 0;
  virtual void WritesDone() = 0;

  // The next answer; its round_trip is from its Write. Where the stream has ended, how: the
  // server's status, or OUT_OF_RANGE after the last answer.
  virtual absl::StatusOr<SampleResult> Read() = 0;
};

// Thread-safe: any method from any thread, calls at the same time share one connection.
//
// Errors are the server's, code and text, with the number of attempts appended where there was more
// than one. UNAVAILABLE and RESOURCE_EXHAUSTED are tried again: after the server's
// `grpc-retry-pushback-ms` where it sent one (negative: not at all), otherwise after an exponential
// backoff with jitter; never past the deadline. Not so a RESOURCE_EXHAUSTED of gRPC's own, for a
// message larger than the server's transport takes.
class Client {
 public:
  // INVALID_ARGUMENT: an address or option that cannot work. Connects at the first call, not here.
  static absl::StatusOr<std::unique_ptr<Client>> Create(ClientOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  absl::StatusOr<TopKResult> TopK(const TopKRequest& request);
  absl::StatusOr<SampleResult> Sample(const SampleRequest& request);
  absl::StatusOr<VerifyResult> Verify(const VerifyRequest& request);
  absl::StatusOr<ScoreResult> Score(const ScoreRequest& request);

  // Score of a sequence of any length: cut into messages of whole rows (ClientOptions::
  // score_message_bytes, and what the server takes at once), which go as a stream. A stream that is
  // lost is opened again and goes on after the last answer; RetryOptions count the tries since
  // then, and `deadline` is how long an answer may take to come. `progress` runs on this thread
  // after every answer; false ends the call with CANCELLED. Nothing is read meanwhile: where it
  // takes longer than the server waits for its answers to be taken (--receive-timeout), the stream
  // is lost as above. With the last answer the result stands, however the stream ends. What was
  // scored before an error, `progress` knows: a call whose rows begin there, with `offset` and
  // `totals` in the parameters, goes on. A stream opened again looks its head up again: until the
  // call ends, the name must mean the same weights, or losses of two heads are joined and summed
  // and nothing says so.
  absl::StatusOr<ScoreResult> ScoreStream(
      const ScoreRequest& request,
      const std::function<bool(const ScoreProgress&)>& progress = nullptr);

  // Tensors of any size: see ClientOptions::attention_message_bytes. What the server takes at once
  // is asked of it before the first, and again where that is what was refused under: a server that
  // was started anew may have other limits. So it is for ScoreStream. A stream that has to be tried
  // again starts over.
  absl::StatusOr<AttentionResult> AttentionSoftmax(const AttentionSoftmaxRequest& request);
  absl::StatusOr<AttentionResult> AttentionSoftmaxBackward(
      const AttentionSoftmaxBackwardRequest& request);

  // Does not wait for the server; the first Write or Read does. Ends before the Client does.
  std::unique_ptr<SampleStream> OpenSampleStream();

  // One attempt, no retries. `done` runs once, on a gRPC thread, and must not block. The payload
  // needs an owner: INVALID_ARGUMENT (through `done`, before this returns) without. Calls in flight
  // must end before the Client does.
  void TopKAsync(const TopKRequest& request, std::function<void(absl::StatusOr<TopKResult>)> done);

  // The server's output heads; heads.proto has fields and errors. Of a load, `progress`, which may
  // be null, is called now and then, with a total of 0 while the load waits its turn; false gives
  // it up (CANCELLED). A load has no deadline, for it may take minutes, and is tried once.
  absl::StatusOr<v1::Head> LoadHead(
      const v1::LoadHeadRequest& request,
      const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress = nullptr);
  // OK also where a head that is gone is not there when it is tried again.
  absl::Status UnloadHead(const std::string& name);
  absl::StatusOr<std::vector<v1::Head>> ListHeads();  // by ascending name
  absl::StatusOr<v1::Head> GetHead(const std::string& name);

  absl::StatusOr<v1::GetInfoResponse> Info();

  // grpc.health.v1.Health/Check. NOT_FOUND: the server does not know the service. "" is the server
  // as a whole.
  absl::StatusOr<ServingStatus> Health(const std::string& service = "");

  // grpc.health.v1.Health/Watch: calls `on_change` with the present status and every later one
  // until it returns false (OK) or the stream ends (the stream's error). No deadline.
  absl::Status WatchHealth(const std::string& service,
                           const std::function<bool(ServingStatus)>& on_change);

  const ClientOptions& options() const;

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_CLIENT_H_
