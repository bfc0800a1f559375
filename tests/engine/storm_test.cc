// Many threads and every kind of end: each job gets Done once, and every slab comes back.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/random_jobs.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

struct Storm {
  const char* name;
  int devices = 1;
  int streams = 2;
  bool slices = false;     // most batches have several
  double unavailable = 0;  // share of device calls that fail
  // Device calls until the last device is lost, and the one before it; 0: never.
  int last_lost_after = 0;
  int second_last_lost_after = 0;
  bool stop_in_the_middle = false;
  bool loans = false;  // threads have one job each at a time, mostly by SubmitAlone
};

void PrintTo(const Storm& storm, std::ostream* out) { *out << storm.name; }

class StormTest : public EngineFixture,
                  public ::testing::WithParamInterface<std::tuple<Storm, uint32_t>> {
 protected:
  static constexpr int kThreads = 4;
  static constexpr int kJobs = 500;

  void Begin() {
    EngineOptions options = SmallOptions(kAllTestOps);
    options.streams = storm_.streams;
    options.slabs_per_stream = 2;
    options.max_batch_rows = 16;
    options.slab_payload_bytes = 512;
    options.slab_answer_bytes = 512;
    if (storm_.slices) options.max_slice = absl::Microseconds(60);
    if (seed_ % 2 == 0 && !storm_.loans) options.max_batch_delay = absl::Microseconds(200);
    Start(options, storm_.devices);
    for (int i = 0; i < storm_.devices; ++i) {
      device(i).SetOpTime(std::chrono::microseconds(50));
      if (storm_.slices) device(i).SetRowTime(std::chrono::microseconds(20));
      device(i).SetFaults(
          [this, lost_after = LostAfter(i)](FaultPoint) { return Fault(lost_after); });
    }
  }

  int LostAfter(int device) const {
    return device == storm_.devices - 1   ? storm_.last_lost_after
           : device == storm_.devices - 2 ? storm_.second_last_lost_after
                                          : 0;
  }

  absl::Status Fault(int lost_after) {
    const int call = calls_.fetch_add(1);
    if (lost_after > 0 && call >= lost_after) return absl::InternalError("sticky");
    std::minstd_rand random(seed_ + static_cast<uint32_t>(call) * 7919);
    random.discard(3);
    if (std::uniform_real_distribution<>()(random) >= storm_.unavailable) return absl::OkStatus();
    return absl::UnavailableError("hiccup");
  }

  // What one thread does.
  void SubmitAll(uint32_t thread, std::vector<std::shared_ptr<CheckedJob>>& jobs) {
    RandomJobs random(seed_ * 1000 + thread);
    for (int i = 0; i < kJobs; ++i) {
      const auto at = static_cast<size_t>(random.Below(i + 1));
      jobs.push_back(random.Next({.tag = 1 + thread * kJobs + static_cast<uint32_t>(i)},
                                 /*most_rows=*/10, clock_.Now(), absl::Milliseconds(2)));
      if (storm_.loans && !random.OneIn(3)) {
        engine_->SubmitAlone(jobs.back(), [this] { ++lent_; });
      } else {
        engine_->Submit(jobs.back());
      }
      if (random.OneIn(4)) engine_->Cancel(*jobs[at]);
      if (storm_.loans) jobs.back()->Wait().IgnoreError();
      // Answers go back later, on another thread, or at the end.
      for (size_t k = random.OneIn(4) ? 0 : jobs.size(); k < jobs.size(); ++k) {
        jobs[k]->Wait().IgnoreError();
        jobs[k]->Take();
      }
      if (random.OneIn(8)) clock_.Advance(absl::Microseconds(random.Below(300)));
    }
  }

  const Storm storm_ = std::get<0>(GetParam());
  const uint32_t seed_ = std::get<1>(GetParam());
  std::atomic<int> calls_ = 0;
  std::atomic<int> lent_ = 0;
};

