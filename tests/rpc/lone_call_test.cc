// Calls of a ring that run on its thread, beside others. The device is a fake one, which says on
// which thread it ran.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/ring.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "server/arena/arena_server.h"
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
namespace {

using ::logitd::testing::Becomes;

constexpr int64_t kMaxBytes = int64_t{64} << 10;
constexpr int kMessages = 3;  // that the admission has room for
constexpr int64_t kLeaseBytes = int64_t{64} << 10;
constexpr int64_t kRingAt = int64_t{32} << 10;
constexpr absl::Duration kSoon = absl::Seconds(20);

class LoneCallTest : public ::testing::Test {
 protected:
  LoneCallTest() {
    backend_.SetFaults([this](FaultPoint point) {
      if (point == FaultPoint::kOp) {
        absl::MutexLock lock(&mutex_);
        ran_on_.push_back(gettid());
      }
      return absl::OkStatus();
    });
    auto engine = engine::Engine::Create(&backend_,
                                         {.streams = 1,
                                          .slab_payload_bytes = kMaxBytes,
                                          .slab_answer_bytes = kMaxBytes,
                                          .max_batch_rows = 64,
                                          .ops = ops::AllTraits()},
                                         &metrics_, [this](const absl::Status&) { lost_ = true; });
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    const std::string path = absl::StrCat(::testing::TempDir(), "/logitd_lone_", getpid());
    auto arenas =
        arena::ArenaServer::Start({.address = {.path = path}}, &leases_, metrics_.registry());
    EXPECT_TRUE(arenas.ok()) << arenas.status();
    arenas_ = *std::move(arenas);
    auto server = RpcServer::Start(
        {.listen = {"127.0.0.1:0"}, .max_request_bytes = kMaxBytes, .leases = &leases_},
        &admission_, engine_.get(), &heads_, &metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    arenas_->ServeRings(server_->ring_service(), /*cores=*/2);
    stub_ = v1::Sampler::NewStub(
        grpc::CreateChannel(server_->listening()[0], grpc::InsecureChannelCredentials()));

    lease_ = *client::Arena::Lease("unix:" + path, kLeaseBytes);
    ring_ = *client::Ring::Open(lease_.get(), kRingAt,
                                {.slots = 4, .entry_bytes = 1024, .answer_bytes = 1024});
  }
  ~LoneCallTest() override {
    backend_.Release();
    ring_.reset();
    lease_.reset();
    EXPECT_TRUE(arenas_->EndRings(kSoon));
    EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() == 0; }));
    server_.reset();
    arenas_.reset();
    engine_.reset();
  }

  client::TopKRequest RingRequest() const {
    client::TopKRequest request = {
        .rows = 1, .vocab = 3, .logits = {{lease_->data(), 3 * sizeof(float)}}};
    request.arena = lease_.get();
    request.params.add_k(1);
    return request;
  }
  absl::Status CallRing() { return ring_->TopK(RingRequest(), kSoon).status(); }

  grpc::Status CallUnary() {
    v1::TopKRequest request;
    request.set_dtype(v1::DTYPE_F32);
    request.set_rows(1);
    request.set_vocab(3);
    request.add_k(1);
    request.set_logits(std::string(3 * sizeof(float), '\0'));
    grpc::ClientContext context;
    v1::TopKResponse response;
    return stub_->TopK(&context, request, &response);
  }

  // An answer comes a little before its stream is free again.
  void AwaitIdle() { ASSERT_TRUE(engine_->WaitIdle(SteadyNow() + kSoon)); }

  // The engine then knows the kind, and its thread is known: it runs a kind's first job.
  void Warm() {
    ASSERT_TRUE(CallRing().ok());
    AwaitIdle();
    engine_thread_ = LastThread();
  }
  // Calls the ring until it has one call at a time, so that the next one runs on its thread too. On
  // a busy machine the ring may take a call for one that waited.
  void WarmRing() {
    Warm();
    ASSERT_TRUE(Becomes([&] {
      EXPECT_TRUE(CallRing().ok());
      ring_thread_ = LastThread();
      return ring_thread_ != engine_thread_;
    })) << "no call ran alone";
    // The ring's thread posts the answer of a call that it ran, looks for the next call, and then
    // counts.
    ASSERT_TRUE(Becomes([&] { return CountedRows() == static_cast<int64_t>(ran_on().size()); }));
  }
  int64_t CountedRows() {
    constexpr std::string_view kName = "logitd_device_rows_total{device=\"0\"} ";
    const std::string page = prometheus::TextSerializer().Serialize(metrics_.page()->Collect());
    const size_t at = page.find(kName);
    return at == std::string::npos ? 0 : std::atoll(page.c_str() + at + kName.size());
  }

  std::vector<engine::Admission::Ticket> TakeAllRoom() {
    // A call of the ring holds its room a little longer than the client waits for the answer.
    EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() == 0; }));
    std::vector<engine::Admission::Ticket> all;
    for (int i = 0; i < kMessages; ++i) {
      auto entry = admission_.Enter({.bytes = kMaxBytes}, nullptr);
      all.push_back(**std::move(entry.answer));
    }
    EXPECT_EQ(admission_.held_bytes(), kMessages * kMaxBytes);
    return all;
  }

  std::vector<pid_t> ran_on() {
    absl::MutexLock lock(&mutex_);
    return ran_on_;
  }
  pid_t LastThread() { return ran_on().back(); }

  FakeBackend backend_;
  engine::Metrics metrics_{ops::AllNames()};
  engine::Heads heads_{&backend_, &metrics_};
  engine::Admission admission_{
      {.max_request_bytes = kMaxBytes, .max_held_bytes = kMessages * kMaxBytes}, &metrics_};
  arena::Leases leases_{{.max_bytes = kLeaseBytes, .max_leases = 1}};
  std::atomic<bool> lost_ = false;
  absl::Mutex mutex_;
  std::vector<pid_t> ran_on_ ABSL_GUARDED_BY(mutex_);  // the thread of each op
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<arena::ArenaServer> arenas_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::Sampler::Stub> stub_;
  std::unique_ptr<client::Arena> lease_;
  std::unique_ptr<client::Ring> ring_;
  pid_t engine_thread_ = 0;
  pid_t ring_thread_ = 0;
};

