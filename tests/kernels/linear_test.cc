// linear_topk, linear_sample and linear_cross_entropy on the CPU backend.
#include "kernels/linear.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "hwy/targets.h"
#include "kernels/backend.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {
namespace {

class LinearCpuTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateBackend("cpu", {.cpu_threads = 2}).value();
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(backend_.get()).value();
};

TEST_F(LinearCpuTest, GivesTheAnswersOfTheUnfusedOps) {
  for (const LinearCase& c : ExactCases()) EXPECT_EQ(FirstExactDifference(*runner_, c), "");
}

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

TEST_F(LinearCpuTest, LossAgreesWithDoublePrecision) {
  for (const LinearCase& c : LinearLossCases()) EXPECT_EQ(FirstLossDifference(*runner_, c), "");
}

TEST_F(LinearCpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const LinearCase& c : LinearInvarianceCases()) {
    EXPECT_EQ(BrokenLinearInvariance(*runner_, c), "");
  }
}

TEST_F(LinearCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  const LinearCase c{DType::kBF16, 70, 1000, 100, true, true, 30, 0, 8};
  const std::string want = LinearBits(*runner_, c, 70, 66).value();
  const LinearInput input = RandomInput({DType::kF16, 70, 300, 100, true, false, 5, 0, 8});
  const LinearBackwardCall call =
      MakeLinearBackwardCall({DType::kF16, 70, 300, 100, true, false, 5, 0, 8}, input, DType::kF16);
  const LinearBackwardAnswer want_gradient = runner_->LinearCrossEntropyBackward(call).value();
  for (int threads : {1, 3, 7}) {
    auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
    auto runner = OpRunner::Create(backend.get()).value();
    EXPECT_EQ(LinearBits(*runner, c, 70, 66).value(), want) << threads << " threads";
    const LinearBackwardAnswer got = runner->LinearCrossEntropyBackward(call).value();
    EXPECT_EQ(got.d_hidden.bytes(), want_gradient.d_hidden.bytes()) << threads << " threads";
    EXPECT_EQ(got.d_weight.bytes(), want_gradient.d_weight.bytes()) << threads << " threads";
    EXPECT_EQ(got.d_bias, want_gradient.d_bias) << threads << " threads";
  }
}

TEST_F(LinearCpuTest, StreamsOfOneBackendComputeAtOnceWithoutMixingRows) {
  const LinearCase c{DType::kBF16, 9, 1000, 100, true, true, 30, 0, 8};
  const std::string want = LinearBits(*runner_, c, 1, 0).value();
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      auto runner = OpRunner::Create(backend_.get()).value();
      for (int i = 0; i < 3; ++i) {
        auto got = LinearBits(*runner, c, 1 + t * 3, t);
        if (!got.ok() || *got != want) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(LinearCpuTest, NormIsRoundedToTheWeightsType) {
  EXPECT_EQ(BrokenNormRounding(*runner_), "");
}

TEST_F(LinearCpuTest, TopKAndSampleAreOfLogitsAfterTheSoftcap) {
  EXPECT_EQ(BrokenSoftcap(*runner_), "");
}

TEST_F(LinearCpuTest, NanStaysInItsRow) { EXPECT_EQ(BrokenNanIsolation(*runner_), ""); }

TEST_F(LinearCpuTest, GradientAgreesWithDoublePrecision) {
  for (const LinearCase& c : LinearGradientCases()) {
    EXPECT_EQ(FirstLinearGradientDifference(*runner_, c), "");
  }
}

TEST_F(LinearCpuTest, GradientIsThatOfTheLossByFiniteDifferences) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    EXPECT_EQ(FirstLinearFiniteDifference(*runner_, seed), "");
  }
}

TEST_F(LinearCpuTest, GradientOfARowIsItsOwn) { EXPECT_EQ(BrokenGradientIsolation(*runner_), ""); }

TEST_F(LinearCpuTest, IgnoredRowsAddNothing) { EXPECT_EQ(BrokenGradientOfIgnored(*runner_), ""); }

TEST_F(LinearCpuTest, NoRowsHaveGradientsOfZero) {
  EXPECT_EQ(BrokenGradientOfNoRows(*runner_), "");
}

TEST_F(LinearCpuTest, TrainingAgreesWithDoublePrecision) {
  for (const LinearCase& c : LinearTrainingCases()) {
    EXPECT_EQ(FirstLinearTrainingDifference(*runner_, c), "");
  }
}

TEST_F(LinearCpuTest, TrainingOfARowIsItsOwn) { EXPECT_EQ(BrokenTrainingIsolation(*runner_), ""); }

// Each instruction set this machine has, one after another.
TEST(LinearTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
    auto runner = OpRunner::Create(backend.get()).value();
    SCOPED_TRACE(backend->device().name);
    uint64_t n = 0;
    for (const LinearCase& c : ExactCases()) {
      if (++n % 4 != 0) continue;
      EXPECT_EQ(FirstExactDifference(*runner, c), "");
    }
    for (const LinearCase& c : LinearLossCases()) {
      if (++n % 6 != 0) continue;
      EXPECT_EQ(FirstLossDifference(*runner, c), "");
    }
    for (const LinearCase& c : LinearInvarianceCases()) {
      if (c.vocab > 50000 || c.hidden > 1000) continue;
      EXPECT_EQ(BrokenLinearInvariance(*runner, c), "");
    }
    for (const LinearCase& c : LinearGradientCases()) {
      if (++n % 5 != 0) continue;
      EXPECT_EQ(FirstLinearGradientDifference(*runner, c), "");
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace logitd::testing
