// Linear ops on heads that are cut over CUDA devices: the checks of one device, and its bits. Where
// there are fewer devices than shards, a device has several shards.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/nccl.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/cutting_backend.h"
#include "tests/kernels/holding_backend.h"
#include "tests/kernels/partial_backend.h"
#include "tests/kernels/shard_cases.h"

namespace logitd::testing {
namespace {

// `shards` devices, the first one that of the tests. Those that cannot reach its memory are left out.
std::vector<std::unique_ptr<Backend>> DevicesOf(int shards) {
  std::vector<int> numbers;
  for (int i = 0; i < CountCudaDevices(); ++i) {
    const int number = (CudaTestDevice() + i) % CountCudaDevices();
    const auto device = CreateBackend("cuda", {.device = number}).value();
    const std::vector<Backend*> pair = {Cuda()->get(), device.get()};
    if (CheckCanShard(pair).ok()) numbers.push_back(number);
  }
  std::vector<std::unique_ptr<Backend>> devices;
  for (int i = 0; i < shards; ++i) {
    const int number = numbers[static_cast<size_t>(i) % numbers.size()];
    devices.push_back(CreateBackend("cuda", {.device = number}).value());
  }
  return devices;
}

class ShardsGpuTest : public CudaTest {};

// ---- The checks of the linear ops, on shards

class LinearOnThreeShardsGpuTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    backend_ = std::make_unique<CuttingBackend>(DevicesOf(3));
    runner_ = OpRunner::Create(backend_.get()).value();
  }
  void TearDown() override { runner_.reset(); }

  std::unique_ptr<CuttingBackend> backend_;
};
const bool kRegistered =
    RegisterChecks<LinearOnThreeShardsGpuTest>("LinearOnThreeShardsGpuTest", LinearChecks()) &&
    RegisterChecks<LinearOnThreeShardsGpuTest>("LinearOnThreeShardsGpuTest",
                                               LinearGradientChecks());

// ---- Bits

// In addition to those of the CPU: more than one block of rows, long rows and wide heads.
std::vector<ShardCase> GpuShardCases() {
  std::vector<ShardCase> cases = ShardCases();
  uint64_t n = 1000;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const float softcap : {0.0f, 20.0f}) {
      ++n;
      cases.push_back({{dtype, 5, 50257, 128, n % 2 == 0, n % 4 < 2, softcap, 0, n}});
      cases.push_back({{dtype, 300, 12289, 128, n % 2 == 1, n % 4 < 2, softcap, 0, n}});
      cases.push_back({{dtype, 40, 128256, 64, softcap > 0, false, softcap, 0, n}});
    }
  }
  cases.push_back({{DType::kBF16, 700, 33000, 256, false, true, 0, 0, ++n}});
  return cases;
}

// The answers of one device to all cases, by case and call. Made once.
const std::vector<std::vector<std::string>>& BitsOfOneDevice() {
  static const auto& bits = *new auto([] {
    const auto runner = OpRunner::Create(Cuda()->get()).value();
    std::vector<std::vector<std::string>> want;
    for (const ShardCase& c : GpuShardCases()) want.push_back(AllBits(*runner, c));
    return want;
  }());
  return bits;
}

void ExpectBitsOfOneDevice(Backend* sharded, int shards) {
  const std::vector<ShardCase> cases = GpuShardCases();
  const auto runner = OpRunner::Create(sharded).value();
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::vector<std::string> got = AllBits(*runner, cases[i]);
    for (size_t call = 0; call < got.size(); ++call) {
      EXPECT_EQ(got[call] == BitsOfOneDevice()[i][call], true)
          << DescribeShards(cases[i]) << ", call " << call << ", " << shards << " shards";
    }
  }
}

TEST_F(ShardsGpuTest, AnyNumberOfDevicesGivesTheBitsOfOne) {
  for (const int shards : {1, 2, 3, 5, 8}) {
    CuttingBackend backend(DevicesOf(shards));
    ExpectBitsOfOneDevice(&backend, shards);
  }
}

TEST_F(ShardsGpuTest, PartialsAndTheirMergeGiveTheBitsOfOneDevice) {
  for (const int shards : {1, 2, 3}) {
    PartialBackend backend(Cuda()->get(), shards);
    ExpectBitsOfOneDevice(&backend, shards);
  }
}

