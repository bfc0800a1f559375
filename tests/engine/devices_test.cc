// The engine with several devices: who runs what, and what a lost device takes with it.
#include "server/engine/devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/engine/activity.h"
#include "server/engine/engine.h"
#include "server/engine/metrics.h"
#include "spdlog/spdlog.h"
#include "tests/engine/test_job.h"
#include "tests/fake_backend.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

// The engine logs every lost device. Here many are lost on purpose.
[[maybe_unused]] const bool kQuiet = [] {
  spdlog::set_level(spdlog::level::off);
  return true;
}();

// Devices 10, 11, ... with one stream each.
class DevicesTest : public ::testing::Test {
 protected:
  void Start(int count, const EngineOptions& options = SmallOptions()) {
    std::vector<Backend*> backends;
    std::vector<int> numbers;
    for (int i = 0; i < count; ++i) {
      backends_.push_back(std::make_unique<FakeBackend>(
          DeviceInfo{.backend = "fake", .number = 10 + i, .name = "fake"}));
      backends.push_back(backends_.back().get());
      numbers.push_back(10 + i);
    }
    metrics_ = std::make_unique<Metrics>(kOpNames, numbers);
    devices_ = std::make_shared<Devices>(backends);
    auto engine = Engine::Create(devices_, options, metrics_.get(),
                                 [this](const absl::Status&) { lost_.fetch_add(1); });
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  ~DevicesTest() override {
    for (const auto& backend : backends_) backend->Release();
    engine_.reset();
    for (const auto& backend : backends_) EXPECT_EQ(backend->live_slabs(), 0);
    for (const auto& job : jobs_) {
      EXPECT_EQ(job->dones(), 1);
      EXPECT_FALSE(job->misused());
    }
  }

  std::shared_ptr<TestJob> Submit(const TestJob::Shape& shape = {}) {
    auto job = std::make_shared<TestJob>(shape);
    jobs_.push_back(job);
    engine_->Submit(job);
    return job;
  }

  FakeBackend& device(int i) { return *backends_[static_cast<size_t>(i)]; }
  size_t Ran(int i) { return device(i).log().size(); }
  bool Idle() { return engine_->WaitIdle(SteadyNow() + absl::Seconds(20)); }

  // Waits until `count` devices run a batch each.
  void WaitUntilBusy(int count) {
    const auto busy = [&] {
      int held = 0;
      for (const auto& backend : backends_) held += backend->held() > 0 ? 1 : 0;
      return held >= count;
    };
    while (!busy()) absl::SleepFor(absl::Microseconds(100));
  }

  static constexpr std::string_view kOpNames[] = {"digest"};
  std::vector<std::unique_ptr<FakeBackend>> backends_;
  std::unique_ptr<Metrics> metrics_;
  std::shared_ptr<Devices> devices_;
  std::atomic<int> lost_ = 0;
  std::vector<std::shared_ptr<TestJob>> jobs_;
  std::unique_ptr<Engine> engine_;
};

EngineOptions OneJobABatch() {
  EngineOptions options = SmallOptions();
  options.max_batch_rows = 1;
  return options;
}

TEST_F(DevicesTest, EveryDeviceWorksAtTheSameTime) {
  Start(3);
  for (int i = 0; i < 3; ++i) device(i).Hold();
  for (int i = 0; i < 3; ++i) {
    Submit();
    WaitUntilBusy(i + 1);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Ran(i), 1);
    device(i).Release();
  }
  EXPECT_TRUE(Idle());
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok());
}

TEST_F(DevicesTest, WorkThatWaitsGoesToTheDeviceThatIsFreeFirst) {
  Start(2, OneJobABatch());
  device(0).Hold();
  device(1).Hold();
  for (int i = 0; i < 40; ++i) Submit();
  WaitUntilBusy(2);
  // Device 0 stands still. It keeps only the batch that it runs.
  device(1).Release();
  while (device(1).log().size() < 39) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(Ran(0), 1);
  EXPECT_FALSE(engine_->WaitIdle(SteadyNow() + absl::Milliseconds(20)));
  device(0).Release();
  EXPECT_TRUE(Idle());
  EXPECT_EQ(Ran(0), 1);
  EXPECT_EQ(Ran(1), 39);
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok());
}

