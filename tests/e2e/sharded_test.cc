// Heads that are cut over the (simulated) devices of one server, over gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/e2e/sharded_cases.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

TEST(ShardedTest, TheBitsAreThoseOfAWholeHead) {
  const HeadFolder folder;
  const std::string flag = absl::StrCat("--head=h=", folder.File());
  std::vector<std::vector<std::string>> whole;
  {
    const ServerProcess one({flag, "--cpu-threads=2"});
    whole = Answers(one);
  }
  // Two devices, four, and more devices than cells.
  for (const char* devices : {"--device=0,1", "--device=0,1,2,3", "--device=0,1,2,3,4,5,6,7"}) {
    ServerProcess sharded({absl::StrCat(flag, ",shard"), devices, "--cpu-threads=2"});
    EXPECT_EQ(Answers(sharded), whole) << devices;
    sharded.Signal(SIGTERM);
    EXPECT_EQ(sharded.Wait(absl::Seconds(20)), 0) << sharded.Log();
  }
}

TEST(ShardedTest, AHeadThatDoesNotFitOneDeviceLoadsShardedAndServes) {
  const HeadFolder folder;
  // The head takes about 500 KB, its largest shard of three 40% of that.
  const ServerProcess server({"--device=0,4,2", "--cpu-threads=1", "--max-head-bytes=256KiB",
                              absl::StrCat("--head-root=", folder.path())});
  v1::Head head;
  const grpc::Status refused = Load(server, /*shard=*/false, &head);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(refused.error_message(), HasSubstr("(--max-head-bytes)"));
  const grpc::Status loaded = Load(server, /*shard=*/true, &head);
  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  EXPECT_EQ(head.vocab(), kVocab);
  EXPECT_EQ(head.hidden(), kHidden);
  EXPECT_TRUE(head.bias());
  ASSERT_EQ(head.shards_size(), 3);
  const int numbers[] = {0, 4, 2};
  const int64_t tokens[] = {2048, 2048, kVocab - 4096};
  v1::GetInfoResponse info;
  const auto channel = Connect(server.tcp());
  ASSERT_TRUE(
      v1::Server::NewStub(channel)->GetInfo(Context().get(), v1::GetInfoRequest(), &info).ok());
  for (int i = 0; i < 3; ++i) {
    const v1::HeadShard& shard = head.shards(i);
    EXPECT_EQ(shard.device(), numbers[i]);
    EXPECT_EQ(shard.first_token(), i * 2048);
    EXPECT_EQ(shard.tokens(), tokens[i]);
    EXPECT_GE(shard.device_bytes(), tokens[i] * (kHidden * 2 + 4));
    EXPECT_LE(shard.device_bytes(), head.device_bytes());
    EXPECT_EQ(info.devices(i).head_bytes(), shard.device_bytes());
    EXPECT_EQ(server.Metric(absl::StrCat("logitd_device_head_bytes{device=\"", numbers[i], "\"}")),
              static_cast<double>(shard.device_bytes()));
  }
  v1::ScoreRequest supported = Scored(1, 1);
  supported.add_support_ids(supported.targets(0));
  v1::ScoreResponse scored;
  const grpc::Status no = v1::Scorer::NewStub(channel)->Score(Context().get(), supported, &scored);
  EXPECT_EQ(no.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(no.error_message(), HasSubstr("support_ids: got some, allowed none with head h"));
  const grpc::Status score =
      v1::Scorer::NewStub(channel)->Score(Context().get(), Scored(3, 1), &scored);
  EXPECT_TRUE(score.ok()) << score.error_message();
  EXPECT_EQ(scored.losses_size(), 3);
  for (const int number : numbers) {
    EXPECT_TRUE(server.WaitForMetric(
        absl::StrCat("logitd_device_rows_total{device=\"", number, "\"}"), '=', 3))
        << number;
  }
}

}  // namespace
}  // namespace logitd::e2e
