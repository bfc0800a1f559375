// cross_entropy and its backward on the CUDA backend: the CPU's cases.
#include <gtest/gtest.h>

#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class CrossEntropyGpuTest : public CudaTest {};

TEST_F(CrossEntropyGpuTest, KeepsEveryClaim) {
  for (const LossClaim& claim : LossClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(CrossEntropyGpuTest, GradientKeepsEveryClaim) {
  for (const LossGradientClaim& claim : LossGradientClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(CrossEntropyGpuTest, ANanFromAboveIsSeenInEveryType) {
  EXPECT_EQ(FirstLostNan(*runner_), "");
}

TEST_F(CrossEntropyGpuTest, EveryMixOfParametersAgreesWithDoublePrecision) {
  for (const LossCase& c : LossCases()) EXPECT_EQ(FirstDifference(*runner_, c), "");
}

TEST_F(CrossEntropyGpuTest, GradientAgreesWithDoublePrecision) {
  for (const LossCase& c : LossGradientCases())
    EXPECT_EQ(FirstLossGradientDifference(*runner_, c), "");
}

TEST_F(CrossEntropyGpuTest, GradientIsThatOfTheLossByFiniteDifferences) {
  for (uint64_t seed = 1; seed <= 20; ++seed) EXPECT_EQ(FirstFiniteDifference(*runner_, seed), "");
}

TEST_F(CrossEntropyGpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const LossCase& c : LossInvarianceCases()) {
    EXPECT_EQ(BrokenLossInvariance(*runner_, c), "");
  }
}

}  // namespace
}  // namespace logitd::testing
