// The engine with heads that are cut over its devices: one batch on all devices, turns, and what a
// device that fails takes with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
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
#include "server/engine/heads.h"
#include "tests/engine/engine_fixture.h"
#include "tests/shard_backend.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

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

const OpTraits kTop1 = {
    .name = "top1",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = [](Stream& stream, const BatchView& batch) {
      return stream.Run(LinearTopKArgs{.hidden = batch.Payload(),
                                       .head = *batch.head,
                                       .topk = {.rows = batch.In(kInRows),
                                                .max_k = 1,
                                                .indices = batch.Out(kOutTokens),
                                                .probs = batch.Out(kOutProbs),
                                                .logsumexp = batch.Out(kOutLogsumexp),
                                                .status = batch.Out(kOutStatus)}});
    }};

// An op that answers the best token of its second head.
const OpTraits kTop1OfReference = {.name = "top1_of_reference",
                                   .inputs = kInputs,
                                   .outputs = kOutputs,
                                   .enqueue = [](Stream& stream, const BatchView& batch) {
                                     BatchView of_reference = batch;
                                     of_reference.head = batch.reference_head;
                                     return kTop1.enqueue(stream, of_reference);
                                   }};

// kLast has the largest weight of all tokens, kFirst the least. They are on different devices.
constexpr int32_t kFirst = 5;
constexpr int32_t kLast = kVocab - 5;
float Weight(int64_t token) {
  return token == kLast ? 1 : token == kFirst ? -1 : static_cast<float>(token % 7) * 0.1f;
}

// Row r asks for kFirst or kLast, of `reference` where there is one.
class TopJob final : public CheckedJob {
 public:
  TopJob(std::shared_ptr<const Head> head, int64_t rows,
         std::shared_ptr<const Head> reference = nullptr)
      : head_(std::move(head)), reference_(std::move(reference)) {
    spec_.key = {.op = reference_ == nullptr ? &kTop1 : &kTop1OfReference,
                 .dtype = DType::kF32,
                 .row_elements = kHidden,
                 .head = head_.get(),
                 .reference_head = reference_.get()};
    spec_.counts[kRows] = spec_.counts[kEntries] = rows;
    spec_.max_row_entries = 1;
    spec_.size = SizeOfJob(spec_);
  }

  void CopyRowsTo(std::byte* dst, size_t row_stride) override {
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const float hidden[kHidden] = {Wants(r) == kFirst ? -1.0f : 1.0f};
      std::memcpy(dst + static_cast<size_t>(r) * row_stride, hidden, sizeof(hidden));
    }
  }
  void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) override {
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const SoftmaxTopKRow row = {.first_entry = first[kEntries] + r, .temperature = 1, .k = 1};
      std::memcpy(inputs[0] + static_cast<size_t>(r) * sizeof(row), &row, sizeof(row));
    }
  }

 private:
  int32_t Wants(int64_t row) const { return (row + spec_.rows()) % 3 == 0 ? kFirst : kLast; }

  bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const override {
    const auto* const tokens = reinterpret_cast<const int32_t*>(outputs[0].data());
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      if (tokens[r] != Wants(r)) return false;
    }
    return true;
  }

  const std::shared_ptr<const Head> head_;
  const std::shared_ptr<const Head> reference_;
};

// Three devices with one stream each.
class ShardedTest : public EngineFixtureOn<ShardBackend> {
 protected:
  static constexpr int kDevices = 3;
  static constexpr const OpTraits* kOps[] = {&kTop1, &kTop1OfReference};

  void Start(int streams, const ShardOptions& shards = {}) {
    EngineOptions options = SmallOptions(kOps);
    options.streams = streams;
    EngineFixtureOn::Start(options, kDevices, shards);
    sharded_ = MakeTestHead(true);
    whole_ = MakeTestHead(false);
  }

