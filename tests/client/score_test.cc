// Scoring through the client library and logitctl: against the real server, and against one that
// misbehaves.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <png.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/messages/codec.h"
#include "client/tensor_file.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/running_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_model.h"
#include "tests/client/test_values.h"
#include "tests/tree.h"

namespace logitd {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::Daemon;
using ::logitd::testing::InTree;
using ::logitd::testing::LogitdFlags;
using ::logitd::testing::Normal;
using ::logitd::testing::Npy;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::Safetensors;
using ::logitd::testing::TempDir;
using ::logitd::testing::ViewOf;
using ::logitd::testing::WaitUntilServing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

TEST(ScoreEncodeTest, VerifyTakesLogitsAlone) {
  const client::VerifyRequest request = {.head = "demo"};
  EXPECT_THAT(std::string(client::EncodeRequest(request, nullptr).status().message()),
              HasSubstr("head: got \"demo\", allowed none"));
}

// --- the real server

// Logits (a, b, -a - b) of a state (a, b).
std::string TinyHead(const TempDir& dir) {
  return dir.Write("tiny.safetensors",
                   Safetensors(R"({"w":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}})",
                               BytesOf<float>({1, 0, 0, 1, -1, -1})));
}

class ScoreTest : public ::logitd::testing::RunningLogitd {
 protected:
  ScoreTest()
      : RunningLogitd(
            [](const TempDir& dir) -> Flags {
              return {"--head", absl::StrCat("tiny=", TinyHead(dir)), "--head",
                      absl::StrCat("demo=", InTree("demo/model").string())};
            },
            "logitd.v1.Scorer") {}

  // The answer of a command that succeeds.
  nlohmann::json Json(std::vector<std::string> args) const {
    args.insert(args.end(), {"--format", "json"});
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
  }

