// The engine with heads that are cut over its devices: one batch on all devices, turns, and what a
// device that fails takes with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/shards.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "spdlog/spdlog.h"
#include "tests/engine/test_job.h"
#include "tests/shard_backend.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

[[maybe_unused]] const bool kQuiet = [] {
  spdlog::set_level(spdlog::level::off);
  return true;
}();

constexpr int64_t kVocab = 3000;
constexpr int64_t kHidden = 4;

// ---- The op: the most probable token of every row

enum Axis : size_t { kRows = kRowAxis, kEntries };
constexpr Input<SoftmaxTopKRow> kInRows{0, kRows};
constexpr Output<int32_t> kOutTokens{0, kEntries};
constexpr Output<float> kOutProbs{1, kEntries};
constexpr Output<float> kOutLogsumexp{2, kRows};
constexpr Output<RowStatus> kOutStatus{3, kRows};
constexpr auto kInputs = ArraysOf(kInRows);
constexpr auto kOutputs = ArraysOf(kOutTokens, kOutProbs, kOutLogsumexp, kOutStatus);

const OpTraits kTop1 = {.name = "top1",
                        .inputs = kInputs,
                        .outputs = kOutputs,
                        .enqueue = [](Stream& stream, const BatchView& batch) {
                          return stream.LinearTopK({.hidden = batch.Payload(),
                                                    .head = *batch.head,
                                                    .topk = {.rows = batch.In(kInRows),
                                                             .max_k = 1,
                                                             .indices = batch.Out(kOutTokens),
                                                             .probs = batch.Out(kOutProbs),
                                                             .logsumexp = batch.Out(kOutLogsumexp),
                                                             .status = batch.Out(kOutStatus)}});
                        }};
constexpr std::string_view kOpNames[] = {"top1"};

// Row r of a job asks for token `token` + r: its hidden state points to that row of the weight.
float Weight(int64_t token, int64_t d) {
  return static_cast<float>((token * 2654435761u >> (4 * d)) % 16) - 8;
}

class TopJob final : public CheckedJob {
 public:
  TopJob(std::shared_ptr<const Head> head, int64_t rows, int64_t seed)
      : head_(std::move(head)), seed_(seed) {
    spec_.key = {.op = &kTop1, .dtype = DType::kF32, .row_elements = kHidden, .head = head_.get()};
    spec_.counts[kRows] = spec_.counts[kEntries] = rows;
    spec_.max_row_entries = 1;
    spec_.size = SizeOfJob(spec_);
  }

  void CopyRowsTo(std::byte* dst, size_t row_stride) override {
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      for (int64_t d = 0; d < kHidden; ++d) {
        const float x = Hidden(r, d);
        std::memcpy(dst + static_cast<size_t>(r) * row_stride + static_cast<size_t>(d) * 4, &x, 4);
      }
    }
  }
  void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) override {
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const SoftmaxTopKRow row = {.first_entry = first[kEntries] + r, .temperature = 1, .k = 1};
      std::memcpy(inputs[0] + static_cast<size_t>(r) * sizeof(row), &row, sizeof(row));
    }
  }

 private:
  float Hidden(int64_t r, int64_t d) const { return Weight(seed_ * 131 + r, d); }

  bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const override {
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      int32_t best = 0;
      float most = 0;
      for (int32_t i = 0; i < kVocab; ++i) {
        float x = 0;
        for (int64_t d = 0; d < kHidden; ++d) x += Hidden(r, d) * Weight(i, d);
        if (i == 0 || x > most) most = x, best = i;
      }
      if (std::memcmp(outputs[0].data() + r * 4, &best, 4) != 0) return false;
    }
    return true;
  }

  const std::shared_ptr<const Head> head_;
  const int64_t seed_;
};

// ---- The fixture: devices 10, 11, 12 with one stream each

class ShardedTest : public ::testing::Test {
 protected:
  static constexpr int kDevices = 3;

