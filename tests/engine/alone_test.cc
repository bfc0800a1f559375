// Jobs that the thread which submits them may run: Engine::SubmitAlone.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

// The engine logs every batch that the device fails. Here one fails on purpose.
[[maybe_unused]] const bool kQuiet = [] {
  spdlog::set_level(spdlog::level::off);
  return true;
}();

class EngineAloneTest : public ::testing::Test {
 protected:
  EngineAloneTest() {
    backend_.SetRowTime(std::chrono::microseconds(20));
    EngineOptions options = SmallOptions();
    options.streams = 2;
    auto engine = Engine::Create(&backend_, options, nullptr, [](const absl::Status&) {});
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }
  ~EngineAloneTest() override { backend_.Release(); }

  std::shared_ptr<TestJob> Job() {
    auto job = std::make_shared<TestJob>(TestJob::Shape{});
    job->on_done = [this](const absl::Status&) { ran_on_ = std::this_thread::get_id(); };
    return job;
  }
  // Whether the job ran in the call. It is done.
  bool RunsHere(const std::shared_ptr<TestJob>& job) {
    bool ended = false;
    engine_->SubmitAlone(job, [&] {
      ended = true;
      EXPECT_TRUE(job->status().has_value());
    });
    EXPECT_TRUE(job->Wait().ok());
    EXPECT_EQ(ended, ran_on_ == std::this_thread::get_id());
    EXPECT_FALSE(job->misused());
    return ran_on_ == std::this_thread::get_id();
  }
  // The engine then knows what a job takes, and has none.
  void Warm() {
    auto job = Job();
    engine_->Submit(job);
    ASSERT_TRUE(job->Wait().ok());
    ASSERT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
  }

  FakeBackend backend_;
  std::unique_ptr<Engine> engine_;
  std::thread::id ran_on_;
};

TEST_F(EngineAloneTest, TheOnlyJobRunsOnTheThreadThatSubmitsIt) {
  Warm();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(RunsHere(Job())) << i;
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
}

TEST_F(EngineAloneTest, AJobOfUnknownTimeRunsOnAStreamsThread) { EXPECT_FALSE(RunsHere(Job())); }

TEST_F(EngineAloneTest, ALongJobRunsOnAStreamsThread) {
  backend_.SetRowTime(std::chrono::milliseconds(1));
  Warm();
  EXPECT_FALSE(RunsHere(Job()));
}

TEST_F(EngineAloneTest, AJobBesideAnotherRunsOnAStreamsThread) {
  Warm();
  backend_.Hold(FaultPoint::kUpload);
  auto first = Job();
  first->on_done = nullptr;
  engine_->Submit(first);
  auto second = Job();
  engine_->SubmitAlone(second, [] {});  // returns, although the device is held
  backend_.Release();
  EXPECT_TRUE(first->Wait().ok());
  EXPECT_TRUE(second->Wait().ok());
  EXPECT_NE(ran_on_, std::this_thread::get_id());
}

// While its stream is lent, the other stream does all other work, and work that waits for a stream is
// not forgotten when it is given back.
TEST_F(EngineAloneTest, OtherJobsGoOnWhileAStreamIsLent) {
  Warm();
  for (int round = 0; round < 50; ++round) {
    backend_.Hold();
    const size_t begun = backend_.log().size();
    auto alone = Job();
    std::thread thread([&] { engine_->SubmitAlone(alone, [] {}); });
    backend_.WaitForOps(begun + 1);
    std::vector<std::shared_ptr<TestJob>> others;
    for (int i = 0; i < 6; ++i) {
      others.push_back(std::make_shared<TestJob>(
          TestJob::Shape{.row_elements = 3 + i % 3, .caller = {.id = static_cast<uint64_t>(i)}}));
      engine_->Submit(others.back());
    }
    backend_.WaitForOps(begun + 2);
    backend_.Release();
    for (const auto& job : others) EXPECT_TRUE(job->Wait().ok());
    thread.join();
    EXPECT_TRUE(alone->Wait().ok());
    EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20))) << round;
  }
}

TEST_F(EngineAloneTest, StopWaitsForALentStream) {
  Warm();
  backend_.Hold();
  auto alone = Job();
  std::thread thread([&] { engine_->SubmitAlone(alone, [] {}); });
  backend_.WaitForOps(2);
  std::thread stopper([&] { engine_->Stop(); });
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(alone->status().has_value());
  backend_.Release();
  stopper.join();
  thread.join();
  EXPECT_TRUE(alone->Wait().ok());
}

TEST_F(EngineAloneTest, ALostDeviceEndsTheJobThatFoundIt) {
  Warm();
  backend_.FailNext(FaultPoint::kWait, absl::InternalError("sticky"));
  auto alone = Job();
  engine_->SubmitAlone(alone, [] {});
  EXPECT_TRUE(absl::IsUnavailable(alone->Wait()));
  auto later = Job();
  engine_->SubmitAlone(later, [] {});
  EXPECT_TRUE(absl::IsUnavailable(later->Wait()));
}

// A few threads with one job each at a time: streams are lent, and not, in all orders.
TEST_F(EngineAloneTest, LoansComeAndGo) {
  Warm();
  constexpr int kThreads = 3;
  constexpr int kJobs = 300;
  std::atomic<int> here = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::minstd_rand random(static_cast<uint32_t>(t) + 1);
      for (int i = 0; i < kJobs; ++i) {
        auto job = std::make_shared<TestJob>(TestJob::Shape{.caller = {.id = uint64_t(t)}});
        std::thread::id ran_on;
        job->on_done = [&ran_on](const absl::Status&) { ran_on = std::this_thread::get_id(); };
        if (random() % 3 == 0) {
          engine_->Submit(job);
        } else {
          engine_->SubmitAlone(job, [] {});
        }
        if (random() % 8 == 0) engine_->Cancel(*job);
        const absl::Status status = job->Wait();
        ASSERT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
        ASSERT_FALSE(job->misused());
        if (ran_on == std::this_thread::get_id()) ++here;
        if (random() % 4 == 0) absl::SleepFor(absl::Microseconds(random() % 300));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
  EXPECT_GT(here, 0);
  EXPECT_LT(here, kThreads * kJobs);
}

}  // namespace
}  // namespace logitd::engine
