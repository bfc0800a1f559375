// Predictions of how long calls take, with a clock of the test's own.
#include "server/engine/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <deque>
#include <string>

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
  ahead.Remove(&heavy.share, Priority::kInteractive, 1'000'000);
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
  static constexpr absl::Duration kTakes = absl::Milliseconds(10);

  absl::Status Begin(uint64_t caller, absl::Duration left, Load::Work* work) {
    return load_.Begin(
        {.caller = {.id = caller}, .op = &kOp, .bytes = 1000, .deadline = clock_.Now() + left},
        work);
  }

  // One call of `caller` in 10 ms, or what it `takes`, if it is let in.
  bool RunOne(uint64_t caller, absl::Duration left = absl::InfiniteDuration(),
              absl::Duration takes = kTakes) {
    Load::Work work;
    if (!Begin(caller, left, &work).ok()) return false;
    EXPECT_TRUE(work.Arrived(1000, spec_).ok());
    clock_.Advance(takes);
    work.End(true);
    return true;
  }

  // How many calls of `caller` are let in before one is refused; 1000 at most.
  int Fill(uint64_t caller, absl::Duration left, std::deque<Load::Work>* works) {
    absl::Status refusal;
    while (refusal.ok() && works->size() < 1000) {
      works->emplace_back();
      refusal = Begin(caller, left, &works->back());
    }
    works->pop_back();
    return static_cast<int>(works->size());
  }

  // Ends all calls but the first `kept`.
  static void Drain(std::deque<Load::Work>* works, size_t kept) {
    while (works->size() > kept) works->pop_back();
  }

  void Learn() {
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(RunOne(1));
  }

  static constexpr OpTraits kOp = {.name = "op"};
  ManualClock clock_;
  Metrics metrics_{{}};
  Load load_{/*costs=*/nullptr, &metrics_, clock_};
  JobSpec spec_{.key = {.op = &kOp}, .counts = {1}};
};

TEST_F(LoadTest, WithoutAnEstimateNothingIsRefused) {
  std::deque<Load::Work> works(100);
  for (Load::Work& work : works) {
    EXPECT_TRUE(Begin(1, absl::Milliseconds(1), &work).ok());
  }
}

// A flood at the start would otherwise keep every call from ending in time.
TEST_F(LoadTest, WithoutAnEstimateOnly256CallsWithADeadlineAreLetIn) {
  std::deque<Load::Work> works;
  EXPECT_EQ(Fill(1, absl::Milliseconds(200), &works), 256);
  Load::Work work, patient;
  const absl::Status refusal = Begin(2, absl::Milliseconds(200), &work);
  EXPECT_TRUE(absl::IsResourceExhausted(refusal));
  EXPECT_THAT(refusal.message(), HasSubstr("256 calls are not over, allowed 256"));
  EXPECT_EQ(RetryDelayOf(refusal), absl::Milliseconds(10));
  EXPECT_TRUE(Begin(2, absl::Seconds(5), &patient).ok()) << "it has time";
  works.pop_back();
  works.pop_back();
  EXPECT_TRUE(Begin(2, absl::Milliseconds(200), &work).ok());
}

TEST_F(LoadTest, DevicesShareTheWorkOfOtherCallsAndALostOneDoesNone) {
  FakeBackend first, second;
  Devices devices({&first, &second});
  Load load(/*costs=*/nullptr, &metrics_, clock_, &devices);
  const auto begin = [&](absl::Duration left, Load::Work* work) {
    return load.Begin(
        {.caller = {.id = 1}, .op = &kOp, .bytes = 1000, .deadline = clock_.Now() + left}, work);
  };
  for (int i = 0; i < 100; ++i) {
    Load::Work work;
    ASSERT_TRUE(begin(absl::InfiniteDuration(), &work).ok());
    ASSERT_TRUE(work.Arrived(1000, spec_).ok());
    clock_.Advance(kTakes);
    work.End(true);
  }
  std::deque<Load::Work> works;
  const auto fill = [&] {
    absl::Status refusal;
    while (refusal.ok() && works.size() < 100) {
      works.emplace_back();
      refusal = begin(absl::Milliseconds(200), &works.back());
    }
    works.pop_back();
    return static_cast<double>(works.size());
  };
  // Four fifths of 200 ms are a call of 10 ms and 30 others on two devices.
  EXPECT_NEAR(fill(), 31, 2);
  const absl::Duration on_two = *load.PredictNext();
  EXPECT_NEAR(absl::ToDoubleMilliseconds(on_two), 15, 2);  // its own, and as much of caller 1
  devices.Lose(1);
  EXPECT_NEAR(absl::ToDoubleMilliseconds(*load.PredictNext()), 20, 2);
  Load::Work late;
  EXPECT_TRUE(absl::IsResourceExhausted(begin(absl::Milliseconds(200), &late)));
  clock_.Advance(Load::kShortLine);
  while (works.size() > 10) works.pop_back();
  EXPECT_NEAR(fill(), 16, 2);
}

