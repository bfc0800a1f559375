// The engine's threads on one device: who wakes whom, what happens at a time, and the end. What
// runs when is tested without threads: scheduler_test.cc.
#include "server/engine/engine.h"

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/activity.h"
#include "tests/engine/engine_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

EngineOptions TwoStreams() {
  EngineOptions options = SmallOptions(kAllTestOps);
  options.streams = 2;
  return options;
}

class EngineTest : public EngineFixture {
 protected:
  std::shared_ptr<ShiftJob> SubmitKept() {
    auto job = Submit(std::make_shared<ShiftJob>(ShiftJob::Shape{.rows = 9, .keep = true}));
    EXPECT_TRUE(job->Wait().ok());
    return job;
  }
};

TEST_F(EngineTest, EveryStreamWorksAtTheSameTime) {
  Start(TwoStreams());
  device().Hold();
  auto a = Submit({.row_elements = 4});
  auto b = Submit({.row_elements = 5});
  WaitUntilHeld(2);
  device().Release();
  EXPECT_TRUE(a->Wait().ok());
  EXPECT_TRUE(b->Wait().ok());
}

TEST_F(EngineTest, WhatWaitsForATimeHappensInTheCallThatMovesTheClock) {
  Start();
  device().Hold();
  auto runs = Submit();
  device().WaitForOps(1);
  auto late = Submit({.deadline = clock_.Now() + absl::Milliseconds(5)});
  auto later = Submit({.deadline = clock_.Now() + absl::Milliseconds(6)});
  clock_.Advance(absl::Milliseconds(5));
  ASSERT_TRUE(late->status().has_value());
  EXPECT_EQ(late->status()->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(later->status().has_value());
  device().Release();
  EXPECT_TRUE(later->Wait().ok());
}

TEST_F(EngineTest, WhatIsDueWakesAStream) {
  EngineOptions options = SmallOptions();
  options.max_batch_delay = absl::Milliseconds(2);
  Start(options, /*devices=*/3);
  for (int round = 0; round < 100; ++round) {
    auto a = Submit({.row_elements = 4 + round % 3});
    auto b = Submit({.row_elements = 4 + round % 2});
    clock_.Advance(absl::Milliseconds(1));
    EXPECT_FALSE(a->status().has_value() || b->status().has_value());
    clock_.Advance(absl::Milliseconds(1));
    WaitIdle();
  }
}

TEST_F(EngineTest, ACancelEndsAJobInTheCallUnlessItRuns) {
  Start();
  device().Hold();
  auto runs = Submit();
  device().WaitForOps(1);
  auto waits = Submit();
  engine_->Cancel(*waits);
  EXPECT_EQ(waits->status()->code(), absl::StatusCode::kCancelled);
  engine_->Cancel(*runs);
  EXPECT_FALSE(runs->status().has_value());
  device().Release();
  EXPECT_EQ(runs->Wait().code(), absl::StatusCode::kCancelled);
  engine_->Cancel(*runs);
  WaitIdle();
  EXPECT_EQ(Ran(0), 1u);
}

TEST_F(EngineTest, AJobIsCancelledBetweenItsSlices) {
  EngineOptions options = SmallOptions();
  options.max_slice = absl::Milliseconds(10);
  Start(options);
  device().SetRowTime(std::chrono::milliseconds(1));
  EXPECT_TRUE(Submit()->Wait().ok());  // tells what a row costs
  auto job = Submit({.rows = 50});
  // The device ends its second slice when the job's caller has left.
  device().Hold();
  device().WaitForOps(2);
  engine_->Cancel(*job);
  device().Release();
  EXPECT_EQ(job->Wait().code(), absl::StatusCode::kCancelled);
  WaitIdle();
  EXPECT_LT(Ran(0), 6u);
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_stopped_total{op=\"digest\"} 1\n"));
  EXPECT_TRUE(Submit()->Wait().ok());
}

TEST_F(EngineTest, WaitIdleGivesUpAtItsDeadline) {
  Start();
  EXPECT_TRUE(engine_->WaitIdle(absl::InfinitePast()));
  device().Hold();
  Submit();
  EXPECT_FALSE(engine_->WaitIdle(absl::InfinitePast()));
  std::thread waits([&] { EXPECT_FALSE(engine_->WaitIdle(clock_.Now() + absl::Milliseconds(5))); });
  clock_.WaitForSleeper(absl::Milliseconds(5));
  clock_.Advance(absl::Milliseconds(5));
  waits.join();
}

TEST_F(EngineTest, ItsActivityAndOldestBatchAreThoseOfItsSlices) {
  Start();
  EXPECT_FALSE(engine_->OldestRunning().has_value());
  device().Hold();
  Submit({.rows = 7});
  device().WaitForOps(1);
  clock_.Advance(absl::Milliseconds(20));
  const Activity& activity = engine_->activity();
  EXPECT_EQ(activity.Stalled(clock_.Nanos()), absl::Milliseconds(20));
  const std::optional<RunningBatch> oldest = engine_->OldestRunning();
  ASSERT_TRUE(oldest.has_value());
  EXPECT_EQ(oldest->op, kDigest.name);
  EXPECT_EQ(oldest->rows, 7);
  EXPECT_EQ(oldest->age, absl::Milliseconds(20));
  device().Release();
  WaitIdle();
  engine_->Stop();
  EXPECT_FALSE(engine_->OldestRunning().has_value());
  EXPECT_EQ(activity.Stalled(clock_.Nanos()), absl::ZeroDuration());
  EXPECT_GT(activity.Read(clock_.Nanos()).busy, 0);
  EXPECT_EQ(activity.Read(clock_.Nanos()).ops[0].rows_per_s, 7);
}

