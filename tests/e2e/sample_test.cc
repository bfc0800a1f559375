// Sampler.Sample, Sampler.SampleStream and Sampler.Verify through generated stubs.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/shared_server.h"

namespace logitd::e2e {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

grpc::Status Sample(v1::Sampler::Stub& stub, const v1::SampleRequest& request,
                    v1::SampleResponse* response) {
  return stub.Sample(Context().get(), request, response);
}

class SampleTransportTest : public BothTransportsTest {
 protected:
  const std::unique_ptr<v1::Sampler::Stub> stub_ = v1::Sampler::NewStub(channel_);
};
INSTANTIATE_TEST_SUITE_P(All, SampleTransportTest, ::testing::Bool(), TransportName);

// The random bits of seed 0, as fractions: 0.8805 at position 0, 0.3621 at 1, 0.6937 at 4.
TEST_P(SampleTransportTest, TokensMatchTheSemanticsPage) {
  // Probabilities 0.5, 0.25, 0.25, in five rows.
  std::vector<float> logits;
  for (int row = 0; row < 5; ++row) {
    for (double p : {0.5, 0.25, 0.25}) logits.push_back(static_cast<float>(std::log(p)));
  }
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 5);
  request.add_seed(0);
  for (uint64_t position : {0, 1, 4, 0, 0}) request.add_position(position);
  for (float temperature : {1.0f, 1.0f, 1.0f, 0.0f, 1.0f}) request.add_temperature(temperature);
  for (int k : {0, 0, 0, 0, 2}) request.add_top_k(k);  // the last row keeps 2/3 and 1/3
  request.add_top_logprobs(1);
  request.add_extra_ids(2);
  for (bool want : {true, true, true, true, false}) request.add_want_rank(want);
  v1::SampleResponse response;
  const grpc::Status status = Sample(*stub_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.tokens(), ElementsAre(2, 0, 1, 0, 1));
  EXPECT_THAT(response.ranks(), ElementsAre(3, 1, 2, 1, 0));
  EXPECT_THAT(response.top_ids(), ElementsAre(0, 0, 0, 0, 0));
  for (int row = 0; row < 5; ++row) {
    EXPECT_NEAR(response.logprobs(row), std::log(response.tokens(row) == 0 ? 0.5 : 0.25), 1e-5);
    EXPECT_NEAR(response.top_logprobs(row), std::log(0.5), 1e-5);
    EXPECT_NEAR(response.extra_logprobs(row), std::log(0.25), 1e-5);
    EXPECT_NEAR(response.logsumexp(row), 0, 1e-5);
  }
  EXPECT_GT(response.timings().total_ns(), 0);
}

TEST_P(SampleTransportTest, SupportsAreWhatTheFiltersLeaveUpToTheirCaps) {
  const float ln2 = std::log(2.0f), ln3 = std::log(3.0f);
  std::vector<float> logits;  // 0.5, 0.25, 0.25, in four rows
  for (int row = 0; row < 4; ++row) logits.insert(logits.end(), {ln2, 0, 0});
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 4);
  request.add_seed(0);
  for (int k : {2, 0, 0, 0}) request.add_top_k(k);
  for (float temperature : {1.0f, 1.0f, 0.0f, 1.0f}) request.add_temperature(temperature);
  for (int cap : {3, 1, 2, 0}) request.add_want_support(cap);
  v1::SampleResponse response;
  const grpc::Status status = Sample(*stub_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.support_size(), ElementsAre(2, 3, 1, 0));
  EXPECT_THAT(response.support_count(), ElementsAre(2, 1, 1, 0));
  EXPECT_THAT(response.support_ids(), ElementsAre(0, 1, 0, 0));
  const std::vector<float> want = {ln2 - ln3, -ln3, -ln2, 0};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(response.support_logprobs(i), want[i], 1e-6) << i;
  request.clear_want_support();
  ASSERT_TRUE(Sample(*stub_, request, &response).ok());
  EXPECT_EQ(response.support_size_size() + response.support_count_size(), 0);
}

