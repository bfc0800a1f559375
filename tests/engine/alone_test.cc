// Jobs that the thread which submits them may run: Engine::SubmitAlone.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "tests/engine/engine_fixture.h"

namespace logitd::engine {
namespace {

class EngineAloneTest : public EngineFixture {
 protected:
  EngineAloneTest() {
    EngineOptions options = SmallOptions();
    options.streams = 2;
    Start(options);
    device().SetRowTime(std::chrono::microseconds(20));
  }

  std::shared_ptr<TestJob> Alone(const TestJob::Shape& shape = {}) {
    auto job = std::make_shared<TestJob>(shape);
    job->on_done = [this](const absl::Status&) { ran_on_ = std::this_thread::get_id(); };
    jobs_.push_back(job);
    engine_->SubmitAlone(job, [this, &job = *job] {
      ++ended_;
      EXPECT_TRUE(job.status().has_value());
    });
    return job;
  }
  // True: a job that is submitted here runs in the call.
  bool RunsHere() {
    const int before = ended_;
    EXPECT_TRUE(Alone()->Wait().ok());
    const bool here = ran_on_ == std::this_thread::get_id();
    EXPECT_EQ(ended_ - before, here ? 1 : 0);
    return here;
  }
  // The engine then knows what a job takes, and has none.
  void Warm() {
    EXPECT_TRUE(Submit()->Wait().ok());
    WaitIdle();
  }

  std::atomic<int> ended_ = 0;
  std::thread::id ran_on_;
};

TEST_F(EngineAloneTest, TheOnlyJobRunsOnTheThreadThatSubmitsItIfItIsKnownToBeShort) {
  EXPECT_FALSE(RunsHere());
  WaitIdle();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(RunsHere()) << i;
  device().SetRowTime(std::chrono::milliseconds(1));
  for (int i = 0; i < 10; ++i) Warm();
  EXPECT_FALSE(RunsHere());
}

TEST_F(EngineAloneTest, AJobBesideAnotherRunsOnAStreamsThread) {
  Warm();
  device().Hold(FaultPoint::kUpload);
  Submit();
  const auto second = Alone();  // returns, although the device is held
  device().Release();
  EXPECT_TRUE(second->Wait().ok());
  EXPECT_NE(ran_on_, std::this_thread::get_id());
}

// While its stream is lent, the other stream does all other work, and work that waits for a stream
// is not forgotten when it is given back.
TEST_F(EngineAloneTest, OtherJobsGoOnWhileAStreamIsLent) {
  Warm();
  for (int round = 0; round < 50; ++round) {
    device().Hold();
    const size_t begun = Ran(0);
    std::thread thread([&] { EXPECT_TRUE(Alone()->Wait().ok()); });
    device().WaitForOps(begun + 1);
    for (int i = 0; i < 6; ++i) {
      Submit({.row_elements = 3 + i % 3, .caller = {.id = static_cast<uint64_t>(i)}});
    }
    device().WaitForOps(begun + 2);
    device().Release();
    thread.join();
    WaitIdle();
  }
}

TEST_F(EngineAloneTest, StopWaitsForALentStream) {
  Warm();
  device().Hold();
  std::thread thread([&] { EXPECT_TRUE(Alone()->Wait().ok()); });
  device().WaitForOps(2);
  Submit({.row_elements = 5});
  device().WaitForOps(3);
  const auto later = Submit({.row_elements = 6});
  std::thread stopper([&] { engine_->Stop(); });
  EXPECT_TRUE(absl::IsUnavailable(later->Wait()));  // it stops
  EXPECT_EQ(ended_, 0);
  device().Release();
  stopper.join();
  EXPECT_EQ(ended_, 1);
  thread.join();
}

TEST_F(EngineAloneTest, ALostDeviceEndsTheJobThatFoundIt) {
  Warm();
  device().FailNext(FaultPoint::kWait, absl::InternalError("sticky"));
  EXPECT_TRUE(absl::IsUnavailable(Alone()->Wait()));
  EXPECT_EQ(owner_told_, 1);
  EXPECT_TRUE(absl::IsUnavailable(Alone()->Wait()));
}

}  // namespace
}  // namespace logitd::engine
