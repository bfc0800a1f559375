// One server with several (simulated) devices.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"
#include "tests/tree.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = 144;  // of the demo's model
constexpr int64_t kVocab = 4096;

std::string HeadFlag() {
  const std::string model = ::logitd::testing::InTree("demo/model");
  return absl::StrCat("--head=demo=", model);
}

v1::ScoreRequest HiddenRequest(int64_t rows, uint32_t seed) {
  v1::ScoreRequest request;
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(rows);
  request.set_head("demo");
  request.set_hidden_size(kHidden);
  request.set_hidden(Encode(v1::DTYPE_BF16, Normal<double>(rows * kHidden, seed, 1)));
  for (int64_t row = 0; row < rows; ++row) {
    request.add_targets(static_cast<int32_t>(row * 977 % kVocab));
  }
  return request;
}

v1::DivergenceRequest PairRequest(int64_t rows, uint32_t seed) {
  const v1::ScoreRequest first = HiddenRequest(rows, seed), second = HiddenRequest(rows, seed + 1);
  v1::DivergenceRequest request;
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(rows);
  request.set_head("demo");
  request.set_hidden_size(kHidden);
  request.set_hidden(first.hidden());
  request.set_reference_head("demo");
  request.set_reference_hidden_size(kHidden);
  request.set_reference_hidden(second.hidden());
  return request;
}

v1::SampleRequest DrawRequest(uint32_t seed) {
  v1::SampleRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(4);
  request.set_vocab(3000);
  request.set_logits(Encode(v1::DTYPE_F32, Normal<double>(4 * 3000, seed, 3)));
  request.add_seed(seed);
  request.add_temperature(0.8f);
  request.add_top_p(0.9f);
  return request;
}

// What the calls of `threads` threads get, by thread and call.
std::vector<std::vector<std::string>> Answers(const ServerProcess& server, int threads) {
  constexpr int kCalls = 20;
  std::vector<std::vector<std::string>> answers(static_cast<size_t>(threads));
  std::vector<std::thread> callers;
  for (int t = 0; t < threads; ++t) {
    callers.emplace_back([&, t] {
      const auto channel = Connect(server.tcp());
      for (uint32_t i = 0; i < kCalls; ++i) {
        const uint32_t seed = static_cast<uint32_t>(t) * 100 + i;
        v1::ScoreResponse scored;
        v1::SampleResponse drawn;
        const auto scorer = v1::Scorer::NewStub(channel);
        const auto sampler = v1::Sampler::NewStub(channel);
        const grpc::Status score =
            scorer->Score(Context().get(), HiddenRequest(1 + i % 5, seed), &scored);
        const grpc::Status draw = sampler->Sample(Context().get(), DrawRequest(seed), &drawn);
        EXPECT_TRUE(score.ok()) << score.error_message();
        EXPECT_TRUE(draw.ok()) << draw.error_message();
        v1::DivergenceResponse compared;
        const grpc::Status pair =
            scorer->Divergence(Context().get(), PairRequest(1 + i % 5, seed), &compared);
        EXPECT_TRUE(pair.ok()) << pair.error_message();
        answers[static_cast<size_t>(t)].push_back(Bits(scored) + Bits(drawn) + Bits(compared));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return answers;
}

std::string OfDevice(const std::string& name, int number) {
  return absl::StrCat(name, "{device=\"", number, "\"}");
}

TEST(DevicesTest, TheBitsDoNotDependOnTheNumberOfDevices) {
  constexpr int kThreads = 8;
  std::vector<std::vector<std::string>> alone;
  {
    const ServerProcess one({HeadFlag(), "--cpu-threads=2"});
    alone = Answers(one, kThreads);
  }
  const ServerProcess three({HeadFlag(), "--device=0,1,5", "--cpu-threads=2"});
  EXPECT_EQ(Answers(three, kThreads), alone);
  const auto rows = [&] {
    double sum = 0;
    for (const int number : {0, 1, 5}) {
      sum += three.Metric(OfDevice("logitd_device_rows_total", number));
    }
    return sum;
  };
  // A slice is counted after its answers.
  constexpr int kRows = kThreads * (2 * 4 * (1 + 2 + 3 + 4 + 5) + 20 * 4);
  for (int i = 0; i < 1000 && rows() < kRows; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(rows(), kRows);
  for (const int number : {0, 1, 5}) {
    EXPECT_GT(three.Metric(OfDevice("logitd_device_rows_total", number)), 0) << number;
    EXPECT_GT(three.Metric(OfDevice("logitd_device_busy_seconds_total", number)), 0) << number;
  }
}

TEST(DevicesTest, EveryDeviceIsShown) {
  ServerProcess server({HeadFlag(), "--device=0,3", "--streams=3"});
  const auto channel = Connect(server.tcp());
  v1::GetInfoResponse info;
  ASSERT_TRUE(
      v1::Server::NewStub(channel)->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  ASSERT_EQ(info.devices_size(), 2);
  EXPECT_EQ(info.devices(0).number(), 0);
  EXPECT_EQ(info.devices(1).number(), 3);
  EXPECT_FALSE(info.devices(0).lost());
  EXPECT_FALSE(info.devices(1).lost());
  EXPECT_EQ(info.device().SerializeAsString(), info.devices(0).SerializeAsString());
  EXPECT_EQ(info.limits().streams(), 6);
  v1::GetLoadResponse load;
  ASSERT_TRUE(
      v1::Server::NewStub(channel)->GetLoad(Context().get(), v1::GetLoadRequest(), &load).ok());
  EXPECT_EQ(load.devices(), 2);

  v1::ListHeadsResponse heads;
  ASSERT_TRUE(
      v1::Heads::NewStub(channel)->List(Context().get(), v1::ListHeadsRequest(), &heads).ok());
  ASSERT_EQ(heads.heads_size(), 1);
  const auto bytes = static_cast<double>(heads.heads(0).device_bytes());
  EXPECT_EQ(server.Metric("logitd_head_bytes"), 2 * bytes);
  EXPECT_EQ(server.Metric("logitd_slabs"), 12);
  for (const int number : {0, 3}) {
    EXPECT_EQ(server.Metric(OfDevice("logitd_device_up", number)), 1);
    EXPECT_EQ(server.Metric(OfDevice("logitd_device_head_bytes", number)), bytes);
  }
  EXPECT_THAT(server.Log(), HasSubstr("device 3"));

  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(20)), 0) << server.Log();
}

}  // namespace
}  // namespace logitd::e2e
