// The scheduler by itself, in time that stands still: its order, and its invariants under many
// interleavings of everything that can happen to jobs.
#include "server/engine/scheduler.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kRowNs = 1'000'000;
constexpr int64_t kSliceNs = 10'000'000;

// A job that only counts its ends.
class CountedJob final : public Job {
 public:
  CountedJob(JobSpec spec, int id) : id(id), spec_(std::move(spec)) {
    spec_.size = SizeOfJob(spec_);
  }
  const JobSpec& spec() const override { return spec_; }
  void CopyRowsTo(std::byte*, size_t) override {}
  void WriteInputs(absl::Span<std::byte* const>, const AxisCounts&) override {}
  void Done(const absl::Status& status, const JobAnswer&, const JobTimes&) override {
    ++dones;
    ended_with = status;
  }

  const int id;
  int dones = 0;
  absl::Status ended_with;

 private:
  JobSpec spec_;
};

// A scheduler, streams that run what it says, and its clock.
class World {
 public:
  World(int devices, int streams, int slabs_per_stream,
        absl::Duration max_batch_delay = absl::ZeroDuration())
      : options_(Options(streams, slabs_per_stream, max_batch_delay)),
        slabs_(static_cast<size_t>(devices * streams * slabs_per_stream), Slab{.device = &memory_}),
        scheduler_(options_, kRules, devices, slabs_, costs_),
        running_(static_cast<size_t>(devices * streams)),
        devices_(devices) {
    // Rows take kRowNs.
    costs_.Ran({.op = &kDigest, .dtype = DType::kF32, .row_elements = 4}, 1, 16,
               absl::Nanoseconds(kRowNs));
  }

  // Ends all jobs, which keep themselves until then.
  ~World() {
    Close();
    for (int stream = 0; stream < streams(); ++stream) EndSlice(stream);
    TellAll();
  }

  struct Shape {
    int64_t rows = 1;
    int64_t row_elements = 4;
    int device = kAnyDevice;
    uint64_t caller = 0;
    Priority priority = Priority::kInteractive;
    absl::Duration time = absl::InfiniteDuration();
    bool whole = false;
    const Head* head = nullptr;
  };
  int Submit(const Shape& shape) {
    JobSpec spec;
    spec.key = {.op = &kDigest,
                .dtype = DType::kF32,
                .row_elements = shape.row_elements,
                .head = shape.head,
                .device = shape.device};
    spec.counts[kRowAxis] = shape.rows;
    spec.caller = {.id = shape.caller, .priority = shape.priority};
    spec.deadline = now() + shape.time;
    spec.whole = shape.whole;
    const int id = static_cast<int>(jobs_.size());
    jobs_.push_back(std::make_shared<CountedJob>(std::move(spec), id));
    scheduler_.Submit(jobs_.back(), now_ns_);
    return id;
  }

  // The stream begins a slice. False: it is at work, or there is nothing for it.
  bool Take(int stream) {
    Batch*& batch = running_[static_cast<size_t>(stream)];
    if (batch != nullptr) return false;
    const int device = DeviceOf(stream);
    const bool has_work = scheduler_.HasWork(device, now_ns_);
    batch = scheduler_.Take(device, now_ns_);
    EXPECT_TRUE(has_work || batch == nullptr);
    if (batch != nullptr) Check(*batch, device);
    return batch != nullptr;
  }

