// How much time devices may spend on pinning memory.
#include "server/arena/pin_budget.h"

#include <gtest/gtest.h>

namespace logitd::arena {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

TEST(PinBudgetTest, ASecondAtOnceAndThenAFifthOfTheTime) {
  PinBudget budget(kStart);
  int pinned = 0;
  absl::Duration busy;
  absl::Time now = kStart;
  for (; now < kStart + absl::Seconds(100); now += absl::Milliseconds(1)) {  // without pause
    if (!budget.Allows(now)) continue;
    now += absl::Milliseconds(300);
    budget.Spend(absl::Milliseconds(300), now);
    busy += absl::Milliseconds(300);
    ++pinned;
    if (now < kStart + absl::Seconds(1)) {
      EXPECT_TRUE(budget.Allows(now)) << "the first second";
    }
  }
  EXPECT_GE(busy, absl::Seconds(20));
  EXPECT_LE(busy, absl::Seconds(21.5));
}

TEST(PinBudgetTest, AQuietTimeGivesNoMoreThanASecond) {
  PinBudget budget(kStart);
  absl::Time now = kStart + absl::Hours(1);
  budget.Spend(absl::Seconds(0.9), now);
  EXPECT_TRUE(budget.Allows(now));
  budget.Spend(absl::Seconds(0.1), now);
  EXPECT_FALSE(budget.Allows(now));
  EXPECT_TRUE(budget.Allows(now + absl::Milliseconds(1)));
  EXPECT_TRUE(budget.Allows(now)) << "a clock that goes back takes nothing";
}

TEST(PinBudgetTest, WhatWasTooMuchIsPaidBack) {
  PinBudget budget(kStart);
  budget.Spend(absl::Seconds(3), kStart);
  EXPECT_FALSE(budget.Allows(kStart + absl::Seconds(9.9)));
  EXPECT_TRUE(budget.Allows(kStart + absl::Seconds(10.1)));
}

}  // namespace
}  // namespace logitd::arena