TEST_F(DevicesTest, EqualDevicesGetAboutEqualShares) {
  Start(4, OneJobABatch());
  for (int i = 0; i < 4; ++i) device(i).SetOpTime(std::chrono::milliseconds(2));
  // A device whose thread gets no processor for a while rightly takes less work.
  size_t least = 0;
  size_t submitted = 0;
  for (int attempt = 0; attempt < 10 && least < 25; ++attempt, submitted += 200) {
    const std::vector<size_t> before = {Ran(0), Ran(1), Ran(2), Ran(3)};
    for (int i = 0; i < 200; ++i) Submit();
    EXPECT_TRUE(Idle());
    least = 200;
    for (int i = 0; i < 4; ++i) least = std::min(least, Ran(i) - before[static_cast<size_t>(i)]);
  }
  EXPECT_GE(least, 25);
  size_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    sum += Ran(i);
    EXPECT_THAT(Scrape(*metrics_), HasSubstr(absl::StrCat("logitd_device_rows_total{device=\"",
                                                          10 + i, "\"} ", Ran(i), "\n")));
  }
  EXPECT_EQ(sum, submitted);
}

// The fake devices have memory of their own, so a slice on another device would read garbage.
TEST_F(DevicesTest, ABatchThatHasBegunStaysOnItsDevice) {
  EngineOptions options = SmallOptions();
  options.max_slice = absl::Microseconds(500);
  options.slabs_per_stream = 3;
  Start(3, options);
  for (int i = 0; i < 3; ++i) device(i).SetRowTime(std::chrono::microseconds(200));
  for (int i = 0; i < 60; ++i) {
    Submit({.tag = static_cast<uint32_t>('a' + i % 26),
            .rows = 1 + i % 20,
            .notes_per_row = i % 3,
            .caller = {.id = static_cast<uint64_t>(i % 5)}});
  }
  EXPECT_TRUE(Idle());
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok());
  for (int i = 0; i < 3; ++i) EXPECT_GT(Ran(i), 0) << "device " << i;
}

TEST_F(DevicesTest, MaxBatchDelayHoldsWithSeveralDevices) {
  EngineOptions options = SmallOptions();
  options.max_batch_delay = absl::Milliseconds(2);
  Start(3, options);
  for (int round = 0; round < 100; ++round) {
    auto a = Submit({.row_elements = 4 + round % 3});
    auto b = Submit({.row_elements = 4 + round % 2});
    ASSERT_TRUE(Idle()) << "a batch that was due was left";
  }
}

TEST_F(DevicesTest, CancelReachesTheDeviceThatRunsTheJob) {
  Start(2, OneJobABatch());
  device(0).Hold();
  device(1).Hold();
  auto first = Submit();
  WaitUntilBusy(1);
  auto second = Submit();
  WaitUntilBusy(2);
  auto third = Submit();
  engine_->Cancel(*second);
  engine_->Cancel(*third);
  EXPECT_TRUE(absl::IsCancelled(third->Wait()));
  device(0).Release();
  device(1).Release();
  EXPECT_TRUE(first->Wait().ok());
  EXPECT_TRUE(absl::IsCancelled(second->Wait()));
  EXPECT_TRUE(Idle());
  EXPECT_EQ(Ran(0) + Ran(1), 2);
}

TEST_F(DevicesTest, StopLetsRunningBatchesOfAllDevicesFinish) {
  Start(2, OneJobABatch());
  device(0).Hold();
  device(1).Hold();
  for (int i = 0; i < 5; ++i) Submit();
  WaitUntilBusy(2);
  std::thread stop([&] { engine_->Stop(); });
  while (!jobs_.back()->status().has_value()) absl::SleepFor(absl::Milliseconds(1));
  device(0).Release();
  device(1).Release();
  stop.join();
  int ok = 0;
  for (const auto& job : jobs_) ok += job->Wait().ok() ? 1 : 0;
  EXPECT_EQ(ok, 2);
  EXPECT_EQ(lost_, 0);
}

