// A stream of chunks over a device that is slow, or fails, seen from both of its ends.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/backend.h"
#include "logitd/v1/attention.grpc.pb.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/metrics.h"
#include "server/ops/ops.h"
#include "server/rpc/rpc_server.h"

namespace logitd::rpc {
namespace {

using ::testing::HasSubstr;

// Counts its ops, holds them back, and lets one fail.
class HeldBackend final : public Backend {
 public:
  const DeviceInfo& device() const override { return info_; }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override {
    auto* memory = new std::byte[bytes]();
    ++slabs_;
    return Slab{.host = memory, .device = memory, .bytes = bytes};
  }
  void FreeSlab(const Slab& slab) override {
    delete[] slab.host;
    --slabs_;
  }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t) override {
    return absl::ResourceExhaustedError("it has slabs alone");
  }
  void FreeDevice(const DeviceMemory&) override {}
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse) override {
    return std::make_unique<HeldStream>(this);
  }

  void Hold() {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = true;
  }
  void Release() {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  void FailOp(int op) { failing_ = op; }  // counted from 1
  int ops() const { return ops_; }
  int slabs() const { return slabs_; }

 private:
  class HeldStream final : public Stream {
   public:
    explicit HeldStream(HeldBackend* backend) : backend_(backend) {}
    absl::Status Upload(const Slab&, size_t, size_t) override { return absl::OkStatus(); }
    absl::Status Download(const Slab&, size_t, size_t) override { return absl::OkStatus(); }
    absl::Status Fill(const Slab&, size_t, size_t, std::byte*) override { return absl::OkStatus(); }
    absl::Status AttentionSoftmax(const AttentionSoftmaxArgs& args) override {
      // In place: the answer is the scores.
      for (int64_t row = 0; row < args.shape.rows; ++row) args.status[row] = RowStatus();
      return backend_->Op();
    }
    absl::StatusOr<StreamTimes> Wait() override { return StreamTimes(); }

   private:
    HeldBackend* const backend_;
  };

  absl::Status Op() {
    const int op = ++ops_;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !held_; });
    return op == failing_ ? absl::UnavailableError("hiccup") : absl::OkStatus();
  }

  const DeviceInfo info_{.backend = "held", .name = "held"};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::atomic<int> ops_ = 0;
  std::atomic<int> slabs_ = 0;
  std::atomic<int> failing_ = 0;
};

constexpr int64_t kKeys = 1024;
constexpr int64_t kChunkRows = 256;
constexpr int64_t kChunkBytes = kChunkRows * kKeys * 4;  // large enough to be kept
constexpr int64_t kMaxMessage = int64_t{2} << 20;

class AttentionStreamTest : public ::testing::Test {
 protected:
  using ClientStream =
      grpc::ClientReaderWriter<v1::AttentionSoftmaxRequest, v1::AttentionSoftmaxResponse>;

  AttentionStreamTest() {
    auto engine = engine::Engine::Create(&backend_,
                                         {.streams = 1,
                                          .slab_payload_bytes = kMaxMessage,
                                          .slab_answer_bytes = kMaxMessage,
                                          .max_batch_rows = 1024,
                                          .ops = ops::AllTraits()},
                                         &metrics_, [](const absl::Status&) { FAIL(); });
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    auto server =
        RpcServer::Start({.listen = {"127.0.0.1:0"}, .max_request_bytes = kMaxMessage},
                         backend_.device(), &admission_, engine_.get(), &heads_, &metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Attention::NewStub(
        grpc::CreateChannel(server_->listening()[0], grpc::InsecureChannelCredentials()));
    context_.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    first_.set_dtype(v1::DTYPE_F32);
    first_.set_batch(1);
    first_.set_heads(1);
    first_.set_queries(100 * kChunkRows);
    first_.set_keys(kKeys);
    next_.set_scores(std::string(static_cast<size_t>(kChunkBytes), '\1'));
    first_.set_scores(next_.scores());
  }

  ~AttentionStreamTest() override {
    backend_.Release();
    EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() == 0; }));
    server_->Shutdown();
    engine_.reset();
    EXPECT_EQ(backend_.slabs(), 0);
  }

  static bool Becomes(const std::function<bool()>& condition) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!condition()) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  HeldBackend backend_;
  engine::Metrics metrics_{{}};
  engine::Heads heads_{&backend_, &metrics_};
  engine::Admission admission_{{.max_request_bytes = kMaxMessage, .max_held_bytes = 64 << 20},
                               &metrics_};
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  grpc::ClientContext context_;
  v1::AttentionSoftmaxRequest first_;
  v1::AttentionSoftmaxRequest next_;
};

TEST_F(AttentionStreamTest, ADeviceErrorEndsItAfterTheAnswersBeforeIt) {
  backend_.FailOp(3);
  const std::unique_ptr<ClientStream> stream = stub_->SoftmaxStream(&context_);
  v1::AttentionSoftmaxResponse answer;
  for (int chunk = 0; chunk < 3; ++chunk) {
    ASSERT_TRUE(stream->Write(chunk == 0 ? first_ : next_));
    ASSERT_EQ(stream->Read(&answer), chunk < 2);
    if (chunk < 2) {
      EXPECT_EQ(answer.first_row(), chunk * kChunkRows);
      EXPECT_EQ(answer.probs(), next_.scores());
    }
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("hiccup"));
}

TEST_F(AttentionStreamTest, ASlowDeviceHoldsFourChunksAndCancellingGivesThemBack) {
  backend_.Hold();
  const std::unique_ptr<ClientStream> stream = stub_->SoftmaxStream(&context_);
  // More than four could only be written if they were read.
  std::atomic<int> written = 0;
  std::thread writer([&] {
    while (written < 50 && stream->Write(written == 0 ? first_ : next_)) ++written;
  });
  EXPECT_TRUE(Becomes([&] { return backend_.ops() == 1; }));
  EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() >= 4 * kChunkBytes; }));
  absl::SleepFor(absl::Milliseconds(200));  // for a fifth to come, were it read
  EXPECT_LT(admission_.held_bytes(), 5 * kChunkBytes);
  EXPECT_LT(written, 10);  // the transport takes some unread
  EXPECT_EQ(backend_.ops(), 1);
  context_.TryCancel();
  writer.join();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  // The client knows at once, the server soon: all but the chunk that runs.
  EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() < 2 * kChunkBytes; }));
  backend_.Release();
  EXPECT_TRUE(engine_->WaitIdle(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(backend_.ops(), 1) << "what was dropped ran";
}

TEST_F(AttentionStreamTest, SlabsComeBackWhileAStreamRunsLongerThanTheyReach) {
  const std::unique_ptr<ClientStream> stream = stub_->SoftmaxStream(&context_);
  std::thread writer([&] {
    for (int chunk = 0; chunk < 100; ++chunk) stream->Write(chunk == 0 ? first_ : next_);
    stream->WritesDone();
  });
  v1::AttentionSoftmaxResponse answer;
  int answers = 0;
  for (; stream->Read(&answer); ++answers) {
    EXPECT_EQ(answer.first_row(), answers * kChunkRows);
    EXPECT_EQ(answer.probs(), next_.scores());
  }
  writer.join();
  EXPECT_EQ(answers, 100);
  EXPECT_TRUE(stream->Finish().ok());
}

}  // namespace
}  // namespace logitd::rpc