TEST_F(ShardsGpuTest, GradientsOfPartsAreThoseOfTheWhole) {
  for (const int shards : {1, 2, 3, 8}) {
    PartialBackend backend(Cuda()->get(), shards);
    const auto sharded = OpRunner::Create(&backend).value();
    std::vector<LinearCase> cases = ShardGradientCases();
    cases.push_back({DType::kBF16, 20, 40000, 64, true, false, 0, 0, 400});  // several chunks
    for (const LinearCase& c : cases) {
      if (shards != 3 && c.rows > 9) continue;  // the reference takes long
      EXPECT_EQ(FirstLinearGradientDifference(*sharded, c), "") << shards << " shards";
    }
  }
}

// Heads of several cells, whose last one is short, of one cell, and of several chunks of training.cu on
// a shard. The last does not fit it: the forward and the backward are calls of their own.
std::vector<LinearCase> TrainingOnShardsCases() {
  std::vector<LinearCase> cases;
  uint64_t n = 500;
  struct Shape {
    int64_t rows, vocab, hidden;
  };
  for (const Shape& shape : {Shape{9, 5000, 1024}, Shape{70, 3000, 100}, Shape{40, 9216, 64},
                             Shape{3, 700, 64}, Shape{64, 100000, 64}, Shape{300, 9000, 64}}) {
    for (int i = 0; i < 2; ++i) {
      cases.push_back({DType::kBF16, shape.rows, shape.vocab, shape.hidden, false, false, 0,
                       static_cast<int64_t>(n % 3), ++n});
    }
  }
  return cases;
}

void ExpectTrainingOfOneDevice(OpRunner& one, Backend* backend, int shards) {
  const auto sharded = OpRunner::Create(backend).value();
  for (const LinearCase& c : TrainingOnShardsCases()) {
    LinearBackwardCall call{.hidden = RandomTensors(c).hidden,
                            .head = RandomTensors(c).head,
                            .upstream = std::vector<float>(static_cast<size_t>(c.rows), 0.5f),
                            .d_hidden = AlignedTensor(DType::kBF16, c.rows, c.hidden, 0),
                            .d_weight = AlignedTensor(DType::kBF16, c.vocab, c.hidden, 0),
                            .want_d_bias = false};
    for (int64_t r = 0; r < c.rows; ++r) {
      call.rows.push_back(PlainLoss(static_cast<int32_t>((r * 977 + c.vocab - 1) % c.vocab)));
      call.rows.back().label_smoothing = r % 2 == 0 ? 0.0f : 0.1f;
    }
    const LinearTrainingAnswer want = one.LinearCrossEntropyTraining(call).value();
    const LinearTrainingAnswer got = sharded->LinearCrossEntropyTraining(call).value();
    EXPECT_EQ(BitsOfLosses(got.loss) == BitsOfLosses(want.loss), true)
        << DescribeSharded(c, shards);
    EXPECT_EQ(HiddenDifference(got.gradient, want.gradient), "") << DescribeSharded(c, shards);
    EXPECT_EQ(WeightDifference(got.gradient, want.gradient), "") << DescribeSharded(c, shards);
    // Twice the same: the same bits.
    const LinearTrainingAnswer again = sharded->LinearCrossEntropyTraining(call).value();
    EXPECT_EQ(again.gradient.d_hidden.bytes() == got.gradient.d_hidden.bytes(), true)
        << DescribeSharded(c, shards);
    EXPECT_EQ(again.gradient.d_weight.bytes() == got.gradient.d_weight.bytes(), true)
        << DescribeSharded(c, shards);
  }
}

// Why a test that makes the logits once cannot run; "": it can.
std::string WhyNoTraining() {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, CudaTestDevice());
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (properties.major == 9 && properties.minor == 0) return "";
  return absl::StrFormat("shards make the logits of training once on sm_90, the device is sm_%d%d",
                         properties.major, properties.minor);
}

