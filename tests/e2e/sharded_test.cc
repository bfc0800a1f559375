// Heads that are cut over the (simulated) devices of one server, over gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/e2e/sharded_cases.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

// The flags of a server with simulated devices.
std::vector<std::string> With(std::vector<std::string> heads, const char* devices) {
  heads.push_back(devices);
  heads.push_back("--cpu-threads=2");
  return heads;
}

TEST(ShardedTest, TheBitsAreThoseOfAWholeHead) {
  const HeadFolder folder;
  std::vector<std::vector<std::string>> whole;
  {
    const ServerProcess one(With(folder.Flags("", ""), "--device=0"));
    whole = Answers(one, /*divergence=*/true);
  }
  // Two devices, four, and more devices than cells.
  for (const char* devices : {"--device=0,1", "--device=0,1,2,3", "--device=0,1,2,3,4,5,6,7"}) {
    ServerProcess sharded(With(folder.Flags(",shard", ",shard"), devices));
    EXPECT_EQ(Answers(sharded, /*divergence=*/true), whole) << devices;
    sharded.Signal(SIGTERM);
    EXPECT_EQ(sharded.Wait(absl::Seconds(20)), 0) << sharded.Log();
  }
}

TEST(ShardedTest, DivergenceTakesOneHeadThatIsCutAndOneThatIsWhole) {
  const HeadFolder folder;
  const v1::DivergenceRequest request = Compared(90, 3);
  std::vector<std::string> answers;
  for (const auto& [first, reference] : {std::pair("", ""), {",shard", ""}, {"", ",shard"}}) {
    const ServerProcess server(With(folder.Flags(first, reference), "--device=0,1,2"));
    v1::DivergenceResponse compared;
    const grpc::Status status =
        v1::Scorer::NewStub(Connect(server.tcp()))->Divergence(Context().get(), request, &compared);
    ASSERT_TRUE(status.ok()) << status.error_message();
    answers.push_back(Bits(compared));
  }
  EXPECT_EQ(answers[1], answers[0]);
  EXPECT_EQ(answers[2], answers[0]);
}

// The first of two messages of a stream comes before an update of the reference, the second after.
TEST(ShardedTest, AStreamKeepsTheReferenceThatItBeganWith) {
  const HeadFolder folder;
  const ServerProcess server(
      {"--device=0,1,2", "--cpu-threads=1", absl::StrCat("--head-root=", folder.path())});
  v1::Head head;
  ASSERT_TRUE(Load(server, /*shard=*/true, &head).ok());
  ASSERT_TRUE(Load(server, /*shard=*/true, &head, "g", "reference.safetensors").ok());
  const auto channel = Connect(server.tcp());
  const auto scorer = v1::Scorer::NewStub(channel);
  const auto context = Context();
  const auto stream = scorer->DivergenceStream(context.get());
  v1::DivergenceResponse first, second, third;
  ASSERT_TRUE(stream->Write(Compared(5, 3)));
  ASSERT_TRUE(stream->Read(&first));
  v1::UpdateHeadRequest update;
  update.set_name("g");
  update.set_path("reference.safetensors");
  const auto heads = v1::Heads::NewStub(channel);
  const auto updating = Context();
  const auto call = heads->Update(updating.get());
  ASSERT_TRUE(call->Write(update));
  call->WritesDone();
  v1::UpdateHeadResponse progress;
  while (call->Read(&progress)) {
  }
  const grpc::Status updated = call->Finish();
  ASSERT_TRUE(updated.ok()) << updated.error_message();
  EXPECT_EQ(progress.head().shards_size(), 3);
  ASSERT_TRUE(stream->Write(Compared(5, 3)));
  ASSERT_TRUE(stream->Read(&second));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_TRUE(scorer->Divergence(Context().get(), Compared(5, 3), &third).ok());
  EXPECT_EQ(first.reference_head_version(), 1);
  EXPECT_EQ(second.reference_head_version(), 1);
  EXPECT_GT(third.reference_head_version(), 1);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(second.forward_kl(i), first.forward_kl(i));
    EXPECT_EQ(third.forward_kl(i), first.forward_kl(i));
  }
}

// A head that is not cut. 70 rows are more than the CPU multiplies at once.
TEST(ShardedTest, VerifyThroughAWholeHeadEmitsTheTokensOfSample) {
  constexpr int kRows = 70;
  const HeadFolder folder;
  const ServerProcess server({absl::StrCat("--head=h=", folder.File()), "--cpu-threads=2"});
  const auto stub = v1::Sampler::NewStub(Connect(server.tcp()));
  v1::SampleResponse drawn;
  const v1::SampleRequest sample = Drawn(kRows, 3);
  grpc::Status status = stub->Sample(Context().get(), sample, &drawn);
  ASSERT_TRUE(status.ok()) << status.error_message();

  v1::VerifyRequest verify = OfHead<v1::VerifyRequest>(kRows, 3);
  ASSERT_TRUE(verify.MergeFromString(sample.SerializeAsString()));  // the same fields
  verify.add_sequence_rows(kRows);
  for (int i = 0; i + 1 < kRows; ++i) verify.add_drafts(drawn.tokens(i));
  verify.set_drafts(67, (drawn.tokens(67) + 1) % kVocab);  // the target draws another token
  v1::VerifyResponse response;
  status = stub->Verify(Context().get(), verify, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.accepted(0), 67);
  EXPECT_EQ(response.head_version(), drawn.head_version());
  EXPECT_NE(response.head_version(), 0);
  for (int i = 0; i < kRows; ++i) {
    EXPECT_EQ(response.tokens(i), i <= 67 ? drawn.tokens(i) : -1) << i;
    EXPECT_EQ(response.status(i), i <= 67 ? v1::ROW_STATUS_OK : v1::ROW_STATUS_NOT_REACHED) << i;
    if (i <= 67) {
      EXPECT_EQ(response.logprobs(i), drawn.logprobs(i)) << i;
    }
  }
  EXPECT_TRUE(
      server.WaitForMetric("logitd_stream_busy_seconds_total{op=\"linear_verify\"}", '>', 0));
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
  v1::ScoreResponse scored;
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
