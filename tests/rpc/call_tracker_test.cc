#include <gtest/gtest.h>

#include <memory>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/watchdog.h"

namespace logitd::rpc {
namespace {

class CountedCall final : public DrainedCall {
 public:
  void OnDrain() override { ++drains; }
  int drains = 0;
};

TEST(CallTrackerTest, ADrainReachesCallsBetweenAddAndRemove) {
  CallTracker tracker(absl::Seconds(30), absl::Milliseconds(50));
  const auto over = std::make_shared<CountedCall>();
  const auto alive = std::make_shared<CountedCall>();
  const auto late = std::make_shared<CountedCall>();
  tracker.Add(over);
  tracker.Add(alive);
  EXPECT_EQ(tracker.alive(), 2);
  tracker.Remove(over);
  tracker.Drain(absl::Seconds(1));
  tracker.Add(late);
  EXPECT_EQ(tracker.alive(), 2);
  EXPECT_EQ(over->drains, 0);
  EXPECT_EQ(alive->drains, 1);
  EXPECT_EQ(late->drains, 1);
}

TEST(CallTrackerTest, ADrainReachesACallAtTheAddressOfAnEndedCall) {
  CallTracker tracker(absl::Seconds(30), absl::Milliseconds(50));
  CountedCall memory;
  const auto made_there = [&memory] {
    return std::shared_ptr<DrainedCall>(&memory, [](DrainedCall*) {});
  };
  std::shared_ptr<DrainedCall> first = made_there();
  const std::weak_ptr<DrainedCall> gone = first;
  tracker.Add(first);
  first.reset();
  const std::shared_ptr<DrainedCall> second = made_there();
  tracker.Add(second);
  tracker.Remove(gone);
  EXPECT_EQ(tracker.alive(), 1);
  tracker.Drain(absl::Seconds(1));
  EXPECT_EQ(memory.drains, 1);
}

// Without an end of its own, as with --receive-timeout inf.
TEST(WatchdogTest, HurryBoundsWhatIsUnderWayAndWhatComes) {
  Watchdog watchdog(absl::InfiniteDuration());
  Watchdog::Entry before, after, over;
  absl::Notification before_late, after_late;
  bool over_late = false;
  watchdog.Watch(&before, [&] { before_late.Notify(); });
  watchdog.Watch(&over, [&] { over_late = true; });
  EXPECT_FALSE(before_late.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  watchdog.Unwatch(&over);
  watchdog.Hurry(absl::Milliseconds(20));
  EXPECT_TRUE(before_late.WaitForNotificationWithTimeout(absl::Seconds(5)));
  watchdog.Watch(&after, [&] { after_late.Notify(); });
  EXPECT_TRUE(after_late.WaitForNotificationWithTimeout(absl::Seconds(5)));
  watchdog.Hurry(absl::Hours(1));
  EXPECT_EQ(watchdog.timeout(), absl::Milliseconds(20));
  EXPECT_FALSE(over_late);
}

TEST(CallTrackerTest, AMessageThatIsLateInADrainIsUnavailable) {
  CallTracker tracker(absl::Seconds(30), absl::Milliseconds(50));
  EXPECT_EQ(tracker.MessageLateError().code(), absl::StatusCode::kDeadlineExceeded);
  tracker.Drain(absl::Milliseconds(300));
  EXPECT_EQ(tracker.MessageLateError(),
            absl::UnavailableError(
                "the server is draining and did not receive the message within 300ms"));
}

}  // namespace
}  // namespace logitd::rpc