TEST_F(DevicesTest, ALostDeviceHarmsOnlyTheBatchesThatItRuns) {
  Start(2, OneJobABatch());
  device(0).Hold();
  device(1).Hold();
  device(1).FailNext(FaultPoint::kWait, absl::InternalError("sticky"));
  for (int i = 0; i < 20; ++i) Submit();
  WaitUntilBusy(2);
  device(1).Release();
  while (!devices_->lost(1)) absl::SleepFor(absl::Milliseconds(1));
  device(0).Release();
  EXPECT_TRUE(Idle());
  int failed = 0;
  for (const auto& job : jobs_) {
    const absl::Status status = job->Wait();
    if (status.ok()) continue;
    ++failed;
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("sticky"));
  }
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(Ran(1), 1);
  EXPECT_EQ(lost_, 0);
  EXPECT_EQ(devices_->left(), 1);
  const std::string page = Scrape(*metrics_);
  for (const char* line :
       {"logitd_device_up{device=\"10\"} 1\n", "logitd_device_up{device=\"11\"} 0\n",
        "logitd_device_errors_total{device=\"11\",kind=\"lost\"} 1\n",
        "logitd_device_errors_total{device=\"10\",kind=\"lost\"} 0\n", "logitd_slabs 4\n"}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
  // It does not come back.
  for (int i = 0; i < 20; ++i) Submit();
  EXPECT_TRUE(Idle());
  for (size_t i = 20; i < 40; ++i) EXPECT_TRUE(jobs_[i]->Wait().ok());
  EXPECT_EQ(Ran(1), 1);
  // The last one ends the service.
  device(0).FailNext(FaultPoint::kOp, absl::InternalError("sticky"));
  EXPECT_TRUE(absl::IsUnavailable(Submit()->Wait()));
  EXPECT_TRUE(absl::IsUnavailable(Submit()->Wait()));
  EXPECT_TRUE(Idle());
  engine_->Stop();
  EXPECT_EQ(lost_, 1);
  EXPECT_EQ(devices_->left(), 0);
}

TEST_F(DevicesTest, ABatchBetweenSlicesEndsWithItsDevice) {
  EngineOptions options = SmallOptions();
  options.max_slice = absl::Microseconds(500);
  Start(2, options);
  device(0).Hold();
  device(1).Hold();
  std::atomic<int> ops = 0;
  // The second slice on device 0 loses it. By then its first batch has run one slice.
  device(0).SetFaults([&](FaultPoint point) {
    return point == FaultPoint::kOp && ++ops == 2 ? absl::InternalError("sticky")
                                                  : absl::OkStatus();
  });
  auto first = Submit({.rows = 40, .whole = true});
  WaitUntilBusy(1);
  const int busy = device(0).held() > 0 ? 0 : 1;
  auto second = Submit({.row_elements = 5, .rows = 40, .whole = true});
  WaitUntilBusy(2);
  // Batch work in slices takes both devices, and interactive work comes between its slices.
  device(busy).Release();
  device(1 - busy).Release();
  EXPECT_TRUE(first->Wait().ok());
  EXPECT_TRUE(second->Wait().ok());
  ASSERT_EQ(ops, 1);
  device(0).SetRowTime(std::chrono::microseconds(200));
  device(1).SetRowTime(std::chrono::microseconds(200));
  std::vector<std::shared_ptr<TestJob>> sliced;
  for (int i = 0; i < 4; ++i) {
    sliced.push_back(
        Submit({.row_elements = 6 + i,
                .rows = 30,
                .caller = {.id = static_cast<uint64_t>(i), .priority = Priority::kBatch}}));
  }
  EXPECT_TRUE(Idle());
  EXPECT_TRUE(devices_->lost(0));
  int failed = 0;
  for (const auto& job : sliced) failed += absl::IsUnavailable(job->Wait()) ? 1 : 0;
  EXPECT_GE(failed, 1);
  EXPECT_LT(failed, 4);
  EXPECT_TRUE(Submit()->Wait().ok());
}

TEST_F(DevicesTest, AnotherUserOfADeviceMayTellThatItIsLost) {
  Start(2);
  engine_->DeviceLost(OfDevice(1, absl::InternalError("sticky")));
  EXPECT_FALSE(devices_->lost(0));
  EXPECT_TRUE(devices_->lost(1));
  engine_->DeviceLost(OfDevice(1, absl::InternalError("sticky")));
  EXPECT_EQ(lost_, 0);
  EXPECT_TRUE(Submit()->Wait().ok());
  engine_->DeviceLost(OfDevice(0, absl::InternalError("sticky")));
  EXPECT_EQ(lost_, 1);
  EXPECT_TRUE(absl::IsUnavailable(Submit()->Wait()));
}