  std::unique_ptr<client::Client> ConnectWith(int64_t message_bytes) const {
    return Connect({.score_message_bytes = message_bytes});
  }
};

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
  ASSERT_TRUE(WaitUntilServing({.address = address}));
  const auto client = *client::Client::Create(
      {.address = address, .deadline = absl::Seconds(20), .score_message_bytes = 400 * kVocab * 4});
  const auto slow = client->ScoreStream(request, [&](const client::ScoreProgress& progress) {
    rows.push_back(progress.rows);
    if (progress.rows == 800) absl::SleepFor(absl::Milliseconds(2500));
    return true;
  });
  ASSERT_TRUE(slow.ok()) << slow.status();
  EXPECT_THAT(rows, ElementsAre(400, 800, 1200, 1600, 2000, 2400, 2800, 3200));
  EXPECT_EQ(Bits(slow->answer), Bits(whole->answer));
  EXPECT_GT(slow->attempts, 1) << "the server waited after all: this shows nothing";
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
    const FakeScorer& server, absl::Duration patience = absl::Seconds(20),
    const std::function<bool(const client::ScoreProgress&)>& progress = nullptr) {
  const std::vector<float> logits = Normal(40, 7);
  client::ScoreRequest request = {.rows = 10, .vocab = 4, .logits = {ViewOf(logits)}};
  for (int row = 0; row < 10; ++row) request.params.add_targets(row);
  request.params.add_z_loss(0.5f);
  const auto client = *client::Client::Create(
      {.address = server.address(),
       .deadline = patience,
       .retry = {.max_attempts = 3, .initial_backoff = absl::Milliseconds(1)},
       .score_message_bytes = 32});
  return client->ScoreStream(request, progress);
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
  const absl::StatusOr<client::ScoreResult> result = SendTenRows(server, absl::Seconds(2));
  given_up.Notify();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->answer.losses(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(ScoreFaultTest, StoppingAtTheLastRowIsStopping) {
  const FakeScorer server([](int, FakeScorer::Stream* stream) { return EchoAll(stream); });
  const absl::Status status =
      SendTenRows(server, absl::Seconds(20), [](const client::ScoreProgress& progress) {
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
  const absl::Status status = SendTenRows(server, absl::Seconds(2)).status();
  given_up.Notify();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no answer for 2s, after 1 of 5 messages"));
}

TEST(ScoreFaultTest, TheTimeOfProgressIsNotTheServers) {
  absl::Notification over;
  const FakeScorer server([&](int, FakeScorer::Stream* stream) {
    v1::ScoreRequest request;
    for (int message = 0; stream->Read(&request); ++message) {
      if (message == 1) {  // so that there is something to wait for afterwards
        over.WaitForNotification();
        absl::SleepFor(absl::Milliseconds(300));
      }
      stream->Write(Echo(request));
    }
    return grpc::Status::OK;
  });
  const absl::StatusOr<client::ScoreResult> result =
      SendTenRows(server, absl::Seconds(2), [&](const client::ScoreProgress& progress) {
        if (progress.rows == 2) {
          absl::SleepFor(absl::Milliseconds(2500));
          over.Notify();
        }
        return true;
      });
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

// --- logitctl

std::string Ids(const std::vector<int64_t>& ids) {
  return Npy(
      absl::StrCat("{'descr': '<i8', 'fortran_order': False, 'shape': (", ids.size(), ",), }\n"),
      BytesOf(ids));
}

struct Rgb {
  uint8_t red, green, blue;
};
constexpr Rgb kPlotLine = {30, 90, 180};
constexpr Rgb kPlotDots = {190, 205, 230};

// A PNG as another program reads it.
class Picture {
 public:
  explicit Picture(const std::string& path) {
    png_image image = {};
    image.version = PNG_IMAGE_VERSION;
    EXPECT_NE(png_image_begin_read_from_file(&image, path.c_str()), 0) << image.message;
    image.format = PNG_FORMAT_RGB;
    pixels_.resize(PNG_IMAGE_SIZE(image));
    EXPECT_NE(png_image_finish_read(&image, nullptr, pixels_.data(), 0, nullptr), 0)
        << image.message;
    width_ = static_cast<int>(image.width);
  }

  int width() const { return width_; }

  // The pixels of a color in columns [begin, end), from the top.
  struct Found {
    int count = 0;
    double mean_y = 0;
  };
  Found Find(Rgb color, int begin = 0, int end = std::numeric_limits<int>::max()) const {
    Found found;
    for (size_t i = 0; i + 2 < pixels_.size(); i += 3) {
      const int x = static_cast<int>(i / 3) % width_;
      if (x < begin || x >= end || pixels_[i] != color.red || pixels_[i + 1] != color.green ||
          pixels_[i + 2] != color.blue) {
        continue;
      }
      ++found.count;
      found.mean_y += static_cast<int>(i / 3) / width_;
    }
    found.mean_y /= std::max(1, found.count);
    return found;
  }

 private:
  int width_ = 1;
  std::vector<uint8_t> pixels_;
};

TEST_F(ScoreTest, LogitctlScoresFiles) {
  const std::vector<float> logits = {0.0f, 0.69314718f, 1.60943791f, 0, 0, 0};  // 1/8, 2/8, 5/8
  const std::string npy = dir_.Write("a.npy", NpyF32(2, 3, logits));
  const std::string ids = dir_.Write("t.npy", Ids({1, 2}));
  const std::string out = dir_.path("losses.npy");
  const std::string plot = dir_.path("loss.png");
  const nlohmann::json read =
      Json({"score", "--logits", npy, "--targets", ids, "--rank", "--entropy", "--top-logprobs",
            "1", "--out", out, "--plot", plot});
  EXPECT_NEAR(read["losses"][0].get<double>(), std::log(4.0), 1e-5);
  EXPECT_NEAR(read["losses"][1].get<double>(), std::log(3.0), 1e-5);
  EXPECT_EQ(read["ranks"], nlohmann::json({2, 3}));
  EXPECT_EQ(read["top_ids"], nlohmann::json({2, 0}));
  EXPECT_EQ(read["targets"], nlohmann::json({1, 2}));
  EXPECT_NEAR(read["entropies"][1].get<double>(), std::log(3.0), 1e-5);
  EXPECT_NEAR(read["totals"]["perplexity"].get<double>(), std::sqrt(12.0), 1e-4);
  const auto losses = client::LoadTensor(out);
  ASSERT_TRUE(losses.ok()) << losses.status();
  EXPECT_THAT(losses->shape, ElementsAre(2));
  float first = 0;
  std::memcpy(&first, losses->bytes.data(), sizeof(first));
  EXPECT_NEAR(first, std::log(4.0), 1e-5);
  EXPECT_GT(Picture(plot).Find(kPlotLine).count, 0);

  const Ran table = Logitctl({"score", "--logits", npy, "--targets", ids, "--ignore-index", "2"});
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("2 rows: 1 counted, 1 ignored, 0 faulty"),
                               HasSubstr("perplexity 4\n")));
  const Ran totals = Logitctl({"score", "--logits", npy, "--targets", ids, "--totals"});
  EXPECT_THAT(totals.out, ::testing::StartsWith("2 rows: 2 counted"));
}

// One row of two logits for each loss; their target is token 0.
struct Losses {
  explicit Losses(const std::vector<double>& losses) {
    for (double loss : losses) {
      logits.push_back(0);
      logits.push_back(static_cast<float>(std::log(std::expm1(loss))));
    }
  }
  std::vector<float> logits;
};

TEST_F(ScoreTest, LogitctlPlotsHigherLossesHigher) {
  // Rows of no number and of an infinite loss among them, which leave no mark.
  std::vector<double> losses;
  for (int row = 0; row < 60; ++row) losses.push_back(row < 30 ? 1 : row < 45 ? 4 : 2);
  Losses rows(losses);
  rows.logits[2 * 10] = NAN;
  rows.logits[2 * 50] = -INFINITY;
  const std::string plot = dir_.path("loss.png");
  const Ran ran =
      Logitctl({"score", "--logits", dir_.Write("a.npy", NpyF32(60, 2, rows.logits)), "--targets",
                dir_.Write("t.npy", Ids(std::vector<int64_t>(60, 0))), "--totals", "--plot", plot});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Picture picture(plot);
  const auto part = [&](double begin, double end) {
    return picture.Find(kPlotLine, static_cast<int>(begin * picture.width()),
                        static_cast<int>(end * picture.width()));
  };
  const Picture::Found low = part(0.1, 0.45);
  const Picture::Found high = part(0.6, 0.7);
  const Picture::Found middle = part(0.85, 0.95);
  EXPECT_GT(low.count, 100);
  EXPECT_GT(high.count, 50);
  EXPECT_GT(middle.count, 50);
  EXPECT_LT(high.mean_y, middle.mean_y);  // rows of pixels count from the top
  EXPECT_LT(middle.mean_y, low.mean_y);
  // In proportion: 1, 2 and 4 above the axis.
  EXPECT_NEAR((low.mean_y - middle.mean_y) * 2, middle.mean_y - high.mean_y, 3);
}

TEST_F(ScoreTest, LogitctlPlotsALossAloneAndNone) {
  const std::string ids = dir_.Write("t.npy", Ids({0}));
  const std::string plot = dir_.path("loss.png");
  const auto run = [&](const std::vector<float>& logits) {
    const Ran ran = Logitctl({"score", "--logits", dir_.Write("a.npy", NpyF32(1, 2, logits)),
                              "--targets", ids, "--plot", plot});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return Picture(plot).Find(kPlotDots).count;
  };
  EXPECT_GT(run(Losses({2}).logits), 0);
  EXPECT_EQ(run({NAN, 0}), 0);
  EXPECT_EQ(run({-INFINITY, 0}), 0);
}

TEST_F(ScoreTest, LogitctlPrintsItsResultsAlsoWhereAFileCannotBeWritten) {
  const std::string npy = dir_.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 3, 4, 5}));
  const std::string ids = dir_.Write("t.npy", Ids({1, 2}));
  for (const auto& [flag, name] : {std::pair("--out", "none/x.npy"), {"--plot", "none/x.png"}}) {
    const Ran ran = Logitctl({"score", "--logits", npy, "--targets", ids, flag, dir_.path(name)});
    EXPECT_EQ(ran.code, 2) << flag;
    EXPECT_THAT(ran.err, HasSubstr(name));
    EXPECT_THAT(ran.out, HasSubstr("2 rows: 2 counted"));
  }
}