// The random bits of the draws of seed 0, as fractions: 0.8805, 0.9397, 0.7129, 0.0678 at position
// 0; 0.3621, 0.8507 at 1.
TEST_P(SampleTransportTest, ARowIsDrawnFromAsOftenAsItAsksFor) {
  const float ln2 = std::log(2.0f);
  const std::vector<float> logits = {ln2, 0, 0, ln2, 0, 0, ln2, 0, 0};  // 0.5, 0.25, 0.25
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 3);
  request.add_seed(0);
  for (uint64_t position : {0, 1, 0}) request.add_position(position);
  for (int n : {4, 0, 1}) request.add_draws(n);
  v1::SampleResponse response;
  const grpc::Status status = Sample(*stub_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.tokens(), ElementsAre(2, 0, 2));
  EXPECT_THAT(response.draw_count(), ElementsAre(4, 0, 1));
  EXPECT_THAT(response.draw_tokens(), ElementsAre(2, 2, 1, 0, 2));
  const std::vector<float> want = {-2 * ln2, -2 * ln2, -2 * ln2, -ln2, -2 * ln2};
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(response.draw_logprobs(i), want[i], 1e-6) << i;
  request.clear_draws();
  ASSERT_TRUE(Sample(*stub_, request, &response).ok());
  EXPECT_EQ(response.draw_count_size() + response.draw_tokens_size(), 0);
}

// By key 7 the scores of three tokens are 1.43, 0.93 and -0.26 without a history, 3.71, 2.47 and
// 0.57 after token 0, 0.38, 1.94 and -0.51 after 0 and 1.
TEST_P(SampleTransportTest, AWatermarkTakesTheTokenWithTheLargestScore) {
  const std::vector<float> logits(12, 0);
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 4);
  request.add_watermark_key(7);
  for (int width : {2, 1, 2, 3}) request.add_watermark_width(width);
  for (int count : {0, 3, 3, 2}) request.add_history_count(count);
  for (int id : {2, 1, 0, 2, 0, 1, 0, 1}) request.add_history(id);
  v1::SampleResponse response;
  const grpc::Status status = Sample(*stub_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.tokens(), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(response.logprobs(), Each(FloatNear(-std::log(3.0f), 1e-6f)));
  request.add_draws(2);
  EXPECT_THAT(Sample(*stub_, request, &response).error_message(),
              HasSubstr("draws: got 2 at row 0, allowed 0..1 with a watermark"));
}

TEST_P(SampleTransportTest, ListsOfEveryKindApplyToTheirRows) {
  const std::vector<float> row = {5, 4, 3, 2};
  std::vector<float> logits;
  for (int r = 0; r < 5; ++r) logits.insert(logits.end(), row.begin(), row.end());
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 5);
  request.add_temperature(0);
  for (int n : {0, 1, 0, 0, 0}) request.add_logit_bias_count(n);
  request.add_logit_bias_ids(3);
  request.add_logit_bias(10);
  for (int n : {0, 0, 3, 0, 0}) request.add_history_count(n);
  for (int id : {0, 0, 1}) request.add_history(id);
  request.add_frequency_penalty(1);   // 5 - 2, 4 - 1, 3: a tie
  request.add_presence_penalty(0.5);  // token 2 wins the tie
  for (int mask : {-1, -1, -1, 0, 1}) request.add_allowed_tokens_mask(mask);
  request.set_allowed_tokens(std::string("\x0a\0\0\0\x00\0\0\0", 8));
  v1::SampleResponse response;
  const grpc::Status status = Sample(*stub_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.tokens(), ElementsAre(0, 3, 2, 1, -1));
  EXPECT_EQ(response.status(4), v1::ROW_STATUS_EMPTY_SUPPORT);
}

TEST_P(SampleTransportTest, EntropiesAreSentWhereARowWantsThem) {
  const float ln2 = std::log(2.0f);
  const std::vector<float> logits = {2 * ln2, 0, 0, 2 * ln2, 0, 0};
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 2);
  request.add_seed(1);
  request.add_temperature(2);
  request.add_logprob_mode(v1::LOGPROB_MODE_TEMPERED);
  request.add_extra_ids(0);
  v1::SampleResponse response;
  ASSERT_TRUE(Sample(*stub_, request, &response).ok());
  EXPECT_THAT(response.entropies(), IsEmpty());
  EXPECT_THAT(response.raw_entropies(), IsEmpty());
  for (const bool want : {false, true}) request.add_want_entropy(want);
  ASSERT_TRUE(Sample(*stub_, request, &response).ok());
  EXPECT_THAT(response.extra_logprobs(), Each(FloatNear(-ln2, 1e-6f)));
  EXPECT_THAT(response.entropies(), ElementsAre(0, FloatNear(1.5f * ln2, 1e-6f)));
  EXPECT_THAT(response.raw_entropies(), ElementsAre(0, FloatNear(0.8675632f, 1e-6f)));
}

