// Batches on a head that wait for the kernels of another one on it: see "Heads on a device" in
// batcher.h.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/engine/batcher.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

constexpr int kKernelsUs = 900;  // of a batch of one row
constexpr absl::Duration kKernels = absl::Microseconds(kKernelsUs);
static_assert(absl::Microseconds(2 * kKernelsUs) < Batcher::kMostHeld);
constexpr absl::Duration kLongHold = absl::Microseconds(1500);
static_assert(kLongHold < Batcher::kMostHeld);
constexpr absl::Duration kDelay = absl::Microseconds(50);  // so that jobs share a batch
// On a busy machine threads wait for a processor, so what takes too long is tried again.
constexpr absl::Duration kMostTries = absl::Seconds(20);

class HeldBatchTest : public ::testing::Test {
 protected:
  HeldBatchTest() { SetKernels(kKernels); }
  ~HeldBatchTest() override { backend_.Release(); }

  void SetKernels(absl::Duration time) { backend_.SetRowTime(absl::ToChronoMicroseconds(time)); }
  std::shared_ptr<TestJob> Submit(std::shared_ptr<const Head> head, int64_t rows = 1,
                                  absl::Duration time = absl::InfiniteDuration()) {
    auto job = std::make_shared<TestJob>(
        TestJob::Shape{.rows = rows, .head = std::move(head), .deadline = absl::Now() + time});
    engine_->Submit(job);
    return job;
  }
  // The engine then knows what a batch on the head takes, and has no job. Several, for a busy machine
  // may delay one.
  void Warm(int64_t rows = 1) {
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(Submit(head_, rows)->Wait().ok());
      ASSERT_TRUE(engine_->WaitIdle(absl::Now() + absl::Seconds(20)));
    }
  }
  // Submits `jobs` jobs on head_ at once, and waits until they run, which they do until Release. False:
  // they did not share a batch, because this thread waited for a processor.
  bool Begin(int jobs, int64_t rows, std::vector<std::shared_ptr<TestJob>>& begun) {
    backend_.Hold();
    const size_t before = backend_.log().size();
    for (int i = 0; i < jobs; ++i) begun.push_back(Submit(head_, rows));
    backend_.WaitForOps(before + 1);
    return backend_.log()[before].rows == jobs * rows;
  }
  void End(const std::vector<std::shared_ptr<TestJob>>& jobs) {
    backend_.Release();
    for (const auto& job : jobs) {
      EXPECT_TRUE(job->Wait().ok());
      EXPECT_FALSE(job->misused());
    }
    EXPECT_TRUE(engine_->WaitIdle(absl::Now() + absl::Seconds(20)));
  }
  // How long after a batch on head_ was submitted, which does not end before, a job on `head` begins.
  absl::Duration BeginsAfter(const std::shared_ptr<const Head>& head, int jobs_before = 2,
                             int64_t rows_before = 1) {
    const absl::Time last = absl::Now() + kMostTries;
    while (absl::Now() < last) {
      std::vector<std::shared_ptr<TestJob>> jobs;
      const absl::Time start = absl::Now();
      const bool together = Begin(jobs_before, rows_before, jobs);
      const size_t begun = backend_.log().size();
      if (together) {
        jobs.push_back(Submit(head));
        backend_.WaitForOps(begun + 1);
      }
      const absl::Duration after = absl::Now() - start;
      End(jobs);
      if (together) return after;
    }
    ADD_FAILURE() << "jobs never shared a batch";
    return absl::ZeroDuration();
  }
  // Whether a job begins before a hold of kLongHold would end. Its deadline is `time` after it is
  // submitted. Before it, `held_before` jobs without a deadline are in its batch, which is held.
  bool BeginsInsteadOfBeingHeld(absl::Duration time, int held_before) {
    const absl::Time last = absl::Now() + kMostTries;
    while (absl::Now() < last) {
      std::vector<std::shared_ptr<TestJob>> jobs;
      const absl::Time start = absl::Now();
      const bool together = Begin(2, 1, jobs);
      const size_t begun = backend_.log().size();
      for (int i = 0; i < held_before; ++i) jobs.push_back(Submit(head_));
      if (held_before > 0) absl::SleepFor(kDelay * 2);  // an idle stream has looked at them
      const auto job = Submit(head_, 1, time);
      while (backend_.log().size() == begun && !job->status().has_value()) {
        std::this_thread::yield();
      }
      const bool early = absl::Now() < start + kLongHold && backend_.log().size() > begun;
      End(jobs);
      job->Wait().IgnoreError();  // its deadline passes while it runs
      EXPECT_FALSE(job->misused());
      if (together && early && backend_.log()[begun].rows == held_before + 1) return true;
    }
    return false;
  }
  // The least of several times, until it is less than `limit`.
  absl::Duration BeginsSoonestAfter(const std::shared_ptr<const Head>& head, int jobs_before = 2,
                                    int64_t rows_before = 1, absl::Duration limit = kKernels) {
    absl::Duration least = absl::InfiniteDuration();
    const absl::Time last = absl::Now() + kMostTries;
    while (least >= limit && absl::Now() < last) {
      least = std::min(least, BeginsAfter(head, jobs_before, rows_before));
    }
    return least;
  }

  FakeBackend backend_;
  const std::shared_ptr<const Head> head_ = MakeHead({&backend_}, /*scale=*/1);
  const std::shared_ptr<const Head> other_ = MakeHead({&backend_}, /*scale=*/2);
  std::unique_ptr<Engine> engine_ = [this] {
    EngineOptions options = SmallOptions();
    options.streams = 2;
    options.max_batch_rows = 128;
    options.max_batch_delay = kDelay;
    options.max_slice = absl::Milliseconds(100);  // no batch here runs in slices
    return Engine::Create(&backend_, options, nullptr, [](const absl::Status&) {}).value();
  }();
};