  std::shared_ptr<const Head> MakeTestHead(bool sharded) {
    const VocabShards cut = {.vocab = kVocab, .count = kDevices};
    std::vector<Head::Copy> copies;
    for (int i = 0; i < kDevices; ++i) {
      const VocabShard part = sharded ? cut.at(i) : VocabShard{0, kVocab};
      const DeviceMemory memory =
          device(i).AllocateDevice(static_cast<size_t>(part.tokens * kHidden) * 4).value();
      auto* const weight = reinterpret_cast<float*>(memory.data);
      for (int64_t t = 0; t < part.tokens * kHidden; ++t) {
        weight[t] = t % kHidden == 0 ? Weight(part.first + t / kHidden) : 0;
      }
      copies.push_back({.backend = &device(i),
                        .memory = memory,
                        .view = {.weight = {weight, DType::kF32, part.tokens, kHidden, kHidden}}});
    }
    std::optional<HeadView> whole;
    if (sharded) whole = {.weight = {nullptr, DType::kF32, kVocab, kHidden, kHidden}};
    return std::make_shared<Head>(std::move(copies), HeadInfo{.name = "h"}, whole);
  }

  std::shared_ptr<TopJob> Submit(const std::shared_ptr<const Head>& head, int64_t rows = 1) {
    return EngineFixtureOn::Submit(std::make_shared<TopJob>(head, rows));
  }
  // Submits a job with a sharded second head; `head` is its first.
  std::shared_ptr<TopJob> SubmitReference(const std::shared_ptr<const Head>& head,
                                          int64_t rows = 1) {
    return EngineFixtureOn::Submit(std::make_shared<TopJob>(head, rows, sharded_));
  }

  std::shared_ptr<const Head> sharded_;
  std::shared_ptr<const Head> whole_;
};

TEST_F(ShardedTest, JobsOnWholeAndShardedHeadsAreAnsweredSideBySide) {
  Start(1);
  for (int i = 0; i < 60; ++i) Submit(i % 3 == 0 ? whole_ : sharded_, 1 + i % 5);
  WaitIdle();
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok()) << job->Wait();
  EXPECT_GT(device(0).partials(), 0);
  EXPECT_EQ(device(0).partials(), device(1).partials());
  EXPECT_EQ(device(0).partials(), device(2).partials());
}

TEST_F(ShardedTest, AShardedReferenceRunsOnAllDevices) {
  Start(2);
  const std::shared_ptr<const Head> heads[] = {whole_, sharded_, nullptr};
  for (int i = 0; i < 60; ++i) SubmitReference(heads[i % 3], 1 + i % 5);
  WaitIdle();
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok()) << job->Wait();
  EXPECT_GT(device(0).partials(), 0);
  EXPECT_EQ(device(0).partials(), device(1).partials());
  EXPECT_EQ(device(0).partials(), device(2).partials());
}

