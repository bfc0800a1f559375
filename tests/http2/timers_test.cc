#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/http2/loop.h"

namespace logitd::http2 {
namespace {

constexpr int64_t kMs = 1'000'000;

// Times that fired, in milliseconds, by a clock that the test sets.
class TimersTest : public ::testing::Test {
 protected:
  std::unique_ptr<Timer> Make(char name) {
    return std::make_unique<Timer>([this, name] { fired_ += name; });
  }

  Timers timers_{1000 * kMs};
  std::string fired_;
};

TEST_F(TimersTest, FireOnceAndNeverEarly) {
  const auto a = Make('a');
  timers_.Set(a.get(), 1005 * kMs + 1);
  EXPECT_TRUE(a->set());
  timers_.Advance(1005 * kMs);
  timers_.Advance(1005 * kMs + 999'999);
  EXPECT_EQ(fired_, "");
  timers_.Advance(1006 * kMs);
  EXPECT_EQ(fired_, "a");
  EXPECT_FALSE(a->set());
  timers_.Advance(9000 * kMs);
  EXPECT_EQ(fired_, "a");
}

TEST_F(TimersTest, ATimeThatIsPastFiresInTheNextMillisecond) {
  const auto a = Make('a');
  timers_.Set(a.get(), 3 * kMs);
  timers_.Advance(1001 * kMs);
  EXPECT_EQ(fired_, "a");
}

TEST_F(TimersTest, TheWaitIsUntilTheNextOneIsDue) {
  EXPECT_EQ(timers_.WaitMs(1000 * kMs), -1);
  const auto a = Make('a'), b = Make('b');
  timers_.Set(a.get(), 1050 * kMs);
  timers_.Set(b.get(), 1010 * kMs);
  EXPECT_EQ(timers_.WaitMs(1000 * kMs), 11);
  EXPECT_EQ(timers_.WaitMs(1010 * kMs + 1), 1);
  EXPECT_EQ(timers_.WaitMs(1100 * kMs), 0);
  timers_.Advance(1011 * kMs);
  EXPECT_EQ(fired_, "b");
  EXPECT_EQ(timers_.WaitMs(1011 * kMs), 40);
}

TEST_F(TimersTest, ANewTimeReplacesTheOldAndCancelForgetsIt) {
  const auto a = Make('a'), b = Make('b');
  timers_.Set(a.get(), 1010 * kMs);
  timers_.Set(a.get(), 1100 * kMs);
  timers_.Set(b.get(), 1010 * kMs);
  b->Cancel();
  b->Cancel();
  timers_.Advance(1050 * kMs);
  EXPECT_EQ(fired_, "");
  timers_.Set(a.get(), 1060 * kMs);
  timers_.Advance(1061 * kMs);
  EXPECT_EQ(fired_, "a");
}

// 4096 slots of a millisecond: a timer of a later round shares its slot with earlier ones.
TEST_F(TimersTest, LaterRoundsOfTheSameSlotWait) {
  const auto a = Make('a'), b = Make('b'), c = Make('c');
  timers_.Set(a.get(), 1010 * kMs);
  timers_.Set(b.get(), (1010 + 4096) * kMs);
  timers_.Set(c.get(), (1010 + 3 * 4096) * kMs);
  timers_.Advance(1011 * kMs);
  EXPECT_EQ(fired_, "a");
  timers_.Advance((1010 + 4096) * kMs);
  EXPECT_EQ(fired_, "a");
  timers_.Advance((1011 + 4096) * kMs);
  EXPECT_EQ(fired_, "ab");
  timers_.Advance((1010 + 3 * 4096) * kMs);
  EXPECT_EQ(fired_, "ab");
  timers_.Advance((1011 + 3 * 4096) * kMs);
  EXPECT_EQ(fired_, "abc");
}

TEST_F(TimersTest, AJumpOfManyRoundsFiresAllThatAreDue) {
  const auto a = Make('a'), b = Make('b'), later = Make('l');
  timers_.Set(a.get(), 1010 * kMs);
  timers_.Set(b.get(), 20'000 * kMs);
  timers_.Set(later.get(), 100'001 * kMs);
  timers_.Advance(100'000 * kMs);
  EXPECT_EQ(fired_.size(), 2u);
  EXPECT_TRUE(later->set());
  timers_.Advance(100'002 * kMs);
  EXPECT_EQ(fired_.back(), 'l');
}

TEST_F(TimersTest, AJumpOfARoundFiresNothingThatIsDueALittleLater) {
  const auto a = Make('a');
  timers_.Set(a.get(), 9000 * kMs + 500'000);
  timers_.Advance(9000 * kMs + 499'999);
  EXPECT_EQ(fired_, "");
  timers_.Advance(9001 * kMs);
  EXPECT_EQ(fired_, "a");
}

TEST_F(TimersTest, ACallbackMaySetCancelAndDestroyTimers) {
  std::unique_ptr<Timer> doomed = Make('d'), cancelled = Make('c'), again;
  int times = 0;
  again = std::make_unique<Timer>([&] {
    doomed.reset();
    cancelled->Cancel();
    if (++times < 3) timers_.Set(again.get(), 1010 * kMs);
  });
  timers_.Set(again.get(), 1010 * kMs);  // before the others: it fires first
  timers_.Set(doomed.get(), 1010 * kMs);
  timers_.Set(cancelled.get(), 1010 * kMs);
  timers_.Advance(1020 * kMs);
  EXPECT_EQ(times, 1) << "what a callback sets waits for the next Advance";
  timers_.Advance(1021 * kMs);
  timers_.Advance(1022 * kMs);
  EXPECT_EQ(times, 3);
  EXPECT_EQ(fired_, "");
}

TEST_F(TimersTest, RandomTimesFireInTheRightAdvance) {
  constexpr uint32_t kSeed = 11;
  std::mt19937 random(kSeed);
  struct Known {
    int64_t due_ns = 0;
    int64_t fired_ns = 0;
    std::unique_ptr<Timer> timer;
  };
  std::vector<Known> all(300);
  int64_t now = 1000 * kMs;
  for (Known& known : all) {
    known.timer = std::make_unique<Timer>([&known, &now] { known.fired_ns = now; });
    known.due_ns = now + static_cast<int64_t>(random() % (20'000 * 1000)) * 1000;
    timers_.Set(known.timer.get(), known.due_ns);
  }
  while (now < 22'000 * kMs) {
    const int64_t before = now;
    now += static_cast<int64_t>(random() % 6000) * (random() % 10 == 0 ? kMs : kMs / 100);
    timers_.Advance(now);
    for (const Known& known : all) {
      if (known.fired_ns == now && now != before) {
        EXPECT_LE(known.due_ns, now) << "seed " << kSeed;
        EXPECT_GT(known.due_ns + 2 * kMs, before) << "late; seed " << kSeed;
      }
    }
  }
  for (const Known& known : all) EXPECT_NE(known.fired_ns, 0) << "seed " << kSeed;
}

}  // namespace
}  // namespace logitd::http2
