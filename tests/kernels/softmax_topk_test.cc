// softmax_topk on the CPU backend.
#include "kernels/softmax_topk.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "hwy/targets.h"
#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/softmax_topk_cases.h"

namespace logitd::testing {
namespace {

class SoftmaxTopKCpuTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateBackend("cpu", {.cpu_threads = 2}).value();
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(backend_.get()).value();
};

TEST_F(SoftmaxTopKCpuTest, KeepsEveryClaim) {
  for (const TopKClaim& claim : TopKClaims())
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
}

TEST_F(SoftmaxTopKCpuTest, EveryShapeAgreesWithDoublePrecision) {
  for (const TopKCase& c : ShapeCases()) ASSERT_EQ(FirstDifference(*runner_, c), "");
}

TEST_F(SoftmaxTopKCpuTest, EveryKindOfRowAgreesWithDoublePrecision) {
  for (const TopKCase& c : FillCases()) ASSERT_EQ(FirstDifference(*runner_, c), "");
}

TEST_F(SoftmaxTopKCpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const InvarianceCase& c : InvarianceCases()) ASSERT_EQ(BrokenInvariance(*runner_, c), "");
}

TEST_F(SoftmaxTopKCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  for (const InvarianceCase& c : InvarianceCases()) {
    const Company company{.rows = 3, .place = 1, .others_k = 2};
    const RowBits want = BitsInCompany(*runner_, c, company).value();
    for (int threads : {1, 3, 7}) {
      auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
      auto runner = OpRunner::Create(backend.get()).value();
      EXPECT_TRUE(SameBits(want, BitsInCompany(*runner, c, company).value()))
          << threads << " threads, vocab " << c.vocab << " " << Name(c.dtype) << " k " << c.k;
    }
  }
}

TEST_F(SoftmaxTopKCpuTest, StreamsOfOneBackendComputeAtOnceWithoutMixingRows) {
  const InvarianceCase c{DType::kF32, 33333, 65, 1.0f, Fill::kNormal};
  const RowBits want = BitsInCompany(*runner_, c, {}).value();
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      auto runner = OpRunner::Create(backend_.get()).value();
      for (int i = 0; i < 4; ++i) {
        auto got = BitsInCompany(*runner, c, {.rows = 1 + t * 3, .place = t, .others_k = 3});
        if (!got.ok() || !SameBits(want, *got)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Each instruction set this machine has, one after another: widths differ, so do the cells' inner
// orders.
TEST(SoftmaxTopKTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
    auto runner = OpRunner::Create(backend.get()).value();
    SCOPED_TRACE(backend->device().name);
    for (const TopKClaim& claim : TopKClaims()) {
      EXPECT_EQ(BrokenClaim(*runner, claim), "") << claim.name;
    }
    uint64_t n = 0;
    for (const TopKCase& c : FillCases()) {
      if (c.vocab > 10000 && ++n % 5 != 0) continue;
      EXPECT_EQ(FirstDifference(*runner, c), "");
    }
    for (const InvarianceCase& c : InvarianceCases()) {
      if (c.vocab > 40000) continue;
      EXPECT_EQ(BrokenInvariance(*runner, c), "");
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace logitd::testing