TEST_F(HeldBatchTest, ABatchWaitsForTheKernelsOfAnotherOneOnItsHeadAndNoLonger) {
  Warm();
  for (int i = 0; i < 5; ++i) EXPECT_GE(BeginsAfter(head_), kKernels) << i;
}

TEST_F(HeldBatchTest, JobsThatComeMeanwhileShareTheNextBatch) {
  Warm();
  const absl::Time last = absl::Now() + kMostTries;
  while (absl::Now() < last) {
    std::vector<std::shared_ptr<TestJob>> jobs;
    if (!Begin(2, 1, jobs)) {  // both streams may run
      End(jobs);
      continue;
    }
    const size_t begun = backend_.log().size();
    jobs.push_back(Submit(head_));
    absl::SleepFor(kDelay * 2);  // long enough for the idle stream to take it
    jobs.push_back(Submit(head_));
    backend_.WaitForOps(begun + 1);
    End(jobs);
    if (backend_.log()[begun].rows == 2) return;
  }
  FAIL() << "no batch had both jobs";
}

TEST_F(HeldBatchTest, ABatchOnAnotherHeadOrOnLogitsDoesNotWait) {
  Warm();
  EXPECT_LT(BeginsSoonestAfter(other_), kKernels);
  EXPECT_LT(BeginsSoonestAfter(nullptr), kKernels);
}

TEST_F(HeldBatchTest, TwoJobsRunAtTheSameTime) {
  Warm();
  EXPECT_LT(BeginsSoonestAfter(head_, /*jobs_before=*/1), kKernels);
}

TEST_F(HeldBatchTest, NothingWaitsForLongKernels) {
  SetKernels(absl::Milliseconds(3));
  Warm();
  EXPECT_LT(BeginsSoonestAfter(head_), kKernels);
}

TEST_F(HeldBatchTest, NothingWaitsForABatchThatReadsTheHeadMoreThanOnce) {
  SetKernels(absl::Microseconds(25));
  Warm(/*rows=*/60);
  constexpr absl::Duration kHold = absl::Microseconds(60 * 25);
  EXPECT_LT(BeginsSoonestAfter(head_, /*jobs_before=*/2, /*rows_before=*/35, kHold), kHold);
}

TEST_F(HeldBatchTest, AJobWhoseDeadlineLiesWithinTheHoldBegins) {
  SetKernels(kLongHold);
  Warm();
  EXPECT_TRUE(BeginsInsteadOfBeingHeld(kLongHold / 2, /*held_before=*/0));
}

TEST_F(HeldBatchTest, AJobThatWouldBeLateAfterTheHoldBeginsBeforeItsEnd) {
  SetKernels(kLongHold);
  Warm();
  EXPECT_TRUE(BeginsInsteadOfBeingHeld(kLongHold + kLongHold / 4, /*held_before=*/0));
}

TEST_F(HeldBatchTest, ABatchThatIsHeldBeginsForADeadlineThatJoinsIt) {
  SetKernels(kLongHold);
  Warm();
  EXPECT_TRUE(BeginsInsteadOfBeingHeld(kLongHold / 2, /*held_before=*/1));
}

// Its end is not lost: the stream that held it for another batch ends too.
TEST_F(HeldBatchTest, AHeldJobCanBeCancelledAndTheEngineStops) {
  Warm();
  std::vector<std::shared_ptr<TestJob>> jobs;
  Begin(2, 1, jobs);
  const auto held = Submit(head_);
  engine_->Cancel(*held);
  const absl::Status status = held->status().value_or(absl::OkStatus());
  EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  jobs.push_back(Submit(head_));
  End(jobs);
  engine_->Stop();
}

}  // namespace
}  // namespace logitd::engine
