// A real gRPC server over an engine on a fake device, in the test's process.
#ifndef LOGITD_TESTS_RPC_SERVED_ENGINE_H_
#define LOGITD_TESTS_RPC_SERVED_ENGINE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/arena/leases.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/ops/ops.h"
#include "server/rpc/rpc_server.h"
#include "tests/becomes.h"
#include "tests/fake_backend.h"

namespace logitd::rpc {

using ::logitd::testing::Becomes;

class ServedEngine : public ::testing::Test {
 protected:
  // One stream; slabs, messages and answers of up to `max_bytes`.
  ServedEngine(int64_t max_bytes, int64_t max_held_bytes)
      : max_bytes_(max_bytes),
        admission_({.max_request_bytes = max_bytes, .max_held_bytes = max_held_bytes}, &metrics_) {
    auto engine = engine::Engine::Create(&backend_,
                                         {.streams = 1,
                                          .slab_payload_bytes = max_bytes,
                                          .slab_answer_bytes = max_bytes,
                                          .max_batch_rows = 1024,
                                          .ops = ops::AllTraits()},
                                         &metrics_, [this](const absl::Status& cause) {
                                           absl::MutexLock lock(&mutex_);
                                           device_lost_ = cause;
                                         });
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  ~ServedEngine() override {
    backend_.Release();
    EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() == 0; }));
    server_.reset();
    engine_.reset();
    EXPECT_EQ(backend_.live_slabs(), 0);
  }

  // Returns a channel to the server, which replaces the one before.
  std::shared_ptr<grpc::Channel> Start(const std::string& head_root = "",
                                       const std::string& remote_listen = "") {
    server_.reset();
    auto server = RpcServer::Start({.listen = {"127.0.0.1:0"},
                                    .max_request_bytes = max_bytes_,
                                    .head_root = head_root,
                                    .remote_listen = remote_listen,
                                    .http2 = http2_,
                                    .leases = leases_},
                                   &admission_, engine_.get(), &heads_, &metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    return grpc::CreateChannel(server_->listening()[0], grpc::InsecureChannelCredentials());
  }

  // What the engine told its owner; OK while the device is not lost.
  absl::Status device_lost() {
    absl::MutexLock lock(&mutex_);
    return device_lost_;
  }

  const int64_t max_bytes_;
  const arena::Leases* leases_ = nullptr;  // of servers that start later
  http2::ServerOptions http2_;             // likewise
  absl::Mutex mutex_;
  absl::Status device_lost_ ABSL_GUARDED_BY(mutex_);
  FakeBackend backend_;
  engine::Metrics metrics_{{}};
  engine::Heads heads_{&backend_, &metrics_};
  engine::Admission admission_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<RpcServer> server_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_TESTS_RPC_SERVED_ENGINE_H_
