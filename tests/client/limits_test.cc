// One client and a server that is started anew with other limits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "tests/client/running_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::testing::Daemon;
using ::logitd::testing::LogitdFlags;
using ::logitd::testing::TempDir;
using ::logitd::testing::TopKParams;
using ::logitd::testing::ViewOf;
using ::logitd::testing::WaitUntilServing;
using ::testing::HasSubstr;
using ::testing::Not;

class LimitsTest : public ::testing::Test {
 protected:
  // Ends the one before.
  void Serve(const std::string& max_request, int max_rows) {
    server_.reset();
    server_.emplace("logitd", LogitdFlags(address_, {"--max-request-bytes", max_request,
                                                     "--max-batch-rows", absl::StrCat(max_rows)}));
    ASSERT_TRUE(WaitUntilServing(*client_));
  }

  TempDir dir_;
  const std::string address_ = "unix:" + dir_.path("socket");
  const std::unique_ptr<client::Client> client_ =
      *client::Client::Create({.address = address_, .deadline = absl::Seconds(20)});
  std::optional<Daemon> server_;
};

std::vector<float> Logits(int64_t size) {
  std::vector<float> logits(static_cast<size_t>(size));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 37 % 101) / 10;
  return logits;
}

client::ScoreRequest ScoreOf(int64_t rows, int64_t vocab, absl::string_view logits) {
  client::ScoreRequest request = {.rows = rows, .vocab = vocab, .logits = {logits}};
  for (int row = 0; row < rows; ++row) request.params.add_targets(0);
  return request;
}

std::vector<float> LossesOf(const client::ScoreResult& result) {
  return {result.answer.losses().begin(), result.answer.losses().end()};
}

TEST_F(LimitsTest, SmallerOnesAreAskedForWhenAMessageIsRefused) {
  const std::vector<float> logits = Logits(1000 * 100);
  const client::ScoreRequest score = ScoreOf(1000, 100, ViewOf(logits));
  const client::AttentionSoftmaxRequest attention = {.shape = {.queries = 1000, .keys = 100},
                                                     .scores = ViewOf(logits)};
  Serve("1MiB", 65536);
  const auto losses = client_->ScoreStream(score);
  ASSERT_TRUE(losses.ok()) << losses.status();
  EXPECT_EQ(losses->messages, 1);
  const auto probs = client_->AttentionSoftmax(attention);
  ASSERT_TRUE(probs.ok()) << probs.status();
  EXPECT_EQ(probs->messages, 1);

  // With 65536 rows the server reads the message before it refuses it, with 100 its transport does.
  for (const int max_rows : {65536, 100}) {
    Serve("100KiB", max_rows);
    const auto more_losses = client_->ScoreStream(score);
    ASSERT_TRUE(more_losses.ok()) << more_losses.status();
    EXPECT_GE(more_losses->messages, 4);
    EXPECT_EQ(LossesOf(*more_losses), LossesOf(*losses));
    Serve("1MiB", 65536);
    ASSERT_TRUE(client_->ScoreStream(score).ok());
    Serve("100KiB", max_rows);
    const auto more_probs = client_->AttentionSoftmax(attention);
    ASSERT_TRUE(more_probs.ok()) << more_probs.status();
    EXPECT_GE(more_probs->messages, 4);
    EXPECT_EQ(more_probs->values, probs->values);
    Serve("1MiB", 65536);
    ASSERT_TRUE(client_->AttentionSoftmax(attention).ok());
  }
}

// The client states the size of its message, so the server refuses it on the headers.
TEST_F(LimitsTest, AMessageTooLargeForTheServerIsNotSentAgain) {
  const std::vector<float> logits = Logits(1000 * 100);
  Serve("100KiB", 100);
  const absl::Status refused =
      client_
          ->TopK(
              {.rows = 1000, .vocab = 100, .logits = {ViewOf(logits)}, .params = TopKParams({1})})
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("logitd-payload-bytes: got \"40"));
  EXPECT_THAT(std::string(refused.message()), Not(HasSubstr("attempts"))) << "tried again";
}

TEST_F(LimitsTest, LargerOnesAreAskedForWhenARowDoesNotFit) {
  const std::vector<float> logits = Logits(2 * 50000);
  const client::ScoreRequest score = ScoreOf(2, 50000, ViewOf(logits));
  const client::AttentionSoftmaxRequest attention = {.shape = {.queries = 2, .keys = 50000},
                                                     .scores = ViewOf(logits)};
  Serve("100KiB", 65536);
  const absl::Status refused = client_->ScoreStream(score).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_request_bytes 102400"));
  Serve("1MiB", 65536);
  EXPECT_TRUE(client_->ScoreStream(score).ok());

  Serve("100KiB", 65536);
  EXPECT_EQ(client_->AttentionSoftmax(attention).status().code(),
            absl::StatusCode::kInvalidArgument);
  Serve("1MiB", 65536);
  EXPECT_TRUE(client_->AttentionSoftmax(attention).ok());
}

TEST_F(LimitsTest, AStreamGoesOnUnderThoseOfTheServerThatComesBack) {
  const std::vector<float> logits = Logits(2000 * 200);
  const client::ScoreRequest score = ScoreOf(2000, 200, ViewOf(logits));
  Serve("512KiB", 65536);
  const auto whole = client_->ScoreStream(score);
  ASSERT_TRUE(whole.ok()) << whole.status();
  std::vector<int64_t> rows;
  const auto losses = client_->ScoreStream(score, [&](const client::ScoreProgress& progress) {
    rows.push_back(progress.rows);
    if (rows.size() == 1) Serve("100KiB", 65536);
    return true;
  });
  ASSERT_TRUE(losses.ok()) << losses.status();
  EXPECT_EQ(LossesOf(*losses), LossesOf(*whole));
  ASSERT_GE(rows.size(), 2u);
  EXPECT_EQ(rows[0], 655);
  for (size_t i = 1; i < rows.size(); ++i) EXPECT_GT(rows[i], rows[i - 1]) << "scored again";
}

}  // namespace
}  // namespace logitd
