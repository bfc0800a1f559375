// Rows that streams copy from where they lie: calls over gRPC to an engine with two fake devices,
// whose memory a client leases.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "logitd/v1/attention.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "server/engine/admission.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/ops/ops.h"
#include "server/rpc/rpc_server.h"
#include "tests/arena/fake_devices.h"
#include "tests/fake_backend.h"

namespace logitd::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMaxBytes = int64_t{1} << 20;
constexpr int64_t kUnit = int64_t{2} << 20;

std::string Random(size_t floats, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> values(floats);
  for (float& value : values) value = normal(random);
  return {reinterpret_cast<const char*>(values.data()), floats * sizeof(float)};
}

class PlacedRowsTest : public ::testing::Test {
 protected:
  PlacedRowsTest() {
    engine_ = *engine::Engine::Create(backend_devices_,
                                      {.streams = 1,
                                       .slab_payload_bytes = kMaxBytes,
                                       .slab_answer_bytes = kMaxBytes,
                                       .max_batch_rows = 1024,
                                       .ops = ops::AllTraits()},
                                      &metrics_, [](const absl::Status&) { FAIL(); });
    server_ = *RpcServer::Start(
        {.listen = {"127.0.0.1:0"}, .max_request_bytes = kMaxBytes, .leases = &leases_},
        &admission_, engine_.get(), &heads_, &metrics_);
    channel_ = grpc::CreateChannel(server_->listening()[0], grpc::InsecureChannelCredentials());
  }

  // A lease, and its memory as its client sees it.
  struct Leased {
    std::string id;
    char* data = nullptr;
  };
  Leased Lease(int device) {  // -1: host
    const auto lease =
        device < 0 ? leases_.Open(kUnit) : leases_.OpenOnDevice(devices_.number(device) + 1, kUnit);
    EXPECT_TRUE(lease.ok()) << lease.status();
    Leased leased = {.id = std::string(lease->id.begin(), lease->id.end())};
    if (device < 0) {
      leased.data = static_cast<char*>(
          mmap(nullptr, kUnit, PROT_READ | PROT_WRITE, MAP_SHARED, lease->fd, 0));
    } else {
      const auto arena = leases_.Find(leased.id);
      leased.data = reinterpret_cast<char*>(const_cast<std::byte*>((*arena)->address()));
    }
    close(lease->fd);
    return leased;
  }

  static v1::SharedRows At(const Leased& leased, int64_t offset, int64_t row_stride = 0) {
    v1::SharedRows rows;
    rows.set_lease(leased.id);
    rows.set_offset(offset);
    rows.set_row_stride(row_stride);
    return rows;
  }

  // The answer without its timings, or the error.
  template <typename Response, typename Method, typename Request>
  std::string Call(Method method, const Request& request) {
    grpc::ClientContext context;
    Response response;
    const grpc::Status status = method(&context, request, &response);
    if (!status.ok()) return status.error_message();
    response.clear_timings();
    return response.SerializeAsString();
  }
  std::string TopK(const v1::TopKRequest& request) {
    const auto stub = v1::Sampler::NewStub(channel_);
    return Call<v1::TopKResponse>(
        [&](auto* context, const auto& in, auto* out) { return stub->TopK(context, in, out); },
        request);
  }
  std::string Backward(const v1::AttentionSoftmaxBackwardRequest& request) {
    const auto stub = v1::Attention::NewStub(channel_);
    return Call<v1::AttentionSoftmaxBackwardResponse>(
        [&](auto* context, const auto& in, auto* out) {
          return stub->SoftmaxBackward(context, in, out);
        },
        request);
  }

  size_t Gathered(int device) {
    size_t bytes = 0;
    for (const FakeBackend::Ran& ran : backends_[device].log()) bytes += ran.gathered_bytes;
    return bytes;
  }

  arena::FakeDevices devices_{2};
  arena::Leases leases_{{.max_bytes = 2 * kUnit, .max_leases = 4, .max_device_bytes = 2 * kUnit},
                        &devices_};
  FakeBackend backends_[2] = {FakeBackend({.backend = "fake", .number = 10, .name = "fake"}),
                              FakeBackend({.backend = "fake", .number = 11, .name = "fake"})};
  engine::Metrics metrics_{ops::AllNames(), {10, 11}};
  std::shared_ptr<engine::Devices> backend_devices_ =
      std::make_shared<engine::Devices>(std::vector<Backend*>{&backends_[0], &backends_[1]});
  engine::Heads heads_{backend_devices_, &metrics_, int64_t{1} << 20};
  engine::Admission admission_{{.max_request_bytes = kMaxBytes, .max_held_bytes = 16 * kMaxBytes},
                               &metrics_};
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

v1::TopKRequest TopKOf(int64_t rows, int64_t vocab) {
  v1::TopKRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(vocab);
  request.add_k(4);
  return request;
}

TEST_F(PlacedRowsTest, RowsOfADeviceRunThereAndAnswerAsSentOnes) {
  for (const int device : {1, 0, 1}) {
    const Leased leased = Lease(device);
    const std::string logits = Random(3 * 700, 1);
    v1::TopKRequest request = TopKOf(3, 700);
    request.set_logits(logits);
    const std::string sent = TopK(request);
    const size_t other = backends_[1 - device].log().size();
    for (const int64_t stride : {2800, 2804, 4000}) {
      for (int r = 0; r < 3; ++r)
        std::memcpy(leased.data + 52 + r * stride, &logits[r * 2800], 2800);
      *request.mutable_shared() = At(leased, 52, stride);
      const size_t before = Gathered(device);
      EXPECT_EQ(TopK(request), sent);
      EXPECT_EQ(Gathered(device), before + 3 * 2800);
    }
    EXPECT_EQ(backends_[1 - device].log().size(), other);
  }
}

TEST_F(PlacedRowsTest, RowsOfPinnedHostMemoryAreGatheredFrom4KiBOn) {
  const Leased leased = Lease(-1);
  const auto gathered = [&](int64_t rows, int64_t vocab, int64_t stride) {
    const std::string logits = Random(static_cast<size_t>(rows * vocab), 2);
    v1::TopKRequest request = TopKOf(rows, vocab);
    request.set_logits(logits);
    const std::string sent = TopK(request);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(leased.data + 4 + r * stride, &logits[static_cast<size_t>(r * vocab * 4)],
                  static_cast<size_t>(vocab * 4));
    }
    *request.mutable_shared() = At(leased, 4, stride);
    const size_t before = Gathered(0) + Gathered(1);
    EXPECT_EQ(TopK(request), sent);
    return Gathered(0) + Gathered(1) - before;
  };
  EXPECT_EQ(gathered(1, 1024, 4096), 4096);
  EXPECT_EQ(gathered(1, 1023, 4092), 0)
      << "few bytes are copied to the slab by the stream's thread";
  EXPECT_EQ(gathered(32, 1024, 4096), 131072);
  EXPECT_EQ(gathered(32, 1024, 4100), 131072);
  EXPECT_EQ(gathered(128, 1020, 4084), 0) << "short rows with space between";
  EXPECT_EQ(gathered(128, 1020, 4080), 128 * 4080) << "short rows that touch";
}

