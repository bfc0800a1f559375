// attention_softmax on the CUDA backend: the CPU's cases.
#include <gtest/gtest.h>

#include <memory>

#include "kernels/backend.h"
#include "tests/kernels/attention_softmax_cases.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {
namespace {

class AttentionSoftmaxGpuTest : public CudaTest {};

TEST_F(AttentionSoftmaxGpuTest, KeepsEveryClaim) {
  for (const AttentionClaim& claim : AttentionClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(AttentionSoftmaxGpuTest, KeepsEveryClaimOfGradients) {
  for (const GradientClaim& claim : GradientClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(AttentionSoftmaxGpuTest, EveryShapeAgreesWithDoublePrecision) {
  for (const AttentionCase& c : AttentionShapeCases()) {
    ASSERT_EQ(FirstDifference(*runner_, c, /*x_roundings=*/0), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, EveryGradientAgreesWithDoublePrecision) {
  for (const AttentionCase& c : AttentionShapeCases()) {
    ASSERT_EQ(FirstGradientDifference(*runner_, c), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, EveryKindOfRowAgreesWithDoublePrecision) {
  for (const AttentionCase& c : AttentionFillCases()) {
    ASSERT_EQ(FirstDifference(*runner_, c, /*x_roundings=*/0), "");
    ASSERT_EQ(FirstGradientDifference(*runner_, c), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, AMaskMayBeSharedOverBatchHeadsAndQueries) {
  for (const AttentionCase& c : BroadcastCases()) {
    ASSERT_EQ(FirstDifference(*runner_, c, /*x_roundings=*/0), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, TheLongestRowAgreesWithDoublePrecision) {
  for (const AttentionCase& c : LongestRowCases()) {
    EXPECT_EQ(FirstDifference(*runner_, c, /*x_roundings=*/0), "");
    EXPECT_EQ(FirstGradientDifference(*runner_, c), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, GradientsAreWhatSmallStepsFind) {
  for (const AttentionCase& c : FiniteDifferenceCases()) {
    ASSERT_EQ(BrokenFiniteDifferences(*runner_, c), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, SinkGradientsOfManyRowsAddUp) {
  EXPECT_EQ(FirstGradientDifference(*runner_, ManySinkRows()), "");
}

TEST_F(AttentionSoftmaxGpuTest, ChunksHaveTheBitsOfOneCall) {
  for (const AttentionCase& c : AttentionInvarianceCases()) {
    ASSERT_EQ(BrokenChunks(*runner_, c, 1, {.stride_extra = 3, .offset = 5}), "");
    ASSERT_EQ(BrokenChunks(*runner_, c, 4, {.offset = 1, .in_place = true}), "");
    ASSERT_EQ(BrokenChunks(*runner_, c, c.shape.rows, {.stride_extra = 8}), "");
  }
}

TEST_F(AttentionSoftmaxGpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const AttentionCase& c : AttentionInvarianceCases()) {
    ASSERT_EQ(BrokenCompany(*runner_, c), "");
  }
}

}  // namespace
}  // namespace logitd::testing
