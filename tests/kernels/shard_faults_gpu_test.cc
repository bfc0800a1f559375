// Heads that are cut over CUDA devices, one of which fails, hangs or is late.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/stream.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "tests/kernels/cuda_shards.h"
#include "tests/kernels/cutting_backend.h"
#include "tests/kernels/holding_backend.h"

namespace logitd::testing {
namespace {

// The most probable token of a row of zeros, on a head of zeros.
class OneRow {
 public:
  explicit OneRow(Backend& first) : slab_(first.AllocateSlab(size_t{1} << 20).value()) {
    std::memset(slab_.host, 0, slab_.bytes);
    *reinterpret_cast<SoftmaxTopKRow*>(slab_.host + kStates + 256) = {
        .first_entry = 0, .temperature = 1, .k = 1};
  }

  HeadView Head(const std::byte* weight) const {
    return {.weight = {weight, DType::kBF16, kVocab, kHidden, kHidden}};
  }
  HeadView Whole() const { return Head(slab_.device); }

  absl::Status Run(Stream& stream, const HeadView& head) const {
    absl::Status status = stream.Upload(slab_, 0, slab_.bytes);
    if (!status.ok()) return status;
    status = Enqueue(stream, head, /*max_k=*/1);
    const auto waited = stream.Wait();
    return status.ok() ? waited.status() : status;
  }

  // The call only, on what Run has uploaded.
  absl::Status Enqueue(Stream& stream, const HeadView& head, int max_k) const {
    std::byte* const answers = slab_.device + kStates + 512;
    return stream.Run(LinearTopKArgs{
        .hidden = {slab_.device + kStates, DType::kBF16, 1, kHidden, kHidden},
        .head = head,
        .topk = {.rows = reinterpret_cast<const SoftmaxTopKRow*>(slab_.device + kStates + 256),
                 .max_k = max_k,
                 .indices = reinterpret_cast<int32_t*>(answers),
                 .probs = reinterpret_cast<float*>(answers + 256),
                 .logsumexp = reinterpret_cast<float*>(answers + 512),
                 .status = reinterpret_cast<RowStatus*>(answers + 768)}});
  }

  static constexpr int64_t kVocab = 3000, kHidden = 64;

 private:
  static constexpr size_t kStates = kVocab * kHidden * 2;
  const Slab slab_;
};

// Runs in a process of its own, because a device that has read a wrong address is lost to it. Ends
// it with 0 where all is as it should be.
void FaultOnTheSecondDevice(ShardExchange exchange) {
  const std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  const std::vector<Backend*> backends = {devices[0].get(), devices[1].get()};
  const auto stream = CreateShardedStream(backends, {.exchange = exchange}).value();
  const OneRow row(*devices[0]);
  std::vector<HeadView> parts = CutHead(row.Whole(), 2);
  parts[1].weight.data = reinterpret_cast<const void*>(uintptr_t{1} << 46);
  const absl::Status status = row.Run(*stream, WithShards(row.Whole(), parts));
  std::fprintf(stderr, "%s, shard %d\n", status.ToString().c_str(),
               FailedShard(status).value_or(-1));
  std::_Exit(absl::IsInternal(status) && FailedShard(status).has_value() ? 0 : 1);
}

TEST_F(ShardsGpuTest, AFaultOfOneDeviceEndsTheCall) {
  const auto devices = DevicesOf(2);
  if (devices[0]->device().number == devices[1]->device().number) GTEST_SKIP() << "one GPU";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(FaultOnTheSecondDevice(ShardExchange::kPeers), ::testing::ExitedWithCode(0),
              "INTERNAL");
}
TEST_F(ShardsByNcclGpuTest, AFaultOfOneDeviceEndsTheCall) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(FaultOnTheSecondDevice(ShardExchange::kNccl), ::testing::ExitedWithCode(0),
              "INTERNAL");
}

// Two devices, of which the second can be held, and a sharded stream of both. The second may be the
// first one again.
struct TwoDevices {
  static constexpr absl::Duration kHangAfter = absl::Milliseconds(500);

  explicit TwoDevices(ShardExchange exchange)
      : devices(DevicesOf(2)),
        second(std::move(devices[1])),
        backends{devices[0].get(), &second},
        stream(CreateShardedStream(backends, {.exchange = exchange, .hang_after = kHangAfter})
                   .value()) {}

