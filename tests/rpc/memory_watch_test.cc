#include "server/memory_watch.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "tests/manual_clock.h"

namespace logitd {
namespace {

// A process whose memory is a number. Limit 100, margin 10.
class MemoryWatchTest : public ::testing::Test {
 protected:
  MemoryWatchOptions Options() {
    return {.base = 40,
            .allowed_growth = [] { return int64_t{60}; },
            .held = [this] { return held_; },
            .shed = [this](bool shed) { shedding_ = shed; },
            .saw = [this](int64_t resident) { saw_ = resident; },
            .margin = 10,
            .spare = 20,
            .clock = &clock_,
            .resident = [this] { return resident_; },
            .give_back =
                [this] {
                  ++given_back_;
                  resident_ -= std::exchange(unused_, 0);
                }};
  }
  void ALookPasses() { clock_.Advance(MemoryWatchOptions().period); }

  ManualClock clock_;
  int64_t resident_ = 40;
  int64_t unused_ = 0;
  int64_t held_ = 0;
  int64_t saw_ = 0;
  int given_back_ = 0;
  bool shedding_ = false;
};

TEST_F(MemoryWatchTest, BelowTheLimitItOnlyLooks) {
  resident_ = 90;
  held_ = 50;
  const MemoryWatch watch(Options());
  EXPECT_EQ(watch.limit(), 100);
  for (int i = 0; i < 200; ++i) ALookPasses();
  EXPECT_EQ(saw_, 90);
  EXPECT_FALSE(shedding_);
  EXPECT_EQ(given_back_, 0);
}

TEST_F(MemoryWatchTest, UnusedMemoryGoesBeforeConnectionsAreRefused) {
  const MemoryWatch watch(Options());
  held_ = 50;
  unused_ = 30;
  resident_ = 95;
  ALookPasses();
  EXPECT_EQ(resident_, 65);
  EXPECT_FALSE(shedding_);
}

TEST_F(MemoryWatchTest, AboveTheLimitItShedsUntilMemoryIsWellBelow) {
  const MemoryWatch watch(Options());
  resident_ = 95;
  ALookPasses();
  EXPECT_TRUE(shedding_);
  EXPECT_GT(given_back_, 0) << "it first gives unused memory back";
  resident_ = 85;  // below, but not by the margin
  ALookPasses();
  EXPECT_EQ(saw_, 85);
  EXPECT_TRUE(shedding_);
  resident_ = 60;
  ALookPasses();
  EXPECT_FALSE(shedding_);
}

TEST_F(MemoryWatchTest, MemoryThatStaysUnusedIsGivenBack) {
  const MemoryWatch watch(Options());
  held_ = 10;
  unused_ = 5;
  resident_ = 75;  // 40 + 10 + 20 are in use or spare
  ALookPasses();
  clock_.Advance(absl::Milliseconds(4999));
  EXPECT_EQ(given_back_, 0);
  clock_.Advance(absl::Milliseconds(50));
  EXPECT_EQ(given_back_, 1);
}

TEST(ResidentBytesTest, AreThoseOfTheProcess) {
  const int64_t before = ResidentBytes();
  EXPECT_GT(before, 1 << 20);
  const std::vector<char> touched(64 << 20, 'x');
  EXPECT_GT(ResidentBytes() - before, 60 << 20);
}

// A lease's memory, which has a limit of its own.
TEST(ResidentBytesTest, AreNotThoseOfSharedMemory) {
  constexpr size_t kBytes = 64 << 20;
  void* const shared =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  const int64_t before = ResidentBytes();
  std::memset(shared, 1, kBytes);
  EXPECT_LT(ResidentBytes() - before, 16 << 20);
  munmap(shared, kBytes);
}

}  // namespace
}  // namespace logitd