TEST_F(ShardsGpuTest, TrainingOverDevicesHasTheLossesOfOne) {
  if (const std::string why = WhyNoTraining(); !why.empty()) GTEST_SKIP() << why;
  for (const int shards : {1, 2, 3, 4, 8}) {
    CuttingBackend backend(DevicesOf(shards));
    ExpectTrainingOfOneDevice(*runner_, &backend, shards);
  }
}

// More rows than one exchange has room for, and more logits than linear_topk exchanges.
TEST_F(ShardsGpuTest, RowsThatDoNotFitInOneExchangeRunInSeveral) {
  ShardCase c{{DType::kBF16, 700, 100000, 64, false, false, 0, 0, 5}};
  CuttingBackend backend(DevicesOf(2));
  EXPECT_EQ(AllBits(*OpRunner::Create(&backend).value(), c), AllBits(*runner_, c));
}

// So many rows that peers do not exchange their logits: more than 64 MiB.
TEST_F(ShardsGpuTest, RowsThatNeedFewTokensGetTheBitsOfOneDevice) {
  uint64_t n = 76;
  for (const Logits logits : {Logits::kRandom, Logits::kTied, Logits::kNans, Logits::kBans,
                              Logits::kAllBanned, Logits::kCertain}) {
    const DType dtype = ++n % 2 == 0 ? DType::kBF16 : DType::kF32;
    const ShardCase c{{dtype, 3400, 5003, 16, true, false, 0, 0, n}, logits};
    const std::string want = KeptBits(*runner_, c, /*says_kept=*/false);
    EXPECT_EQ(KeptBits(*runner_, c, true) == want, true) << "one device";
    for (const int shards : {1, 2, 3, 8}) {
      CuttingBackend backend(DevicesOf(shards));
      EXPECT_EQ(KeptBits(*OpRunner::Create(&backend).value(), c, true) == want, true)
          << DescribeShards(c) << ", " << shards << " shards";
    }
  }
}

// ---- NCCL

// Skips, with the reason, on a machine with one GPU or without NCCL's library.
class ShardsByNcclGpuTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (CountCudaDevices() < 2) GTEST_SKIP() << "one GPU";
    const absl::Status status = CheckCanShard(Pointers(All()), kByNccl).status();
    if (absl::StrContains(status.message(), "NCCL cannot be loaded")) GTEST_SKIP() << status;
    ASSERT_TRUE(status.ok()) << status;
  }

  static std::vector<std::unique_ptr<Backend>> All() { return DevicesOf(CountCudaDevices()); }
  static std::vector<Backend*> Pointers(const std::vector<std::unique_ptr<Backend>>& devices) {
    std::vector<Backend*> pointers;
    for (const auto& device : devices) pointers.push_back(device.get());
    return pointers;
  }

  static constexpr ShardOptions kByNccl = {.exchange = ShardExchange::kNccl};
};

TEST_F(ShardsByNcclGpuTest, TheBitsAreThoseOfOneDevice) {
  for (int devices = 2; devices <= CountCudaDevices(); ++devices) {
    CuttingBackend backend(DevicesOf(devices), kByNccl);
    ExpectBitsOfOneDevice(&backend, devices);
  }
}

TEST_F(ShardsByNcclGpuTest, RowsThatNeedFewTokensGetTheBitsOfOneDevice) {
  for (int devices = 2; devices <= CountCudaDevices(); ++devices) {
    CuttingBackend backend(DevicesOf(devices), kByNccl);
    const auto sharded = OpRunner::Create(&backend).value();
    for (const ShardCase& c : GpuShardCases()) {
      EXPECT_EQ(KeptBits(*sharded, c, true) == KeptBits(*runner_, c, false), true)
          << DescribeShards(c) << ", " << devices << " devices";
    }
  }
}

TEST_F(ShardsByNcclGpuTest, RowsThatDoNotFitInOneExchangeRunInSeveral) {
  ShardCase c{{DType::kBF16, 700, 100000, 64, false, false, 0, 0, 5}};
  CuttingBackend backend(All(), kByNccl);
  EXPECT_EQ(AllBits(*OpRunner::Create(&backend).value(), c), AllBits(*runner_, c));
}

