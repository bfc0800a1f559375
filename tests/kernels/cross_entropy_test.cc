// cross_entropy and its backward on the CPU backend.
#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "hwy/targets.h"
#include "kernels/backend.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {
namespace {

class CrossEntropyCpuTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateBackend("cpu", {.cpu_threads = 2}).value();
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(backend_.get()).value();
};

TEST_F(CrossEntropyCpuTest, KeepsEveryClaim) {
  for (const LossClaim& claim : LossClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(CrossEntropyCpuTest, GradientKeepsEveryClaim) {
  for (const LossGradientClaim& claim : LossGradientClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(CrossEntropyCpuTest, ANanFromAboveIsSeenInEveryType) {
  EXPECT_EQ(FirstLostNan(*runner_), "");
}

TEST_F(CrossEntropyCpuTest, EveryMixOfParametersAgreesWithDoublePrecision) {
  for (const LossCase& c : LossCases()) EXPECT_EQ(FirstDifference(*runner_, c), "");
}

TEST_F(CrossEntropyCpuTest, GradientAgreesWithDoublePrecision) {
  for (const LossCase& c : LossGradientCases())
    EXPECT_EQ(FirstLossGradientDifference(*runner_, c), "");
}

TEST_F(CrossEntropyCpuTest, GradientIsThatOfTheLossByFiniteDifferences) {
  for (uint64_t seed = 1; seed <= 20; ++seed) EXPECT_EQ(FirstFiniteDifference(*runner_, seed), "");
}

TEST_F(CrossEntropyCpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const LossCase& c : LossInvarianceCases()) {
    EXPECT_EQ(BrokenLossInvariance(*runner_, c), "");
  }
}

TEST_F(CrossEntropyCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  for (const int64_t rows : {2, 50}) {
    const int64_t vocab = rows == 2 ? 70000 : 5000;
    HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
    LossBatch batch;
    std::mt19937_64 random(3);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 3);
      AddRandomLoss(batch, vocab, /*with_softcap=*/true, random);
    }
    const LossAnswer want = runner_->CrossEntropy(tensor, batch).value();
    for (int threads : {1, 3, 7}) {
      auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
      auto runner = OpRunner::Create(backend.get()).value();
      const LossAnswer got = runner->CrossEntropy(tensor, batch).value();
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(LossBits(got, batch.rows[r], r), LossBits(want, batch.rows[r], r))
            << threads << " threads, row " << r;
      }
    }
  }
}

// Each instruction set this machine has, one after another.
TEST(CrossEntropyTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
    auto runner = OpRunner::Create(backend.get()).value();
    SCOPED_TRACE(backend->device().name);
    for (const LossClaim& claim : LossClaims()) {
      EXPECT_EQ(BrokenClaim(*runner, claim), "") << claim.name;
    }
    for (const LossGradientClaim& claim : LossGradientClaims()) {
      EXPECT_EQ(BrokenClaim(*runner, claim), "") << claim.name;
    }
    uint64_t n = 0;
    for (const LossCase& c : LossGradientCases()) {
      if (++n % 5 != 0 || c.vocab > 10000) continue;
      EXPECT_EQ(FirstDifference(*runner, c), "");
      EXPECT_EQ(FirstLossGradientDifference(*runner, c), "");
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace logitd::testing