TEST_P(StormTest, EveryJobEndsOnceAndRight) {
  SCOPED_TRACE(absl::StrCat("seed ", seed_));
  Begin();
  std::vector<std::vector<std::shared_ptr<CheckedJob>>> jobs(kThreads);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { SubmitAll(t, jobs[t]); });
  }
  std::atomic<bool> ended = false;
  std::thread time([&] {  // delays end, while threads wait for their jobs
    while (!ended) {
      clock_.Advance(absl::Microseconds(20));
      std::this_thread::yield();
    }
  });
  if (storm_.stop_in_the_middle) {
    device().WaitForOps(20);
    engine_->Stop();
  }
  for (std::thread& thread : threads) thread.join();
  WaitIdle();
  std::map<absl::StatusCode, int> ends;
  for (int i = 0; i < storm_.devices; ++i) {  // one that got no work is lost by this
    if (LostAfter(i) > 0) ++ends[Submit({.placed = true, .device = i})->Wait().code()];
  }
  const bool serves = devices_->left() > 0 && !storm_.stop_in_the_middle;
  const absl::Status last = Submit()->Wait();  // what is left still serves
  EXPECT_TRUE(last.ok() == serves || (serves && storm_.unavailable > 0)) << last;
  ended = true;
  time.join();
  engine_->Stop();

  int could_keep = 0;
  for (const auto& mine : jobs) {
    for (const auto& job : mine) {
      ++ends[job->status()->code()];
      could_keep += job->could_keep() ? 1 : 0;
      job->Take();
      jobs_.push_back(job);
    }
  }
  jobs.clear();
  for (const auto& [code, count] : ends) {
    EXPECT_THAT(code, ::testing::AnyOf(absl::StatusCode::kOk, absl::StatusCode::kCancelled,
                                       absl::StatusCode::kDeadlineExceeded,
                                       absl::StatusCode::kUnavailable));
  }
  EXPECT_GT(ends[absl::StatusCode::kOk], serves ? kThreads * kJobs / 2 : 0);
  EXPECT_GE(could_keep, serves && storm_.devices == 1 ? kThreads * kJobs / 64 : 0);
  const bool may_fail = storm_.unavailable > 0 || storm_.last_lost_after > 0;
  EXPECT_EQ(ends[absl::StatusCode::kUnavailable] > 0, may_fail || storm_.stop_in_the_middle);
  EXPECT_EQ(lent_ > 0, storm_.loans);
  EXPECT_EQ(owner_told_, devices_->left() == 0 ? 1 : 0);
  EXPECT_EQ(devices_->left(), storm_.devices - (storm_.last_lost_after > 0 ? 1 : 0) -
                                  (storm_.second_last_lost_after > 0 ? 1 : 0));
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_slabs_in_use 0\n"));
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_slabs_kept 0\n"));
}

INSTANTIATE_TEST_SUITE_P(
    All, StormTest,
    ::testing::Combine(
        ::testing::Values(Storm{"calm_device"},
                          Storm{.name = "slices", .streams = 3, .slices = true},
                          Storm{.name = "hiccups", .unavailable = 0.03},
                          Storm{.name = "hiccups_in_slices", .slices = true, .unavailable = 0.03},
                          Storm{.name = "lost", .unavailable = 0.01, .last_lost_after = 100},
                          Storm{.name = "stopped", .stop_in_the_middle = true},
                          Storm{.name = "loans", .loans = true},
                          Storm{.name = "one_of_three_lost", .devices = 3, .last_lost_after = 150},
                          Storm{.name = "two_of_three_lost",
                                .devices = 3,
                                .streams = 1,
                                .slices = true,
                                .last_lost_after = 150,
                                .second_last_lost_after = 350}),
        ::testing::Values(1u, 2u, 3u)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param).name, "_", std::get<1>(info.param));
    });

}  // namespace
}  // namespace logitd::engine