TEST_F(LoadTest, ACallThatCannotEndInTimeIsRefusedWithBothTimes) {
  Learn();
  std::deque<Load::Work> works;
  absl::Status refusal;
  while (refusal.ok() && works.size() < 100) {
    works.emplace_back();
    refusal = Begin(1, absl::Milliseconds(200), &works.back());
  }
  // Four fifths of 200 ms are 16 calls of 10 ms.
  EXPECT_NEAR(static_cast<double>(works.size()), 17, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(refusal));
  EXPECT_THAT(refusal.message(), HasSubstr("predicted 2"));
  EXPECT_THAT(refusal.message(), HasSubstr("the deadline leaves 200 ms; retry after "));
  ASSERT_TRUE(RetryDelayOf(refusal).has_value());
  EXPECT_GE(*RetryDelayOf(refusal), absl::Milliseconds(1));
  EXPECT_LE(*RetryDelayOf(refusal), absl::Milliseconds(30));
  EXPECT_THAT(Scrape(metrics_),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"hopeless\"} 1\n"));
  // A call without a deadline, and one with more time.
  Load::Work patient, longer;
  EXPECT_TRUE(Begin(1, absl::InfiniteDuration(), &patient).ok());
  EXPECT_TRUE(Begin(1, absl::Milliseconds(400), &longer).ok());
}

TEST_F(LoadTest, ALightCallerIsJudgedByItsShare) {
  Learn();
  std::deque<Load::Work> flood(1000);
  for (Load::Work& work : flood) ASSERT_TRUE(Begin(1, absl::InfiniteDuration(), &work).ok());
  Load::Work first, second, third;
  EXPECT_TRUE(Begin(2, absl::Milliseconds(25), &first).ok());
  EXPECT_TRUE(Begin(2, absl::Milliseconds(55), &second).ok());
  EXPECT_FALSE(Begin(2, absl::Milliseconds(55), &third).ok());
}

TEST_F(LoadTest, AfterARefusalTheLineOfThatCallerIsKeptShort) {
  Learn();
  std::deque<Load::Work> works;
  // Four fifths of 4 s are 320 calls of 10 ms. A tenth of it is 400 ms, 40 of them.
  EXPECT_NEAR(Fill(1, absl::Seconds(4), &works), 320, 40);
  Drain(&works, 2);
  EXPECT_NEAR(Fill(1, absl::Seconds(4), &works), 40, 5);
  EXPECT_THAT(Scrape(metrics_),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"hopeless\"} 1\n"));
  EXPECT_THAT(Scrape(metrics_),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"overloaded\"} 1\n"));
  Load::Work refused, patient, longer, other;
  const absl::Status refusal = Begin(1, absl::Seconds(4), &refused);
  EXPECT_TRUE(absl::IsResourceExhausted(refusal));
  EXPECT_THAT(refusal.message(),
              HasSubstr("allowed 400 ms while more calls come than can be done"));
  ASSERT_TRUE(RetryDelayOf(refusal).has_value());
  EXPECT_LE(*RetryDelayOf(refusal), absl::Milliseconds(100));
  // Other callers, and calls with twice the time or without a deadline, may wait.
  EXPECT_TRUE(Begin(1, absl::InfiniteDuration(), &patient).ok());
  EXPECT_TRUE(Begin(1, absl::Seconds(8), &longer).ok());
  std::deque<Load::Work> others;
  EXPECT_GT(Fill(2, absl::Seconds(4), &others), 100);
}

TEST_F(LoadTest, AShortLineHolds8CallsHoweverShortTheirDeadline) {
  Learn();
  std::deque<Load::Work> works;
  Fill(1, absl::Milliseconds(500), &works);  // four fifths are 40 calls
  Drain(&works, 2);
  EXPECT_NEAR(Fill(1, absl::Milliseconds(500), &works), Load::kShortCalls, 1);
}