TEST_F(DevicesTest, RowsThatHaveAPlaceShareABatchWithOthers) {
  Start(1);
  device(0).Hold();
  Submit({.tag = 'z', .row_elements = 7});  // keeps the stream busy
  WaitUntilBusy(1);
  std::vector<std::shared_ptr<TestJob>> jobs;
  for (uint32_t i = 0; i < 12; ++i) {
    jobs.push_back(Submit({.tag = 'a' + i, .rows = 1 + i % 3, .placed = i % 3 != 1}));
  }
  device(0).Release();
  for (const auto& job : jobs) EXPECT_TRUE(job->Wait().ok());
  const std::vector<FakeBackend::Ran> log = device(0).log();
  ASSERT_EQ(log.size(), 2);
  EXPECT_EQ(log[1].rows, 24);
  EXPECT_EQ(log[1].gathered_bytes, 16 * 16);
}

TEST_F(DevicesTest, ABatchWhoseRowsAllHaveAPlaceUploadsOnlyItsInputs) {
  Start(1);
  EXPECT_TRUE(Submit({.row_elements = 250, .rows = 4, .placed = true})->Wait().ok());
  EXPECT_EQ(device(0).log()[0].uploaded_bytes, 4 * sizeof(DigestRow));
  EXPECT_EQ(device(0).log()[0].gathered_bytes, 4000);
}

TEST_F(DevicesTest, RowsInMemoryOfADeviceRunThere) {
  Start(3);
  std::vector<std::shared_ptr<TestJob>> jobs;
  for (int i = 0; i < 60; ++i) {
    jobs.push_back(Submit({.tag = static_cast<uint32_t>('a' + i % 26),
                           .rows = 1 + i % 4,
                           .caller = {.id = static_cast<uint64_t>(i % 5)},
                           .placed = true,
                           .device = 1}));
  }
  EXPECT_TRUE(Idle());
  for (const auto& job : jobs) EXPECT_TRUE(job->Wait().ok());
  EXPECT_EQ(Ran(0) + Ran(2), 0);
  EXPECT_GT(Ran(1), 0);
}

// Device 1 stands still with work that only it can do. The others do the rest.
TEST_F(DevicesTest, WorkThatIsBoundToABusyDeviceKeepsNoOtherDeviceIdle) {
  Start(2, OneJobABatch());
  device(1).Hold();
  auto bound = Submit({.placed = true, .device = 1});
  WaitUntilBusy(1);
  auto waits = Submit({.placed = true, .device = 1});
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(Submit()->Wait().ok());
  EXPECT_FALSE(waits->status().has_value());
  device(1).Release();
  EXPECT_TRUE(bound->Wait().ok());
  EXPECT_TRUE(waits->Wait().ok());
  EXPECT_EQ(Ran(0), 20);
  EXPECT_EQ(Ran(1), 2);
}

TEST_F(DevicesTest, WorkThatIsBoundToALostDeviceEndsWithIt) {
  EngineOptions options = OneJobABatch();
  options.slabs_per_stream = 2;
  Start(2, options);
  device(0).Hold();
  device(1).Hold();
  auto running = Submit({.placed = true, .device = 1});
  WaitUntilBusy(1);
  std::vector<std::shared_ptr<TestJob>> bound;  // in batches, and without a slab
  for (int i = 0; i < 6; ++i) bound.push_back(Submit({.placed = true, .device = 1}));
  auto other = Submit({.placed = true, .device = 0});
  engine_->DeviceLost(OfDevice(1, absl::InternalError("sticky")));
  for (const auto& job : bound) {
    const absl::Status status = job->Wait();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("sticky"));
  }
  EXPECT_TRUE(absl::IsUnavailable(Submit({.placed = true, .device = 1})->Wait()));
  device(0).Release();
  device(1).Release();
  EXPECT_TRUE(other->Wait().ok());
  running->Wait().IgnoreError();
  EXPECT_TRUE(Submit()->Wait().ok());
}

