// cross_entropy of rows with supports on the CPU backend.
#include "tests/kernels/support_cases.h"

#include "tests/kernels/cpu_test.h"

namespace logitd::testing {
namespace {

class SupportCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<SupportCpuTest>("SupportCpuTest", SupportChecks());

TEST_F(SupportCpuTest, EveryInstructionSetHasTheBitsOfItsOwnSample) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(OtherBitsThanSample(runner, {.rows = 30, .vocab = 3001, .seed = 8}), "");
  });
}

}  // namespace
}  // namespace logitd::testing
