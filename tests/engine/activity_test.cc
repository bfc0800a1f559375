#include "server/engine/activity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr OpTraits kFirst = {.name = "first"};
constexpr OpTraits kSecondOp = {.name = "second"};
constexpr const OpTraits* kOps[] = {&kFirst, &kSecondOp};

TEST(ActivityTest, AStreamThatAlwaysWorksIsBusyAndItsRowsAreARate) {
  Activity activity(/*streams=*/2, kOps);
  int64_t now = kSecond;
  for (int i = 0; i < 1000; ++i) {  // ten seconds
    activity.Begin(0, &kSecondOp, now);
    now += kSecond / 100;
    activity.End(0, 30, now);
  }
  const Activity::View view = activity.Read(now);
  EXPECT_NEAR(view.busy, 0.5, 1e-3);  // one stream of two
  ASSERT_EQ(view.ops.size(), 2u);
  EXPECT_EQ(view.ops[0].op, "first");
  EXPECT_EQ(view.ops[0].busy, 0);
  EXPECT_EQ(view.ops[0].rows_per_s, 0);
  EXPECT_EQ(view.ops[1].op, "second");
  EXPECT_NEAR(view.ops[1].busy, 0.5, 1e-3);
  EXPECT_NEAR(view.ops[1].rows_per_s, 3000, 3000 * 0.01);  // half a slice of 10 ms
}

TEST(ActivityTest, AVariantOfAnOpCountsAsTheOpOfItsName) {
  static constexpr OpTraits kVariant = {.name = "second", .rows_apart = true};
  Activity activity(/*streams=*/1, kOps);
  activity.Begin(0, &kVariant, kSecond);
  activity.End(0, 7, 2 * kSecond);
  const Activity::View view = activity.Read(2 * kSecond);
  EXPECT_EQ(view.ops[0].rows_per_s, 0);
  EXPECT_NEAR(view.ops[1].rows_per_s, 7, 1e-9);
}

TEST(ActivityTest, ASliceMayCountAsSeveralStreams) {
  Activity activity(/*streams=*/4, kOps);
  activity.Begin(0, &kFirst, kSecond, /*as_many=*/3);
  EXPECT_NEAR(activity.Read(100 * kSecond).busy, 0.75, 1e-9);
  activity.End(0, 5, 100 * kSecond);
  EXPECT_NEAR(activity.Read(100 * kSecond).busy, 0.75, 1e-9);
  activity.Begin(1, &kFirst, 100 * kSecond);  // counts as itself again
  activity.Begin(0, &kSecondOp, 100 * kSecond);
  EXPECT_NEAR(activity.Read(200 * kSecond).busy, 0.5, 1e-9);
  activity.Begin(2, &kFirst, 200 * kSecond, /*as_many=*/4);
  EXPECT_EQ(activity.Read(300 * kSecond).busy, 1);  // with others beside it
}

TEST(ActivityTest, ThePastFadesByESecond) {
  Activity activity(/*streams=*/1, kOps);
  activity.Begin(0, &kFirst, kSecond);
  activity.End(0, 1, 100 * kSecond);
  EXPECT_NEAR(activity.Read(100 * kSecond).busy, 1, 1e-9);
  EXPECT_NEAR(activity.Read(101 * kSecond).busy, std::exp(-1), 1e-9);
  EXPECT_NEAR(activity.Read(103 * kSecond).busy, std::exp(-3), 1e-9);
}

TEST(ActivityTest, ASliceThatStillRunsCounts) {
  Activity activity(/*streams=*/1, kOps);
  activity.Begin(0, &kFirst, 5 * kSecond);
  EXPECT_NEAR(activity.Read(6 * kSecond).busy, 1 - std::exp(-1), 1e-9);
}

TEST(ActivityTest, ItIsStalledWhileNoStreamEndsASlice) {
  Activity activity(/*streams=*/2, kOps);
  EXPECT_EQ(activity.Stalled(kSecond), absl::ZeroDuration());
  activity.Begin(0, &kFirst, kSecond);
  EXPECT_EQ(activity.Stalled(9 * kSecond), absl::ZeroDuration());  // the other stream is free
  activity.Begin(1, &kFirst, 4 * kSecond);
  EXPECT_EQ(activity.Stalled(9 * kSecond), absl::Seconds(5));
  activity.End(0, 1, 9 * kSecond);
  EXPECT_EQ(activity.Stalled(20 * kSecond), absl::ZeroDuration());
}

TEST(ActivityTest, AStreamThatIsOutIsNeitherIdleNorStalled) {
  Activity activity(2, kTestOps);
  activity.Begin(0, &kDigest, kSecond);
  activity.Begin(1, &kDigest, kSecond);
  EXPECT_EQ(activity.Stalled(3 * kSecond), absl::Seconds(2));
  activity.End(1, 1, 10 * kSecond);
  EXPECT_EQ(activity.Stalled(11 * kSecond), absl::ZeroDuration());
  EXPECT_LT(activity.Read(20 * kSecond).busy, 0.6);
  activity.Remove(1);
  EXPECT_EQ(activity.Stalled(20 * kSecond), absl::Seconds(19));
  EXPECT_GT(activity.Read(20 * kSecond).busy, 0.99);
  activity.Remove(0);
  EXPECT_EQ(activity.Stalled(20 * kSecond), absl::ZeroDuration());
}

}  // namespace
}  // namespace logitd::engine
