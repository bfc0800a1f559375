// linear_topk, linear_sample and linear_cross_entropy on the CPU backend.
#include "kernels/linear.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "kernels/shards.h"
#include "tests/kernels/cpu_test.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/linear_gradient_cases.h"

namespace logitd::testing {
namespace {

class LinearCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<LinearCpuTest>("LinearCpuTest", LinearChecks()) &&
                         RegisterChecks<LinearCpuTest>("LinearCpuTest", LinearGradientChecks());

// The same code reads the same logits.
TEST_F(LinearCpuTest, GivesTheBitsOfTheUnfusedOps) {
  const LinearCase c{DType::kBF16, 70, 1000, 100, true, true, 0, 1, 3};
  const LinearInput input = ExactInput(c);
  const LossBatch losses = LossBatchOf(c);
  const LossAnswer loss = runner_->CrossEntropy(input.logits, losses).value();
  const LossAnswer linear_loss =
      runner_->LinearCrossEntropy(input.hidden, input.head, losses).value();
  const SampleBatch samples = SampleBatchOf(c);
  const SampleAnswer sample = runner_->Sample(input.logits, samples).value();
  const SampleAnswer linear_sample =
      runner_->LinearSample(input.hidden, input.head, samples).value();
  for (int64_t r = 0; r < c.rows; ++r) {
    if (losses.rows[r].active != 0) {
      EXPECT_EQ(LossBits(linear_loss, losses.rows[r], r), LossBits(loss, losses.rows[r], r)) << r;
    }
    if (samples.rows[r].active != 0) {
      EXPECT_EQ(SampleBits(linear_sample, samples.rows[r], r),
                SampleBits(sample, samples.rows[r], r))
          << r;
    }
  }
}

// The bits of every row's losses, with every option, lists included.
std::string AllLossBits(const LossAnswer& answer, const LossBatch& batch) {
  std::string bits;
  for (size_t r = 0; r < batch.rows.size(); ++r) {
    if (batch.rows[r].active != 0) bits += LossBits(answer, batch.rows[r], r);
  }
  return bits;
}

// Losses come from one cell of the vocabulary at a time: every answer must be that of whole rows.
TEST(LinearLossTest, OfManyCellsHasTheBitsOfTheUnfusedOpWithEveryInstructionSet) {
  ForEachInstructionSet([](OpRunner& runner) {
    for (const LinearCase& c : {LinearCase{DType::kBF16, 70, 5003, 40, true, true, 0, 1, 3},
                                LinearCase{DType::kF32, 3, 70000, 8, true, false, 0, 0, 4},
                                LinearCase{DType::kF16, 300, 2049, 24, false, false, 0, 0, 5},
                                LinearCase{DType::kF32, 5, 9000, 520, false, false, 0, 0, 6},
                                LinearCase{DType::kBF16, 33, 4096, 600, true, false, 30, 0, 7}}) {
      const LinearInput input = ExactInput(c);  // hundreds of tokens tie
      const LossBatch losses = LossBatchOf(c);
      EXPECT_EQ(AllLossBits(*runner.LinearCrossEntropy(input.hidden, input.head, losses), losses) ==
                    AllLossBits(*runner.CrossEntropy(input.logits, losses), losses),
                true)
          << Describe(c);
    }
  });
}

// Top tokens in an order that is hard on a list that grows cell by cell.
TEST_F(LinearCpuTest, TopTokensOfRisingFallingAndTiedLogitsAreThoseOfTheUnfusedOp) {
  constexpr int64_t kVocab = 40 * kVocabCell + 17;
  for (const float step : {1.0f, -1.0f, 0.0f}) {
    HostTensor hidden = AlignedTensor(DType::kF32, 3, 1, 0);
    HostHead head{.weight = AlignedTensor(DType::kF32, kVocab, 1, 0)};
    HostTensor logits(DType::kF32, 3, kVocab, kVocab, 0);
    LossBatch losses;
    for (int64_t r = 0; r < 3; ++r) {
      hidden.Set(r, 0, 1);
      for (int64_t i = 0; i < kVocab; ++i) {
        head.weight.Set(i, 0, step * static_cast<float>(i / 3));
        logits.Set(r, i, step * static_cast<float>(i / 3));
      }
      CrossEntropyRow row = PlainLoss(static_cast<int32_t>(kVocab / 2 + r));
      row.want = kWantRank | kWantEntropy;
      row.first_top_entry = losses.top_entries;
      row.top_logprobs = r == 0 ? 1 : r == 1 ? 20 : 128;
      losses.top_entries += row.top_logprobs;
      losses.rows.push_back(row);
    }
    EXPECT_EQ(AllLossBits(*runner_->LinearCrossEntropy(hidden, head, losses), losses) ==
                  AllLossBits(*runner_->CrossEntropy(logits, losses), losses),
              true)
        << step;
  }
}

TEST_F(LinearCpuTest, LossesOfManyCellsDoNotDependOnTheNumberOfThreads) {
  const LinearCase c{DType::kBF16, 130, 5003, 40, true, false, 0, 0, 9};
  const LinearInput input = RandomTensors(c);
  const LossBatch losses = LossBatchOf(c);
  const std::string want =
      AllLossBits(*runner_->LinearCrossEntropy(input.hidden, input.head, losses), losses);
  ForEachThreadCount([&](OpRunner& runner) {
    EXPECT_EQ(
        AllLossBits(*runner.LinearCrossEntropy(input.hidden, input.head, losses), losses) == want,
        true);
  });
}

TEST_F(LinearCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  const LinearCase c{DType::kBF16, 70, 1000, 100, true, true, 30, 0, 8};
  const std::string want = LinearBits(*runner_, c, 70, 66).value();
  const LinearCase gradient_case{DType::kF16, 70, 300, 100, true, false, 5, 0, 8};
  const LinearBackwardCall call =
      MakeLinearBackwardCall(gradient_case, RandomInput(gradient_case), DType::kF16);
  const LinearBackwardAnswer want_gradient = runner_->LinearCrossEntropyBackward(call).value();
  ForEachThreadCount([&](OpRunner& runner) {
    EXPECT_EQ(LinearBits(runner, c, 70, 66).value(), want);
    const LinearBackwardAnswer got = runner.LinearCrossEntropyBackward(call).value();
    EXPECT_EQ(got.d_hidden.bytes(), want_gradient.d_hidden.bytes());
    EXPECT_EQ(got.d_weight.bytes(), want_gradient.d_weight.bytes());
    EXPECT_EQ(got.d_bias, want_gradient.d_bias);
  });
}

TEST_F(LinearCpuTest, WorkThatIsAbandonedIsNotComputed) {
  std::vector<float> weight(1000 * 16, 0.5f), hidden(70 * 16, 1.0f);
  std::vector<SoftmaxTopKRow> rows(70);
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r] = {.first_entry = static_cast<int64_t>(r), .temperature = 1, .k = 1};
  }
  const auto backend = *CreateCpuBackend({.cpu_threads = 2});
  const auto stream = *backend->CreateStream();
  for (const bool is_abandoned : {true, false}) {
    std::vector<int32_t> indices(rows.size(), kUnwrittenIndex);
    std::vector<float> probs(rows.size()), logsumexp(rows.size());
    std::vector<RowStatus> status(rows.size());
    const std::atomic<bool> abandoned = is_abandoned;
    stream->Watch(&abandoned);
    ASSERT_TRUE(
        stream
            ->Run(LinearTopKArgs{.hidden = {hidden.data(), DType::kF32, 70, 16, 16},
                                 .head = {.weight = {weight.data(), DType::kF32, 1000, 16, 16}},
                                 .topk = {.rows = rows.data(),
                                          .max_k = 1,
                                          .indices = indices.data(),
                                          .probs = probs.data(),
                                          .logsumexp = logsumexp.data(),
                                          .status = status.data()}})
            .ok());
    ASSERT_TRUE(stream->Wait().ok());
    EXPECT_EQ(indices[0], is_abandoned ? kUnwrittenIndex : 0);
    EXPECT_EQ(indices[69], is_abandoned ? kUnwrittenIndex : 0);
  }
}

