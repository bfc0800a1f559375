// The engine on the machine's own clock and cores. Only what needs them is here.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

double Micros(SteadyTime::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

std::unique_ptr<Engine> MakeEngine(Backend* backend, const EngineOptions& options) {
  return Engine::Create(backend, options, nullptr, [](const absl::Status&) {}).value();
}

TEST(RealTimeTest, ADelayAndADeadlineEndByThemselves) {
  FakeBackend backend;
  EngineOptions options = SmallOptions();
  options.max_batch_delay = absl::Milliseconds(2);
  const auto engine = MakeEngine(&backend, options);
  backend.Hold();
  auto job = std::make_shared<TestJob>(TestJob::Shape{});
  engine->Submit(job);
  backend.WaitForOps(1);
  auto late =
      std::make_shared<TestJob>(TestJob::Shape{.deadline = SteadyNow() + absl::Milliseconds(5)});
  engine->Submit(late);
  EXPECT_EQ(late->Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(engine->WaitIdle(SteadyNow() + absl::Milliseconds(5)));
  backend.Release();
  EXPECT_TRUE(job->Wait().ok());
}

// The engine's own time for a job, next to the start of a thread. Beside other work most jobs wait
// for a processor, so the quickest tenth counts.
TEST(RealTimeTest, AOneRowJobTakesNoLongerThanAFewStartsOfAThread) {
  FakeBackend backend;
  const auto engine = MakeEngine(&backend, SmallOptions());
  std::vector<double> jobs;
  std::vector<double> threads;
  for (int i = 0; i < 1000; ++i) {
    SteadyTime end;
    auto job = std::make_shared<TestJob>(TestJob::Shape{});
    job->on_done = [&end](const absl::Status&) { end = std::chrono::steady_clock::now(); };
    auto begin = std::chrono::steady_clock::now();
    engine->Submit(job);
    ASSERT_TRUE(job->Wait().ok());
    jobs.push_back(Micros(end - begin));
    begin = std::chrono::steady_clock::now();
    std::thread([&end] { end = std::chrono::steady_clock::now(); }).join();
    threads.push_back(Micros(end - begin));
  }
  std::sort(jobs.begin(), jobs.end());
  std::sort(threads.begin(), threads.end());
  std::printf("[ MEASURED ] a one-row job: p10 %.1f us, p50 %.1f us; a thread: %.1f, %.1f\n",
              jobs[100], jobs[500], threads[100], threads[500]);
  EXPECT_LT(jobs[100], 10 * threads[100]);
}

}  // namespace
}  // namespace logitd::engine
