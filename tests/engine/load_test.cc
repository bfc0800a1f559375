// Predictions of how long calls take, with a clock of the test's own.
#include "server/engine/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/devices.h"
#include "server/engine/metrics.h"
#include "tests/engine/test_job.h"
#include "tests/fake_backend.h"
#include "tests/manual_clock.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

// --- the work ahead

struct Shared {
  WorkAhead::Share share;
  explicit Shared(double weight = 1) { share.weight = weight; }
};

TEST(WorkAheadTest, OfEveryOtherCallerCountsNotMoreThanTheOwnWork) {
  WorkAhead ahead;
  Shared heavy, light, other;
  ahead.Add(&heavy.share, Priority::kInteractive, 1'000'000);
  ahead.Add(&other.share, Priority::kInteractive, 64);
  EXPECT_EQ(ahead.Of(light.share, Priority::kInteractive, 1000), 1000 + 1000 + 64);
  EXPECT_EQ(ahead.Of(heavy.share, Priority::kInteractive, 1000), 1'001'000 + 64);
  ahead.Add(&heavy.share, Priority::kInteractive, -1'000'000);
  EXPECT_EQ(ahead.Of(light.share, Priority::kInteractive, 1000), 1064);
}

TEST(WorkAheadTest, AHeavierCallerGetsMore) {
  WorkAhead ahead;
  Shared three(3), one(1);
  ahead.Add(&three.share, Priority::kInteractive, 1'000'000);
  ahead.Add(&one.share, Priority::kInteractive, 1'000'000);
  // While 1000 of `one` are done, 3000 of `three` are.
  EXPECT_EQ(ahead.Of(Shared(1).share, Priority::kInteractive, 1000), 1000 + 1000 + 3000);
  EXPECT_NEAR(ahead.Of(Shared(3).share, Priority::kInteractive, 3000), 3000 + 1000 + 3000, 1);
}

TEST(WorkAheadTest, BatchWaitsForAllInteractiveWorkAndNotTheOtherWayRound) {
  WorkAhead ahead;
  Shared interactive, batch;
  ahead.Add(&interactive.share, Priority::kInteractive, 5000);
  ahead.Add(&batch.share, Priority::kBatch, 7000);
  EXPECT_EQ(ahead.Of(Shared().share, Priority::kInteractive, 10), 10 + 10);
  EXPECT_EQ(ahead.Of(Shared().share, Priority::kBatch, 10), 10 + 10 + 5000);
}

// --- slowness

TEST(SlownessTest, FollowsTheCallsAndNeedsSome) {
  Slowness slowness;
  for (int i = 0; i < 15; ++i) slowness.Sample(100, 300, 100, true);
  EXPECT_FALSE(slowness.Predict(100, 0).has_value());
  slowness.Sample(100, 300, 100, true);
  EXPECT_NEAR(*slowness.Predict(1000, 0), 3000, 1);
  for (int i = 0; i < 500; ++i) slowness.Sample(100, 600, 100, true);
  EXPECT_NEAR(*slowness.Predict(1000, 0), 6000, 60);
  for (int i = 0; i < 500; ++i) slowness.Sample(100, 50, 100, true);
  EXPECT_NEAR(*slowness.Predict(1000, 0), 500, 5);
}

TEST(SlownessTest, AStrangeCallMovesLittle) {
  Slowness slowness;
  for (int i = 0; i < 100; ++i) slowness.Sample(100, 300, 100, true);
  slowness.Sample(100, 1e12, 100, true);
  EXPECT_LT(*slowness.Predict(1000, 0), 3200);
  // Cheap calls count little, however many they are.
  for (int i = 0; i < 10; ++i) slowness.Sample(1, 1e12, 1, true);
  EXPECT_LT(*slowness.Predict(1000, 0), 3300);
}

TEST(SlownessTest, AnUnfinishedCallCountsOnlyAsSlow) {
  Slowness slowness;
  for (int i = 0; i < 100; ++i) slowness.Sample(100, 300, 100, true);
  for (int i = 0; i < 100; ++i) slowness.Sample(100, 200, 100, false);
  EXPECT_NEAR(*slowness.Predict(1000, 0), 3000, 1);
  for (int i = 0; i < 100; ++i) slowness.Sample(100, 900, 100, false);
  EXPECT_GT(*slowness.Predict(1000, 0), 8000);
}

// --- decisions

// A server that does one call after another, each in 10 ms.
class LoadTest : public ::testing::Test {
 protected:
  using Works = std::deque<Load::Work>;
  static constexpr absl::Duration kTakes = absl::Milliseconds(10);