TEST_F(ScoreTest, AHeadThatDoesNotFitTheModelIsBadUsage) {
  const std::string model = testing::TinyModel().Write(dir_);
  for (const char* command : {"score", "topk", "sample", "generate"}) {
    const Ran ran = Logitctl({command, "--text", "x", "--model", model, "--head", "demo"});
    EXPECT_EQ(ran.code, 2) << command;
    EXPECT_THAT(ran.err, HasSubstr("--head demo is of 4096 tokens by 144; the model of --model has "
                                   "259 by 1"));
  }
}

TEST_F(ScoreTest, LogitctlTakesTargetsOfBothWidthsFromBothKindsOfFile) {
  const std::string npy = dir_.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 3, 4, 5}));
  const std::vector<int32_t> narrow = {1, 2};
  const std::string files[] = {
      dir_.Write("narrow.npy", Npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }\n",
                                   BytesOf(narrow))),
      dir_.Write("narrow.safetensors",
                 Safetensors(R"({"t":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})",
                             BytesOf(narrow))),
      dir_.Write("wide.safetensors",
                 Safetensors(R"({"t":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})",
                             BytesOf<int64_t>({1, 2})))};
  for (const std::string& file : files) {
    EXPECT_EQ(Json({"score", "--logits", npy, "--targets", file})["targets"],
              nlohmann::json({1, 2}));
  }
}

