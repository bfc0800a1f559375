// cross_entropy_training on the CPU backend.
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/cross_entropy_training_cases.h"

namespace logitd::testing {
namespace {

class CrossEntropyTrainingCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<CrossEntropyTrainingCpuTest>("CrossEntropyTrainingCpuTest",
                                                                     CrossEntropyTrainingChecks());

// Threads take whole rows or cells, by how many rows there are for each.
TEST_F(CrossEntropyTrainingCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  for (const int64_t rows : {2, 50}) {
    const LossCase c{DType::kBF16, rows, rows == 2 ? 70000 : 5000, 1, 0, Fill::kNormal, 4, false};
    const LossTrainingCall call = MakeTrainingCall(c);
    ForEachThreadCount([&](OpRunner& runner) {
      const LossTrainingAnswer got = runner.CrossEntropyTraining(call).value();
      EXPECT_EQ(OtherBitsThanInTwoCalls(*runner_, call, got), "") << rows;
    });
  }
}

TEST(CrossEntropyTrainingTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, LossTrainingClaims(), BrokenClaim), "");
    uint64_t n = 0;
    for (const LossCase& c : LossTrainingCases()) {
      if (++n % 5 != 0 || c.vocab > 10000) continue;
      EXPECT_EQ(FirstTrainingDifference(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