  std::vector<std::unique_ptr<Backend>> devices;
  HoldingBackend second;
  const std::vector<Backend*> backends;
  std::unique_ptr<ShardedStream> stream;
};

// And a row on a head, whose second part lies on the second device.
struct RowOnTwoDevices : TwoDevices {
  explicit RowOnTwoDevices(ShardExchange exchange)
      : TwoDevices(exchange),
        row(*devices[0]),
        part(second.AllocateDevice(size_t{1} << 20).value()),
        parts(CutHead(row.Whole(), 2)) {
    parts[1].weight.data = part.data;
    head = WithShards(row.Whole(), parts);
  }

  absl::Status Run() const { return row.Run(*stream, head); }
  absl::Status Enqueue(int max_k) const { return row.Enqueue(*stream, head, max_k); }

  const OneRow row;
  const DeviceMemory part;
  std::vector<HeadView> parts;
  HeadView head;
};

// Runs in a process of its own, for which the device then hangs. The second device may be the first
// one again. Ends the process with 0 where all is as it should be.
void HangOnTheSecondDevice(ShardExchange exchange) {
  const auto check = [](bool is_right, const char* what) {
    if (is_right) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::_Exit(1);
  };
  RowOnTwoDevices on(exchange);
  const OneRow& row = on.row;
  Backend& lead = *on.devices[0];
  const bool two = lead.device().number != on.second.device().number;
  const auto alone = lead.CreateStream(StreamUse::kOps).value();
  check(on.Run().ok(), "the call before");
  check(row.Run(*alone, row.Whole()).ok(), "the call on one device before");
  on.second.Hold();
  absl::Time begun = absl::Now();
  const absl::Status status = on.Run();
  const absl::Duration took = absl::Now() - begun;
  std::fprintf(stderr, "%s, shard %d, after %s\n", status.ToString().c_str(),
               FailedShard(status).value_or(-1), absl::FormatDuration(took).c_str());
  check(absl::IsInternal(status) && FailedShard(status) == 1, "the status");
  check(took >= TwoDevices::kHangAfter && took < TwoDevices::kHangAfter + absl::Seconds(4),
        "the time");
  begun = absl::Now();
  check(on.Run() == status, "the next call");
  if (two) {  // the other device works, and nothing waits for the one that hangs
    check(row.Run(*alone, row.Whole()).ok(), "the call on one device");
    lead.FreeDevice(lead.AllocateDevice(size_t{1} << 20).value());
    lead.FreeSlab(lead.AllocateSlab(size_t{1} << 20).value());
  }
  on.second.FreeDevice(on.part);
  on.stream.reset();
  const absl::Duration rest = absl::Now() - begun;
  std::fprintf(stderr, "the rest took %s\n", absl::FormatDuration(rest).c_str());
  check(rest < absl::Seconds(3), "the time of the rest");
  std::_Exit(0);
}

TEST_F(ShardsGpuTest, ADeviceThatHangsEndsTheCallInTimeAndHoldsUpNoOther) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangOnTheSecondDevice(ShardExchange::kPeers), ::testing::ExitedWithCode(0),
              "ended no part of its work for 500ms.*, shard 1");
}
TEST_F(ShardsByNcclGpuTest, ADeviceThatHangsEndsTheCallInTimeAndHoldsUpNoOther) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangOnTheSecondDevice(ShardExchange::kNccl), ::testing::ExitedWithCode(0),
              "ended no part of its work for 500ms.*, shard 1");
}

// Two of three devices hang at once.
void HangOnTwoDevices() {
  std::vector<std::unique_ptr<Backend>> devices = DevicesOf(3);
  HoldingBackend second(std::move(devices[1])), third(std::move(devices[2]));
  const std::vector<Backend*> backends = {devices[0].get(), &second, &third};
  auto stream = CreateShardedStream(backends, {.hang_after = absl::Milliseconds(500)}).value();
  const OneRow row(*devices[0]);
  const std::vector<HeadView> parts = CutHead(row.Whole(), 3);
  const HeadView head = WithShards(row.Whole(), parts);
  const absl::Status first = row.Run(*stream, head);
  second.Hold();
  third.Hold();
  const absl::Time begun = absl::Now();
  const absl::Status status = row.Run(*stream, head);
  stream.reset();
  const absl::Duration took = absl::Now() - begun;
  std::fprintf(stderr, "%s; %s, shards %s, after %s\n", first.ToString().c_str(),
               status.ToString().c_str(), absl::StrJoin(FailedShards(status), " ").c_str(),
               absl::FormatDuration(took).c_str());
  std::_Exit(first.ok() && absl::IsInternal(status) && took < absl::Seconds(5) ? 0 : 1);
}