TEST_F(DevicesTest, BusyCountsOnlyDevicesThatServe) {
  Start(2);
  for (int i = 0; i < 2; ++i) device(i).Hold();
  Submit();
  WaitUntilBusy(1);
  const int busy = device(0).held() > 0 ? 0 : 1;
  EXPECT_EQ(engine_->activity().Stalled(MonotonicNanos()), absl::ZeroDuration());
  engine_->DeviceLost(OfDevice(1 - busy, absl::InternalError("sticky")));
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_GE(engine_->activity().Stalled(MonotonicNanos()), absl::Milliseconds(5));
  device(busy).Release();
  EXPECT_TRUE(Idle());
}

// Each job asks for a head whose scale, on each device, is the device's number.
TEST_F(DevicesTest, ADeviceUsesItsOwnCopyOfAHead) {
  Start(2, OneJobABatch());
  class WhoRan final : public CheckedJob {
   public:
    explicit WhoRan(const std::shared_ptr<const Head>& head) : head_(head) {
      spec_.key = {.op = &kDigest, .dtype = DType::kF32, .row_elements = 4, .head = head.get()};
      spec_.counts[kDigestRows] = 1;
      spec_.size = SizeOfJob(spec_);
    }
    void CopyRowsTo(std::byte* dst, size_t) override { std::memset(dst, 0, 16); }
    void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts&) override {
      const DigestRow row{.first_entry = 0, .first_note = 0, .entries = 0, .notes = 0, .tag = 1};
      std::memcpy(inputs[0], &row, sizeof(row));
    }
    int scale = 0;

   private:
    bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const override {
      uint32_t tag;
      std::memcpy(&tag, outputs[2].data(), sizeof(tag));
      const_cast<WhoRan*>(this)->scale = static_cast<int>(tag) - 1;
      return true;
    }
    const std::shared_ptr<const Head> head_;
  };
  std::vector<Head::Copy> copies;
  for (int i = 0; i < 2; ++i) {
    copies.push_back(
        {.backend = &device(i), .memory = {}, .view = {.scale = static_cast<float>(10 + i)}});
    device(i).SetOpTime(std::chrono::milliseconds(1));
  }
  const auto head = std::make_shared<const Head>(std::move(copies), HeadInfo());
  std::vector<std::shared_ptr<WhoRan>> jobs;
  for (int i = 0; i < 40; ++i) {
    jobs.push_back(std::make_shared<WhoRan>(head));
    engine_->Submit(jobs.back());
  }
  EXPECT_TRUE(Idle());
  size_t of_first = 0;
  for (const auto& job : jobs) {
    ASSERT_TRUE(job->Wait().ok());
    EXPECT_TRUE(job->scale == 10 || job->scale == 11) << job->scale;
    of_first += job->scale == 10 ? 1 : 0;
  }
  EXPECT_EQ(of_first, Ran(0));
  EXPECT_EQ(40 - of_first, Ran(1));
  EXPECT_GT(of_first, 0);
  EXPECT_LT(of_first, 40);
}

TEST(DevicesCreateTest, AnErrorNamesTheDeviceAndLeavesNothing) {
  FakeBackend first({.backend = "fake", .number = 3, .name = "fake"});
  FakeBackend second({.backend = "fake", .number = 7, .name = "fake"});
  second.LimitSlabs(2);
  const auto engine =
      Engine::Create(std::make_shared<Devices>(std::vector<Backend*>{&first, &second}),
                     SmallOptions(), nullptr, [](const absl::Status&) {});
  EXPECT_TRUE(absl::IsResourceExhausted(engine.status())) << engine.status();
  EXPECT_EQ(engine.status().message(), "device 7: no memory for a slab");
  EXPECT_EQ(first.live_slabs(), 0);
  EXPECT_EQ(second.live_slabs(), 0);
}

// ---- storms: every job ends once, whatever device is lost ----

class DevicesStormTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(DevicesStormTest, EveryJobEndsOnceAndRight) {
  const uint32_t seed = GetParam();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  constexpr int kThreads = 4;
  constexpr int kJobs = 200;
  std::vector<std::unique_ptr<FakeBackend>> backends;
  std::vector<Backend*> pointers;
  std::atomic<int> calls = 0;
  for (int i = 0; i < 3; ++i) {
    backends.push_back(std::make_unique<FakeBackend>());
    pointers.push_back(backends.back().get());
    // Device 2 is lost after some work, in every second storm device 1 too.
    backends.back()->SetFaults([&calls, i, seed](FaultPoint) -> absl::Status {
      const int call = calls.fetch_add(1);
      const int lost_after = i == 2 ? 150 : (i == 1 && seed % 2 == 0) ? 350 : 1 << 30;
      return call >= lost_after ? absl::InternalError("sticky") : absl::OkStatus();
    });
    backends.back()->SetOpTime(std::chrono::microseconds(50));
    backends.back()->SetRowTime(std::chrono::microseconds(seed > 2 ? 20 : 0));
  }
  EngineOptions options = SmallOptions();
  if (seed > 2) options.max_slice = absl::Microseconds(60);
  options.streams = seed % 3 == 0 ? 1 : 2;
  options.slabs_per_stream = 2;
  options.max_batch_rows = 16;
  options.slab_payload_bytes = 256;
  options.slab_answer_bytes = 512;
  if (seed % 4 == 1) options.max_batch_delay = absl::Microseconds(200);
  std::atomic<int> lost = 0;
  const auto devices = std::make_shared<Devices>(pointers);
  auto engine = Engine::Create(devices, options, nullptr, [&](const absl::Status&) { ++lost; });
  ASSERT_TRUE(engine.ok()) << engine.status();

  std::vector<std::vector<std::shared_ptr<TestJob>>> jobs(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    jobs[static_cast<size_t>(t)].resize(kJobs);
    threads.emplace_back([&, t] {
      std::mt19937 random(seed * 1000 + static_cast<uint32_t>(t));
      const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
      auto& mine = jobs[static_cast<size_t>(t)];
      for (uint32_t i = 0; i < kJobs; ++i) {
        TestJob::Shape shape{.tag = 1 + static_cast<uint32_t>(t) * kJobs + i,
                             .row_elements = 3 + below(3),
                             .rows = 1 + below(5),
                             .entries_per_row = static_cast<int32_t>(below(4)),
                             .notes_per_row = static_cast<int32_t>(below(6)),
                             .caller = {.id = below(3), .weight = 1.0 + below(2)}};
        if (below(4) == 0) shape.caller.priority = Priority::kBatch;
        if (below(8) == 0) shape.deadline = SteadyNow() + absl::Microseconds(below(2000));
        mine[i] = std::make_shared<TestJob>(shape);
        (*engine)->Submit(mine[i]);
        if (below(6) == 0) (*engine)->Cancel(*mine[below(i + 1)]);
        if (below(16) == 0) absl::SleepFor(absl::Microseconds(below(300)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE((*engine)->WaitIdle(SteadyNow() + absl::Seconds(30)));
  // Those that are left still do everything.
  auto last = std::make_shared<TestJob>(TestJob::Shape{});
  (*engine)->Submit(last);
  EXPECT_TRUE(last->Wait().ok());
  (*engine)->Stop();
  std::map<std::string, int> ends;
  int ok = 0;
  int unavailable = 0;
  for (const auto& mine : jobs) {
    for (const auto& job : mine) {
      ASSERT_EQ(job->dones(), 1);
      ASSERT_FALSE(job->misused());
      ASSERT_EQ(job.use_count(), 1) << "the engine still holds the job";
      ++ends[absl::StatusCodeToString(job->status()->code())];
      ok += job->status()->ok() ? 1 : 0;
      unavailable += absl::IsUnavailable(*job->status()) ? 1 : 0;
    }
  }
  EXPECT_GT(ok, kThreads * kJobs / 2) << absl::StrJoin(ends, " ", absl::PairFormatter(":"));
  EXPECT_GE(unavailable, 1);
  EXPECT_EQ(lost, 0);
  EXPECT_TRUE(devices->lost(2));
  EXPECT_EQ(devices->lost(1), seed % 2 == 0);
  engine->reset();
  for (const auto& backend : backends) EXPECT_EQ(backend->live_slabs(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, DevicesStormTest, ::testing::Range(1u, 7u));

}  // namespace
}  // namespace logitd::engine