TEST_F(LoneCallTest, CallsOfARingRunOnItsThread) { WarmRing(); }

// Whoever gives the room back must not run the call, which may take long.
TEST_F(LoneCallTest, ACallOfARingThatWaitedForRoomRunsOnAnEngineThread) {
  WarmRing();
  std::vector<engine::Admission::Ticket> all = TakeAllRoom();
  ASSERT_TRUE(ring_->Submit(RingRequest(), /*tag=*/7).ok());
  ASSERT_TRUE(Becomes([&] { return metrics_.Get(engine::Gauge::kWaitingCalls) == 1; }));
  backend_.Hold();
  auto given_back = std::async(std::launch::async, [&] { all.clear(); });
  EXPECT_EQ(given_back.wait_for(std::chrono::seconds(20)), std::future_status::ready)
      << "it runs the call";
  backend_.Release();
  uint64_t tag = 0;
  EXPECT_TRUE(ring_->Wait(&tag, kSoon).ok());
  EXPECT_EQ(tag, 7u);
  EXPECT_EQ(LastThread(), engine_thread_);
}

TEST_F(LoneCallTest, WhileACallOfARingRunsAloneOthersFormABatch) {
  WarmRing();
  backend_.Hold();
  const size_t before = backend_.log().size();
  ASSERT_TRUE(ring_->Submit(RingRequest(), /*tag=*/7).ok());
  backend_.WaitForOps(before + 1);
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      const grpc::Status status = CallUnary();
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  }
  EXPECT_TRUE(Becomes([&] { return metrics_.Get(engine::Gauge::kQueuedJobs) == 3; }));
  backend_.Release();
  for (std::thread& other : others) other.join();
  uint64_t tag = 0;
  EXPECT_TRUE(ring_->Wait(&tag, kSoon).ok());
  EXPECT_EQ(backend_.log().size(), before + 2) << "one for the ring's call, one for the others";
  const std::vector<pid_t> threads = ran_on();
  EXPECT_EQ(threads[threads.size() - 2], ring_thread_) << "the ring's call did not run alone";
  EXPECT_EQ(threads.back(), engine_thread_);
}

TEST_F(LoneCallTest, ADeviceThatIsLostInACallOfARingEndsItAndIsTold) {
  WarmRing();
  backend_.FailNext(FaultPoint::kWait, absl::InternalError("sticky"));
  EXPECT_TRUE(absl::IsUnavailable(CallRing()));
  EXPECT_EQ(LastThread(), ring_thread_);
  EXPECT_TRUE(Becomes([&] { return lost_.load(); }));
  EXPECT_TRUE(absl::IsUnavailable(CallRing()));
  EXPECT_EQ(CallUnary().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(LoneCallTest, RingsEndInTimeOrSayThatACallStillRuns) {
  WarmRing();
  backend_.Hold();
  const size_t before = backend_.log().size();
  ASSERT_TRUE(ring_->Submit(RingRequest(), /*tag=*/7).ok());
  backend_.WaitForOps(before + 1);
  EXPECT_FALSE(arenas_->EndRings(absl::ZeroDuration()));
  const auto running = engine_->OldestRunning();
  EXPECT_TRUE(running.has_value());
  backend_.Release();
  EXPECT_TRUE(arenas_->EndRings(kSoon));
}

}  // namespace
}  // namespace logitd::rpc