TEST_F(ShardsGpuTest, DevicesThatHangAtTheSameTimeAreAllNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangOnTwoDevices(), ::testing::ExitedWithCode(0), "OK; INTERNAL.*, shards 1 2,");
}

// A copy to no memory cannot be enqueued, while the device hangs in what comes before it.
TEST_F(ShardsGpuTest, AWaitForWorkThatWasNotEnqueuedHasALimitToo) {
  HoldingBackend device(CreateBackend("cuda", {.device = CudaTestDevice()}).value());
  device.Hold();
  const auto stream = device.CreateStream(StreamUse::kCopies).value();
  auto& copies = static_cast<HoldingBackend::HoldingStream&>(*stream).inner();
  copies.LimitWait(absl::Milliseconds(200));
  std::byte from[64] = {};
  const Slab nowhere = {from, reinterpret_cast<std::byte*>(uintptr_t{1} << 46), sizeof(from)};
  EXPECT_TRUE(copies.Upload(nowhere, 0, sizeof(from)).ok());  // it is kept
  const absl::Time begun = absl::Now();
  EXPECT_EQ(copies.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - begun, absl::Seconds(2));
  device.Release();
}

// A device that hangs before the stream is there: neither its making nor what takes it down waits.
void HangAtTheStart() {
  std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  HoldingBackend second(std::move(devices[1]));
  const std::vector<Backend*> backends = {devices[0].get(), &second};
  second.Hold();
  const absl::Time begun = absl::Now();
  const absl::Status status =
      CreateShardedStream(backends, {.hang_after = absl::Milliseconds(500)}).status();
  const absl::Duration took = absl::Now() - begun;
  std::fprintf(stderr, "%s, shard %d, after %s\n", status.ToString().c_str(),
               FailedShard(status).value_or(-1), absl::FormatDuration(took).c_str());
  std::_Exit(absl::IsInternal(status) && FailedShard(status) == 1 && took < absl::Seconds(5) ? 0
                                                                                             : 1);
}

TEST_F(ShardsGpuTest, ADeviceThatHangsAtTheStartEndsItInTime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangAtTheStart(), ::testing::ExitedWithCode(0), "INTERNAL.*, shard 1");
}

// A call that nobody waits for, on a device that hangs: what takes the stream down gives it up.
void HangWithoutAWait(ShardExchange exchange) {
  alarm(60);  // a call of the driver that waits for the device does not end
  RowOnTwoDevices on(exchange);
  const absl::Status first = on.Run();
  on.second.Hold();
  const absl::Status enqueued = on.Enqueue(/*max_k=*/1);
  const absl::Time begun = absl::Now();
  on.stream.reset();
  const absl::Duration took = absl::Now() - begun;
  const bool known = cuda::IsHung(on.second.device().number);
  std::fprintf(stderr, "%s; %s; %s, %s\n", first.ToString().c_str(), enqueued.ToString().c_str(),
               known ? "known to hang" : "not known to hang", absl::FormatDuration(took).c_str());
  std::_Exit(first.ok() && enqueued.ok() && known && took < absl::Seconds(5) ? 0 : 1);
}

TEST_F(ShardsGpuTest, ADeviceThatHangsDoesNotHoldUpTheEndOfAStreamThatNobodyWaitedFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangWithoutAWait(ShardExchange::kPeers), ::testing::ExitedWithCode(0),
              "OK; OK; known to hang");
}
TEST_F(ShardsByNcclGpuTest, ADeviceThatHangsDoesNotHoldUpTheEndOfAStreamThatNobodyWaitedFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangWithoutAWait(ShardExchange::kNccl), ::testing::ExitedWithCode(0),
              "OK; OK; known to hang");
}

// A device hangs in work that the stream does not know, while NCCL's joining, which was given up,
// may use it: what takes the stream down leaves its memory.
void HangWhileNcclJoins() {
  alarm(60);
  const std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  const std::vector<Backend*> backends = {devices[0].get(), devices[1].get()};
  const int numbers[] = {devices[0]->device().number, devices[1]->device().number};
  HoldingBackend holding(CreateBackend("cuda", {.device = numbers[1]}).value());
  holding.Hold();
  const auto held = holding.CreateStream(StreamUse::kOps).value();
  const absl::Status given_up = cuda::NcclGather::Create(numbers, absl::ZeroDuration()).status();
  const absl::Time begun = absl::Now();
  const absl::Status status =
      CreateShardedStream(backends, {.exchange = ShardExchange::kNccl}).status();
  const absl::Duration took = absl::Now() - begun;
  std::fprintf(stderr, "%s; %s, after %s\n", given_up.ToString().c_str(), status.ToString().c_str(),
               absl::FormatDuration(took).c_str());
  std::_Exit(absl::IsUnavailable(status) && took < absl::Seconds(5) ? 0 : 1);
}

