// cross_entropy and its backward on the CPU backend.
#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cross_entropy_softcap_cases.h"

namespace logitd::testing {
namespace {

class CrossEntropyCpuTest : public CpuTest {};
const bool kRegistered =
    RegisterChecks<CrossEntropyCpuTest>("CrossEntropyCpuTest", CrossEntropyChecks()) &&
    RegisterChecks<CrossEntropyCpuTest>("CrossEntropyCpuTest", CrossEntropySoftcapChecks());

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
    ForEachThreadCount([&](OpRunner& runner) {
      const LossAnswer got = runner.CrossEntropy(tensor, batch).value();
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(LossBits(got, batch.rows[r], r), LossBits(want, batch.rows[r], r)) << r;
      }
    });
  }
}

TEST(CrossEntropyTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, LossClaims(), BrokenClaim), "");
    EXPECT_EQ(FailuresOf(runner, LossGradientClaims(), BrokenClaim), "");
    uint64_t n = 0;
    for (const LossCase& c : LossGradientCases()) {
      if (++n % 5 != 0 || c.vocab > 10000) continue;
      EXPECT_EQ(FirstDifference(runner, c), "");
      EXPECT_EQ(FirstLossGradientDifference(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
