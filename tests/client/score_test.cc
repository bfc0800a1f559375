// Scoring through the client library and logitctl: against the real server, and against one that
// misbehaves.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/messages/codec.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "tests/becomes.h"
#include "tests/client/fake_server.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_clock.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::testing::Becomes;
using ::logitd::testing::ClientOf;
using ::logitd::testing::Daemon;
using ::logitd::testing::LogitdFlags;
using ::logitd::testing::Normal;
using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::TestClock;
using ::logitd::testing::ViewOf;
using ::logitd::testing::WaitUntilServing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The answer without its timings and totals.
std::string Bits(v1::ScoreResponse response) {
  response.clear_timings();
  response.clear_totals();
  return response.SerializeAsString();
}

// --- the wire

TEST(ScoreEncodeTest, GeneratedCodeReadsHiddenStatesAndTheirParameters) {
  const std::string states(24, 'x');
  client::ScoreRequest request = {
      .dtype = v1::DTYPE_BF16,
      .rows = 2,
      .head = "demo",
      .hidden_size = 6,
      .hidden = {absl::string_view(states).substr(0, 10), absl::string_view(states).substr(10)}};
  request.params.add_targets(7);
  request.params.add_targets(-100);
  request.params.add_z_loss(0.5f);
  request.params.set_logits("not looked at");
  const absl::StatusOr<grpc::ByteBuffer> buffer = client::EncodeRequest(request, nullptr);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  grpc::Slice slice;
  ASSERT_TRUE(buffer->DumpToSingleSlice(&slice).ok());
  v1::ScoreRequest read;
  ASSERT_TRUE(read.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  EXPECT_EQ(read.dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(read.rows(), 2);
  EXPECT_EQ(read.head(), "demo");
  EXPECT_EQ(read.hidden_size(), 6);
  EXPECT_EQ(read.input_case(), v1::ScoreRequest::kHidden);
  EXPECT_EQ(read.hidden(), states);
  EXPECT_THAT(read.targets(), ElementsAre(7, -100));
  EXPECT_THAT(read.z_loss(), ElementsAre(0.5f));
}

// --- the real server

class ScoreTest : public testing::ScoringLogitd {};

TEST_F(ScoreTest, IsTheDefinition) {
  constexpr int kRows = 4;
  constexpr int kVocab = 50;
  const std::vector<float> logits = Normal(kRows * kVocab, 3);
  client::ScoreRequest request = {.rows = kRows, .vocab = kVocab, .logits = {ViewOf(logits)}};
  v1::ScoreRequest& params = request.params;
  const int targets[kRows] = {3, 49, -100, 0};
  for (int target : targets) params.add_targets(target);
  params.add_temperature(2);
  params.add_label_smoothing(0.1f);
  params.add_z_loss(0.01f);
  params.add_top_logprobs(1);
  params.add_extra_ids(7);
  params.set_want_rank(true);
  params.set_want_entropy(true);
  const absl::StatusOr<client::ScoreResult> result = client_->Score(request);
  ASSERT_TRUE(result.ok()) << result.status();
  const v1::ScoreResponse& answer = result->answer;
  ASSERT_EQ(result->rows(), kRows);
  double loss_sum = 0;
  double logprob_sum = 0;
  for (int row = 0; row < kRows; ++row) {
    const float* l = logits.data() + row * kVocab;
    double sum = 0;
    double mean = 0;
    for (int i = 0; i < kVocab; ++i) {
      sum += std::exp(l[i] / 2.0);
      mean += l[i] / 2.0 / kVocab;
    }
    const double lse = std::log(sum);
    double entropy = 0;
    for (int i = 0; i < kVocab; ++i) entropy -= std::exp(l[i] / 2.0 - lse) * (l[i] / 2.0 - lse);
    EXPECT_NEAR(answer.logsumexp(row), lse, 1e-5);
    EXPECT_NEAR(answer.entropies(row), entropy, 1e-4);
    EXPECT_NEAR(answer.extra_logprobs(row), l[7] / 2.0 - lse, 1e-5);
    const int highest = static_cast<int>(std::max_element(l, l + kVocab) - l);
    EXPECT_EQ(answer.top_ids(row), highest);
    EXPECT_NEAR(answer.top_logprobs(row), l[highest] / 2.0 - lse, 1e-5);
    if (targets[row] < 0) {
      EXPECT_EQ(answer.losses(row), 0);
      EXPECT_EQ(answer.ranks(row), 0);
      continue;
    }
    const double logprob = l[targets[row]] / 2.0 - lse;
    const double smoothing = static_cast<double>(0.1f);
    const double loss = -(1 - smoothing) * logprob + smoothing * (lse - mean) +
                        static_cast<double>(0.01f) * lse * lse;
    EXPECT_NEAR(answer.losses(row), loss, 1e-4);
    EXPECT_NEAR(answer.target_logprobs(row), logprob, 1e-5);
    EXPECT_EQ(answer.ranks(row),
              1 + std::count_if(l, l + kVocab, [&](float v) { return v > l[targets[row]]; }));
    loss_sum += answer.losses(row);
    logprob_sum += answer.target_logprobs(row);
  }
  EXPECT_EQ(answer.totals().counted(), 3);
  EXPECT_EQ(answer.totals().ignored(), 1);
  EXPECT_DOUBLE_EQ(answer.totals().loss_sum(), loss_sum);
  EXPECT_DOUBLE_EQ(answer.totals().loss_mean(), loss_sum / 3);
  EXPECT_DOUBLE_EQ(answer.totals().perplexity(), std::exp(-logprob_sum / 3));
}

// exp has no double above 709.78.
TEST_F(ScoreTest, APerplexityBeyondEveryDoubleIsInfinite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const float low : {-709.79f, -800.0f, -3e38f, -INFINITY}) {
    const std::vector<float> logits = {0, low, 0, low, 0, low};
    client::ScoreRequest request = {.rows = 3, .vocab = 2, .logits = {ViewOf(logits)}};
    for (int row = 0; row < 3; ++row) request.params.add_targets(1);
    const absl::StatusOr<client::ScoreResult> whole = client_->Score(request);
    int answers = 0;
    const absl::StatusOr<client::ScoreResult> streamed =
        ConnectWith(1)->ScoreStream(request, [&](const client::ScoreProgress& progress) {
          EXPECT_EQ(progress.totals.perplexity(), kInfinity);
          ++answers;
          return true;
        });
    EXPECT_EQ(answers, 3);
    request.params.set_offset(3);
    if (whole.ok()) *request.params.mutable_totals() = whole->answer.totals();
    const absl::StatusOr<client::ScoreResult> continued = client_->ScoreStream(request, nullptr);
    for (const auto* result : {&whole, &streamed, &continued}) {
      ASSERT_TRUE(result->ok()) << result->status();
      const v1::ScoreTotals& totals = (*result)->answer.totals();
      EXPECT_FLOAT_EQ(static_cast<float>(totals.loss_mean()), -low);
      EXPECT_EQ(totals.perplexity(), kInfinity) << low;
    }
  }
}

// 60 rows with parameters of every kind.
struct Sequence {
  Sequence() {
    for (int row = 0; row < 60; ++row) {
      request.params.add_targets(row % 7 == 0 ? -1 : row);
      request.params.add_temperature(0.5f + 0.01f * static_cast<float>(row));
      request.params.add_extra_count(row % 3);
      for (int i = 0; i < row % 3; ++i) request.params.add_extra_ids(row + i);
    }
    request.params.set_ignore_index(-1);
    request.params.add_label_smoothing(0.1f);
    request.params.add_top_logprobs(2);
    request.params.set_want_rank(true);
  }
  const std::vector<float> logits = Normal(60 * 70, 5);
  client::ScoreRequest request = {
      .rows = 60,
      .vocab = 70,
      .logits = {ViewOf(logits).substr(0, 1001), ViewOf(logits).substr(1001)}};
};

TEST_F(ScoreTest, AStreamGivesTheBitsOfOneCallWhateverItsMessages) {
  const Sequence sequence;
  const absl::StatusOr<client::ScoreResult> whole = client_->Score(sequence.request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (const int64_t bytes : {1, 3000, 1 << 20}) {
    std::vector<int64_t> rows;
    const absl::StatusOr<client::ScoreResult> cut = ConnectWith(bytes)->ScoreStream(
        sequence.request, [&](const client::ScoreProgress& progress) {
          rows.push_back(progress.rows);
          EXPECT_EQ(progress.total_rows, 60);
          EXPECT_EQ(progress.totals.rows(), progress.rows);
          return true;
        });
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_EQ(cut->messages, bytes == 1 ? 60 : bytes == 3000 ? 6 : 1);
    EXPECT_EQ(static_cast<int>(rows.size()), cut->messages);
    EXPECT_EQ(rows.back(), 60);
    EXPECT_EQ(Bits(cut->answer), Bits(whole->answer));
    EXPECT_EQ(cut->top_offsets, whole->top_offsets);
    EXPECT_EQ(cut->extra_offsets, whole->extra_offsets);
    const v1::ScoreTotals& totals = cut->answer.totals();
    EXPECT_EQ(totals.counted(), whole->answer.totals().counted());
    EXPECT_EQ(totals.ignored(), 9);
    EXPECT_NEAR(totals.loss_sum() / whole->answer.totals().loss_sum(), 1, 1e-14);
    EXPECT_NEAR(totals.perplexity() / whole->answer.totals().perplexity(), 1, 1e-14);
  }
}

TEST_F(ScoreTest, AStreamTakesEachRowsSupportAlong) {
  const std::vector<float> logits = Normal(60 * 70, 6);
  client::ScoreRequest request = {.rows = 60, .vocab = 70, .logits = {ViewOf(logits)}};
  v1::ScoreRequest& params = request.params;
  for (int row = 0; row < 60; ++row) {
    params.add_targets(row);
    params.add_support_count(row % 4);
    for (int i = 0; i < row % 4; ++i) params.add_support_ids((row + 9 * i) % 70);
  }
  const absl::StatusOr<client::ScoreResult> whole = client_->Score(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->answer.target_logprobs(1), 0);  // its support is its target
  for (const int64_t bytes : {1, 3000}) {
    const absl::StatusOr<client::ScoreResult> cut = ConnectWith(bytes)->ScoreStream(request);
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_EQ(Bits(cut->answer), Bits(whole->answer));
  }
}

TEST_F(ScoreTest, ProgressThatTakesLongerThanAServerWaitsLosesNothing) {
  // Answers of 450 KB, which no window takes unread.
  constexpr int kRows = 8 * 400;
  constexpr int kVocab = 128;
  const std::vector<float> logits = Normal(kRows * kVocab, 9);
  client::ScoreRequest request = {.rows = kRows, .vocab = kVocab, .logits = {ViewOf(logits)}};
  for (int row = 0; row < kRows; ++row) request.params.add_targets(row % kVocab);
  request.params.add_top_logprobs(kVocab);
  const auto whole = client_->ScoreStream(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  std::vector<int64_t> rows;
  const std::string address = absl::StrCat("unix:", dir_.path("impatient"));
  const Daemon impatient("logitd", LogitdFlags(address, {"--receive-timeout", "1s"}));
  const auto client = *client::Client::Create(
      {.address = address, .deadline = absl::Seconds(20), .score_message_bytes = 400 * kVocab * 4});
  ASSERT_TRUE(WaitUntilServing(*client));
  // Asked by another process: a call of this one would also read what its streams have received.
  const auto given_up = [&] {
    return absl::StrContains(RunBinary("logitctl", {"load", "--addr", address}).out,
                             ", 0 of them streams");
  };
  const auto slow = client->ScoreStream(request, [&](const client::ScoreProgress& progress) {
    rows.push_back(progress.rows);
    return progress.rows != 800 || Becomes(given_up);
  });
  ASSERT_TRUE(slow.ok()) << slow.status();
  EXPECT_THAT(rows, ElementsAre(400, 800, 1200, 1600, 2000, 2400, 2800, 3200));
  EXPECT_EQ(Bits(slow->answer), Bits(whole->answer));
  EXPECT_GT(slow->attempts, 1);
}

TEST_F(ScoreTest, ACallThatBeginsWhereAnotherWasStoppedHasTheTotalsOfBoth) {
  const Sequence sequence;
  const auto whole = ConnectWith(3000)->ScoreStream(sequence.request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  client::ScoreProgress last;
  const absl::Status stopped = ConnectWith(3000)
                                   ->ScoreStream(sequence.request,
                                                 [&](const client::ScoreProgress& progress) {
                                                   last = progress;
                                                   return progress.rows < 30;
                                                 })
                                   .status();
  EXPECT_EQ(stopped.code(), absl::StatusCode::kCancelled) << stopped;
  EXPECT_EQ(last.rows, 30);

  Sequence rest;
  client::ScoreRequest& request = rest.request;
  request.rows = 30;
  request.logits = {ViewOf(rest.logits).substr(30 * 70 * sizeof(float))};
  v1::ScoreRequest& params = request.params;
  params.mutable_targets()->erase(params.targets().begin(), params.targets().begin() + 30);
  params.mutable_temperature()->erase(params.temperature().begin(),
                                      params.temperature().begin() + 30);
  params.mutable_extra_count()->erase(params.extra_count().begin(),
                                      params.extra_count().begin() + 30);
  params.mutable_extra_ids()->erase(params.extra_ids().begin(), params.extra_ids().begin() + 30);
  params.set_offset(last.rows);
  *params.mutable_totals() = last.totals;
  const auto resumed = ConnectWith(3000)->ScoreStream(request);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->answer.offset(), 30);
  EXPECT_EQ(resumed->answer.totals().SerializeAsString(),
            whole->answer.totals().SerializeAsString());
}

TEST_F(ScoreTest, WhatCannotBeCutIsRefusedUnsent) {
  struct Case {
    std::function<void(client::ScoreRequest*)> change;
    const char* text;
  };
  const Case cases[] = {
      {[](auto* r) { r->rows = 0; }, "rows: got 0"},
      {[](auto* r) { r->vocab = 71; }, "logits: got 16800 bytes, allowed 17040"},
      {[](auto* r) { r->vocab = 0; }, "vocab: got 0"},
      {[](auto* r) { r->head = "h"; }, "hidden_size: got 0"},
      {[](auto* r) { r->params.add_targets(1); }, "targets: got 61 values, allowed 60 (rows)"},
      {[](auto* r) { r->params.add_temperature(1); }, "temperature: got 61 values"},
      {[](auto* r) { r->params.add_extra_ids(1); },
       "extra_count: adds up to 60, but extra has 61 values"},
      {[](auto* r) { r->params.set_extra_count(0, -1); }, "extra_count: got -1"},
  };
  for (const Case& c : cases) {
    Sequence sequence;
    c.change(&sequence.request);
    const absl::Status status = client_->ScoreStream(sequence.request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  // What the server has to say of the rest keeps its words.
  Sequence sequence;
  sequence.request.params.set_targets(5, 70);
  EXPECT_THAT(std::string(client_->ScoreStream(sequence.request).status().message()),
              HasSubstr("targets: got 70 at row 5, allowed 0..69, or -1 (ignore_index)"));
  sequence.request.head = "nobody";
  sequence.request.hidden_size = 70;
  sequence.request.hidden = sequence.request.logits;
  EXPECT_EQ(client_->ScoreStream(sequence.request).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->GetHead("nobody").status().code(), absl::StatusCode::kNotFound);
}

// --- a server that misbehaves

class FakeScorer final : public v1::Scorer::Service,
                         public testing::StreamHandler<v1::ScoreRequest, v1::ScoreResponse> {
 public:
  using StreamHandler::StreamHandler;
  std::string address() const { return server_.address(); }
  grpc::Status ScoreStream(grpc::ServerContext*, Stream* stream) override { return Handle(stream); }

 private:
  const testing::LocalServer server_{this};
};

// A row's loss is its target.
v1::ScoreResponse Echo(const v1::ScoreRequest& request) {
  v1::ScoreResponse response;
  response.set_offset(request.offset());
  v1::ScoreTotals* totals = response.mutable_totals();
  totals->set_rows(request.offset() + request.rows());
  for (int32_t target : request.targets()) {
    response.add_losses(static_cast<float>(target));
    response.add_target_logprobs(0);
    response.add_logsumexp(0);
    response.add_status(v1::ROW_STATUS_OK);
    response.add_status_position(-1);
    response.add_top_count(0);
    response.add_extra_count(0);
  }
  return response;
}

grpc::Status EchoAll(FakeScorer::Stream* stream) {
  v1::ScoreRequest request;
  while (stream->Read(&request)) stream->Write(Echo(request));
  return grpc::Status::OK;
}

// Answers one message.
void EchoOne(FakeScorer::Stream* stream) {
  v1::ScoreRequest request;
  if (stream->Read(&request)) stream->Write(Echo(request));
}

absl::StatusOr<client::ScoreResult> SendTenRows(
    const FakeScorer& server,
    const std::function<bool(const client::ScoreProgress&)>& progress = nullptr,
    client::Clock& clock = client::SteadyClock()) {
  const std::vector<float> logits = Normal(40, 7);
  client::ScoreRequest request = {.rows = 10, .vocab = 4, .logits = {ViewOf(logits)}};
  for (int row = 0; row < 10; ++row) request.params.add_targets(row);
  request.params.add_z_loss(0.5f);
  const auto client =
      ClientOf({.address = server.address(),
                .deadline = absl::Seconds(20),
                .retry = {.max_attempts = 3, .initial_backoff = absl::Milliseconds(1)},
                .score_message_bytes = 32},
               clock);
  return client->ScoreStream(request, progress);
}

std::function<bool(const client::ScoreProgress&)> Count(int64_t* rows) {
  return [rows](const client::ScoreProgress& progress) {
    *rows = progress.rows;
    return true;
  };
}

TEST(ScoreFaultTest, AStreamThatIsLostGoesOnAfterItsLastAnswer) {
  // Two rows a message. Every stream is lost after an answer; more often than max_attempts.
  const FakeScorer server([&](int call, FakeScorer::Stream* stream) {
    v1::ScoreRequest request;
    EXPECT_TRUE(stream->Read(&request));
    const int64_t row = 2 * (call - 1);
    EXPECT_EQ(request.offset(), row);
    EXPECT_EQ(request.dtype(), v1::DTYPE_F32);
    EXPECT_EQ(request.vocab(), 4);
    EXPECT_THAT(request.z_loss(), ElementsAre(0.5f));
    EXPECT_THAT(request.targets(), ElementsAre(row, row + 1));
    EXPECT_EQ(request.has_totals(), call > 1);
    EXPECT_EQ(request.totals().rows(), row);
    stream->Write(Echo(request));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  const absl::StatusOr<client::ScoreResult> result = SendTenRows(server);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->answer.losses(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(result->answer.totals().rows(), 10);
  EXPECT_EQ(result->messages, 5);
  EXPECT_EQ(result->attempts, 5);
}

TEST(ScoreFaultTest, AServerThatStaysAwayIsGivenUp) {
  const FakeScorer server([&](int call, FakeScorer::Stream* stream) {
    if (call == 2) EchoOne(stream);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  const absl::Status status = SendTenRows(server).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("gave up after 3 attempts"));
  EXPECT_EQ(server.calls(), 4);  // the second got on, so that counting began again with it
}

TEST(ScoreFaultTest, AStreamThatTheServerCancelsGoesOnToo) {
  const FakeScorer server([&](int call, FakeScorer::Stream* stream) {
    v1::ScoreRequest request;
    EXPECT_TRUE(stream->Read(&request));
    EXPECT_EQ(request.offset(), 2 * (call - 1));
    stream->Write(Echo(request));
    return grpc::Status(grpc::StatusCode::CANCELLED, "answers not taken");
  });
  const absl::StatusOr<client::ScoreResult> result = SendTenRows(server);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->answer.losses(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(result->attempts, 5);
}

TEST(ScoreFaultTest, AnotherErrorIsNotTriedAgain) {
  const FakeScorer server([&](int, FakeScorer::Stream*) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no");
  });
  EXPECT_EQ(SendTenRows(server).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(server.calls(), 1);
}

TEST(ScoreFaultTest, AllAnswersAreAResultHoweverTheStreamEnds) {
  for (const grpc::StatusCode code :
       {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::DEADLINE_EXCEEDED,
        grpc::StatusCode::CANCELLED, grpc::StatusCode::INTERNAL}) {
    const FakeScorer server([&](int, FakeScorer::Stream* stream) {
      for (int i = 0; i < 5; ++i) EchoOne(stream);
      return grpc::Status(code, "gone");
    });
    const absl::StatusOr<client::ScoreResult> result = SendTenRows(server);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->answer.losses(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
    EXPECT_EQ(server.calls(), 1);
  }
}

TEST(ScoreFaultTest, AllAnswersAreAResultThoughTheStreamDoesNotEnd) {
  absl::Notification given_up;
  const FakeScorer server([&](int, FakeScorer::Stream* stream) {
    const grpc::Status status = EchoAll(stream);
    given_up.WaitForNotification();
    return status;
  });
  TestClock clock;
  int64_t rows = 0;
  clock.stands_still = [&rows] { return rows < 10; };
  const absl::StatusOr<client::ScoreResult> result = SendTenRows(server, Count(&rows), clock);
  given_up.Notify();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->answer.losses(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(ScoreFaultTest, StoppingAtTheLastRowIsStopping) {
  const FakeScorer server([](int, FakeScorer::Stream* stream) { return EchoAll(stream); });
  const absl::Status status = SendTenRows(server, [](const client::ScoreProgress& progress) {
                                return progress.rows < 10;
                              }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_EQ(server.calls(), 1);
}

TEST(ScoreFaultTest, AnAnswerThatDoesNotComeIsNotWaitedForForEver) {
  absl::Notification given_up;
  const FakeScorer server([&](int, FakeScorer::Stream* stream) {
    EchoOne(stream);
    given_up.WaitForNotification();
    return grpc::Status::OK;
  });
  TestClock clock;
  int64_t rows = 0;
  clock.stands_still = [&rows] { return rows < 2; };
  const absl::Status status = SendTenRows(server, Count(&rows), clock).status();
  given_up.Notify();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no answer for 20s, after 1 of 5 messages"));
}

TEST(ScoreFaultTest, TheTimeOfProgressIsNotTheServers) {
  absl::Notification over;
  const FakeScorer server([&](int, FakeScorer::Stream* stream) {
    v1::ScoreRequest request;
    for (int message = 0; stream->Read(&request); ++message) {
      if (message == 1) over.WaitForNotification();
      stream->Write(Echo(request));
    }
    return grpc::Status::OK;
  });
  TestClock clock;
  int64_t rows = 0;
  clock.stands_still = [&, waits = 0]() mutable {
    if (rows == 2 && ++waits == 10) over.Notify();  // the client does wait for the second answer
    return true;
  };
  const auto progress = [&](const client::ScoreProgress& now) {
    clock.Advance(absl::Hours(1));
    return Count(&rows)(now);
  };
  const absl::StatusOr<client::ScoreResult> result = SendTenRows(server, progress, clock);
  if (!over.HasBeenNotified()) over.Notify();  // for the server to end, where no answer came
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST(ScoreFaultTest, NoMessageIsLargerThanAllowed) {
  constexpr int kRows = 300;
  for (const bool row_by_row : {false, true}) {
    const std::vector<float> logits = Normal(kRows * 4, 7);
    client::ScoreRequest request = {.rows = kRows, .vocab = 4, .logits = {ViewOf(logits)}};
    v1::ScoreRequest& params = request.params;
    for (int row = 0; row < kRows; ++row) {
      params.add_targets(row);
      if (row > 0 && !row_by_row) continue;
      params.add_temperature(1);
      params.add_softcap(1);
      params.add_label_smoothing(0.5f);
      params.add_smoothing(v1::SMOOTHING_CONVENTION_MEGATRON);
      params.add_z_loss(1);
      params.add_top_logprobs(1);
      params.add_extra_count(2);
    }
    for (int i = 0; i < (row_by_row ? 2 * kRows : 2); ++i) params.add_extra_ids(1);
    params.set_offset(int64_t{1} << 50);
    params.set_ignore_index(-1);
    params.mutable_totals()->set_rows(int64_t{1} << 49);
    for (const int64_t most : {300, 1000, 4000}) {
      size_t largest = 0;
      const FakeScorer server([&](int, FakeScorer::Stream* stream) {
        v1::ScoreRequest message;
        while (stream->Read(&message)) {
          largest = std::max(largest, message.ByteSizeLong());
          stream->Write(Echo(message));
        }
        return grpc::Status::OK;
      });
      const auto client = *client::Client::Create(
          {.address = server.address(), .deadline = absl::Seconds(20), .max_message_bytes = most});
      const auto result = client->ScoreStream(request);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->rows(), kRows);
      EXPECT_LE(largest, static_cast<size_t>(most));
      EXPECT_GT(largest, static_cast<size_t>(most / 4));
    }
  }
}

TEST(ScoreFaultTest, AnAnswerToAnotherQuestionIsInternal) {
  const std::function<void(v1::ScoreResponse*)> changes[] = {
      [](auto* r) { r->set_offset(5); },
      [](auto* r) { r->add_losses(1); },
      [](auto* r) { *r = v1::ScoreResponse(); },
      [](auto* r) {
        for (int i = 0; i < 2; ++i) r->add_ranks(1);
      },
      [](auto* r) { r->set_top_count(0, 1); },
  };
  for (const auto& change : changes) {
    const FakeScorer server([&](int, FakeScorer::Stream* stream) {
      v1::ScoreRequest request;
      if (!stream->Read(&request)) return grpc::Status::OK;
      v1::ScoreResponse answer = Echo(request);
      change(&answer);
      stream->Write(answer);
      return grpc::Status::OK;
    });
    EXPECT_EQ(SendTenRows(server).status().code(), absl::StatusCode::kInternal);
  }
}

}  // namespace
}  // namespace logitd