TEST_P(SampleTransportTest, PresenceAndFrequencyDoNotCountThePrompt) {
  std::vector<float> logits;
  for (int r = 0; r < 3; ++r) {
    for (const float x : {5.f, 4.f, 3.f}) logits.push_back(x);
  }
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 3);
  request.add_temperature(0);
  for (int id : {0, 0, 1}) request.add_history(id);
  request.add_presence_penalty(0.75);
  request.add_frequency_penalty(1);
  // 5 - 2.75, 4 - 1.75, 3; 5 - 1.75, 4 - 1.75, 3; 5, 4, 3
  for (int n : {0, 1, 3}) request.add_prompt_tokens(n);
  v1::SampleResponse response;
  const grpc::Status status = Sample(*stub_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.tokens(), ElementsAre(2, 0, 0));
  request.set_prompt_tokens(2, 4);
  EXPECT_THAT(Sample(*stub_, request, &response).error_message(),
              HasSubstr("prompt_tokens: got 4 at row 2, allowed 0..3"));
}

TEST_P(SampleTransportTest, ABadRowAffectsNoOtherRow) {
  std::vector<float> logits = Normal(300, 3);
  v1::SampleRequest request = Of<v1::SampleRequest>(logits, 3);
  request.add_seed(9);
  v1::SampleResponse good;
  ASSERT_TRUE(Sample(*stub_, request, &good).ok());
  logits[150] = std::numeric_limits<float>::quiet_NaN();
  v1::SampleRequest damaged = Of<v1::SampleRequest>(logits, 3);
  damaged.add_seed(9);
  v1::SampleResponse response;
  ASSERT_TRUE(Sample(*stub_, damaged, &response).ok());
  EXPECT_EQ(response.status(1), v1::ROW_STATUS_NAN_LOGIT);
  EXPECT_EQ(response.status_position(1), 50);
  EXPECT_EQ(response.tokens(1), -1);
  for (int row : {0, 2}) {
    EXPECT_EQ(response.tokens(row), good.tokens(row));
    EXPECT_EQ(response.logprobs(row), good.logprobs(row));
  }
}

TEST_P(SampleTransportTest, VerifyOfOneHotDraftsEmitsTheTokensOfSample) {
  constexpr int kVocab = 50, kDrafts = 5;
  const std::vector<float> logits = Normal((kDrafts + 1) * kVocab, 4);
  v1::SampleRequest sample = Of<v1::SampleRequest>(logits, kDrafts + 1);
  sample.add_seed(77);
  for (int i = 0; i <= kDrafts; ++i) sample.add_position(static_cast<uint64_t>(i));
  v1::SampleResponse drawn;
  ASSERT_TRUE(Sample(*stub_, sample, &drawn).ok());

  v1::VerifyRequest verify = Of<v1::VerifyRequest>(logits, kDrafts + 1);
  *verify.mutable_seed() = sample.seed();
  *verify.mutable_position() = sample.position();
  verify.add_sequence_rows(kDrafts + 1);
  for (int i = 0; i < kDrafts; ++i) verify.add_drafts(drawn.tokens(i));
  verify.set_drafts(3, (drawn.tokens(3) + 1) % kVocab);  // the target draws another token
  v1::VerifyResponse response;
  const grpc::Status status = stub_->Verify(Context().get(), verify, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.accepted(), ElementsAre(3));
  EXPECT_THAT(response.tokens(), ElementsAre(drawn.tokens(0), drawn.tokens(1), drawn.tokens(2),
                                             drawn.tokens(3), -1, -1));
  EXPECT_EQ(response.status(3), v1::ROW_STATUS_OK);
  EXPECT_EQ(response.status(4), v1::ROW_STATUS_NOT_REACHED);
}

