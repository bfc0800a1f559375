// linear_topk, linear_sample and linear_cross_entropy on the CUDA backend: the CPU's cases.
#include <gtest/gtest.h>

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/linear_cases.h"

namespace logitd::testing {
namespace {

class LinearGpuTest : public CudaTest {};

TEST_F(LinearGpuTest, GivesTheAnswersOfTheUnfusedOps) {
  for (const LinearCase& c : ExactCases()) EXPECT_EQ(FirstExactDifference(*runner_, c), "");
}

TEST_F(LinearGpuTest, LossAgreesWithDoublePrecision) {
  for (const LinearCase& c : LinearLossCases()) EXPECT_EQ(FirstLossDifference(*runner_, c), "");
}

TEST_F(LinearGpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const LinearCase& c : LinearInvarianceCases()) {
    EXPECT_EQ(BrokenLinearInvariance(*runner_, c), "");
  }
}

TEST_F(LinearGpuTest, NormIsRoundedToTheWeightsType) {
  EXPECT_EQ(BrokenNormRounding(*runner_), "");
}

TEST_F(LinearGpuTest, TopKAndSampleAreOfLogitsAfterTheSoftcap) {
  EXPECT_EQ(BrokenSoftcap(*runner_), "");
}

TEST_F(LinearGpuTest, NanStaysInItsRow) { EXPECT_EQ(BrokenNanIsolation(*runner_), ""); }

TEST_F(LinearGpuTest, GradientAgreesWithDoublePrecision) {
  for (const LinearCase& c : LinearGradientCases()) {
    EXPECT_EQ(FirstLinearGradientDifference(*runner_, c), "");
  }
}

TEST_F(LinearGpuTest, GradientIsThatOfTheLossByFiniteDifferences) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    EXPECT_EQ(FirstLinearFiniteDifference(*runner_, seed), "");
  }
}

TEST_F(LinearGpuTest, GradientOfARowIsItsOwn) { EXPECT_EQ(BrokenGradientIsolation(*runner_), ""); }

TEST_F(LinearGpuTest, IgnoredRowsAddNothing) { EXPECT_EQ(BrokenGradientOfIgnored(*runner_), ""); }

TEST_F(LinearGpuTest, NoRowsHaveGradientsOfZero) {
  EXPECT_EQ(BrokenGradientOfNoRows(*runner_), "");
}

TEST_F(LinearGpuTest, TrainingAgreesWithDoublePrecision) {
  for (const LinearCase& c : LinearTrainingCases()) {
    EXPECT_EQ(FirstLinearTrainingDifference(*runner_, c), "");
  }
}

TEST_F(LinearGpuTest, TrainingOfARowIsItsOwn) { EXPECT_EQ(BrokenTrainingIsolation(*runner_), ""); }

}  // namespace
}  // namespace logitd::testing
