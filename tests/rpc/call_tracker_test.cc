#include "server/rpc/transport/call_tracker.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace logitd::rpc {
namespace {

TEST(CallTrackerTest, CallsOfRingsAreAliveUntilTheyAreRemoved) {
  CallTracker tracker(absl::Seconds(30), absl::Milliseconds(50), /*loops=*/2);
  tracker.Add();
  tracker.Add();
  tracker.Remove();
  EXPECT_EQ(tracker.alive(), 1);
}

TEST(CallTrackerTest, AMessageThatIsLateInADrainIsUnavailable) {
  CallTracker tracker(absl::Seconds(30), absl::Milliseconds(50), /*loops=*/1);
  EXPECT_EQ(tracker.message_timeout(), absl::Seconds(30));
  EXPECT_EQ(tracker.LateStatus().code(), absl::StatusCode::kDeadlineExceeded);
  tracker.BeginDrain(absl::Milliseconds(300));
  EXPECT_EQ(tracker.message_timeout(), absl::Milliseconds(300));
  EXPECT_EQ(tracker.LateStatus(),
            absl::UnavailableError(
                "the server is draining and did not receive the message within 300ms"));
}

// One tracker is that of --receive-timeout inf; the other has a timeout shorter than the drain's.
TEST(CallTrackerTest, ADrainOnlyShortensTheTimeForAMessage) {
  CallTracker endless(absl::InfiniteDuration(), absl::Milliseconds(50), /*loops=*/1);
  EXPECT_EQ(endless.message_timeout(), absl::InfiniteDuration());
  endless.BeginDrain(absl::Seconds(1));
  EXPECT_EQ(endless.message_timeout(), absl::Seconds(1));
  CallTracker brief(absl::Milliseconds(20), absl::Milliseconds(50), /*loops=*/1);
  brief.BeginDrain(absl::Seconds(1));
  EXPECT_EQ(brief.message_timeout(), absl::Milliseconds(20));
}

}  // namespace
}  // namespace logitd::rpc