// p is (1/3, 2/3) and q the other way round. The coins of seed 0 are 0.4268 at position 3, 0.9170
// at 4: token by token a draft of token 0 is accepted below 1/2; of two together, both below 1/4.
TEST_P(SampleTransportTest, BlockVerificationDecidesAboutDraftsTogether) {
  std::vector<float> logits;
  for (int row = 0; row < 3; ++row) {
    for (double p : {1.0 / 3, 2.0 / 3}) logits.push_back(static_cast<float>(std::log(p)));
  }
  v1::VerifyRequest request = Of<v1::VerifyRequest>(logits, 3);
  request.add_seed(0);
  for (uint64_t position : {3, 4, 5}) request.add_position(position);
  request.add_sequence_rows(3);
  for (int draft : {0, 0}) request.add_drafts(draft);
  request.add_draft_kind(v1::DRAFT_KIND_DENSE);
  const std::vector<float> q = {2.0f / 3, 1.0f / 3, 2.0f / 3, 1.0f / 3};
  request.set_draft_probs(std::string(reinterpret_cast<const char*>(q.data()), 16));
  v1::VerifyResponse response;
  grpc::Status status = stub_->Verify(Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.tokens(), ElementsAre(0, 1, -1));
  request.set_block_verification(true);
  status = stub_->Verify(Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.accepted(), ElementsAre(0));
  EXPECT_THAT(response.tokens(), ElementsAre(1, -1, -1));
}

// --- streams

TEST_P(SampleTransportTest, AStreamAnswersWithTheBitsOfUnaryCalls) {
  const auto context = Context();
  const auto stream = stub_->SampleStream(context.get());
  const std::vector<float> logits = Normal(500, 5);
  for (int position = 0; position < 20; ++position) {
    v1::SampleRequest request = Of<v1::SampleRequest>(logits, 1);
    request.add_seed(6);
    request.add_position(static_cast<uint64_t>(position));
    ASSERT_TRUE(stream->Write(request));
    v1::SampleResponse streamed;
    ASSERT_TRUE(stream->Read(&streamed));
    v1::SampleResponse unary;
    ASSERT_TRUE(Sample(*stub_, request, &unary).ok());
    EXPECT_EQ(Bits(streamed), Bits(unary));
  }
  stream->WritesDone();
  v1::SampleResponse none;
  EXPECT_FALSE(stream->Read(&none));
  EXPECT_TRUE(stream->Finish().ok());
}

// One open stream over a server of its own.
struct OpenStream {
  explicit OpenStream(const std::string& flag = "--log-level=info")
      : server({flag}),
        stub(v1::Sampler::NewStub(Connect(server.tcp()))),
        stream(stub->SampleStream(context.get())) {}

  ServerProcess server;
  std::unique_ptr<v1::Sampler::Stub> stub;
  std::unique_ptr<grpc::ClientContext> context = Context();
  std::unique_ptr<grpc::ClientReaderWriter<v1::SampleRequest, v1::SampleResponse>> stream;
};

v1::SampleRequest Greedy(size_t logits, int64_t rows = 1) {
  auto request = Of<v1::SampleRequest>(std::vector<float>(logits), rows);
  request.add_temperature(0);
  return request;
}

// Messages of 8 MiB, written without waiting for answers.
TEST(SampleStreamTest, AllLargeMessagesAreAnsweredAndTheirRoomIsFreed) {
  OpenStream open;
  auto& stream = open.stream;
  const v1::SampleRequest request = Greedy(8 * 65536 * 4, 8);
  constexpr int kMessages = 20;
  std::thread writer([&] {
    for (int i = 0; i < kMessages && stream->Write(request); ++i) {
    }
    stream->WritesDone();
  });
  int answers = 0;
  v1::SampleResponse response;
  while (stream->Read(&response)) ++answers;
  writer.join();
  EXPECT_EQ(answers, kMessages);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(open.server.WaitForMetric(kHeldBytes, '=', 0));
}

