// Clients that know nothing of ours: protobuf requests, gRPC's generic stubs, and bare HTTP/2 for
// what no gRPC library would do.
#ifndef LOGITD_TESTS_E2E_PEERS_H_
#define LOGITD_TESTS_E2E_PEERS_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "logitd/v1/sampler.pb.h"

namespace logitd::e2e {

inline constexpr const char* kTopK = "/logitd.v1.Sampler/TopK";

// A connection of its own.
std::shared_ptr<grpc::Channel> Connect(const std::string& address);

grpc::ByteBuffer ToBuffer(std::string_view bytes);
std::string ToString(const grpc::ByteBuffer& buffer);

// One row-major f32 request over `logits`, [rows, vocab].
v1::TopKRequest Request(const std::vector<float>& logits, int64_t rows, int k);

// A valid request with a payload of `rows` x 65536 zeros in f32, as slices of shared memory: costs
// this process nothing however many there are.
grpc::ByteBuffer LargeRequest(int64_t rows);
inline constexpr int64_t kLargeRowBytes = 65536 * 4;

// One call by hand over a generic stub. Each step waits until it is done.
class GenericCall {
 public:
  GenericCall(std::shared_ptr<grpc::Channel> channel, const std::string& method,
              absl::Duration deadline = absl::Seconds(30));
  // Cancels what is not finished.
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

// Many unary calls at once, each on a connection of its own.
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
  std::thread poller_;  // gRPC moves bytes while somebody polls
};

// HTTP/2 by hand, one stream.
class BarePeer {
 public:
  // Connects to 127.0.0.1:`port` and says hello; `window`: how much of an answer it is ready to
  // take.
  explicit BarePeer(int port, uint32_t window = 65535);
  // Vanishes without a word.
  ~BarePeer();

  void SendHeaders(const std::string& method);
  // A gRPC message that claims `claimed` bytes but brings `body`.
  void SendMessage(uint32_t claimed, std::string_view body, bool end_stream);
  // Reads until a frame of type `type` (3 = RST_STREAM, 1 = HEADERS) comes for the stream. False
  // after `timeout` or at the end of the connection.
  bool WaitForFrame(uint8_t type, absl::Duration timeout);

 private:
  void SendFrame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload);

  int fd_;
};

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_PEERS_H_
