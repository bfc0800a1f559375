// linear_topk, linear_sample and linear_cross_entropy on the CPU backend.
#include "kernels/linear.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

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
    ASSERT_TRUE(stream
                    ->LinearTopK({.hidden = {hidden.data(), DType::kF32, 70, 16, 16},
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
