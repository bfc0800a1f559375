// Linear ops on heads that are cut over several devices, on the CPU backend: the bits of one device,
// and what happens where one device fails.
#include "kernels/shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
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
#include "tests/kernels/linear_cases.h"
#include "tests/shard_backend.h"

namespace logitd::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
  const SamplePartialShape sample = {.shards = shards, .rows = 4};
  EXPECT_EQ(sample.bytes(), 4u * 63 * 1024 * 4);
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
    RegisterChecks<LinearOnThreeShardsTest>("LinearOnThreeShardsTest", LinearChecks());

// ---- Bits

// What the head's bias does besides being random.
enum class Logits { kRandom, kTied, kNans, kBans, kAllBanned, kCertain };

struct ShardCase {
  LinearCase linear;
  Logits logits = Logits::kRandom;
};

std::string DescribeShards(const ShardCase& c) {
  return absl::StrCat(Describe(c.linear), ", logits ", static_cast<int>(c.logits));
}

LinearInput InputOf(const ShardCase& c) {
  LinearInput input = RandomTensors(c.linear);
  const int64_t vocab = c.linear.vocab;
  if (c.logits == Logits::kRandom) return input;
  std::vector<float>& bias = input.head.bias;
  bias.resize(static_cast<size_t>(vocab));
  // Tokens spread over the vocabulary, some on both sides of a border.
  std::vector<int64_t> some = {vocab / 3, vocab / 2, vocab - 1};
  for (int64_t cell = 1; cell * kVocabCell < vocab; cell += 2) {
    some.push_back(cell * kVocabCell - 1);
    some.push_back(cell * kVocabCell);
  }
  switch (c.logits) {
    case Logits::kRandom:
      break;
    case Logits::kTied:
      // Whole numbers: hundreds of tokens tie for each place.
      for (int64_t i = 0; i < vocab; ++i) {
        for (int64_t d = 0; d < c.linear.hidden; ++d) {
          input.head.weight.Set(i, d, static_cast<float>((i * 7 + d) % 3) - 1);
        }
        bias[static_cast<size_t>(i)] = 0;
      }
      for (int64_t r = 0; r < c.linear.rows; ++r) {
        for (int64_t d = 0; d < c.linear.hidden; ++d) {
          input.hidden.Set(r, d, static_cast<float>((r + d) % 3) - 1);
        }
      }
      input.head.scale = 1;
      input.head.softcap = 0;
      break;
    case Logits::kNans:
      for (const int64_t i : some) bias[static_cast<size_t>(i)] = kNan;
      break;
    case Logits::kBans:  // the first two thirds, so whole cells and shards
      std::fill_n(bias.begin(), vocab * 2 / 3, -kInfinity);
      break;
    case Logits::kAllBanned:
      std::fill(bias.begin(), bias.end(), -kInfinity);
      break;
    case Logits::kCertain:
      for (const int64_t i : some) bias[static_cast<size_t>(i)] = kInfinity;
      break;
  }
  return input;
}

template <typename T>
void Append(const std::vector<T>& values, std::string* bits) {
  bits->append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  bits->append("|");
}

std::vector<SoftmaxTopKRow> AsksOf(const LinearCase& c, int64_t* entries) {
  const int64_t ks[] = {1, 20, c.vocab, 0, 1500, 40};
  std::vector<SoftmaxTopKRow> asks;
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto k = static_cast<int32_t>(std::min(c.vocab, ks[r % 6]));
    asks.push_back({.first_entry = *entries, .temperature = r % 2 == 0 ? 1.0f : 0.6f, .k = k});
    *entries += k;
  }
  return asks;
}

// Every answer of the three ops; a separate string for each.
std::vector<std::string> AllBits(OpRunner& runner, const ShardCase& c) {
  const LinearInput input = InputOf(c);
  int64_t entries = 0;
  const std::vector<SoftmaxTopKRow> asks = AsksOf(c.linear, &entries);
  std::vector<std::string> bits(3);
  const auto top = runner.LinearTopK(input.hidden, input.head, asks, entries).value();
  Append(top.indices, &bits[0]);
  Append(top.probs, &bits[0]);
  Append(top.logsumexp, &bits[0]);
  Append(top.status, &bits[0]);
  const auto drawn = runner.LinearSample(input.hidden, input.head, SampleBatchOf(c.linear)).value();
  Append(drawn.tokens, &bits[1]);
  Append(drawn.logprobs, &bits[1]);
  Append(drawn.ranks, &bits[1]);
  Append(drawn.logsumexp, &bits[1]);
  Append(drawn.status, &bits[1]);
  Append(drawn.top_ids, &bits[1]);
  Append(drawn.top_logprobs, &bits[1]);
  Append(drawn.extra_logprobs, &bits[1]);
  const auto scored =
      runner.LinearCrossEntropy(input.hidden, input.head, LossBatchOf(c.linear)).value();
  Append(scored.loss, &bits[2]);
  Append(scored.logsumexp, &bits[2]);
  Append(scored.target_logprob, &bits[2]);
  Append(scored.rank, &bits[2]);
  Append(scored.entropy, &bits[2]);
  Append(scored.status, &bits[2]);
  Append(scored.top_ids, &bits[2]);
  Append(scored.top_logprobs, &bits[2]);
  Append(scored.extra_logprobs, &bits[2]);
  return bits;
}