// The batch waits for more requests, so its messages stay unanswered.
TEST(SampleStreamTest, AtMostFourMessagesAreInFlight) {
  auto [server, stub, context, stream] = OpenStream("--max-batch-delay=1h");
  const v1::SampleRequest request = Greedy(1000);
  for (int message = 0; message < 10; ++message) ASSERT_TRUE(stream->Write(request));
  EXPECT_TRUE(server.WaitForMetric("logitd_queued_jobs", '=', 4));
  absl::SleepFor(absl::Milliseconds(200));  // time in which a fifth could arrive
  EXPECT_EQ(server.Metric("logitd_queued_jobs"), 4);
  context->TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(server.WaitForMetric("logitd_queued_jobs", '=', 0));
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

TEST(SampleStreamTest, ACancelledStreamFreesEverything) {
  ServerProcess server;
  const auto stub = v1::Sampler::NewStub(Connect(server.tcp()));
  for (int i = 0; i < 20; ++i) {
    const auto context = Context();
    const auto stream = stub->SampleStream(context.get());
    const v1::SampleRequest request = Greedy(100000);
    for (int message = 0; message < i % 7; ++message) stream->Write(request);
    context->TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(10)), 0) << server.Log();
}

TEST(SampleStreamTest, AnIdleStreamHoldsNothingAndDoesNotDelayTheDrain) {
  auto [server, stub, context, stream] = OpenStream("--drain-grace=60s");
  const v1::SampleRequest request = Greedy(1000);
  ASSERT_TRUE(stream->Write(request));
  v1::SampleResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  server.Signal(SIGTERM);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.Wait(absl::Seconds(10)), 0) << server.Log();
}

TEST(SampleStreamTest, AStreamWithoutAMessageIsEnded) {
  auto [server, stub, context, stream] = OpenStream("--receive-timeout=100ms");
  v1::SampleResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

// A request that uses every parameter. Its size and lists vary with `i`.
v1::SampleRequest Varied(int i) {
  const int rows = 1 + i % 3;
  const int vocab = 700;
  v1::SampleRequest request = Of<v1::SampleRequest>(
      Normal(static_cast<size_t>(rows) * vocab, static_cast<uint32_t>(i)), rows);
  request.add_seed(static_cast<uint64_t>(i));
  request.add_position(3);
  request.add_temperature(0.9f);
  request.add_top_k(40 + i);
  request.add_top_p(0.9f);
  request.add_repetition_penalty(1.3f);
  for (int n = 0; n < i % 5; ++n) request.add_history((7 * n + i) % vocab);
  for (int n = 0; n < i % 4; ++n) {
    request.add_logit_bias_ids(n + i);
    request.add_logit_bias(1.5f);
  }
  for (int n = 0; n < i % 3; ++n) request.add_extra_ids(n);
  request.add_top_logprobs(i % 6);
  if (i % 2 == 1) request.set_allowed_tokens(std::string((vocab + 31) / 32 * 4, '\x77'));
  request.add_logprob_mode(i % 2 == 0 ? v1::LOGPROB_MODE_RAW : v1::LOGPROB_MODE_PROCESSED);
  return request;
}

TEST(SampleLoadTest, BitsAreTheSameInABatchOfOneRequestAndInASharedBatch) {
  constexpr int kKinds = 12;
  std::vector<std::string> unshared;
  {
    ServerProcess server;
    const auto stub = v1::Sampler::NewStub(Connect(server.tcp()));
    for (int i = 0; i < kKinds; ++i) {
      v1::SampleResponse response;
      const grpc::Status status = Sample(*stub, Varied(i), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      unshared.push_back(Bits(response));
    }
  }
  ServerProcess server({"--max-batch-delay=2ms"});
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kKinds; ++thread) {
    threads.emplace_back([&, thread] {
      const auto stub =
          v1::Sampler::NewStub(Connect(thread % 2 == 0 ? server.tcp() : server.unix_socket()));
      for (int call = 0; call < 20; ++call) {
        const int i = (thread + call) % kKinds;
        v1::SampleResponse response;
        const grpc::Status status = Sample(*stub, Varied(i), &response);
        ASSERT_TRUE(status.ok()) << status.error_message();
        EXPECT_EQ(Bits(response), unshared[static_cast<size_t>(i)]) << i;
        shared += response.timings().batch_rows() > response.tokens_size();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(shared.load(), 0) << "no batch was shared";
  EXPECT_EQ(server.Metric(Requests("OK", "sample")), kKinds * 20);
}

}  // namespace
}  // namespace logitd::e2e