  absl::Status Begin(uint64_t caller, absl::Duration left, Load::Work* work, int64_t bytes = 1000) {
    return load_->Begin(
        {.caller = {.id = caller}, .op = &kOp, .bytes = bytes, .deadline = clock_.Now() + left},
        work);
  }
  bool LetsIn(uint64_t caller, absl::Duration left, int64_t bytes = 1000) {
    Load::Work work;
    return Begin(caller, left, &work, bytes).ok();
  }

  // One call of `caller`, if it is let in.
  bool RunOne(uint64_t caller, absl::Duration left = absl::InfiniteDuration(),
              absl::Duration takes = kTakes) {
    Load::Work work;
    if (!Begin(caller, left, &work).ok()) return false;
    work.Arrived(1000);
    clock_.Advance(takes);
    work.End(true);
    return true;
  }
  void Learn(absl::Duration takes = kTakes) {
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(RunOne(1, absl::InfiniteDuration(), takes));
  }

  // Adds calls of `caller` until one is refused; 1000 at most. Returns how many there are then.
  int Fill(uint64_t caller, absl::Duration left, Works* works) {
    do {
      works->emplace_back();
      refusal_ = Begin(caller, left, &works->back());
    } while (refusal_.ok() && works->size() < 1000);
    works->pop_back();
    return static_cast<int>(works->size());
  }
  void Expect(const std::string& reason, int count) {
    EXPECT_THAT(Scrape(metrics_),
                HasSubstr(absl::StrCat("logitd_refused_total{identity=\"none\",reason=\"", reason,
                                       "\"} ", count, "\n")));
  }

  static constexpr OpTraits kOp = {.name = "op"};
  ManualClock clock_;
  Metrics metrics_{{}};
  std::optional<Load> load_{std::in_place, /*costs=*/nullptr, &metrics_, clock_};
  absl::Status refusal_;
};

// A flood at the start would otherwise keep every call from ending in time.
TEST_F(LoadTest, WithoutAnEstimateOnly256CallsWithADeadlineAreLetIn) {
  Works works;
  EXPECT_EQ(Fill(1, absl::Milliseconds(200), &works), 256);
  EXPECT_TRUE(absl::IsResourceExhausted(refusal_));
  EXPECT_EQ(refusal_.message(),
            "256 calls are not over, allowed 256 before the first calls have shown how long they "
            "take; retry after 10 ms");
  EXPECT_EQ(RetryDelayOf(refusal_), absl::Milliseconds(10));
  EXPECT_TRUE(LetsIn(2, absl::Seconds(5))) << "it has time";
  works.pop_back();
  EXPECT_TRUE(LetsIn(2, absl::Milliseconds(200)));
}

TEST_F(LoadTest, DevicesShareTheWorkOfOtherCallsAndALostOneDoesNone) {
  FakeBackend first, second;
  Devices devices({&first, &second});
  load_.emplace(/*costs=*/nullptr, &metrics_, clock_, &devices);
  Learn();
  Works works;
  // Four fifths of 200 ms are a call of 10 ms and 30 others on two devices.
  EXPECT_NEAR(Fill(1, absl::Milliseconds(200), &works), 31, 2);
  const absl::Duration on_two = *load_->PredictNext();
  EXPECT_NEAR(absl::ToDoubleMilliseconds(on_two), 15, 2);  // its own, and as much of caller 1
  devices.Lose(1);
  EXPECT_NEAR(absl::ToDoubleMilliseconds(*load_->PredictNext()), 20, 2);
  EXPECT_FALSE(LetsIn(1, absl::Milliseconds(200)));
  clock_.Advance(Load::kShortLine);
  works.resize(10);
  EXPECT_NEAR(Fill(1, absl::Milliseconds(200), &works), 16, 2);
}

TEST_F(LoadTest, ACallThatCannotEndInTimeIsRefusedWithBothTimes) {
  Learn();
  Works works;
  // Four fifths of 200 ms are 16 calls of 10 ms.
  EXPECT_NEAR(Fill(1, absl::Milliseconds(200), &works), 16, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(refusal_));
  EXPECT_THAT(refusal_.message(), HasSubstr("predicted 2"));
  EXPECT_THAT(refusal_.message(), HasSubstr(" ms, the deadline leaves 200 ms; retry after "));
  EXPECT_GE(RetryDelayOf(refusal_), absl::Milliseconds(1));
  EXPECT_LE(RetryDelayOf(refusal_), absl::Milliseconds(30));
  Expect("hopeless", 1);
  EXPECT_TRUE(LetsIn(1, absl::InfiniteDuration()));
  EXPECT_TRUE(LetsIn(1, absl::Milliseconds(400)));
}