TEST_F(LinearCpuTest, ALossThatIsAbandonedIsNotAnswered) {
  std::vector<float> weight(3000 * 16, 0.5f), hidden(300 * 16, 1.0f);
  std::vector<CrossEntropyRow> rows(300, PlainLoss(7));
  const auto backend = *CreateCpuBackend({.cpu_threads = 2});
  const auto stream = *backend->CreateStream();
  for (const bool is_abandoned : {true, false}) {
    std::vector<float> loss(rows.size(), -1), logsumexp(rows.size()), logprob(rows.size());
    std::vector<RowStatus> status(rows.size());
    const std::atomic<bool> abandoned = is_abandoned;
    stream->Watch(&abandoned);
    ASSERT_TRUE(stream
                    ->Run(LinearCrossEntropyArgs{
                        .hidden = {hidden.data(), DType::kF32, 300, 16, 16},
                        .head = {.weight = {weight.data(), DType::kF32, 3000, 16, 16}},
                        .cross_entropy = {.rows = rows.data(),
                                          .want = 0,
                                          .max_top_logprobs = 0,
                                          .answers = {.loss = loss.data(),
                                                      .logsumexp = logsumexp.data(),
                                                      .target_logprob = logprob.data(),
                                                      .status = status.data()}}})
                    .ok());
    ASSERT_TRUE(stream->Wait().ok());
    EXPECT_EQ(loss[0] == -1, is_abandoned);
    EXPECT_EQ(loss[299] == -1, is_abandoned);
  }
}

TEST_F(LinearCpuTest, StreamsOfOneBackendComputeAtOnceWithoutMixingRows) {
  const LinearCase c{DType::kBF16, 9, 1000, 100, true, true, 30, 0, 8};
  const std::string want = LinearBits(*runner_, c, 1, 0).value();
  ExpectOnFourStreams(*backend_, [&](OpRunner& runner, int stream) {
    const auto got = LinearBits(runner, c, 1 + stream * 3, stream);
    return got.ok() && *got == want;
  });
}

TEST(LinearTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    uint64_t n = 0;
    for (const LinearCase& c : ExactCases()) {
      if (++n % 4 != 0) continue;
      EXPECT_EQ(FirstExactDifference(runner, c), "");
    }
    for (const LinearCase& c : LinearLossCases()) {
      if (++n % 6 != 0) continue;
      EXPECT_EQ(FirstLossDifference(runner, c), "");
    }
    for (const LinearCase& c : LinearInvarianceCases()) {
      if (c.vocab > 50000 || c.hidden > 1000) continue;
      EXPECT_EQ(BrokenLinearInvariance(runner, c), "");
    }
    for (const LinearCase& c : LinearGradientCases()) {
      if (++n % 5 != 0) continue;
      EXPECT_EQ(FirstLinearGradientDifference(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
