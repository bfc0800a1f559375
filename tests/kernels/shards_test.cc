// Linear ops on heads that are cut over several devices, on the CPU backend: the bits of one
// device, and what happens where one device fails.
#include "kernels/shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/sharded_stream.h"
#include "tests/kernels/cpu_test.h"
#include "tests/kernels/cutting_backend.h"
#include "tests/kernels/partial_backend.h"
#include "tests/kernels/shard_cases.h"
#include "tests/shard_backend.h"

namespace logitd::testing {
namespace {

// ---- The cut

TEST(VocabShardsTest, CutsAtCellsAndMissesNoToken) {
  for (const int64_t vocab : {1, 1023, 1024, 1025, 2048, 5003, 50257, 128256, 1 << 20}) {
    for (const int count : {1, 2, 3, 4, 7, 8, 64}) {
      const VocabShards shards = {.vocab = vocab, .count = count};
      int64_t next = 0, most = 0, least = vocab;
      for (int s = 0; s < count; ++s) {
        const VocabShard shard = shards.at(s);
        ASSERT_EQ(shard.first, next) << vocab << " in " << count;
        if (shard.tokens > 0) {
          ASSERT_EQ(shard.first % kVocabCell, 0);
          ASSERT_EQ(shards.OwnerOf(shard.first), s);
          ASSERT_EQ(shards.OwnerOf(shard.first + shard.tokens - 1), s);
        }
        next += shard.tokens;
        most = std::max(most, shard.cells());
        least = std::min(least, shard.cells());
      }
      EXPECT_EQ(next, vocab) << count;
      EXPECT_LE(most - least, 1) << vocab << " in " << count;
      EXPECT_EQ(most, shards.most_cells());
    }
  }
}

// The partials of a call are a contract with others: a change of their bytes is a change of it.
TEST(VocabShardsTest, BlocksHaveTheBytesThatTheContractStates) {
  const VocabShards shards = {.vocab = 128256, .count = 2};
  EXPECT_EQ(shards.most_cells(), 63);
  const TopKPartialShape topk = {.shards = shards, .rows = 4, .max_k = 2};
  EXPECT_EQ(topk.bytes(), 2u * (4 * 63 * 4) + 4 * 4 + 4 * 2 * 8);
  LossPartialShape loss = {.shards = shards, .rows = 4};
  EXPECT_EQ(loss.bytes(), 2u * (4 * 63 * 4) + 2 * 16);
  loss.totals = true;
  loss.want = kWantRank | kWantEntropy;
  loss.max_top = 2;
  loss.max_extra = 4;
  EXPECT_EQ(loss.bytes(), 4u * (4 * 63 * 4) + 3 * 16 + 4 * 2 * 8 + 4 * 4 * 4);
  SamplePartialShape sample = {.shards = shards, .rows = 4};
  EXPECT_EQ(sample.bytes(), 4u * 63 * 1024 * 4);
  sample.inputs = 2;
  EXPECT_EQ(sample.bytes(), 2u * 4 * 63 * 1024 * 4);
}

// ---- The checks of the linear ops, on shards

template <int shards>
class OnShardsTest : public ::testing::Test {
 protected:
  CuttingBackend backend_{shards, /*threads=*/1};
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(&backend_).value();
};
using LinearOnThreeShardsTest = OnShardsTest<3>;
const bool kRegistered =
    RegisterChecks<LinearOnThreeShardsTest>("LinearOnThreeShardsTest", LinearChecks()) &&
    RegisterChecks<LinearOnThreeShardsTest>("LinearOnThreeShardsTest", ChecksOfExchangedLogits()) &&
    RegisterChecks<LinearOnThreeShardsTest>("LinearOnThreeShardsTest", LinearGradientChecks());

// ---- Bits

TEST(ShardsTest, AnyNumberOfShardsGivesTheBitsOfOneDevice) {
  const std::vector<ShardCase> cases = ShardCases();
  const auto one = CreateCpuBackend({.cpu_threads = 2}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  const auto bits_of = [](OpRunner& of, const ShardCase& c) {
    std::vector<std::string> bits = AllBits(of, c);
    for (std::string& more : DivergencesBits(of, c)) bits.push_back(std::move(more));
    return bits;
  };
  std::vector<std::vector<std::string>> want;
  for (const ShardCase& c : cases) want.push_back(bits_of(*runner, c));
  for (const int shards : {1, 2, 3, 4, 8, 13}) {
    CuttingBackend backend(shards, /*threads=*/shards % 2 + 1);
    const auto sharded = OpRunner::Create(&backend).value();
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::vector<std::string> got = bits_of(*sharded, cases[i]);
      for (size_t op = 0; op < got.size(); ++op) {
        EXPECT_EQ(got[op] == want[i][op], true)
            << DescribeShards(cases[i]) << ", op " << op << ", " << shards << " shards";
      }
    }
  }
}

TEST(ShardsTest, PartialsAndTheirMergeGiveTheBitsOfOneDevice) {
  const auto one = CreateCpuBackend({.cpu_threads = 1}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  PartialBackend backend(one.get(), 3);
  const auto sharded = OpRunner::Create(&backend).value();
  const std::vector<ShardCase> cases = ShardCases();
  for (size_t i = 0; i < cases.size(); i += 3) {
    EXPECT_EQ(AllBits(*sharded, cases[i]) == AllBits(*runner, cases[i]), true)
        << DescribeShards(cases[i]);
    EXPECT_EQ(DivergencesBits(*sharded, cases[i]) == DivergencesBits(*runner, cases[i]), true)
        << DescribeShards(cases[i]);
  }
}

TEST(ShardsTest, AHeadThatIsCutMayComeBesideOneThatIsWhole) {
  const auto one = CreateCpuBackend({.cpu_threads = 1}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  const std::vector<ShardCase> cases = ShardCases();
  for (const CutHeads cut : {CutHeads::kFirst, CutHeads::kReference}) {
    CuttingBackend backend(3, /*threads=*/1, cut);
    const auto sharded = OpRunner::Create(&backend).value();
    for (size_t i = 1; i < cases.size(); i += 4) {
      EXPECT_EQ(DivergencesBits(*sharded, cases[i], /*mixed=*/false) ==
                    DivergencesBits(*runner, cases[i], /*mixed=*/false),
                true)
          << DescribeShards(cases[i]) << ", cut " << static_cast<int>(cut);
    }
  }
}

TEST(ShardsTest, GradientsOfPartsAreThoseOfTheWholeAndTheWeightsHaveTheBitsOfOneDevice) {
  const auto one = CreateCpuBackend({.cpu_threads = 2}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  for (const int shards : {1, 2, 3, 8}) {
    PartialBackend backend(one.get(), shards);
    const auto sharded = OpRunner::Create(&backend).value();
    for (const LinearCase& c : ShardGradientCases()) {
      if (shards == 3) {  // the reference takes long
        EXPECT_EQ(FirstLinearGradientDifference(*sharded, c), "");
      }
      LinearBackwardCall call = MakeLinearBackwardCall(c, RandomInput(c), c.dtype);
      call.want_d_bias = true;
      const LinearBackwardAnswer want = runner->LinearCrossEntropyBackward(call).value();
      const LinearBackwardAnswer got = sharded->LinearCrossEntropyBackward(call).value();
      EXPECT_EQ(got.d_weight.bytes() == want.d_weight.bytes(), true) << Describe(c);
      EXPECT_EQ(got.d_bias, want.d_bias) << Describe(c);
      if (shards == 1) {
        EXPECT_EQ(got.d_hidden.bytes() == want.d_hidden.bytes(), true) << Describe(c);
      }
    }
  }
}

// Several cells, the last one short; one cell, so that all shards but one are empty.
TEST(ShardsTest, TrainingOverDevicesHasTheLossesAndTheGradientsOfWeightsOfOneDevice) {
  const auto one = CreateCpuBackend({.cpu_threads = 2}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  for (const int shards : {1, 2, 3, 8}) {
    CuttingBackend backend(shards, /*threads=*/1);
    const auto sharded = OpRunner::Create(&backend).value();
    for (const LinearCase& c : ShardGradientCases()) {
      LinearBackwardCall call = MakeLinearBackwardCall(c, RandomInput(c), c.dtype);
      call.want_d_bias = true;
      const LinearTrainingAnswer want = runner->LinearCrossEntropyTraining(call).value();
      const LinearTrainingAnswer got = sharded->LinearCrossEntropyTraining(call).value();
      EXPECT_EQ(BitsOfLosses(got.loss) == BitsOfLosses(want.loss), true)
          << DescribeSharded(c, shards);
      EXPECT_EQ(got.gradient.d_weight.bytes() == want.gradient.d_weight.bytes(), true)
          << DescribeSharded(c, shards);
      EXPECT_EQ(got.gradient.d_bias, want.gradient.d_bias) << DescribeSharded(c, shards);
      EXPECT_EQ(HiddenDifference(got.gradient, want.gradient), "") << DescribeSharded(c, shards);
    }
  }
}

TEST(ShardsTest, EveryInstructionSetGivesTheBitsOfOneDevice) {
  std::vector<ShardCase> cases = ShardCases();
  cases.pop_back();
  ForEachInstructionSet([&](OpRunner& runner) {
    CuttingBackend backend(3, /*threads=*/1);
    const auto sharded = OpRunner::Create(&backend).value();
    for (size_t i = 0; i < cases.size(); i += 4) {
      EXPECT_EQ(AllBits(*sharded, cases[i]) == AllBits(runner, cases[i]), true)
          << DescribeShards(cases[i]);
    }
  });
}

// More rows than blocks have room for at once: they run in several parts.
TEST(ShardsTest, RowsThatDoNotFitInOneExchangeRunInSeveral) {
  const LinearCase c{DType::kF32, 130, 150000, 8, false, false, 0, 0, 3};
  const LinearInput input = RandomTensors(c);
  const SampleBatch samples = SampleBatchOf(c);
  std::vector<SoftmaxTopKRow> asks;
  for (int64_t r = 0; r < c.rows; ++r) {
    asks.push_back({.first_entry = r, .temperature = 1, .k = 1});
  }
  asks.back().k = 100000;  // makes each row of a block large
  const int64_t entries = c.rows - 1 + asks.back().k;
  const auto one = CreateCpuBackend({.cpu_threads = 2}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  CuttingBackend backend(2, /*threads=*/1);
  const auto sharded = OpRunner::Create(&backend).value();
  EXPECT_EQ(sharded->LinearSample(input.hidden, input.head, samples)->tokens,
            runner->LinearSample(input.hidden, input.head, samples)->tokens);
  const auto got = sharded->LinearTopK(input.hidden, input.head, asks, entries).value();
  const auto want = runner->LinearTopK(input.hidden, input.head, asks, entries).value();
  EXPECT_EQ(got.indices, want.indices);
  EXPECT_EQ(got.logsumexp, want.logsumexp);
  const LossBatch losses = SupportedLossesOf(c);
  std::string got_losses, want_losses;
  Append(sharded->LinearCrossEntropy(input.hidden, input.head, losses).value(), &got_losses);
  Append(runner->LinearCrossEntropy(input.hidden, input.head, losses).value(), &want_losses);
  EXPECT_EQ(got_losses == want_losses, true);
  // Sequences of more rows than an exchange has room for.
  EXPECT_EQ(VerifyBitsOf(*sharded, input, c, c.rows) == VerifyBitsOf(*runner, input, c, c.rows),
            true);
  EXPECT_EQ(DivergencesBits(*sharded, {c}) == DivergencesBits(*runner, {c}), true);
}

// ---- Faults

class FaultTest : public ::testing::Test {
 protected:
  static constexpr int kDevices = 3;

  FaultTest() {
    for (int i = 0; i < kDevices; ++i) {
      devices_.push_back(std::make_unique<ShardBackend>(i));
      backends_.push_back(devices_.back().get());
    }
    stream_ = CreateShardedStream(backends_).value();
  }

  absl::Status TopK() { return TopK(row_); }
  absl::Status TopK(const SoftmaxTopKRow& row) {
    absl::Status status =
        stream_->Run(LinearTopKArgs{.hidden = {hidden_.data(), DType::kF32, 1, 4, 4},
                                    .head = WithShards(whole_, parts_),
                                    .topk = {.rows = &row,
                                             .max_k = row.k,
                                             .indices = indices_.data(),
                                             .probs = probs_.data(),
                                             .logsumexp = &logsumexp_,
                                             .status = &status_}});
    if (status.ok()) status = stream_->Wait().status();
    return status;
  }

  std::vector<ShardGradient> GradientsOfShards() {
    const VocabShards cut = {.vocab = 3000, .count = kDevices};
    std::vector<ShardGradient> to(kDevices);
    for (int s = 0; s < kDevices; ++s) {
      const VocabShard shard = cut.at(s);
      to[static_cast<size_t>(s)].d_weight = {d_weight_.data() + shard.first * 4, DType::kF32,
                                             shard.tokens, 4, 4};
    }
    return to;
  }

  absl::Status Backward() {
    return Backward(WithShards(whole_, parts_), GradientsOfShards().data());
  }
  absl::Status Backward(const HeadView& head, const ShardGradient* to) {
    const CrossEntropyRow row = PlainLoss(1);
    const float logsumexp = 9, upstream = 1;
    absl::Status status =
        stream_->ShardedBackward({.gradient = {.hidden = {hidden_.data(), DType::kF32, 1, 4, 4},
                                               .head = head,
                                               .rows = &row,
                                               .logsumexp = &logsumexp,
                                               .upstream = &upstream,
                                               .d_hidden = {d_hidden_, DType::kF32, 1, 4, 4}},
                                  .shards = to});
    if (status.ok()) status = stream_->Wait().status();
    return status;
  }

  std::vector<std::unique_ptr<ShardBackend>> devices_;
  std::vector<Backend*> backends_;
  std::unique_ptr<ShardedStream> stream_;
  std::vector<float> d_weight_ = std::vector<float>(3000 * 4, kUnwrittenFloat);
  float d_hidden_[4] = {kUnwrittenFloat, kUnwrittenFloat, kUnwrittenFloat, kUnwrittenFloat};
  std::vector<float> weight_ = std::vector<float>(3000 * 4, 0.25f);
  std::vector<float> hidden_ = std::vector<float>(4, 1.0f);
  const HeadView whole_ = {.weight = {weight_.data(), DType::kF32, 3000, 4, 4}};
  const std::vector<HeadView> parts_ = CutHead(whole_, kDevices);
  const SoftmaxTopKRow row_ = {.first_entry = 0, .temperature = 1, .k = 1};
  std::vector<int32_t> indices_ = std::vector<int32_t>(3000, kUnwrittenIndex);
  std::vector<float> probs_ = std::vector<float>(3000);
  float logsumexp_ = 0;
  RowStatus status_;
};

TEST_F(FaultTest, TheErrorOfOneDeviceNamesItAndTheNextCallIsWhole) {
  devices_[1]->Fail(absl::UnavailableError("out of luck"));
  const absl::Status status = TopK();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "out of luck");
  EXPECT_EQ(FailedShard(status), 1);
  EXPECT_EQ(indices_[0], kUnwrittenIndex);
  devices_[1]->Fail(absl::OkStatus());
  EXPECT_TRUE(TopK().ok());
  EXPECT_EQ(indices_[0], 0);
}

TEST_F(FaultTest, ALostDeviceCountsMoreThanOneThatFails) {
  devices_[0]->Fail(absl::UnavailableError("busy"));
  devices_[2]->Fail(absl::InternalError("gone"));
  const absl::Status status = TopK();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FailedShard(status), 2);
}

// The part goes on when later calls, which need more memory, have been refused.
TEST_F(FaultTest, APartThatHangsKeepsItsMemory) {
  stream_ = CreateShardedStream(backends_, {.hang_after = absl::Milliseconds(100)}).value();
  devices_[1]->Hold();
  const absl::Status hangs = TopK();
  EXPECT_EQ(FailedShard(hangs), 1);
  const SoftmaxTopKRow larger = {.first_entry = 0, .temperature = 1, .k = 3000};
  EXPECT_EQ(TopK(larger), hangs);
  EXPECT_EQ(stream_->Wait().status(), hangs);
  EXPECT_EQ(stream_->Upload({}, 0, 0), hangs);
  devices_[1]->Release();
  stream_.reset();
  for (const auto& device : devices_) device->WaitUntilUnused();
}

TEST_F(FaultTest, AnErrorInTheBackwardNamesItsDeviceAndTheNextCallIsWhole) {
  devices_[2]->Fail(absl::UnavailableError("out of luck"));
  const absl::Status status = Backward();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FailedShard(status), 2);
  EXPECT_EQ(d_hidden_[0], kUnwrittenFloat);
  devices_[2]->Fail(absl::OkStatus());
  ASSERT_TRUE(Backward().ok());
  // All logits are 1: the gradient of each is exp(1 - 9), and one less of the target.
  const double p = std::exp(-8.0);
  // A sum of 3000 terms in fp32: rounded by up to 1e-5 of the sum of their sizes.
  EXPECT_NEAR(d_hidden_[0], 0.25 * (3000 * p - 1), 1e-5 * 0.25 * (3000 * p + 1));
  EXPECT_NEAR(d_weight_[4], p - 1, 1e-6);
  EXPECT_NEAR(d_weight_[2999 * 4], p, 1e-6);
}

// Of two heads, the first of which is cut, and the reference whole or cut.
TEST_F(FaultTest, AnErrorInADivergenceNamesItsDeviceAndTheNextCallIsWhole) {
  const DivergenceRow row = {
      .active = 1, .target = 2, .temperature = 1, .reference_temperature = 1};
  for (const bool cut : {false, true}) {
    float values[8];
    std::fill_n(values, 8, kUnwrittenFloat);
    RowStatus status;
    const LinearDivergenceArgs args = {
        .hidden = {hidden_.data(), DType::kF32, 1, 4, 4},
        .head = WithShards(whole_, parts_),
        .reference_hidden = {hidden_.data(), DType::kF32, 1, 4, 4},
        .reference_head = cut ? WithShards(whole_, parts_) : whole_,
        .divergence = {.rows = &row,
                       .answers = {.forward_kl = values,
                                   .reverse_kl = values + 1,
                                   .entropy = values + 2,
                                   .reference_entropy = values + 3,
                                   .logsumexp = values + 4,
                                   .reference_logsumexp = values + 5,
                                   .target_logprob = values + 6,
                                   .reference_target_logprob = values + 7,
                                   .status = &status}}};
    devices_[2]->Fail(absl::UnavailableError("out of luck"));
    const absl::Status failed = stream_->Run(args);
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(FailedShard(failed), 2);
    EXPECT_EQ(values[0], kUnwrittenFloat);
    EXPECT_TRUE(stream_->Wait().ok());
    devices_[2]->Fail(absl::OkStatus());
    ASSERT_TRUE(stream_->Run(args).ok());
    ASSERT_TRUE(stream_->Wait().ok());
    EXPECT_EQ(values[0], 0);  // both rows are the same: each token has the logit 1
    EXPECT_NEAR(values[2], std::log(3000.0), 4e-6 * std::log(3000.0));
    EXPECT_NEAR(values[7], -std::log(3000.0), 4e-6 * std::log(3000.0));
  }
}

TEST_F(FaultTest, AllDevicesThatHangInTheBackwardAreNamed) {
  stream_ = CreateShardedStream(backends_, {.hang_after = absl::Milliseconds(100)}).value();
  devices_[1]->Hold();
  devices_[2]->Hold();
  const absl::Status hang = Backward();
  EXPECT_EQ(hang.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FailedShards(hang), (std::vector<int>{1, 2}));
  EXPECT_EQ(TopK(), hang);
  devices_[1]->Fail(absl::InternalError("after all"));  // they read no memory of the call any more
  devices_[2]->Fail(absl::InternalError("after all"));
  devices_[1]->Release();
  devices_[2]->Release();
  stream_.reset();
  for (const auto& device : devices_) device->WaitUntilUnused();
}

// ---- Arguments

class ShardGradientsTest : public FaultTest {
 protected:
  ShardGradientsTest() {
    for (ShardGradient& to : good_) to.d_bias = d_bias_.data();
  }

  const HeadView head_ = WithShards(whole_, parts_);
  std::vector<float> d_bias_ = std::vector<float>(3000);
  std::vector<ShardGradient> good_ = GradientsOfShards();
};

TEST_F(ShardGradientsTest, GradientsThatDoNotFitTheShardsAreRefused) {
  HeadView two = head_;
  two.shard_count = 2;
  const auto with = [this](auto change) {
    std::vector<ShardGradient> to = good_;
    change(to[1]);
    return to;
  };
  const struct {
    HeadView head;
    std::vector<ShardGradient> to;  // empty: null
    std::string message;
  } cases[] = {
      {whole_, good_, "head: got 0 shards, allowed 3 (the devices)"},
      {two, good_, "head: got 2 shards, allowed 3 (the devices)"},
      {head_, {}, "shards: got null, allowed an array of 3 (the devices)"},
      {head_, with([](ShardGradient& to) { to.d_weight.data = nullptr; }),
       "shards[1].d_weight: got [1024, 4] with row stride 4 and no memory, allowed memory of "
       "[1024, 4] "
       "with row stride >= 4"},
      {head_, with([](ShardGradient& to) { to.d_weight.rows = 1000; }),
       "shards[1].d_weight: got [1000, 4] with row stride 4, allowed memory of [1024, 4] with row "
       "stride >= 4"},
      {head_, with([](ShardGradient& to) { to.d_weight.cols = 3; }),
       "shards[1].d_weight: got [1024, 3] with row stride 4, allowed memory of [1024, 4] with row "
       "stride >= 4"},
      {head_, with([](ShardGradient& to) { to.d_weight.row_stride = 3; }),
       "shards[1].d_weight: got [1024, 4] with row stride 3, allowed memory of [1024, 4] with row "
       "stride >= 4"},
      {head_, with([](ShardGradient& to) { to.d_weight.dtype = DType::kF16; }),
       "shards[1].d_weight: got f16, allowed f32 (the weight's) or f32"},
      {head_, with([](ShardGradient& to) { to.d_bias = nullptr; }),
       "shards[1].d_bias: got null, allowed memory (as shards[0])"},
  };
  for (const auto& c : cases) {
    const absl::Status want = absl::InvalidArgumentError(c.message);
    const ShardGradient* const to = c.to.empty() ? nullptr : c.to.data();
    EXPECT_EQ(Backward(c.head, to), want);
    ShardedTrainingArgs training = {.shards = to};
    training.training.gradient.head = c.head;
    EXPECT_EQ(stream_->ShardedTraining(training), want);
    EXPECT_EQ(d_hidden_[0], kUnwrittenFloat);
  }
}

TEST(ShardedStreamTest, OtherBackendsAreRefusedWithASentence) {
  ShardBackend cpu(0);
  ShardBackend gpu(1, /*is_host=*/false);
  std::vector<Backend*> backends = {&cpu, &gpu};
  EXPECT_EQ(CreateShardedStream(backends).status(),
            absl::FailedPreconditionError(
                "shard: got backend fake, allowed cpu or cuda, the same for all "
                "devices; on others each device holds the whole head"));
  EXPECT_EQ(CreateShardedStream({}).status(),
            absl::InvalidArgumentError("shards: got 0 devices, allowed 1..64"));
  EXPECT_EQ(FailedShard(absl::OkStatus()), std::nullopt);
}

TEST(ShardedStreamTest, WorkThatIsAbandonedIsNotComputed) {
  CuttingBackend backend(2, /*threads=*/1);
  const auto stream = backend.CreateStream(StreamUse::kOps).value();
  std::vector<float> weight(3000 * 4, 0.25f), hidden(4, 1.0f);
  const SoftmaxTopKRow row = {.first_entry = 0, .temperature = 1, .k = 1};
  for (const bool is_abandoned : {true, false}) {
    int32_t index = kUnwrittenIndex;
    float prob = 0, logsumexp = 0;
    RowStatus status;
    const std::atomic<bool> abandoned = is_abandoned;
    stream->Watch(&abandoned);
    ASSERT_TRUE(
        stream
            ->Run(LinearTopKArgs{.hidden = {hidden.data(), DType::kF32, 1, 4, 4},
                                 .head = {.weight = {weight.data(), DType::kF32, 3000, 4, 4}},
                                 .topk = {.rows = &row,
                                          .max_k = 1,
                                          .indices = &index,
                                          .probs = &prob,
                                          .logsumexp = &logsumexp,
                                          .status = &status}})
            .ok());
    ASSERT_TRUE(stream->Wait().ok());
    EXPECT_EQ(index, is_abandoned ? kUnwrittenIndex : 0);
  }
}

}  // namespace
}  // namespace logitd::testing
