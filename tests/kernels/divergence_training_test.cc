// linear_divergence_training on the CPU backend, and the checks of its parameters.
#include "kernels/divergence_training.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/divergence_training_cases.h"

namespace logitd::testing {
namespace {

class DivergenceTrainingCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<DivergenceTrainingCpuTest>("DivergenceTrainingCpuTest",
                                                                   DivergenceTrainingChecks());

TEST(DivergenceTrainingTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, DivergenceTrainingClaims(), BrokenClaim), "");
    uint64_t n = 0;
    for (const DivergenceTrainingCase& c : DivergenceTrainingCases()) {
      if (++n % 5 != 0 || c.student.vocab > 20000) continue;
      EXPECT_EQ(FirstTrainingDifference(runner, c), "");
    }
  });
}

TEST_F(DivergenceTrainingCpuTest, BitsDoNotDependOnTheNumberOfThreads) {
  for (const DivergenceTrainingCase& c : DivergenceTrainingOfEachType()) {
    const DivergenceTrainingInput in = MakeTrainingInput(c);
    const DivergenceTrainingAnswer want = runner_->LinearDivergenceTraining(in.call).value();
    ForEachThreadCount([&](OpRunner& runner) {
      const DivergenceTrainingAnswer got = runner.LinearDivergenceTraining(in.call).value();
      for (size_t r = 0; r < want.loss.size(); ++r) {
        EXPECT_EQ(BitsOf(got.loss[r]), BitsOf(want.loss[r])) << Describe(c);
      }
      EXPECT_EQ(got.d_hidden.bytes(), want.d_hidden.bytes()) << Describe(c);
      EXPECT_EQ(got.d_weight.bytes(), want.d_weight.bytes()) << Describe(c);
      EXPECT_EQ(got.d_bias, want.d_bias) << Describe(c);
    });
  }
}

struct BadRequest {
  DivergenceTrainingRequest request;
  const char* error;
};

TEST(CheckDivergenceTrainingTest, TellsFieldValueAndWhatIsAllowed) {
  const std::vector<DivergenceRow> rows = {kPlainDivergence};
  const std::vector<DivergenceRow> bad_rows = {{1, kIgnoredTarget, 0, 1}};
  const DivergenceRequest good = {.vocab = 10, .params = rows};
  const BadRequest bad[] = {
      {{.rows = {.vocab = 10, .params = bad_rows}},
       "temperature: got 0 at row 0, allowed finite and > 0"},
      {{.rows = good, .kind = static_cast<DivergenceLoss>(3)}, "kind: got 3, allowed 0..2"},
      {{.rows = good, .beta = 0}, "beta: got 0, allowed above 0 and below 1"},
      {{.rows = good, .beta = 1}, "beta: got 1, allowed above 0 and below 1"},
      {{.rows = good, .beta = std::numeric_limits<float>::quiet_NaN()},
       "beta: got nan, allowed above 0 and below 1"},
      {{.rows = good, .head_has_norm = true}, "norm: got one in the student's head, allowed none"},
  };
  for (const BadRequest& b : bad) {
    const absl::Status status = CheckDivergenceTraining(b.request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), b.error);
  }
  for (const DivergenceLoss kind : kAllDivergenceLosses) {
    EXPECT_TRUE(CheckDivergenceTraining({.rows = good, .kind = kind, .beta = 0.001f}).ok());
  }
}

}  // namespace
}  // namespace logitd::testing