TEST_F(LoadTest, ALightCallerIsJudgedByItsShare) {
  Learn();
  Works flood(1000);
  for (Load::Work& work : flood) ASSERT_TRUE(Begin(1, absl::InfiniteDuration(), &work).ok());
  Load::Work first, second;
  EXPECT_TRUE(Begin(2, absl::Milliseconds(25), &first).ok());
  EXPECT_TRUE(Begin(2, absl::Milliseconds(55), &second).ok());
  EXPECT_FALSE(LetsIn(2, absl::Milliseconds(55)));
}

TEST_F(LoadTest, TheSizeOfWhatArrivedCounts) {
  Learn();
  Works works(2);
  for (Load::Work& work : works) ASSERT_TRUE(Begin(1, absl::InfiniteDuration(), &work).ok());
  EXPECT_TRUE(LetsIn(1, absl::Milliseconds(200)));
  works[0].Arrived(100 << 20);  // in a lease
  EXPECT_FALSE(LetsIn(1, absl::Milliseconds(200)));
}

// A call with rows in a lease takes long for its message, and says nothing of others.
TEST_F(LoadTest, TheTimeOfACallIsComparedWithTheSizeThatArrived) {
  const auto learn = [&](int64_t stated) {
    for (int i = 0; i < 100; ++i) {
      Load::Work work;
      ASSERT_TRUE(Begin(2, absl::InfiniteDuration(), &work, stated).ok());
      work.Arrived(10'000'000);
      clock_.Advance(kTakes);
      work.End(true);
    }
  };
  learn(10'000'000);
  const absl::Duration told = *load_->PredictNext();
  learn(200);
  EXPECT_NEAR(absl::FDivDuration(*load_->PredictNext(), told), 1, 0.01);
}

TEST_F(LoadTest, AnIdleServerLetsCallsIn) {
  Learn();
  EXPECT_TRUE(LetsIn(7, absl::Microseconds(1)));
}

TEST_F(LoadTest, AWrongEstimateRecovers) {
  Learn();
  // The server stands still for a while.
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(RunOne(1, absl::InfiniteDuration(), absl::Seconds(10)));
  }
  // Another caller has something outstanding all the time, and this one has two calls at a time.
  Load::Work stuck;
  ASSERT_TRUE(Begin(9, absl::InfiniteDuration(), &stuck).ok());
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    Load::Work one;
    EXPECT_TRUE(Begin(2, absl::Milliseconds(200), &one).ok());
    refused = RunOne(2, absl::Milliseconds(200)) ? 0 : refused + 1;
    one.Arrived(1000);
    clock_.Advance(kTakes);
    one.End(true);
  }
  EXPECT_EQ(refused, 0);
}

TEST_F(LoadTest, WhereNoCallEndsOneIsLetInNowAndThen) {
  Learn();
  Works works;
  EXPECT_LT(Fill(1, absl::Milliseconds(200), &works), 30);
  clock_.Advance(absl::Seconds(1));
  Load::Work probe;
  EXPECT_TRUE(Begin(1, absl::Milliseconds(200), &probe).ok());
  EXPECT_FALSE(LetsIn(1, absl::Milliseconds(200)));
}

TEST_F(LoadTest, PeersThatSendNothingDoNotSlowTheEstimate) {
  Learn();
  for (int i = 0; i < 100; ++i) {
    Load::Work silent;
    ASSERT_TRUE(Begin(3, absl::InfiniteDuration(), &silent).ok());
    clock_.Advance(absl::Seconds(10));
    silent.End(false);
  }
  Load::Work one;
  ASSERT_TRUE(Begin(1, absl::Milliseconds(200), &one).ok());
  EXPECT_TRUE(LetsIn(1, absl::Milliseconds(25)));
}

TEST_F(LoadTest, TheNextCallIsPredictedFromTheLastOnesAndTheOthersThatWait) {
  EXPECT_FALSE(load_->PredictNext().has_value());
  Learn();
  EXPECT_NEAR(absl::ToDoubleMilliseconds(*load_->PredictNext()), 10, 2);
  // Three other callers have one such call each, however many more one of them has: fair turns.
  Works works(12);
  for (size_t i = 0; i < works.size(); ++i) {
    ASSERT_TRUE(Begin(i < 3 ? i + 1 : 3, absl::InfiniteDuration(), &works[i]).ok());
  }
  EXPECT_EQ(load_->callers(), 3);
  EXPECT_NEAR(absl::ToDoubleMilliseconds(*load_->PredictNext()), 40, 8);
  works.clear();
  EXPECT_EQ(load_->callers(), 0);
}