std::vector<ShardCase> ShardCases() {
  std::vector<ShardCase> cases;
  uint64_t n = 0;
  for (const int64_t vocab : {1, 7, 1023, 1024, 1025, 2049, 3000, 5003, 9216}) {
    for (const int64_t rows : {1, 3, 70}) {
      ++n;
      const DType dtype = n % 3 == 0 ? DType::kF32 : n % 3 == 1 ? DType::kBF16 : DType::kF16;
      cases.push_back({{dtype, rows, vocab, 24, n % 2 == 0, n % 4 < 2, n % 5 == 0 ? 5.0f : 0.0f,
                        static_cast<int64_t>(n % 3), n}});
    }
    for (const Logits logits :
         {Logits::kTied, Logits::kNans, Logits::kBans, Logits::kAllBanned, Logits::kCertain}) {
      ++n;
      cases.push_back({{n % 2 == 0 ? DType::kF32 : DType::kBF16, 12, vocab, 16, true, false,
                        n % 3 == 0 ? 4.0f : 0.0f, 0, n},
                       logits});
    }
  }
  cases.push_back({{DType::kBF16, 33, 50257, 64, true, false, 30, 0, ++n}});
  return cases;
}

TEST(ShardsTest, AnyNumberOfShardsGivesTheBitsOfOneDevice) {
  const std::vector<ShardCase> cases = ShardCases();
  const auto one = CreateCpuBackend({.cpu_threads = 2}).value();
  const auto runner = OpRunner::Create(one.get()).value();
  std::vector<std::vector<std::string>> want;
  for (const ShardCase& c : cases) want.push_back(AllBits(*runner, c));
  for (const int shards : {1, 2, 3, 4, 8, 13}) {
    CuttingBackend backend(shards, /*threads=*/shards % 2 + 1);
    const auto sharded = OpRunner::Create(&backend).value();
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::vector<std::string> got = AllBits(*sharded, cases[i]);
      for (size_t op = 0; op < got.size(); ++op) {
        EXPECT_EQ(got[op] == want[i][op], true)
            << DescribeShards(cases[i]) << ", op " << op << ", " << shards << " shards";
      }
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

  absl::Status TopK() {
    const HeadView whole = {.weight = {weight_.data(), DType::kF32, 3000, 4, 4}};
    const std::vector<HeadView> parts = CutHead(whole, kDevices);
    const SoftmaxTopKRow row = {.first_entry = 0, .temperature = 1, .k = 1};
    absl::Status status = stream_->LinearTopK({.hidden = {hidden_.data(), DType::kF32, 1, 4, 4},
                                               .head = WithShards(whole, parts),
                                               .topk = {.rows = &row,
                                                        .max_k = 1,
                                                        .indices = &index_,
                                                        .probs = &prob_,
                                                        .logsumexp = &logsumexp_,
                                                        .status = &status_}});
    EXPECT_TRUE(stream_->Wait().ok());
    return status;
  }

  std::vector<std::unique_ptr<ShardBackend>> devices_;
  std::vector<Backend*> backends_;
  std::unique_ptr<Stream> stream_;
  std::vector<float> weight_ = std::vector<float>(3000 * 4, 0.25f);
  std::vector<float> hidden_ = std::vector<float>(4, 1.0f);
  int32_t index_ = kUnwrittenIndex;
  float prob_ = 0;
  float logsumexp_ = 0;
  RowStatus status_;
};

TEST_F(FaultTest, TheErrorOfOneDeviceNamesItAndTheNextCallIsWhole) {
  devices_[1]->Fail(absl::UnavailableError("out of luck"));
  const absl::Status status = TopK();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "out of luck");
  EXPECT_EQ(FailedShard(status), 1);
  EXPECT_EQ(index_, kUnwrittenIndex);
  devices_[1]->Fail(absl::OkStatus());
  EXPECT_TRUE(TopK().ok());
  EXPECT_EQ(index_, 0);
}

TEST_F(FaultTest, ALostDeviceCountsMoreThanOneThatFails) {
  devices_[0]->Fail(absl::UnavailableError("busy"));
  devices_[2]->Fail(absl::InternalError("gone"));
  const absl::Status status = TopK();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FailedShard(status), 2);
}

TEST(ShardedStreamTest, OtherBackendsAreRefusedWithASentence) {
  ShardBackend cpu(0);
  ShardBackend gpu(1, /*is_host=*/false);
  std::vector<Backend*> backends = {&cpu, &gpu};
  EXPECT_EQ(
      CreateShardedStream(backends).status(),
      absl::FailedPreconditionError("shard: got backend fake, allowed cpu; on other backends each "
                                    "device holds the whole head"));
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
    ASSERT_TRUE(stream
                    ->LinearTopK({.hidden = {hidden.data(), DType::kF32, 1, 4, 4},
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