TEST_F(LoadTest, WithLessThanASecondAShortLineTakes3PercentOfTheTime) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(RunOne(1, absl::InfiniteDuration(), kTakes / 10));
  std::deque<Load::Work> works;
  Fill(1, absl::Milliseconds(900), &works);
  Drain(&works, 2);
  EXPECT_NEAR(Fill(1, absl::Milliseconds(900), &works), 27, 3) << "of 1 ms in 27 ms";
}

TEST_F(LoadTest, WithManyCoresAShortLineHoldsMoreCalls) {
  EXPECT_EQ(Load::ShortCallsFor(1), 8);
  EXPECT_EQ(Load::ShortCallsFor(16), 32);
}

// Every caller of many may have two calls in its line, and a third one only in a line that is short.
TEST_F(LoadTest, BesideTwoCallsAnotherOneIsRefusedWhereTheLineIsLong) {
  Learn();
  std::deque<Load::Work> works;
  Fill(1, absl::Milliseconds(500), &works);
  Drain(&works, 2);
  // Eight others have as much work as this caller with a third call: 80 ms and more in all.
  std::deque<Load::Work> others(24);
  for (size_t i = 0; i < others.size(); ++i) {
    ASSERT_TRUE(Begin(10 + i % 8, absl::InfiniteDuration(), &others[i]).ok());
  }
  Load::Work second, third;
  EXPECT_FALSE(Begin(1, absl::Milliseconds(500), &third).ok());
  Drain(&works, 1);
  EXPECT_TRUE(Begin(1, absl::Milliseconds(500), &second).ok());
}

// A short line runs empty now and then: that must not make it long again.
TEST_F(LoadTest, TheLineStaysShortWhenTheCallerHasNoCallsForAMoment) {
  Learn();
  std::deque<Load::Work> works;
  const int all = Fill(1, absl::Seconds(4), &works);
  works.clear();
  EXPECT_EQ(load_.callers(), 0);
  EXPECT_LT(Fill(1, absl::Seconds(4), &works), all / 4);
}

// The first refused call may be one whose headers came late.
TEST_F(LoadTest, ARefusedCallWithLittleTimeDoesNotLetTheOthersWait) {
  Learn();
  std::deque<Load::Work> works;
  const int all = Fill(1, absl::Seconds(4), &works);
  Load::Work late;
  EXPECT_FALSE(Begin(1, absl::Milliseconds(20), &late).ok());
  Drain(&works, 2);
  EXPECT_LT(Fill(1, absl::Seconds(4), &works), all / 4);
}

TEST_F(LoadTest, TheLineStaysShortAsLongAsItsCallsAreRefused) {
  Learn();
  std::deque<Load::Work> works;
  const int all = Fill(1, absl::Seconds(4), &works);
  for (int i = 0; i < 5; ++i) {
    Drain(&works, 2);
    clock_.Advance(Load::kShortLine - absl::Milliseconds(1));
    EXPECT_LT(Fill(1, absl::Seconds(4), &works), all / 4) << i;
  }
}

TEST_F(LoadTest, TheLineMayGrowAgainAfterAWhile) {
  Learn();
  std::deque<Load::Work> works;
  const int all = Fill(1, absl::Seconds(4), &works);
  Drain(&works, 2);
  clock_.Advance(Load::kShortLine);
  EXPECT_NEAR(Fill(1, absl::Seconds(4), &works), all, 2);
}

TEST_F(LoadTest, ASmallCallMayWaitForLargeOnesInAShortLine) {
  Learn();
  std::deque<Load::Work> works;
  Fill(1, absl::Seconds(4), &works);
  Drain(&works, 5);
  Load::Work small;
  EXPECT_TRUE(load_
                  .Begin({.caller = {.id = 1},
                          .op = &kOp,
                          .bytes = 1,
                          .deadline = clock_.Now() + absl::Seconds(1)},
                         &small)
                  .ok());
}

TEST_F(LoadTest, AnIdleServerLetsCallsIn) {
  Learn();
  Load::Work work;
  EXPECT_TRUE(Begin(7, absl::Microseconds(1), &work).ok());
}