TEST_F(EngineTest, TheOwnerHearsOfALostDeviceOnce) {
  Start(TwoStreams());
  device().Hold();
  Submit({.row_elements = 4});
  Submit({.row_elements = 5});
  WaitUntilHeld(2);
  Submit({.row_elements = 6});
  for (int i = 0; i < 2; ++i) device().FailNext(FaultPoint::kWait, absl::InternalError("sticky"));
  device().Release();
  for (const auto& job : jobs_) EXPECT_EQ(job->Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Submit()->Wait().code(), absl::StatusCode::kUnavailable);
  engine_->Stop();
  EXPECT_EQ(owner_told_, 1);
  EXPECT_EQ(Ran(0), 2u);
}

// ---- the end

TEST_F(EngineTest, StopEndsWaitingJobsAndLetsRunningOnesFinish) {
  Start(SmallOptions(), /*devices=*/2);
  for (int i = 0; i < 2; ++i) device(i).Hold();
  std::vector<std::shared_ptr<TestJob>> running;
  for (int i = 0; i < 2; ++i) {
    running.push_back(Submit());
    WaitUntilHeld(i + 1);
  }
  auto waits = Submit();
  std::thread stop([&] { engine_->Stop(); });
  EXPECT_EQ(waits->Wait(), absl::UnavailableError("the engine has stopped"));
  EXPECT_EQ(Submit()->Wait().code(), absl::StatusCode::kUnavailable);
  for (const auto& job : running) EXPECT_FALSE(job->status().has_value());
  for (int i = 0; i < 2; ++i) device(i).Release();
  stop.join();
  for (const auto& job : running) EXPECT_TRUE(job->Wait().ok());
  EXPECT_EQ(owner_told_, 0);
}

TEST_F(EngineTest, TheEngineWaitsForKeptAnswers) {
  Start();
  const auto kept = SubmitKept();
  std::thread end([&] { engine_.reset(); });
  clock_.WaitForSleeper(absl::Seconds(5));
  EXPECT_TRUE(kept->KeptIsRight());
  EXPECT_EQ(device().live_slabs(), 4);
  kept->Take();
  end.join();
}

TEST_F(EngineTest, AnswersThatAreKeptForTooLongKeepTheirSlabs) {
  Start();
  const auto kept = SubmitKept();
  std::thread end([&] { engine_.reset(); });
  clock_.WaitForSleeper(absl::Seconds(5));
  clock_.Advance(absl::Seconds(5));
  end.join();
  EXPECT_TRUE(kept->KeptIsRight());
  kept->Take();
  EXPECT_EQ(device().live_slabs(), 4);
  backends_.clear();
}

// ---- the beginning

TEST(EngineCreateTest, RefusesOptionsThatCannotWork) {
  struct Case {
    void (*change)(EngineOptions& options);
    const char* message;
  };
  const Case cases[] = {
      {[](EngineOptions& o) { o.streams = 0; }, "streams: got 0, allowed 1..64"},
      {[](EngineOptions& o) { o.ops = {}; }, "ops: got 0, allowed 1..64"},
      {[](EngineOptions& o) { o.slab_payload_bytes = -1; },
       "slab_payload_bytes: got -1, allowed 1..1099511627776"},
      {[](EngineOptions& o) { o.max_batch_delay = absl::Microseconds(-1); },
       "max_batch_delay in microseconds: got -1, allowed 0..86400000000"},
  };
  for (const Case& c : cases) {
    FakeBackend backend;
    EngineOptions options = SmallOptions();
    c.change(options);
    const auto engine = Engine::Create(&backend, options, nullptr, [](const absl::Status&) {});
    EXPECT_EQ(engine.status().message(), c.message);
    EXPECT_EQ(backend.live_slabs(), 0);
  }
}

TEST(EngineCreateTest, AnErrorNamesTheDeviceAndLeavesNoSlab) {
  FakeBackend first({.backend = "fake", .number = 3, .name = "fake"});
  FakeBackend second({.backend = "fake", .number = 7, .name = "fake"});
  second.LimitSlabs(2);
  const auto engine =
      Engine::Create(std::make_shared<Devices>(std::vector<Backend*>{&first, &second}),
                     SmallOptions(), nullptr, [](const absl::Status&) {});
  EXPECT_EQ(engine.status(), absl::ResourceExhaustedError("device 7: no memory for a slab"));
  EXPECT_EQ(first.live_slabs(), 0);
  EXPECT_EQ(second.live_slabs(), 0);
}

}  // namespace
}  // namespace logitd::engine