TEST_F(ShardedTest, TheStreamsOfTheFirstDeviceTakeTurns) {
  Start(3);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([this] {
      for (int i = 0; i < 50; ++i) {
        const auto job = std::make_shared<TopJob>(i % 4 == 0 ? whole_ : sharded_, 1 + i % 3);
        engine_->Submit(job);
        EXPECT_TRUE(job->Wait().ok()) << job->Wait();
        EXPECT_FALSE(job->misused());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  WaitIdle();
}

TEST_F(ShardedTest, AShardThatFailsEndsItsBatchAndTheNextIsServed) {
  Start(1);
  device(1).Fail(absl::UnavailableError("out of luck"));
  const absl::Status status = Submit(sharded_)->Wait();
  EXPECT_EQ(status, absl::UnavailableError("the device failed: out of luck"));
  device(1).Fail(absl::OkStatus());
  EXPECT_TRUE(Submit(sharded_, 5)->Wait().ok());
  WaitIdle();
  EXPECT_EQ(devices_->left(), kDevices);
  const std::string page = Scrape(*metrics_);
  EXPECT_THAT(page, HasSubstr("logitd_device_errors_total{device=\"11\",kind=\"batch\"} 1"));
  for (int number = 10; number < 13; ++number) {  // a row counts on every device
    EXPECT_THAT(page,
                HasSubstr(absl::StrCat("logitd_device_rows_total{device=\"", number, "\"} 5")));
  }
}

TEST_F(ShardedTest, ALostShardEndsAllWorkOnShardedHeadsAndNoOther) {
  Start(1);
  device(1).Hold();
  const auto running = Submit(sharded_);
  device(1).WaitUntilHeld();
  const auto waiting = Submit(sharded_);
  const auto waiting_too = SubmitReference(whole_);
  device(1).Fail(absl::InternalError("sticky"));
  device(1).Release();
  EXPECT_EQ(running->Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiting->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  EXPECT_EQ(waiting_too->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  EXPECT_EQ(Submit(sharded_)->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  EXPECT_EQ(SubmitReference(nullptr)->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  EXPECT_TRUE(Submit(whole_)->Wait().ok());
  WaitIdle();
  EXPECT_TRUE(devices_->lost(1));
  EXPECT_EQ(devices_->left(), kDevices - 1);
  EXPECT_EQ(owner_told_, 0);
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_device_up{device=\"11\"} 0"));
}

// The time after which a device hangs is the machine's own.
class ShardedRealTimeTest : public ShardedTest {
 protected:
  static constexpr absl::Duration kHangAfter = absl::Milliseconds(200);

  void SetUp() override { Start(1, {.hang_after = kHangAfter}); }
  // Loses the devices, which hold a slice.
  void Hang(const std::vector<int>& held) {
    EXPECT_TRUE(Submit(sharded_)->Wait().ok());
    for (const int i : held) device(i).Hold();
    const auto running = Submit(sharded_);
    for (const int i : held) device(i).WaitUntilHeld();
    const auto waiting = Submit(sharded_);
    EXPECT_THAT(running->Wait().ToString(), HasSubstr(kHangs));
    EXPECT_THAT(waiting->Wait().ToString(), HasSubstr(kHangs));
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Submit(whole_)->Wait().ok());
    WaitIdle();
    const std::string page = Scrape(*metrics_);
    for (int i = 0; i < kDevices; ++i) {
      const bool lost = std::find(held.begin(), held.end(), i) != held.end();
      EXPECT_EQ(devices_->lost(i), lost);
      EXPECT_THAT(page, HasSubstr(absl::StrCat("logitd_device_up{device=\"", 10 + i, "\"} ",
                                               lost ? 0 : 1, "\n")));
      EXPECT_THAT(page, HasSubstr(absl::StrCat("logitd_device_errors_total{device=\"", 10 + i,
                                               "\",kind=\"lost\"} ", lost ? 1 : 0, "\n")));
    }
    EXPECT_EQ(owner_told_, 0);
    engine_.reset();  // waits for no part that hangs
    for (const int i : held) {
      device(i).Fail(absl::InternalError("after all"));  // the slice's memory is gone
      device(i).Release();
    }
    for (int i = 0; i < kDevices; ++i) device(i).WaitUntilUnused();
  }

  static constexpr char kHangs[] = "the device has not ended its part 200ms after another one did";
};

TEST_F(ShardedRealTimeTest, AShardThatHangsIsLostAndHoldsUpNoOther) {
  Hang({1});
  EXPECT_EQ(jobs_[1]->Wait(), absl::UnavailableError(absl::StrCat("the device failed: ", kHangs)));
  EXPECT_EQ(jobs_[2]->Wait(), absl::UnavailableError(absl::StrCat("device 11 is lost: ", kHangs)));
}

TEST_F(ShardedRealTimeTest, ShardsThatHangAtTheSameTimeAreAllLost) { Hang({1, 2}); }

TEST_F(ShardedRealTimeTest, AShardMayTakeLongWhileAllDo) {
  for (int i = 0; i < kDevices; ++i) device(i).Hold();
  const auto slow = Submit(sharded_);
  for (int i = 0; i < kDevices; ++i) device(i).WaitUntilHeld();
  absl::SleepFor(2 * kHangAfter);
  EXPECT_FALSE(slow->status().has_value());
  for (int i = 0; i < kDevices; ++i) device(i).Release();
  EXPECT_TRUE(slow->Wait().ok());
  WaitIdle();
}

}  // namespace
}  // namespace logitd::engine
