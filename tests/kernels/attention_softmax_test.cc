// attention_softmax on the CPU backend.
#include "kernels/attention_softmax.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "tests/kernels/attention_softmax_cases.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {
namespace {

class AttentionSoftmaxCpuTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateBackend("cpu", {.cpu_threads = 2}).value();
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(backend_.get()).value();
};

TEST_F(AttentionSoftmaxCpuTest, KeepsEveryClaim) {
  for (const AttentionClaim& claim : AttentionClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(AttentionSoftmaxCpuTest, EveryShapeAgreesWithDoublePrecision) {
  for (const AttentionCase& c : AttentionShapeCases()) {
    ASSERT_EQ(FirstDifference(*runner_, c, /*x_roundings=*/0), "");
  }
}

TEST_F(AttentionSoftmaxCpuTest, EveryGradientAgreesWithDoublePrecision) {
  for (const AttentionCase& c : AttentionShapeCases()) {
    ASSERT_EQ(FirstGradientDifference(*runner_, c), "");
  }
}

}  // namespace
}  // namespace logitd::testing
