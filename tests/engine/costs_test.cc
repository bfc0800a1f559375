// Estimates of a slice's time from earlier slices.
#include "server/engine/costs.h"

#include <gtest/gtest.h>

#include "server/engine/op.h"

namespace logitd::engine {
namespace {

constexpr OpTraits kTraits = {.name = "shift"};

class CostsOfSlicesTest : public ::testing::Test {
 protected:
  double Ran(int64_t rows, absl::Duration time) { return costs_.Ran(key_, rows, rows * 100, time); }

  Costs costs_;
  const BatchKey key_ = {.op = &kTraits, .row_elements = 50};
};

TEST_F(CostsOfSlicesTest, AKindThatDidNotRunCostsNothing) { EXPECT_EQ(costs_.PerRow(key_), 0); }

TEST_F(CostsOfSlicesTest, ARowCostsItsShareOfTheLastSlices) {
  EXPECT_EQ(Ran(4, absl::Microseconds(8)), 2000);
  for (int i = 0; i < 100; ++i) Ran(4, absl::Microseconds(12));
  EXPECT_NEAR(costs_.PerRow(key_), 3000, 1);
}

// A thread that lost its core for 100 ms beside slices of 20 us.
TEST_F(CostsOfSlicesTest, SlicesThatStoodStillDoNotMakeTheirKindLong) {
  for (int i = 0; i < 10; ++i) Ran(1, absl::Microseconds(20));
  for (int i = 0; i < 3; ++i) Ran(1, absl::Milliseconds(100));
  EXPECT_LT(costs_.PerRow(key_), 1e6);
  EXPECT_LT(costs_.OfCall(*key_.op, 100), absl::Milliseconds(1));
}

TEST_F(CostsOfSlicesTest, AKindThatBecameSlowIsKnownAfterAFewSlices) {
  for (int i = 0; i < 10; ++i) Ran(1, absl::Microseconds(20));
  for (int i = 0; i < 10; ++i) Ran(1, absl::Milliseconds(2));
  EXPECT_GT(costs_.PerRow(key_), 1e6);
}

}  // namespace
}  // namespace logitd::engine
