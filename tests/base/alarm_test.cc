#include "server/base/alarm.h"

#include <atomic>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/manual_clock.h"

namespace logitd {
namespace {

class AlarmTest : public testing::Test {
 protected:
  absl::Time In(int seconds) const { return start_ + absl::Seconds(seconds); }
  void AdvanceTo(int seconds) { clock_.Advance(In(seconds) - clock_.Now()); }

  ManualClock clock_;
  const absl::Time start_ = clock_.Now();
  std::vector<absl::Time> runs_;
  absl::Time next_ = absl::InfiniteFuture();
};

TEST_F(AlarmTest, RunsInsideAdvanceWhenDueAndNotBefore) {
  Alarm alarm(clock_, [this](absl::Time now) {
    runs_.push_back(now);
    return next_;
  });
  alarm.RunBy(In(10));
  AdvanceTo(9);
  EXPECT_TRUE(runs_.empty());
  AdvanceTo(10);
  EXPECT_EQ(runs_, std::vector{In(10)});
  AdvanceTo(100);
  EXPECT_EQ(runs_.size(), 1u);
}

TEST_F(AlarmTest, TheEarliestTimeCounts) {
  Alarm alarm(clock_, [this](absl::Time now) {
    runs_.push_back(now);
    return next_;
  });
  alarm.RunBy(In(10));
  alarm.RunBy(In(5));
  alarm.RunBy(In(20));
  AdvanceTo(6);
  EXPECT_EQ(runs_, std::vector{In(6)});
  AdvanceTo(30);  // the run at 6 saw all that was to do by then
  EXPECT_EQ(runs_.size(), 1u);
}

TEST_F(AlarmTest, RunsAgainWhenItsRunSays) {
  Alarm alarm(clock_, [this](absl::Time now) {
    runs_.push_back(now);
    return runs_.size() < 3 ? now + absl::Seconds(1) : absl::InfiniteFuture();
  });
  alarm.RunBy(In(1));
  for (int second = 1; second < 10; ++second) AdvanceTo(second);
  EXPECT_EQ(runs_, (std::vector{In(1), In(2), In(3)}));
}

TEST_F(AlarmTest, MayBeSetInsideItsRun) {
  Alarm* self = nullptr;
  Alarm alarm(clock_, [&](absl::Time now) {
    runs_.push_back(now);
    if (runs_.size() == 1) self->RunBy(now);
    return absl::InfiniteFuture();
  });
  self = &alarm;
  alarm.RunBy(In(1));
  AdvanceTo(1);
  EXPECT_EQ(runs_.size(), 2u);
}

TEST(SteadyAlarmTest, RunsOnItsOwnThread) {
  absl::Notification ran;
  Alarm alarm(SteadyClock(), [&](absl::Time) {
    ran.Notify();
    return absl::InfiniteFuture();
  });
  alarm.RunBy(absl::InfinitePast());
  ran.WaitForNotification();
}

TEST(SteadyAlarmTest, DoesNotRunAfterItsEnd) {
  std::atomic<int> runs = 0;
  {
    Alarm alarm(SteadyClock(), [&](absl::Time now) {
      ++runs;
      return now + absl::Hours(1);
    });
    alarm.RunBy(SteadyNow() + absl::Hours(1));
  }
  EXPECT_EQ(runs, 0);
}

}  // namespace
}  // namespace logitd