  // The stream's slice ends, as RunSlice ends it.
  void EndSlice(int stream) {
    Batch* const batch = std::exchange(running_[static_cast<size_t>(stream)], nullptr);
    if (batch == nullptr) return;
    Progress& progress = batch->progress;
    progress.begun = true;
    const int64_t rows =
        RowsOfSlice(batch->key, batch->whole, batch->rows - progress.next_row, kRowNs, kRules);
    progress.next_row += rows;
    progress.rows_run += rows;
    progress.slice_rows = rows;
    progress.slice_ns = rows * kRowNs;
    progress.times.kernel_ns += progress.slice_ns;
    progress.kind_row_ns = kRowNs;
    progress.finished = 0;
    progress.done = progress.next_row == batch->rows;
    for (Slot& slot : batch->slots) {
      if (!progress.done || slot.job == nullptr) continue;
      JobTimes times;
      const bool gone = Scheduler::IsGone(*slot.job);
      Scheduler::Finish(slot.job, gone ? absl::CancelledError("gone") : absl::OkStatus(),
                        JobAnswer{}, batch->taken_ns, &times);
      slot.job = nullptr;
      slot.has_run = true;
      ++progress.finished;
    }
    now_ns_ += progress.slice_ns;
    scheduler_.GiveBack(batch, now());
  }

  void Cancel(int id) { scheduler_.Cancel(jobs_[static_cast<size_t>(id)].get()); }
  void Advance(absl::Duration by) { now_ns_ += absl::ToInt64Nanoseconds(by); }
  void MakeDue() { scheduler_.MakeDue(now()); }
  void Lose(int device) {
    if (scheduler_.running().lost(device)) return;
    if (--devices_left_ == 0) {
      scheduler_.Close("all lost", now());
    } else {
      scheduler_.Lose(device, "lost", now());
    }
  }
  void Close() { scheduler_.Close("closed", now()); }
  void TellAll() {
    JobList ended = scheduler_.TakeEnded();
    const int64_t count = ended.size;
    while (Job* job = ended.PopFront()) Scheduler::Tell(job, now_ns_);
    scheduler_.Told(count);
  }

  // Runs everything that is left.
  void Drain() {
    for (bool any = true; any;) {
      any = false;
      for (int stream = 0; stream < streams(); ++stream) {
        EndSlice(stream);
        any = Take(stream) || any;
      }
      if (!any && scheduler_.waiting() > 0) {
        now_ns_ = std::max(now_ns_, absl::ToUnixNanos(scheduler_.next_due()));
        MakeDue();
        any = true;
      }
    }
    TellAll();
  }

  // The order in which jobs ran on one stream, by batches.
  std::vector<std::vector<int>> Run(int stream = 0) {
    std::vector<std::vector<int>> batches;
    while (Take(stream)) {
      std::vector<int>& ids = batches.emplace_back();
      for (const Slot& slot : running_[static_cast<size_t>(stream)]->slots) {
        if (slot.job != nullptr) ids.push_back(static_cast<CountedJob*>(slot.job)->id);
      }
      EndSlice(stream);
    }
    TellAll();
    return batches;
  }

  int streams() const { return static_cast<int>(running_.size()); }
  int devices() const { return devices_; }
  absl::Time now() const { return absl::FromUnixNanos(now_ns_); }
  Scheduler& scheduler() { return scheduler_; }
  // The batch that the stream runs.
  Batch* batch(int stream) { return running_[static_cast<size_t>(stream)]; }
  const std::vector<std::shared_ptr<CountedJob>>& jobs() const { return jobs_; }

 private:
  static constexpr SliceRules kRules = {.max_slice_ns = kSliceNs, .linear_rows = 64};

  static EngineOptions Options(int streams, int slabs_per_stream, absl::Duration max_batch_delay) {
    EngineOptions options = SmallOptions();
    options.streams = streams;
    options.slabs_per_stream = slabs_per_stream;
    options.slab_payload_bytes = 1 << 20;
    options.slab_answer_bytes = 1 << 20;
    options.max_batch_rows = 2000;
    options.max_batch_delay = max_batch_delay;
    return options;
  }
  int DeviceOf(int stream) const { return stream / options_.streams; }