TEST_F(ScoreTest, LogitctlScoresATextThroughTheModelsOwnLogits) {
  const nlohmann::json read = Json(
      {"score", "--text", "It is a truth", "--model", InTree("demo/model"), "--top-logprobs", "1"});
  std::string text;
  for (const auto& token : read["text"]) text += token.get<std::string>();
  EXPECT_EQ(text, "It is a truth");
  EXPECT_EQ(read["top_text"].size(), read["losses"].size());
  EXPECT_GT(read["totals"]["perplexity"].get<double>(), 1);
  EXPECT_LT(read["totals"]["perplexity"].get<double>(), 500);  // of 4096 tokens: it knows English
}

// The state after an "a" is NaN, and so is every one that follows: their top ids are -1.
TEST_F(ScoreTest, LogitctlPrintsTheTextOfRowsWithoutTopTokens) {
  testing::TinyModel model;
  model.tensors["model.embed_tokens.weight"].values['a'] = NAN;
  const std::vector<std::string> args = {"score",           "--text",         "xay", "--model",
                                         model.Write(dir_), "--top-logprobs", "2"};
  const Ran table = Logitctl(args);
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("3 rows: 2 counted, 0 ignored, 1 faulty"));
  const nlohmann::json read = Json(args);
  EXPECT_EQ(read["status"][2], "ROW_STATUS_NAN_LOGIT");
  EXPECT_EQ(read["text"], nlohmann::json({"x", "a", "y"}));
  EXPECT_EQ(read["top_ids"][4], -1);
  EXPECT_EQ(read["top_ids"][5], -1);
  ASSERT_EQ(read["top_text"].size(), 6u);
  EXPECT_EQ(read["top_text"][4], "");
  EXPECT_EQ(read["top_text"][5], "");
}

// The server's head is the model's own, so that both ways mean the same text.
TEST_F(ScoreTest, LogitctlSendsHiddenStatesForAHeadInsteadOfLogits) {
  const std::string model = InTree("demo/model");
  using Args = std::vector<std::string>;
  const Args score = {"score", "--text", "It is a truth universally", "--model", model};
  const Args topk = {"topk", "--text", "It is", "--model", model, "--k", "3"};
  const Args generate = {"generate", "--text", "It is",         "--model", model,
                         "--tokens", "5",      "--temperature", "0"};
  const auto run = [&](Args args, bool head) {
    if (head) args.insert(args.end(), {"--head", "demo"});
    return Json(args);
  };
  const nlohmann::json own = run(score, false);
  const nlohmann::json sent = run(score, true);
  ASSERT_EQ(own["losses"].size(), sent["losses"].size());
  for (size_t i = 0; i < own["losses"].size(); ++i) {
    // The states are rounded to the head's bf16.
    EXPECT_NEAR(own["losses"][i].get<double>(), sent["losses"][i].get<double>(), 0.05);
  }
  EXPECT_EQ(run(topk, false)["indices"], run(topk, true)["indices"]);
  EXPECT_EQ(run(generate, false)["tokens"], run(generate, true)["tokens"]);
  const Args sample = {"sample", "--text",        "It is", "--model",        model, "--seed",
                       "3",      "--temperature", "0",     "--top-logprobs", "2"};
  const nlohmann::json drawn = run(sample, true);
  for (const char* same : {"tokens", "text", "top_ids"}) {
    EXPECT_EQ(drawn[same], run(sample, false)[same]) << same;
  }

  std::vector<std::string> unknown = score;
  unknown.insert(unknown.end(), {"--head", "nobody"});
  const Ran refused = Logitctl(unknown);
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("NOT_FOUND"), HasSubstr("demo")));
}

