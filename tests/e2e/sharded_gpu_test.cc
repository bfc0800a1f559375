// Heads that are cut over the GPUs of one server, over gRPC. Skipped on a machine with fewer than
// two, except what one GPU is asked; that is skipped without any.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/e2e/sharded_cases.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

// How many GPUs a server finds: it refuses the last number that the flag takes, and says which it
// allows. -1, and a failure: it says something else.
int CountGpus() {
  const Ended ended = RunToEnd({"--backend=cuda", "--device=255"});
  if (ended.text.find("no CUDA device answers") != std::string::npos ||
      ended.text.find("this build has only the CPU backend") != std::string::npos) {
    return 0;
  }
  constexpr std::string_view kAllowed = "device: got 255, allowed 0..";
  const size_t at = ended.text.find(kAllowed);
  if (at != std::string::npos) return std::atoi(ended.text.c_str() + at + kAllowed.size()) + 1;
  ADD_FAILURE() << "exit code " << ended.exit_code << ": " << ended.text;
  return -1;
}

template <int kGpus>
class GpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const int gpus = CountGpus();
    ASSERT_GE(gpus, 0);
    if (gpus == 0) std::printf("no CUDA device: every test skipped\n");  // for ctest
    if (gpus < kGpus) GTEST_SKIP() << gpus << " GPUs, " << kGpus << " wanted";
  }
};
using ShardedGpuTest = GpusTest<2>;
using ShardOnOneGpuTest = GpusTest<1>;

TEST_F(ShardedGpuTest, TheBitsAreThoseOfAWholeHead) {
  const HeadFolder folder;
  const std::string flag = absl::StrCat("--head=h=", folder.File());
  std::vector<std::vector<std::string>> whole;
  {
    const ServerProcess one({flag, "--backend=cuda", "--device=0"});
    whole = Answers(one);
  }
  std::vector<std::string> divergences;
  for (const char* devices : {"--device=0,1", "--device=1,0"}) {
    std::vector<std::string> flags = folder.Flags(",shard", ",shard");
    flags.insert(flags.end(), {"--backend=cuda", devices});
    ServerProcess sharded(flags);
    EXPECT_EQ(Answers(sharded), whole) << devices;
    v1::DivergenceResponse compared;
    const grpc::Status status = v1::Scorer::NewStub(Connect(sharded.tcp()))
                                    ->Divergence(Context().get(), Compared(90, 3), &compared);
    EXPECT_TRUE(status.ok()) << status.error_message();
    divergences.push_back(Bits(compared));
    sharded.Signal(SIGTERM);
    EXPECT_EQ(sharded.Wait(absl::Seconds(20)), 0) << sharded.Log();
  }
  EXPECT_EQ(divergences[0], divergences[1]);
}

// The answers of a server that starts with `flags`. nullopt: it does not, because the machine has
// no NCCL.
std::optional<std::vector<std::vector<std::string>>> AnswersByNccl(
    const std::vector<std::string>& flags) {
  try {
    ServerProcess server(flags);
    std::vector<std::vector<std::string>> answers = Answers(server);
    server.Signal(SIGTERM);
    EXPECT_EQ(server.Wait(absl::Seconds(20)), 0) << server.Log();
    return answers;
  } catch (const std::runtime_error& error) {
    if (std::string_view(error.what()).find("NCCL cannot be loaded") == std::string_view::npos) {
      throw;
    }
    return std::nullopt;
  }
}

TEST_F(ShardedGpuTest, TheBitsAreTheSameByNccl) {
  const HeadFolder folder;
  const std::string flag = absl::StrCat("--head=h=", folder.File());
  const auto by_nccl = AnswersByNccl(
      {absl::StrCat(flag, ",shard"), "--backend=cuda", "--device=0,1", "--shard-exchange=nccl"});
  if (!by_nccl.has_value()) GTEST_SKIP() << "no NCCL";
  const ServerProcess one({flag, "--backend=cuda", "--device=0"});
  EXPECT_EQ(*by_nccl, Answers(one));
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

TEST_F(ShardOnOneGpuTest, RefusesWithASentence) {
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
