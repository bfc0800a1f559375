// Heads that are cut over the GPUs of one server, over gRPC. Skipped on a machine with fewer than two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/e2e/sharded_cases.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

// Whether a server starts on the second GPU.
bool HasTwoGpus() {
  try {
    const ServerProcess second({"--backend=cuda", "--device=1"});
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

class ShardedGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasTwoGpus()) GTEST_SKIP() << "fewer than two GPUs";
  }
};

TEST_F(ShardedGpuTest, TheBitsAreThoseOfAWholeHead) {
  const HeadFolder folder;
  const std::string flag = absl::StrCat("--head=h=", folder.File());
  std::vector<std::vector<std::string>> whole;
  {
    const ServerProcess one({flag, "--backend=cuda", "--device=0"});
    whole = Answers(one);
  }
  for (const char* devices : {"--device=0,1", "--device=1,0"}) {
    ServerProcess sharded({absl::StrCat(flag, ",shard"), "--backend=cuda", devices});
    EXPECT_EQ(Answers(sharded), whole) << devices;
    sharded.Signal(SIGTERM);
    EXPECT_EQ(sharded.Wait(absl::Seconds(20)), 0) << sharded.Log();
  }
}

TEST_F(ShardedGpuTest, AHeadThatDoesNotFitOneGpuLoadsShardedAndServes) {
  const HeadFolder folder;
  // The head takes about 500 KB, its larger shard 60% of that.
  const ServerProcess server({"--backend=cuda", "--device=0,1", "--max-head-bytes=384KiB",
                              absl::StrCat("--head-root=", folder.path())});
  v1::Head head;
  const grpc::Status refused = Load(server, /*shard=*/false, &head);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
  const grpc::Status loaded = Load(server, /*shard=*/true, &head);
  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  ASSERT_EQ(head.shards_size(), 2);
  EXPECT_EQ(head.shards(0).tokens(), 3072);
  EXPECT_EQ(head.shards(1).tokens(), kVocab - 3072);
  v1::ScoreResponse scored;
  const grpc::Status score =
      v1::Scorer::NewStub(Connect(server.tcp()))->Score(Context().get(), Scored(3, 1), &scored);
  EXPECT_TRUE(score.ok()) << score.error_message();
  EXPECT_EQ(scored.losses_size(), 3);
}

TEST_F(ShardedGpuTest, OneGpuRefusesToShardWithASentence) {
  const HeadFolder folder;
  const ServerProcess server(
      {"--backend=cuda", "--device=0", absl::StrCat("--head-root=", folder.path())});
  v1::Head head;
  const grpc::Status refused = Load(server, /*shard=*/true, &head);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("shard: got 1 device, allowed 2 or more"));
}

}  // namespace
}  // namespace logitd::e2e