  // A batch that was taken.
  void Check(const Batch& batch, int device) {
    ASSERT_EQ(batch.device, device);
    ASSERT_GT(batch.live, 0);
    ASSERT_TRUE(batch.slots.size() == 1 || !batch.progress.begun)
        << "several jobs in several slices";
    std::set<const void*> kinds;
    for (const Slot& slot : batch.slots) {
      if (slot.job == nullptr) continue;
      const JobSpec& spec = slot.job->spec();
      ASSERT_TRUE(spec.key == batch.key) << "keys are mixed";
      ASSERT_EQ(spec.caller.priority, batch.queue->kind->key.priority) << "priorities are mixed";
      ASSERT_TRUE(spec.key.device == kAnyDevice || spec.key.device == device);
    }
  }

  EngineOptions options_;
  std::byte memory_ = {};  // of a device, not of the host
  const std::vector<Slab> slabs_;
  Costs costs_;
  Scheduler scheduler_;
  std::vector<Batch*> running_;  // by stream
  std::vector<std::shared_ptr<CountedJob>> jobs_;
  const int devices_;
  int devices_left_ = devices_;
  int64_t now_ns_ = 1'000'000'000;
};

TEST(SchedulerTest, ShortJobsOfAKeyShareABatchUpToASlice) {
  World world(1, 1, 4);
  for (int i = 0; i < 25; ++i) world.Submit({});
  const std::vector<std::vector<int>> batches = world.Run();
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].size(), 14u);  // what rounds to one slice of 10 rows
  EXPECT_EQ(batches[1].size(), 11u);
}

TEST(SchedulerTest, InteractiveJobsGoFirstThenFairlyByCaller) {
  World world(1, 1, 4);
  world.Submit({.rows = 8, .row_elements = 5, .caller = 1, .priority = Priority::kBatch});
  world.Submit({.rows = 8, .row_elements = 6, .caller = 2});
  world.Submit({.rows = 8, .row_elements = 7, .caller = 2});
  world.Submit({.rows = 8, .row_elements = 8, .caller = 3});
  EXPECT_THAT(world.Run(),
              ElementsAre(ElementsAre(1), ElementsAre(3), ElementsAre(2), ElementsAre(0)));
}

TEST(SchedulerTest, LongJobsOfTwoCallersTakeTurns) {
  World world(1, 1, 4);
  world.Submit({.rows = 30, .caller = 1});
  world.Submit({.rows = 30, .caller = 2});
  EXPECT_THAT(world.Run(), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(0),
                                       ElementsAre(1), ElementsAre(0), ElementsAre(1)));
}

TEST(SchedulerTest, AShortJobRunsBetweenSlicesAlsoWhereAllButOneSlabAreTaken) {
  World world(1, 1, 2);
  world.Submit({.rows = 60, .caller = 1});
  ASSERT_TRUE(world.Take(0));
  world.Submit({.rows = 60, .caller = 2});  // may not have the last slab
  world.Submit({.rows = 1, .caller = 3});
  world.EndSlice(0);
  const std::vector<std::vector<int>> batches = world.Run();
  ASSERT_GT(batches.size(), 2u);
  EXPECT_THAT(batches.front(), ElementsAre(2));
  EXPECT_THAT(batches.back(), ElementsAre(1));
}

TEST(SchedulerTest, AJobThatWaitsWhileADeviceIsLostRunsOnAnother) {
  World world(2, 1, 2);
  const int any = world.Submit({});
  const int only = world.Submit({.device = 0});
  const int other = world.Submit({.device = 1});
  world.Lose(0);
  world.TellAll();
  EXPECT_EQ(world.jobs()[static_cast<size_t>(only)]->ended_with, absl::UnavailableError("lost"));
  EXPECT_FALSE(world.Take(0));
  world.Drain();
  EXPECT_TRUE(world.jobs()[static_cast<size_t>(any)]->ended_with.ok());
  EXPECT_TRUE(world.jobs()[static_cast<size_t>(other)]->ended_with.ok());
}