  ShardedTest() {
    std::vector<int> numbers;
    for (int i = 0; i < kDevices; ++i) {
      backends_.push_back(std::make_unique<ShardBackend>(10 + i));
      numbers.push_back(10 + i);
    }
    metrics_ = std::make_unique<Metrics>(kOpNames, numbers);
    UseDevices({});
    sharded_ = MakeTestHead(true);
    whole_ = MakeTestHead(false);
    Start(1);
  }
  // Before Start.
  void UseDevices(const ShardOptions& shards) {
    std::vector<Backend*> backends;
    for (const auto& backend : backends_) backends.push_back(backend.get());
    devices_ = std::make_shared<Devices>(backends, NumaNodes(), shards);
  }
  void Start(int streams) {
    engine_.reset();
    EngineOptions options = SmallOptions(kOps);
    options.streams = streams;
    engine_ = Engine::Create(devices_, options, metrics_.get(), [this](const absl::Status&) {
                lost_.fetch_add(1);
              }).value();
  }
  ~ShardedTest() override {
    for (const auto& backend : backends_) backend->Release();
    engine_.reset();
    for (const auto& job : jobs_) {
      EXPECT_EQ(job->dones(), 1);
      EXPECT_FALSE(job->misused());
    }
  }

  std::shared_ptr<const Head> MakeTestHead(bool sharded) {
    const VocabShards cut = {.vocab = kVocab, .count = kDevices};
    std::vector<Head::Copy> copies;
    for (int i = 0; i < kDevices; ++i) {
      const VocabShard part = sharded ? cut.at(i) : VocabShard{0, kVocab};
      Backend* const backend = devices_->backend(i);
      const DeviceMemory memory =
          backend->AllocateDevice(static_cast<size_t>(part.tokens * kHidden) * 4).value();
      auto* const weight = reinterpret_cast<float*>(memory.data);
      for (int64_t t = 0; t < part.tokens * kHidden; ++t) {
        weight[t] = Weight(part.first + t / kHidden, t % kHidden);
      }
      copies.push_back({.backend = backend,
                        .memory = memory,
                        .view = {.weight = {weight, DType::kF32, part.tokens, kHidden, kHidden}}});
    }
    std::optional<HeadView> whole;
    if (sharded) whole = {.weight = {nullptr, DType::kF32, kVocab, kHidden, kHidden}};
    return std::make_shared<Head>(std::move(copies), HeadInfo{.name = "h"}, whole);
  }

  std::shared_ptr<TopJob> Submit(const std::shared_ptr<const Head>& head, int64_t rows = 1) {
    auto job = std::make_shared<TopJob>(head, rows, static_cast<int64_t>(jobs_.size()));
    jobs_.push_back(job);
    engine_->Submit(job);
    return job;
  }
  bool Idle() { return engine_->WaitIdle(SteadyNow() + absl::Seconds(20)); }
  ShardBackend& device(int i) { return *backends_[static_cast<size_t>(i)]; }

  static constexpr const OpTraits* kOps[] = {&kTop1};
  std::vector<std::unique_ptr<ShardBackend>> backends_;
  std::unique_ptr<Metrics> metrics_;
  std::shared_ptr<Devices> devices_;
  std::shared_ptr<const Head> sharded_;
  std::shared_ptr<const Head> whole_;
  std::atomic<int> lost_ = 0;
  std::vector<std::shared_ptr<TopJob>> jobs_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(ShardedTest, JobsOnWholeAndShardedHeadsAreAnsweredSideBySide) {
  for (int i = 0; i < 60; ++i) Submit(i % 3 == 0 ? whole_ : sharded_, 1 + i % 5);
  EXPECT_TRUE(Idle());
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok()) << job->Wait();
  EXPECT_GT(device(0).partials(), 0);
  EXPECT_EQ(device(0).partials(), device(1).partials());
  EXPECT_EQ(device(0).partials(), device(2).partials());
}