TEST_F(ShardsByNcclGpuTest, ADeviceThatHangsWhileNcclJoinsDoesNotHoldUpTheStart) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangWhileNcclJoins(), ::testing::ExitedWithCode(0),
              "not done after 0; UNAVAILABLE.*an earlier attempt has not ended");
}

// Training of 8 rows of zeros, on a head of zeros, whose second shard has its gradients on its
// device.
class EightRows {
 public:
  EightRows(Backend& first, Backend& second)
      : slab_(first.AllocateSlab(size_t{4} << 20).value()),
        second_(second.AllocateDevice(size_t{1} << 20).value()) {
    std::memset(slab_.host, 0, slab_.bytes);
    for (int r = 0; r < kRows; ++r) {
      CrossEntropyRow row{};
      row.active = 1;
      row.temperature = 1;
      row.target = r * 300;
      std::memcpy(slab_.host + kParams + static_cast<size_t>(r) * sizeof(row), &row, sizeof(row));
      const float one = 1;
      std::memcpy(slab_.host + kUpstream + static_cast<size_t>(r) * 4, &one, 4);
    }
  }

  absl::Status Run(ShardedStream& stream) const {
    const HeadView whole = {.weight = {slab_.device, DType::kBF16, kVocab, kHidden, kHidden}};
    const std::vector<HeadView> parts = CutHead(whole, 2);
    LinearCrossEntropyTrainingArgs args;
    args.gradient = {.hidden = {At(kStates), DType::kBF16, kRows, kHidden, kHidden},
                     .head = whole,
                     .rows = reinterpret_cast<const CrossEntropyRow*>(At(kParams)),
                     .upstream = reinterpret_cast<const float*>(At(kUpstream)),
                     .d_hidden = {At(kDHidden), DType::kBF16, kRows, kHidden, kHidden},
                     .d_weight = {At(kDWeight), DType::kBF16, kVocab, kHidden, kHidden}};
    args.answers = {.loss = reinterpret_cast<float*>(At(kAnswers)),
                    .logsumexp = reinterpret_cast<float*>(At(kAnswers + 256)),
                    .target_logprob = reinterpret_cast<float*>(At(kAnswers + 512)),
                    .status = reinterpret_cast<RowStatus*>(At(kAnswers + 768))};
    std::vector<ShardGradient> to = CutGradient(args.gradient, 2);
    to[1].d_weight.data = second_.data;
    args.gradient.head = WithShards(whole, parts);
    absl::Status status = stream.Upload(slab_, 0, slab_.bytes);
    if (status.ok()) status = stream.ShardedTraining({.training = args, .shards = to.data()});
    if (status.ok()) status = stream.Download(slab_, kAnswers, 256);
    const auto waited = stream.Wait();
    if (!status.ok() || !waited.ok()) return status.ok() ? waited.status() : status;
    float loss;
    std::memcpy(&loss, slab_.host + kAnswers, sizeof(loss));
    const bool is_right = std::fabs(loss - std::log(static_cast<float>(kVocab))) < 1e-3f;
    return is_right ? absl::OkStatus() : absl::DataLossError(absl::StrFormat("loss %g", loss));
  }

 private:
  static constexpr int64_t kVocab = 3000, kHidden = 64, kRows = 8;
  static constexpr size_t kStates = size_t{1} << 20, kParams = kStates + (64 << 10),
                          kUpstream = kParams + (64 << 10), kAnswers = kUpstream + 4096,
                          kDHidden = kAnswers + 4096, kDWeight = size_t{2} << 20;
  std::byte* At(size_t offset) const { return slab_.device + offset; }

  const Slab slab_;
  const DeviceMemory second_;
};