TEST(SchedulerTest, ADeadlineThatPassesEndsAJobWhereverItIs) {
  World world(1, 2, 4);
  const int runs = world.Submit({.rows = 30, .time = absl::Milliseconds(15)});
  ASSERT_TRUE(world.Take(0));
  const int waits = world.Submit({.rows = 30, .time = absl::Milliseconds(5)});
  world.EndSlice(0);  // 10 ms have passed
  ASSERT_TRUE(world.Take(0));
  world.EndSlice(0);
  world.MakeDue();
  world.TellAll();
  for (const int id : {runs, waits}) {
    EXPECT_EQ(world.jobs()[static_cast<size_t>(id)]->ended_with.code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_TRUE(world.scheduler().idle());
}

TEST(SchedulerTest, AJobThatIsLateWhenAStreamIsFreeDoesNotRun) {
  World world(1, 1, 2);
  const int late = world.Submit({.time = absl::Milliseconds(5)});
  const int other = world.Submit({});
  world.Advance(absl::Milliseconds(5));
  EXPECT_THAT(world.Run(), ElementsAre(ElementsAre(other)));
  EXPECT_EQ(world.jobs()[static_cast<size_t>(late)]->ended_with.code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(SchedulerTest, KeptAnswersLeaveEachDeviceASlabForEveryStream) {
  World world(2, 2, 2);
  for (int i = 0; i < 3; ++i) {
    world.Submit({.device = 0});
    ASSERT_TRUE(world.Take(0));
    EXPECT_EQ(world.scheduler().running().Keep(world.batch(0)), i < 2) << i;
    world.EndSlice(0);
  }
}

// Every job ends once, whatever happens in whatever order, and nothing stays behind.
TEST(SchedulerTest, EveryInterleavingEndsEveryJobOnce) {
  constexpr uint32_t kSchedules = 3000;
  for (uint32_t seed = 1; seed <= kSchedules; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::minstd_rand random(seed);
    const auto below = [&random](int n) {
      return static_cast<int>(random() % static_cast<uint32_t>(n));
    };
    World world(1 + below(3), 1 + below(3), 1 + below(3),
                absl::Milliseconds(below(4) == 0 ? 3 : 0));
    const bool may_lose = below(3) == 0;
    for (int step = 0; step < 120; ++step) {
      const int stream = below(world.streams());
      const int jobs = static_cast<int>(world.jobs().size());
      switch (below(12)) {
        case 0:
        case 1:
        case 2:
        case 3:
          world.Submit(
              {.rows = below(4) == 0 ? 1 + below(90) : 1 + below(4),
               .row_elements = 4 + below(2),
               .device = below(4) == 0 ? below(world.devices()) : kAnyDevice,
               .caller = static_cast<uint64_t>(below(3)),
               .priority = below(4) == 0 ? Priority::kBatch : Priority::kInteractive,
               .time = below(3) == 0 ? absl::Milliseconds(below(40) - 1) : absl::InfiniteDuration(),
               .whole = below(8) == 0});
          break;
        case 4:
        case 5:
        case 6:
          world.Take(stream);
          break;
        case 7:
        case 8:
          world.EndSlice(stream);
          break;
        case 9:
          if (jobs > 0) world.Cancel(below(jobs));
          break;
        case 10:
          world.Advance(absl::Milliseconds(below(5)));
          if (below(2) == 0) world.MakeDue();
          world.TellAll();
          break;
        default:
          if (may_lose && below(10) == 0) world.Lose(below(world.devices()));
          if (below(200) == 0) world.Close();
      }
    }
    world.Drain();
    for (const std::shared_ptr<CountedJob>& job : world.jobs()) {
      ASSERT_EQ(job->dones, 1) << "job " << job->id;
      ASSERT_EQ(job.use_count(), 1) << "job " << job->id << " is still held";
    }
    ASSERT_TRUE(world.scheduler().idle());
    ASSERT_EQ(world.scheduler().waiting(), 0);
    ASSERT_EQ(world.scheduler().running().slabs_in_use(), 0);
  }
}

}  // namespace
}  // namespace logitd::engine