v1::AttentionSoftmaxBackwardRequest BackwardOf(int64_t queries, int64_t keys) {
  v1::AttentionSoftmaxBackwardRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_batch(1);
  request.set_heads(1);
  request.set_queries(queries);
  request.set_keys(keys);
  request.set_probs(Random(static_cast<size_t>(queries * keys), 3));
  request.set_d_probs(Random(static_cast<size_t>(queries * keys), 4));
  return request;
}

TEST_F(PlacedRowsTest, BothInputsOfAGradientMayLieOnADevice) {
  const Leased leased = Lease(1);
  v1::AttentionSoftmaxBackwardRequest request = BackwardOf(17, 33);
  const std::string probs = request.probs();
  const std::string d_probs = request.d_probs();
  const std::string sent = Backward(request);
  std::memcpy(leased.data, probs.data(), probs.size());
  std::memcpy(leased.data + 8192, d_probs.data(), d_probs.size());
  *request.mutable_shared() = At(leased, 0);
  EXPECT_EQ(Backward(request), sent) << "one is sent";
  *request.mutable_shared_d_probs() = At(leased, 8192);
  EXPECT_EQ(Backward(request), sent);
  request.set_probs(probs);
  EXPECT_EQ(Backward(request), sent) << "the other one is sent";
  EXPECT_EQ(Gathered(1), 4 * probs.size());
  EXPECT_EQ(Gathered(0), 0);
}

TEST_F(PlacedRowsTest, InputsOnTwoDevicesAreRefusedBeforeAnythingRuns) {
  const Leased first = Lease(0);
  const Leased second = Lease(1);
  v1::AttentionSoftmaxBackwardRequest request = BackwardOf(4, 4);
  *request.mutable_shared() = At(first, 0);
  *request.mutable_shared_d_probs() = At(second, 0);
  EXPECT_THAT(Backward(request), HasSubstr("shared_d_probs: got rows on device 11, allowed on "
                                           "device 10, where the rows of shared lie"));
  EXPECT_EQ(backends_[0].log().size() + backends_[1].log().size(), 0);
}

TEST_F(PlacedRowsTest, AnAnswerGoesToItsLease) {
  const auto stub = v1::Attention::NewStub(channel_);
  const Leased host = Lease(-1);
  const Leased first = Lease(0);
  const Leased second = Lease(1);
  // Small and large; to the host, to the device of the rows, and to another one.
  for (const int64_t queries : {5, 2000}) {
    v1::AttentionSoftmaxRequest request;
    request.set_dtype(v1::DTYPE_F32);
    request.set_batch(1);
    request.set_heads(1);
    request.set_queries(queries);
    request.set_keys(9);
    request.set_want_logsumexp(true);
    const std::string scores = Random(static_cast<size_t>(queries * 9), 6);
    request.set_scores(scores);
    v1::AttentionSoftmaxResponse sent;
    grpc::ClientContext alone;
    ASSERT_TRUE(stub->Softmax(&alone, request, &sent).ok());
    for (const v1::DType out : {v1::DTYPE_F32, v1::DTYPE_UNSPECIFIED}) {
      request.set_out_dtype(out);
      for (const Leased& to : {host, first, second}) {
        for (const Leased* from : {&host, &first, static_cast<const Leased*>(nullptr)}) {
          request.set_scores(scores);
          if (from != nullptr) {
            std::memcpy(from->data, scores.data(), scores.size());
            *request.mutable_shared() = At(*from, 0);
          }
          *request.mutable_shared_output() = At(to, 1 << 20);
          std::memset(to.data + (1 << 20), 'x', scores.size() + 1);
          v1::AttentionSoftmaxResponse shared;
          grpc::ClientContext context;
          const grpc::Status status = stub->Softmax(&context, request, &shared);
          ASSERT_TRUE(status.ok()) << status.error_message();
          EXPECT_EQ(shared.output_bytes(), scores.size());
          EXPECT_EQ(std::string(to.data + (1 << 20), scores.size()), sent.probs());
          EXPECT_EQ(to.data[(1 << 20) + scores.size()], 'x');
          EXPECT_EQ(shared.logsumexp(), sent.logsumexp());
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitd::rpc
