#include <gtest/gtest.h>

#include <memory>

#include "absl/time/time.h"
#include "server/rpc/transport/call_tracker.h"

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
  tracker.Drain();
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
  tracker.Drain();
  EXPECT_EQ(memory.drains, 1);
}

}  // namespace
}  // namespace logitd::rpc