TEST_F(ScoreTest, LogitctlSamplesFromAFileOfHiddenStates) {
  const std::string states = dir_.Write("states.npy", NpyF32(2, 2, {2, 1, -1, -1}));
  std::vector<std::string> args = {"sample", "--hidden",      states, "--head",
                                   "tiny",   "--temperature", "0"};
  const nlohmann::json read = Json(args);
  EXPECT_EQ(read["tokens"], nlohmann::json({0, 2}));
  EXPECT_NEAR(read["logsumexp"][0].get<double>(),
              std::log(std::exp(2.0) + std::exp(1.0) + std::exp(-3.0)), 1e-5);
  args.insert(args.end(), {"--allow", "1"});  // one of the head's three tokens
  EXPECT_EQ(Json(args)["tokens"], nlohmann::json({1, 1}));

  struct Case {
    std::vector<std::string> more;
    int code;
    const char* error;
  };
  const Case cases[] = {
      {{"--head", "tiny", "--allow", "3"}, 2, "--allow: got token 3, allowed 0..2"},
      {{}, 2, "--head is missing; with --hidden it names a head"},
      {{"--head", "nobody"}, 1, "NOT_FOUND"},
      {{"--head", "demo"}, 1, "INVALID_ARGUMENT: dtype: got f32, allowed bf16"},
      {{"--head", "tiny", "--text", "x"}, 2, "--hidden"},
  };
  for (const Case& test : cases) {
    args = {"sample", "--hidden", states};
    args.insert(args.end(), test.more.begin(), test.more.end());
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, test.code) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
  }
}

TEST_F(ScoreTest, ALongSequenceOfHiddenStatesIsOneOfTheHead) {
  // 3000 states of 144 zeros: their logits are the head's bias, whatever the row.
  const std::string states(size_t{3000} * 144 * 2, '\0');
  client::ScoreRequest request = {.dtype = v1::DTYPE_BF16,
                                  .rows = 3000,
                                  .head = "demo",
                                  .hidden_size = 144,
                                  .hidden = {states}};
  for (int row = 0; row < 3000; ++row) request.params.add_targets(281);
  const auto result = ConnectWith(200000)->ScoreStream(request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->messages, 5);
  EXPECT_THAT(result->answer.losses(), ::testing::Each(result->answer.losses(0)));
  EXPECT_NEAR(result->answer.totals().loss_mean(), result->answer.losses(0), 1e-9);
}

TEST(ScoreUsageTest, BadUsageIs2AndSaysWhy) {
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 3, 4, 5}));
  const std::string ids = dir.Write("t.npy", Ids({1, 2}));
  const std::string model = testing::TinyModel().Write(dir);
  struct Case {
    std::vector<std::string> args;
    const char* error;
  };
  const Case cases[] = {
      {{"score"}, "Exactly 1 option from [--logits,--hidden,--text,--text-file] is required"},
      {{"score", "--logits", npy}, "--targets is missing"},
      {{"score", "--hidden", npy, "--targets", ids}, "--head is missing"},
      {{"score", "--logits", npy, "--targets", ids, "--head", "h"}, "--head next to --logits"},
      {{"score", "--text", "x", "--targets", ids}, "--targets next to a text"},
      {{"score", "--logits", npy, "--targets", npy}, "dtype '<f4'; allowed: <i4, <i8"},
      {{"score", "--logits", ids, "--targets", ids}, "dtype '<i8'; allowed: <f4, <f2"},
      {{"score", "--logits", npy, "--targets", dir.Write("s.npy", Ids({1}))},
       "s.npy: got 1 values, allowed 2 (rows)"},
      {{"score", "--logits", npy, "--targets", dir.Write("w.npy", Ids({1, int64_t{1} << 40}))},
       "w.npy: got 1099511627776 at row 1, allowed numbers of 32 bits"},
      {{"score", "--text-file", dir.path("none")}, "none cannot be read, or is empty"},
      {{"score", "--text-file", dir.path("")}, "cannot be read, or is empty"},
      {{"score", "--text-file", dir.Write("long.txt", std::string(1100000, 'x')), "--model", model},
       "text: got 1100000 tokens, allowed 1..1036430, because all their logits are kept"},
      {{"score", "--logits", npy, "--targets", ids, "--smoothing", "x"}, "--smoothing"},
      {{"score", "--logits", npy, "--targets", ids, "--out", "x.txt"}, "x.txt"},
      {{"topk", "--logits", npy, "--head", "h"}, "--logits"},
      {{"sample", "--logits", npy, "--head", "h"}, "--logits"},
  };
  for (const Case& test : cases) {
    const Ran ran = RunBinary("logitctl", test.args);
    EXPECT_EQ(ran.code, 2) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
    EXPECT_THAT(ran.out, IsEmpty());
  }
}

}  // namespace
}  // namespace logitd
