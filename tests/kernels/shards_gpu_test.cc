// Linear ops on heads that are cut over CUDA devices: the checks of one device, and its bits. Where
// there are fewer devices than shards, a device has several shards.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/nccl.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "tests/kernels/cuda_shards.h"
#include "tests/kernels/cutting_backend.h"
#include "tests/kernels/partial_backend.h"
#include "tests/kernels/shard_cases.h"

namespace logitd::testing {
namespace {

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
                                               ChecksOfExchangedLogits()) &&
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

// The answers of one device to all cases, by case and call; those of linear_divergence from the
// logits that linear_sample makes. Made once.
const std::vector<std::vector<std::string>>& BitsOfOneDevice() {
  static const auto& bits = *new auto([] {
    const auto runner = OpRunner::Create(Cuda()->get()).value();
    PartialBackend one_shard(Cuda()->get(), 1);
    const auto logits = OpRunner::Create(&one_shard).value();
    std::vector<std::vector<std::string>> want;
    for (const ShardCase& c : GpuShardCases()) {
      want.push_back(AllBits(*runner, c));
      for (std::string& more : DivergencesBits(*logits, c)) want.back().push_back(std::move(more));
    }
    return want;
  }());
  return bits;
}

void ExpectBitsOfOneDevice(Backend* sharded, int shards) {
  const std::vector<ShardCase> cases = GpuShardCases();
  const auto runner = OpRunner::Create(sharded).value();
  for (size_t i = 0; i < cases.size(); ++i) {
    std::vector<std::string> got = AllBits(*runner, cases[i]);
    if (i % 3 == static_cast<size_t>(shards) % 3) {  // each takes long
      for (std::string& more : DivergencesBits(*runner, cases[i])) got.push_back(std::move(more));
    }
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

TEST_F(ShardsGpuTest, AHeadThatIsCutMayComeBesideOneThatIsWhole) {
  const std::vector<ShardCase> cases = GpuShardCases();
  PartialBackend one_shard(Cuda()->get(), 1);
  const auto logits = OpRunner::Create(&one_shard).value();
  for (const CutHeads cut : {CutHeads::kFirst, CutHeads::kReference}) {
    CuttingBackend backend(DevicesOf(3), {}, cut);
    const auto sharded = OpRunner::Create(&backend).value();
    for (size_t i = 0; i < cases.size(); i += 5) {
      EXPECT_EQ(DivergencesBits(*sharded, cases[i], /*mixed=*/false) ==
                    DivergencesBits(*logits, cases[i], /*mixed=*/false),
                true)
          << DescribeShards(cases[i]) << ", cut " << static_cast<int>(cut);
    }
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

// Heads of several cells, whose last one is short, of one cell, and of several chunks of
// training.cu on a shard. The last does not fit it: the forward and the backward are calls of their
// own.
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
  const auto sharded = OpRunner::Create(&backend).value();
  EXPECT_EQ(AllBits(*sharded, c) == AllBits(*runner_, c), true);
  PartialBackend one_shard(Cuda()->get(), 1);
  EXPECT_EQ(
      DivergencesBits(*sharded, c) == DivergencesBits(*OpRunner::Create(&one_shard).value(), c),
      true);
}

TEST_F(ShardsGpuTest, MoreRowsThanACallOfVerifyHasRoomForAreRefused) {
  CuttingBackend backend(DevicesOf(2));
  const auto stream = backend.CreateStream(StreamUse::kOps).value();
  const VerifySequence sequence = {.first_row = 0, .rows = 1, .block = 0};
  const HeadView head = {.weight = {nullptr, DType::kF32, 4, 4, 4}};
  LinearVerifyArgs args = {.hidden = {nullptr, DType::kF32, 130561, 4, 4}, .head = head};
  args.verify.sequences = &sequence;
  args.verify.sequence_count = 1;
  EXPECT_EQ(stream->Run(args),
            absl::ResourceExhaustedError("rows: got 130561, allowed 1..130560 of one linear_verify "
                                         "on a head that is cut over the devices"));
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
  EXPECT_EQ(AllBits(*OpRunner::Create(&backend).value(), c) == AllBits(*runner_, c), true);
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
