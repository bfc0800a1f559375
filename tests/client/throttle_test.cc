#include "client/transport/throttle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace logitd::client {
namespace {

using ::testing::HasSubstr;

class ThrottleTest : public ::testing::Test {
 protected:
  // `calls` calls in `seconds`, to a server that takes every `of`th of those that are sent. Returns
  // how many were sent.
  int Run(int calls, double seconds, int of) {
    int sent = 0;
    for (int i = 0; i < calls; ++i) {
      now_ += absl::Seconds(seconds / calls);
      if (!throttle_.Ask(now_).ok()) continue;
      End(++sent % of == 0 ? absl::OkStatus() : absl::ResourceExhaustedError("full"));
    }
    return sent;
  }
  void End(const absl::Status& status) {
    throttle_.Ended(status, status.ok() ? std::nullopt : std::optional<int64_t>(7), now_);
  }

  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  Throttle throttle_;
};

TEST_F(ThrottleTest, SendsEverythingWhileMostIsTaken) {
  EXPECT_EQ(Run(1000, 1, 1), 1000);
  for (int i = 0; i < 999; ++i) {  // a third is refused: 1.5 are sent for each that is taken
    now_ += absl::Milliseconds(1);
    ASSERT_TRUE(throttle_.Ask(now_).ok());
    End(i % 3 == 2 ? absl::ResourceExhaustedError("full") : absl::OkStatus());
  }
}

TEST_F(ThrottleTest, FewRefusalsKeepNothingBack) {
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(throttle_.Ask(now_).ok());
    End(absl::ResourceExhaustedError("full"));
  }
  EXPECT_TRUE(throttle_.Ask(now_).ok());
}

// A server that takes 1000 calls a second, of 5000: about 1500 are sent.
TEST_F(ThrottleTest, SendsHalfAsMuchAgainAsTheServerTakes) {
  int sent = 0, taken = 0;
  double room = 0;
  for (int i = 0; i < 50000; ++i) {
    now_ += absl::Microseconds(200);
    room = std::min(room + 0.2, 10.0);
    if (!throttle_.Ask(now_).ok()) continue;
    sent += i >= 10000;
    if (room >= 1) {
      room -= 1;
      taken += i >= 10000;
      End(absl::OkStatus());
    } else {
      End(absl::ResourceExhaustedError("full"));
    }
  }
  EXPECT_NEAR(taken, 8000, 300);
  EXPECT_NEAR(sent, 12000, 1200);
}

TEST_F(ThrottleTest, AServerThatTakesCallsAgainGetsThemSoon) {
  Run(5000, 2, 1000000);
  EXPECT_LT(Run(1000, 0.2, 1000000), 200) << "nothing was taken for two seconds";
  now_ += absl::Seconds(10);
  EXPECT_EQ(Run(100, 1, 1), 100);
}

TEST_F(ThrottleTest, SaysHowManyWereRefusedAndTheLastDelay) {
  Run(5000, 0.5, 1000000);
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = throttle_.Ask(now_);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(status.message(), HasSubstr("not sent: of the last "));
  EXPECT_THAT(status.message(), HasSubstr("the server took 0, and about 1.5 are sent"));
  EXPECT_EQ(throttle_.pushback_ms(), 7);
}

TEST_F(ThrottleTest, OtherErrorsKeepNothingBack) {
  for (int i = 0; i < 1000; ++i) {
    throttle_.Ended(absl::DeadlineExceededError(""), std::nullopt, now_);
    throttle_.Ended(absl::UnavailableError(""), 5, now_);
    throttle_.Ended(absl::InvalidArgumentError(""), std::nullopt, now_);
    throttle_.Ended(absl::ResourceExhaustedError("send less at once"), std::nullopt, now_);
    ASSERT_TRUE(throttle_.Ask(now_).ok());
  }
}

}  // namespace
}  // namespace logitd::client