TEST_F(ShardedTest, TheStreamsOfTheFirstDeviceTakeTurns) {
  Start(3);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([this, t] {
      for (int i = 0; i < 50; ++i) {
        const auto job = std::make_shared<TopJob>(i % 4 == 0 ? whole_ : sharded_, 1 + i % 3, t);
        engine_->Submit(job);
        EXPECT_TRUE(job->Wait().ok()) << job->Wait();
        EXPECT_FALSE(job->misused());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(Idle());
}

TEST_F(ShardedTest, ABatchThatWaitsForItsTurnHoldsUpNoOther) {
  device(2).Hold();
  Submit(sharded_);
  device(2).WaitUntilHeld();
  const auto full = Submit(sharded_, 64);  // as many rows as a batch has: sealed
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(Submit(whole_, 1 + i)->Wait().ok());
  EXPECT_FALSE(full->status().has_value());
  device(2).Release();
  EXPECT_TRUE(full->Wait().ok());
  EXPECT_TRUE(Idle());
}

TEST_F(ShardedTest, ARowOnAShardedHeadCountsOnEveryDevice) {
  EXPECT_TRUE(Submit(sharded_, 5)->Wait().ok());
  EXPECT_TRUE(Idle());
  for (int number = 10; number < 13; ++number) {
    EXPECT_THAT(Scrape(*metrics_),
                HasSubstr(absl::StrCat("logitd_device_rows_total{device=\"", number, "\"} 5")));
  }
}

TEST_F(ShardedTest, OneSliceRunsAtATimeAndWhatComesMeanwhileSharesABatch) {
  device(2).Hold();
  Submit(sharded_);
  device(2).WaitUntilHeld();
  for (int i = 0; i < 20; ++i) Submit(sharded_);
  // Other work goes on: on the devices' own streams, except the one that runs the slice.
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(Submit(whole_)->Wait().ok());
  EXPECT_EQ(device(2).partials(), 1);
  device(2).Release();
  EXPECT_TRUE(Idle());
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok());
  EXPECT_EQ(device(2).partials(), 2);
}

TEST_F(ShardedTest, AShardThatFailsEndsItsBatchAndTheNextIsServed) {
  device(1).Fail(absl::UnavailableError("out of luck"));
  const absl::Status status = Submit(sharded_)->Wait();
  EXPECT_EQ(status, absl::UnavailableError("the device failed: out of luck"));
  device(1).Fail(absl::OkStatus());
  EXPECT_TRUE(Submit(sharded_)->Wait().ok());
  EXPECT_TRUE(Idle());
  EXPECT_EQ(devices_->left(), kDevices);
  EXPECT_THAT(Scrape(*metrics_),
              HasSubstr("logitd_device_errors_total{device=\"11\",kind=\"batch\"} 1"));
}

TEST_F(ShardedTest, ALostShardEndsAllWorkOnShardedHeadsAndNoOther) {
  device(1).Hold();
  const auto running = Submit(sharded_);
  device(1).WaitUntilHeld();
  const auto waiting = Submit(sharded_);
  device(1).Fail(absl::InternalError("sticky"));
  device(1).Release();
  EXPECT_EQ(running->Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiting->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  EXPECT_EQ(Submit(sharded_)->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  EXPECT_TRUE(Submit(whole_)->Wait().ok());
  EXPECT_TRUE(Idle());
  EXPECT_TRUE(devices_->lost(1));
  EXPECT_EQ(devices_->left(), kDevices - 1);
  EXPECT_EQ(lost_, 0);
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_device_up{device=\"11\"} 0"));
}

TEST_F(ShardedTest, AShardThatHangsIsLostAndHoldsUpNoOther) {
  UseDevices({.hang_after = absl::Milliseconds(200)});
  Start(1);
  EXPECT_TRUE(Submit(sharded_)->Wait().ok());
  device(1).Hold();
  const absl::Time begun = SteadyNow();
  const auto running = Submit(sharded_);
  device(1).WaitUntilHeld();
  const auto waiting = Submit(sharded_);
  constexpr char kHangs[] = "the device has not ended its part 200ms after another one did";
  EXPECT_EQ(running->Wait(), absl::UnavailableError(absl::StrCat("the device failed: ", kHangs)));
  EXPECT_GE(SteadyNow() - begun, absl::Milliseconds(200));
  EXPECT_EQ(waiting->Wait(), absl::UnavailableError(absl::StrCat("device 11 is lost: ", kHangs)));
  EXPECT_TRUE(Submit(whole_)->Wait().ok());
  EXPECT_TRUE(Idle());
  EXPECT_TRUE(devices_->lost(1));
  EXPECT_EQ(devices_->left(), kDevices - 1);
  EXPECT_EQ(lost_, 0);
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_device_up{device=\"11\"} 0"));
  engine_.reset();  // waits for no part that hangs
  device(1).Fail(absl::InternalError("after all"));
  device(1).Release();
  for (int i = 0; i < kDevices; ++i) device(i).WaitUntilUnused();
}

TEST_F(ShardedTest, ShardsThatHangAtTheSameTimeAreAllLost) {
  UseDevices({.hang_after = absl::Milliseconds(200)});
  Start(1);
  EXPECT_TRUE(Submit(sharded_)->Wait().ok());
  device(1).Hold();
  device(2).Hold();
  EXPECT_EQ(Submit(sharded_)->Wait().code(), absl::StatusCode::kUnavailable);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(Submit(whole_)->Wait().ok());
  EXPECT_TRUE(Idle());
  EXPECT_TRUE(devices_->lost(1));
  EXPECT_TRUE(devices_->lost(2));
  EXPECT_EQ(devices_->left(), 1);
  EXPECT_EQ(lost_, 0);
  const std::string page = Scrape(*metrics_);
  for (const char* line :
       {"logitd_device_up{device=\"11\"} 0\n", "logitd_device_up{device=\"12\"} 0\n",
        "logitd_device_errors_total{device=\"10\",kind=\"lost\"} 0\n",
        "logitd_device_errors_total{device=\"11\",kind=\"lost\"} 1\n",
        "logitd_device_errors_total{device=\"12\",kind=\"lost\"} 1\n"}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
  engine_.reset();
  for (const int held : {1, 2}) {
    device(held).Fail(absl::InternalError("after all"));  // the slice's memory is gone
    device(held).Release();
  }
  for (int i = 0; i < kDevices; ++i) device(i).WaitUntilUnused();
}

TEST_F(ShardedTest, AShardMayTakeLongWhileAllDo) {
  UseDevices({.hang_after = absl::Milliseconds(500)});
  Start(1);
  for (int i = 0; i < kDevices; ++i) device(i).Hold();
  const auto slow = Submit(sharded_);
  for (int i = 0; i < kDevices; ++i) device(i).WaitUntilHeld();
  absl::SleepFor(absl::Seconds(1));
  EXPECT_FALSE(slow->status().has_value());
  for (int i = 0; i < kDevices; ++i) device(i).Release();
  EXPECT_TRUE(slow->Wait().ok());
  EXPECT_TRUE(Idle());
}

TEST_F(ShardedTest, ADeviceLostByOtherWorkEndsWaitingJobsAtOnce) {
  device(0).Hold();
  const auto running = Submit(sharded_);
  device(0).WaitUntilHeld();
  const auto waiting = Submit(sharded_);
  const auto other = Submit(whole_);
  engine_->DeviceLost(OfDevice(2, absl::InternalError("gone")));
  EXPECT_EQ(waiting->Wait(), absl::UnavailableError("device 12 is lost: gone"));
  EXPECT_TRUE(other->Wait().ok());
  device(0).Release();
  EXPECT_TRUE(running->Wait().ok());  // its last slice had begun
  EXPECT_TRUE(Idle());
}

TEST_F(ShardedTest, StopWaitsForTheSliceThatRuns) {
  device(2).Hold();
  const auto running = Submit(sharded_);
  device(2).WaitUntilHeld();
  const auto waiting = Submit(sharded_);
  std::thread release([this] {
    absl::SleepFor(absl::Milliseconds(20));
    device(2).Release();
  });
  engine_->Stop();
  release.join();
  EXPECT_TRUE(running->Wait().ok());
  EXPECT_EQ(waiting->Wait(), absl::UnavailableError("the engine has stopped"));
}

}  // namespace
}  // namespace logitd::engine