TEST_F(ShardsByNcclGpuTest, TrainingOverDevicesHasTheLossesOfOne) {
  if (const std::string why = WhyNoTraining(); !why.empty()) GTEST_SKIP() << why;
  for (int devices = 2; devices <= CountCudaDevices(); ++devices) {
    CuttingBackend backend(DevicesOf(devices), kByNccl);
    ExpectTrainingOfOneDevice(*runner_, &backend, devices);
  }
}

TEST_F(ShardsByNcclGpuTest, GradientsAgreeWithDoublePrecision) {
  CuttingBackend backend(All(), kByNccl);
  const auto sharded = OpRunner::Create(&backend).value();
  for (const LinearCase& c : ShardGradientCases())
    EXPECT_EQ(FirstLinearGradientDifference(*sharded, c), "");
  EXPECT_EQ(BrokenGradientOfNoRows(*sharded), "");
}

// ---- Faults

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
    return stream.LinearTopK(
        {.hidden = {slab_.device + kStates, DType::kBF16, 1, kHidden, kHidden},
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

// Runs in a process of its own, because a device that has read a wrong address is lost to it. Ends it
// with 0 where all is as it should be.
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

// Runs in a process of its own, for which the device then hangs. The second device may be the first
// one again. Ends the process with 0 where all is as it should be.
void HangOnTheSecondDevice(ShardExchange exchange) {
  constexpr absl::Duration kHangAfter = absl::Milliseconds(500);
  const auto check = [](bool is_right, const char* what) {
    if (is_right) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::_Exit(1);
  };
  std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  const bool two = devices[0]->device().number != devices[1]->device().number;
  HoldingBackend second(std::move(devices[1]));
  const std::vector<Backend*> backends = {devices[0].get(), &second};
  auto stream =
      CreateShardedStream(backends, {.exchange = exchange, .hang_after = kHangAfter}).value();
  const auto alone = devices[0]->CreateStream(StreamUse::kOps).value();
  const OneRow row(*devices[0]);
  const DeviceMemory copy = second.AllocateDevice(size_t{1} << 20).value();
  std::vector<HeadView> parts = CutHead(row.Whole(), 2);
  parts[1].weight.data = copy.data;
  const HeadView head = WithShards(row.Whole(), parts);
  check(row.Run(*stream, head).ok(), "the call before");
  check(row.Run(*alone, row.Whole()).ok(), "the call on one device before");
  second.Hold();
  absl::Time begun = absl::Now();
  const absl::Status status = row.Run(*stream, head);
  const absl::Duration took = absl::Now() - begun;
  std::fprintf(stderr, "%s, shard %d, after %s\n", status.ToString().c_str(),
               FailedShard(status).value_or(-1), absl::FormatDuration(took).c_str());
  check(absl::IsInternal(status) && FailedShard(status) == 1, "the status");
  check(took >= kHangAfter && took < kHangAfter + absl::Seconds(4), "the time");
  begun = absl::Now();
  check(row.Run(*stream, head) == status, "the next call");
  if (two) {  // the other device works, and nothing waits for the one that hangs
    check(row.Run(*alone, row.Whole()).ok(), "the call on one device");
    devices[0]->FreeDevice(devices[0]->AllocateDevice(size_t{1} << 20).value());
    devices[0]->FreeSlab(devices[0]->AllocateSlab(size_t{1} << 20).value());
  }
  second.FreeDevice(copy);
  stream.reset();
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

// Training of 8 rows of zeros, on a head of zeros, whose second shard has its gradients on its device.
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
  std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  HoldingBackend second(std::move(devices[1]));
  const std::vector<Backend*> backends = {devices[0].get(), &second};
  auto stream =
      CreateShardedStream(backends, {.exchange = exchange, .hang_after = absl::Milliseconds(500)})
          .value();
  const EightRows rows(*devices[0], second);
  const absl::Status first = rows.Run(*stream);
  const absl::Status again = rows.Run(*stream);
  second.Hold();
  const absl::Time begun = absl::Now();
  const absl::Status hangs = rows.Run(*stream);
  const absl::Status next = rows.Run(*stream);
  stream.reset();
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
  std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  HoldingBackend second(std::move(devices[1]));
  const std::vector<Backend*> backends = {devices[0].get(), &second};
  const auto stream =
      CreateShardedStream(backends, {.exchange = exchange, .hang_after = absl::Milliseconds(500)})
          .value();
  const OneRow row(*devices[0]);
  const DeviceMemory copy = second.AllocateDevice(size_t{1} << 20).value();
  std::vector<HeadView> parts = CutHead(row.Whole(), 2);
  parts[1].weight.data = copy.data;
  const HeadView head = WithShards(row.Whole(), parts);
  const absl::Status first = row.Run(*stream, head);  // CUDA loads kernels at their first use
  second.Hold();
  std::thread release([&second] {
    absl::SleepFor(absl::Milliseconds(1500));
    second.Release();
  });
  const absl::Status late = row.Run(*stream, head);
  release.join();
  const absl::Status next = row.Run(*stream, head);
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

// Two calls in one batch. The second is of a new kind, so it waits on the host, and is given up: the first
// has then merged what was not there.
void LateInTheSecondCall(ShardExchange exchange) {
  std::vector<std::unique_ptr<Backend>> devices = DevicesOf(2);
  HoldingBackend second(std::move(devices[1]));
  const std::vector<Backend*> backends = {devices[0].get(), &second};
  const auto stream =
      CreateShardedStream(backends, {.exchange = exchange, .hang_after = absl::Milliseconds(500)})
          .value();
  const OneRow row(*devices[0]);
  const DeviceMemory copy = second.AllocateDevice(size_t{1} << 20).value();
  std::vector<HeadView> parts = CutHead(row.Whole(), 2);
  parts[1].weight.data = copy.data;
  const HeadView head = WithShards(row.Whole(), parts);
  const absl::Status before = row.Run(*stream, head);
  second.Hold();
  std::thread release([&second] {
    absl::SleepFor(absl::Milliseconds(1500));
    second.Release();
  });
  const absl::Status known = row.Enqueue(*stream, head, /*max_k=*/1);
  const absl::Status given_up = row.Enqueue(*stream, head, /*max_k=*/2);
  const absl::Status batch = stream->Wait().status();
  release.join();
  const absl::Status next = row.Run(*stream, head);
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

// ---- What can be sharded

TEST_F(ShardsGpuTest, DevicesOfSeveralBackendsAreRefusedWithASentence) {
  const auto cpu = CreateCpuBackend({.cpu_threads = 1}).value();
  EXPECT_EQ(CheckCanShard(std::vector<Backend*>{cpu.get(), Cuda()->get()}).status(),
            absl::FailedPreconditionError("shard: got backend cuda, allowed cpu or cuda, the same "
                                          "for all devices; on others each device holds the whole "
                                          "head"));
  EXPECT_TRUE(CheckCanShard(std::vector<Backend*>{Cuda()->get(), Cuda()->get()}).ok());
}

TEST_F(ShardsGpuTest, DevicesThatNcclDoesNotJoinInTimeAreAnErrorAndTheNextTryMayJoinThem) {
  if (const absl::Status there = cuda::NcclGather::Check(); !there.ok()) GTEST_SKIP() << there;
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");  // no multicast
  const int device[] = {CudaTestDevice()};
  EXPECT_EQ(cuda::NcclGather::Create(device, absl::ZeroDuration()).status(),
            absl::UnavailableError("NCCL: make communicators: not done after 0"));
  absl::Status status = absl::UnknownError("not tried");
  for (int i = 0; i < 6000 && !status.ok(); ++i) {  // until the joining that was given up has ended
    absl::SleepFor(absl::Milliseconds(10));
    status = cuda::NcclGather::Create(device, absl::Minutes(1)).status();
  }
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ShardsGpuTest, NcclRefusesToJoinADeviceWithItself) {
  const std::vector<Backend*> twice = {Cuda()->get(), Cuda()->get()};
  const absl::Status status = CheckCanShard(twice, {.exchange = ShardExchange::kNccl}).status();
  EXPECT_EQ(status,
            absl::FailedPreconditionError(absl::StrFormat(
                "shard: NCCL joins no device with itself: device %d is named twice, "
                "allowed devices that NCCL can join; on others each device holds the whole head",
                CudaTestDevice())));
}

}  // namespace
}  // namespace logitd::testing