// As HangOnTheSecondDevice, between the two exchanges of a training call.
void HangInTraining(ShardExchange exchange) {
  TwoDevices on(exchange);
  const EightRows rows(*on.devices[0], on.second);
  const absl::Status first = rows.Run(*on.stream);
  const absl::Status again = rows.Run(*on.stream);
  on.second.Hold();
  const absl::Time begun = absl::Now();
  const absl::Status hangs = rows.Run(*on.stream);
  const absl::Status next = rows.Run(*on.stream);
  on.stream.reset();
  const absl::Duration took = absl::Now() - begun;
  std::fprintf(stderr, "%s; %s; %s, shard %d; after %s\n", first.ToString().c_str(),
               again.ToString().c_str(), hangs.ToString().c_str(), FailedShard(hangs).value_or(-1),
               absl::FormatDuration(took).c_str());
  std::_Exit(first.ok() && again.ok() && absl::IsInternal(hangs) && next == hangs &&
                     took < absl::Seconds(6)
                 ? 0
                 : 1);
}

TEST_F(ShardsGpuTest, ADeviceThatHangsInTrainingEndsTheCallInTime) {
  if (const std::string why = WhyNoTraining(); !why.empty()) GTEST_SKIP() << why;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangInTraining(ShardExchange::kPeers), ::testing::ExitedWithCode(0),
              "OK; OK; .*ended no part of its work for 500ms.*, shard 1");
}
TEST_F(ShardsByNcclGpuTest, ADeviceThatHangsInTrainingEndsTheCallInTime) {
  if (const std::string why = WhyNoTraining(); !why.empty()) GTEST_SKIP() << why;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(HangInTraining(ShardExchange::kNccl), ::testing::ExitedWithCode(0),
              "OK; OK; .*ended no part of its work for 500ms.*, shard 1");
}

// A part that takes longer than it should, and then ends.
void LateOnTheSecondDevice(ShardExchange exchange) {
  RowOnTwoDevices on(exchange);
  const absl::Status first = on.Run();  // CUDA loads kernels at their first use
  on.second.Hold();
  std::thread release([&on] {
    absl::SleepFor(absl::Milliseconds(1500));
    on.second.Release();
  });
  const absl::Status late = on.Run();
  release.join();
  const absl::Status next = on.Run();
  std::fprintf(stderr, "%s; %s; %s\n", first.ToString().c_str(), late.ToString().c_str(),
               next.ToString().c_str());
  std::_Exit(first.ok() && absl::IsUnavailable(late) && next.ok() ? 0 : 1);
}

TEST_F(ShardsGpuTest, ADeviceThatIsLateEndsTheCallAndServesTheNext) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LateOnTheSecondDevice(ShardExchange::kPeers), ::testing::ExitedWithCode(0),
              "OK; UNAVAILABLE.*; OK");
}
TEST_F(ShardsByNcclGpuTest, ADeviceThatIsLateEndsTheCallAndServesTheNext) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LateOnTheSecondDevice(ShardExchange::kNccl), ::testing::ExitedWithCode(0),
              "OK; UNAVAILABLE.*; OK");
}

// Two calls in one batch. The second is of a new kind, so it waits on the host, and is given up:
// the first has then merged what was not there.
void LateInTheSecondCall(ShardExchange exchange) {
  RowOnTwoDevices on(exchange);
  const absl::Status before = on.Run();
  on.second.Hold();
  std::thread release([&on] {
    absl::SleepFor(absl::Milliseconds(1500));
    on.second.Release();
  });
  const absl::Status known = on.Enqueue(/*max_k=*/1);
  const absl::Status given_up = on.Enqueue(/*max_k=*/2);
  const absl::Status batch = on.stream->Wait().status();
  release.join();
  const absl::Status next = on.Run();
  std::fprintf(stderr, "%s; %s; %s; %s; %s\n", before.ToString().c_str(), known.ToString().c_str(),
               given_up.ToString().c_str(), batch.ToString().c_str(), next.ToString().c_str());
  std::_Exit(before.ok() && known.ok() && absl::IsUnavailable(given_up) && batch == given_up &&
                     next.ok()
                 ? 0
                 : 1);
}

TEST_F(ShardsGpuTest, ACallThatIsGivenUpEndsItsBatchWithAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LateInTheSecondCall(ShardExchange::kPeers), ::testing::ExitedWithCode(0),
              "OK; OK; UNAVAILABLE.*; UNAVAILABLE.*; OK");
}
TEST_F(ShardsByNcclGpuTest, ACallThatIsGivenUpEndsItsBatchWithAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LateInTheSecondCall(ShardExchange::kNccl), ::testing::ExitedWithCode(0),
              "OK; OK; UNAVAILABLE.*; UNAVAILABLE.*; OK");
}

}  // namespace
}  // namespace logitd::testing