// --- short lines

// Caller 1 sends calls with `left` ms until one is refused, all end but `kept`, and after `pause`
// ms `caller` sends calls with `left_again` until it has `least` to `most`.
struct ShortLine {
  const char* name;
  int takes, left;
  size_t kept;
  int pause;
  uint64_t caller;
  int left_again;
  int least, most;
};
void PrintTo(const ShortLine& line, std::ostream* out) { *out << line.name; }

constexpr ShortLine kShortLines[] = {
    {"a_short_line_takes_a_tenth_of_the_time", 10, 4000, 2, 0, 1, 4000, 35, 45},
    {"a_short_line_takes_3_percent_of_less_than_a_second", 1, 900, 2, 0, 1, 900, 24, 30},
    {"a_short_line_holds_8_calls_however_short_their_time", 10, 500, 2, 0, 1, 500, 7, 9},
    {"calls_with_twice_the_time_may_wait", 10, 4000, 2, 0, 1, 8000, 600, 700},
    {"calls_of_other_callers_may_wait", 10, 4000, 2, 0, 2, 4000, 101, 400},
    {"a_line_stays_short_when_it_was_empty", 10, 4000, 0, 0, 1, 4000, 35, 45},
    {"a_line_stays_short_for_5_seconds", 10, 4000, 2, 4999, 1, 4000, 35, 45},
    {"a_line_may_grow_after_5_seconds", 10, 4000, 2, 5000, 1, 4000, 280, 360},
};
class ShortLineTest : public LoadTest, public ::testing::WithParamInterface<ShortLine> {};
TEST_P(ShortLineTest, IsAsLong) {
  const ShortLine& line = GetParam();
  Learn(absl::Milliseconds(line.takes));
  Works works, more;
  Fill(1, absl::Milliseconds(line.left), &works);
  works.resize(line.kept);
  clock_.Advance(absl::Milliseconds(line.pause));
  if (line.caller == 1) more.swap(works);
  const int calls = Fill(line.caller, absl::Milliseconds(line.left_again), &more);
  EXPECT_GE(calls, line.least);
  EXPECT_LE(calls, line.most);
}
INSTANTIATE_TEST_SUITE_P(All, ShortLineTest, ::testing::ValuesIn(kShortLines),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(LoadTest, AShortLineSaysSoAndStaysShortAsLongAsItRefuses) {
  Learn();
  Works works;
  Fill(1, absl::Seconds(4), &works);
  EXPECT_FALSE(LetsIn(1, absl::Milliseconds(20))) << "a late call must not let the others wait";
  for (int i = 1; i <= 5; ++i) {
    works.resize(2);
    clock_.Advance(Load::kShortLine - absl::Milliseconds(1));
    EXPECT_NEAR(Fill(1, absl::Seconds(4), &works), 40, 5) << i;
    Expect("overloaded", i);
  }
  EXPECT_THAT(
      refusal_.message(),
      HasSubstr(" ms, allowed 400 ms while more calls come than can be done; retry after "));
  EXPECT_LE(RetryDelayOf(refusal_), absl::Milliseconds(100));
  EXPECT_TRUE(LetsIn(1, absl::InfiniteDuration()));
}

TEST_F(LoadTest, WithManyCoresAShortLineHoldsMoreCalls) {
  EXPECT_EQ(Load::ShortCallsFor(1), 8);
  EXPECT_EQ(Load::ShortCallsFor(16), 32);
}

// Every caller of many may have two calls in its line, and a third one only in a line that is
// short.
TEST_F(LoadTest, BesideTwoCallsAnotherOneIsRefusedWhereTheLineIsLong) {
  Learn();
  Works works;
  Fill(1, absl::Milliseconds(500), &works);
  works.resize(2);
  // Eight others have as much work as this caller with a third call: 80 ms and more in all.
  Works others(24);
  for (size_t i = 0; i < others.size(); ++i) {
    ASSERT_TRUE(Begin(10 + i % 8, absl::InfiniteDuration(), &others[i]).ok());
  }
  EXPECT_FALSE(LetsIn(1, absl::Milliseconds(500)));
  works.resize(1);
  EXPECT_TRUE(LetsIn(1, absl::Milliseconds(500)));
}

TEST_F(LoadTest, ASmallCallMayWaitForLargeOnesInAShortLine) {
  Learn();
  Works works;
  Fill(1, absl::Seconds(4), &works);
  works.resize(5);
  EXPECT_TRUE(LetsIn(1, absl::Seconds(1), /*bytes=*/1));
}

}  // namespace
}  // namespace logitd::engine