TEST_F(LoadTest, AWrongEstimateRecovers) {
  Learn();
  // The server stands still for a while: calls took 10 s.
  for (int i = 0; i < 50; ++i) {
    Load::Work work;
    ASSERT_TRUE(Begin(1, absl::InfiniteDuration(), &work).ok());
    ASSERT_TRUE(work.Arrived(1000, spec_).ok());
    clock_.Advance(absl::Seconds(10));
    work.End(true);
  }
  // Another caller has something outstanding all the time, and this one has two calls at a time.
  Load::Work stuck;
  ASSERT_TRUE(Begin(9, absl::InfiniteDuration(), &stuck).ok());
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    Load::Work one;
    EXPECT_TRUE(Begin(2, absl::Milliseconds(200), &one).ok());
    refused = RunOne(2, absl::Milliseconds(200)) ? 0 : refused + 1;
    if (one.Arrived(1000, spec_).ok()) clock_.Advance(kTakes);
    one.End(true);
  }
  EXPECT_EQ(refused, 0);
}

TEST_F(LoadTest, WhereNoCallEndsOneIsLetInNowAndThen) {
  Learn();
  std::deque<Load::Work> works(200);
  size_t let_in = 0;
  for (Load::Work& work : works) let_in += Begin(1, absl::Milliseconds(200), &work).ok();
  EXPECT_LT(let_in, 30u);
  clock_.Advance(absl::Seconds(1));
  Load::Work probe, next;
  EXPECT_TRUE(Begin(1, absl::Milliseconds(200), &probe).ok());
  EXPECT_FALSE(Begin(1, absl::Milliseconds(200), &next).ok());
}

TEST_F(LoadTest, ACallThatBecameHopelessIsDroppedWhenItsMessageIsThere) {
  Learn();
  std::deque<Load::Work> works(20);
  for (Load::Work& work : works) {
    ASSERT_TRUE(Begin(1, absl::InfiniteDuration(), &work).ok());
    ASSERT_TRUE(work.Arrived(1000, spec_).ok());
  }
  Load::Work late;
  ASSERT_TRUE(Begin(1, absl::Milliseconds(300), &late).ok());
  clock_.Advance(absl::Milliseconds(280));  // its message took long
  const absl::Status dropped = late.Arrived(1000, spec_);
  EXPECT_TRUE(absl::IsResourceExhausted(dropped));
  EXPECT_THAT(dropped.message(), HasSubstr("the deadline leaves 20 ms"));
  EXPECT_THAT(Scrape(metrics_),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"hopeless_late\"} 1\n"));
}

TEST_F(LoadTest, PeersThatSendNothingDoNotSlowTheEstimate) {
  Learn();
  for (int i = 0; i < 100; ++i) {
    Load::Work silent;
    ASSERT_TRUE(Begin(3, absl::InfiniteDuration(), &silent).ok());
    clock_.Advance(absl::Seconds(10));
    silent.End(false);
  }
  Load::Work one, two;
  ASSERT_TRUE(Begin(1, absl::Milliseconds(200), &one).ok());
  EXPECT_TRUE(Begin(1, absl::Milliseconds(25), &two).ok());
}

TEST_F(LoadTest, TheNextCallIsPredictedFromTheLastOnesAndTheOthersThatWait) {
  EXPECT_FALSE(load_.PredictNext().has_value());
  Learn();
  const double takes = absl::ToDoubleSeconds(kTakes);
  ASSERT_TRUE(load_.PredictNext().has_value());
  EXPECT_NEAR(absl::ToDoubleSeconds(*load_.PredictNext()), takes, 0.2 * takes);
  // Three other callers have one such call each, however many more one of them has: fair turns.
  std::deque<Load::Work> works(12);
  for (size_t i = 0; i < works.size(); ++i) {
    ASSERT_TRUE(Begin(i < 3 ? i + 1 : 3, absl::InfiniteDuration(), &works[i]).ok());
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(*load_.PredictNext()), 4 * takes, 0.8 * takes);
}

TEST_F(LoadTest, CallersAreForgottenWhenTheirCallsEnd) {
  {
    std::deque<Load::Work> works(100);
    uint64_t id = 0;
    for (Load::Work& work : works) ASSERT_TRUE(Begin(++id, absl::InfiniteDuration(), &work).ok());
    EXPECT_EQ(load_.callers(), 100);
  }
  EXPECT_EQ(load_.callers(), 0);
}

}  // namespace
}  // namespace logitd::engine
