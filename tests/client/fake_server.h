// A server for the client's tests: generated service classes, and a reference top-K in double
// precision. It can be told what to answer, which the real one cannot.
#ifndef LOGITD_TESTS_CLIENT_FAKE_SERVER_H_
#define LOGITD_TESTS_CLIENT_FAKE_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"

namespace logitd::testing {

// A gRPC server on loopback with one service and GetInfo, which says that there are no limits.
class LocalServer {
 public:
  explicit LocalServer(grpc::Service* service);
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  struct InfoService : v1::Server::Service {
    grpc::Status GetInfo(grpc::ServerContext*, const v1::GetInfoRequest*,
                         v1::GetInfoResponse*) override {
      return grpc::Status::OK;
    }
  };
  InfoService info_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// A service whose only method is a stream, e.g. v1::Scorer::Service with ScoreStream. The handler
// runs for each call, counted from 1.
template <typename Request, typename Response>
class StreamHandler {
 public:
  using Stream = grpc::ServerReaderWriter<Response, Request>;
  using Handler = std::function<grpc::Status(int call, Stream* stream)>;

  explicit StreamHandler(Handler handler) : handler_(std::move(handler)) {}
  int calls() const { return calls_; }

 protected:
  grpc::Status Handle(Stream* stream) { return handler_(++calls_, stream); }

 private:
  const Handler handler_;
  std::atomic<int> calls_ = 0;
};

class FakeServer {
 public:
  // Runs in place of the reference for call number `call`, counted from 1. On several threads.
  using Handler = std::function<grpc::Status(int call, grpc::ServerContext*, const v1::TopKRequest&,
                                             v1::TopKResponse*)>;

  // Listens on loopback, and on `unix_path` where given.
  explicit FakeServer(Handler handler = nullptr, const std::string& unix_path = "");
  ~FakeServer();

  std::string address() const;
  int calls() const { return sampler_.calls; }
  int64_t largest_request() const { return sampler_.largest_request; }
  v1::GetInfoResponse& info() { return info_service_.info; }  // before the first call
  void SetServing(bool serving);
  void Shutdown();

 private:
  struct SamplerService : v1::Sampler::Service {
    grpc::Status TopK(grpc::ServerContext* context, const v1::TopKRequest* request,
                      v1::TopKResponse* response) override;
    Handler handler;
    std::atomic<int> calls = 0;
    std::atomic<int64_t> largest_request = 0;
  };
  struct InfoService : v1::Server::Service {
    grpc::Status GetInfo(grpc::ServerContext*, const v1::GetInfoRequest*,
                         v1::GetInfoResponse* response) override {
      *response = info;
      return grpc::Status::OK;
    }
    v1::GetInfoResponse info;
  };

  SamplerService sampler_;
  InfoService info_service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// The answer by the definition: softmax in double, sorted by probability, then index.
void ReferenceTopK(const v1::TopKRequest& request, v1::TopKResponse* response);

// Takes every call and reads none of it.
class StuckServer {
 public:
  StuckServer();
  ~StuckServer();
  std::string address() const;

 private:
  struct Service : grpc::CallbackGenericService {
    grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override;
  };
  Service service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_FAKE_SERVER_H_
