// Clients without our code: protobuf requests, gRPC's generic stubs, and bare HTTP/2 for what no
// gRPC library does.
#ifndef LOGITD_TESTS_E2E_PEERS_H_
#define LOGITD_TESTS_E2E_PEERS_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "logitd/v1/sampler.pb.h"
#include "tests/e2e/frames.h"

namespace logitd::e2e {

inline constexpr const char* kTopK = "/logitd.v1.Sampler/TopK";
inline constexpr const char* kSoftmax = "/logitd.v1.Attention/Softmax";

// Samples of the metrics page.
inline constexpr const char* kHeldBytes = "logitd_held_bytes";
inline constexpr const char* kWaitingCalls = "logitd_waiting_calls";
std::string Requests(const std::string& code, const std::string& op = "softmax_topk");

// A new connection.
std::shared_ptr<grpc::Channel> Connect(const std::string& address);

grpc::ByteBuffer ToBuffer(std::string_view bytes);
std::string ToString(const grpc::ByteBuffer& buffer);

// With a deadline of a minute.
std::unique_ptr<grpc::ClientContext> Context();

// A request over f32 `logits`, [rows, vocab].
template <typename Request>
Request Of(const std::vector<float>& logits, int64_t rows) {
  Request request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(static_cast<int64_t>(logits.size()) / rows);
  request.set_logits(logits.data(), logits.size() * sizeof(float));
  return request;
}
v1::TopKRequest Request(const std::vector<float>& logits, int64_t rows, int k);

// A response without its timings, as bytes.
template <typename Response>
std::string Bits(Response response) {
  response.clear_timings();
  return response.SerializeAsString();
}

// A valid request with a payload of `rows` x 65536 f32 zeros. Its slices share memory, so many of
// them cost this process nothing.
grpc::ByteBuffer LargeRequest(int64_t rows);
inline constexpr int64_t kLargeRowBytes = 65536 * 4;

// One call over a generic stub. Each step waits until it is done.
class GenericCall {
 public:
  GenericCall(std::shared_ptr<grpc::Channel> channel, const std::string& method,
              absl::Duration deadline = absl::Seconds(30));
  // Cancels the call if it is not finished.
  ~GenericCall();

  grpc::ClientContext& context() { return context_; }
  bool Start();  // sends the headers
  bool Write(const grpc::ByteBuffer& message, bool last = false);
  bool WritesDone();
  bool Read(grpc::ByteBuffer* message);
  grpc::Status Finish();

  // Start, Write, half-close, Read, Finish.
  grpc::Status Unary(const grpc::ByteBuffer& message, grpc::ByteBuffer* answer);

 private:
  bool Next();

  std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool finished_ = false;
};

// A unary call on its own connection whose answer is never read. Its peer is alive and takes only
// what gRPC reads by itself. The destructor cancels it.
class UnreadCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  UnreadCall(const std::string& address, const std::string& method,
             const grpc::ByteBuffer& request);
  ~UnreadCall() override;

 private:
  void OnDone(const grpc::Status&) override { ended_.Notify(); }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  const grpc::ByteBuffer request_;
  absl::Notification ended_;
};

// Many unary calls at the same time, each on its own connection.
class ManyCalls {
 public:
  ManyCalls(const std::string& address, int connections);
  ~ManyCalls();

  // Starts a call on connection `i`.
  void Start(int i, const grpc::ByteBuffer& message, absl::Duration deadline = absl::Seconds(60));
  void CancelAll();
  // Waits for all that were started.
  std::vector<grpc::Status> WaitAll();

 private:
  struct Call;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Call>> calls_;
  absl::Mutex mutex_;
  size_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread poller_;  // gRPC moves bytes only while a thread polls
};

// A socket to 127.0.0.1:`port`, which the caller closes.
int ConnectSocket(int port);

// One HTTP/2 stream without a gRPC library.
class BarePeer {
 public:
  // Connects to 127.0.0.1:`port` and sends the preface. `window`: the bytes of an answer it
  // accepts.
  explicit BarePeer(int port, uint32_t window = 65535);
  // Closes the socket and sends nothing more.
  ~BarePeer();

  // `more`: names and values, each below 127 bytes.
  void SendHeaders(const std::string& method,
                   const std::vector<std::pair<std::string, std::string>>& more = {},
                   uint32_t stream = 1);
  // Sends a gRPC message that claims `claimed` bytes and holds `body`.
  void SendMessage(uint32_t claimed, std::string_view body, bool end_stream,
                   bool marked_compressed = false, uint32_t stream = 1);
  // Reads until a frame of type `type` comes for stream 1. False after `timeout` or at the end of
  // the connection.
  bool WaitForFrame(uint8_t type, absl::Duration timeout);
  // Reads until `text` comes in a ServerFrame::text, for example in a status. False after `timeout`
  // or at the end of the connection.
  bool WaitForText(std::string_view text, absl::Duration timeout);

 private:
  void SendFrame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload);

  const int fd_;
  FrameReader reader_;
};

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_PEERS_H_
