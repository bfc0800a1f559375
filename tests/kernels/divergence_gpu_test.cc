// divergence on the CUDA backend: the checks of the CPU backend.
#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/divergence_cases.h"
#include "tests/kernels/every_plan.h"

namespace logitd::testing {
namespace {

class DivergenceGpuTest : public CudaTest {};
const bool kRegistered = RegisterChecks<DivergenceGpuTest>("DivergenceGpuTest", DivergenceChecks());

TEST_F(DivergenceGpuTest, EveryPlanHasTheSameBits) {
  for (DivergenceCase c : DivergenceInvarianceCases()) {
    c.rows = std::min<int64_t>(c.rows, 7);
    DivergenceInput in = MakeInput(c);
    // Top tokens have plans of their own, whose forms are others.
    for (DivergenceRow& row : in.rows) row.top_logprobs = row.reference_top_logprobs = 0;
    const auto run = [&] { return runner_->Divergence(in.logits, in.reference, in.rows); };
    const auto want = run();
    ASSERT_TRUE(want.ok()) << want.status();
    const int plans = UnderEveryPlan(run, [&](const auto& got, const std::string& plan) {
      ASSERT_TRUE(got.ok()) << got.status();
      for (int64_t r = 0; r < c.rows; ++r) {
        EXPECT_EQ(DivergenceBits(*got, r), DivergenceBits(*want, r)) << Describe(c) << ": " << plan;
      }
    });
    EXPECT_GE(plans, 2) << Describe(c);
  }
}

}  // namespace
}  // namespace logitd::testing
