// divergence on the CPU backend, and the checks of its parameters.
#include "kernels/divergence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/divergence_cases.h"

namespace logitd::testing {
namespace {

class DivergenceCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<DivergenceCpuTest>("DivergenceCpuTest", DivergenceChecks());

TEST(DivergenceTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, DivergenceClaims(), BrokenClaim), "");
    EXPECT_EQ(FailuresOf(runner, DivergenceTopClaims(), BrokenTopClaim), "");
    EXPECT_EQ(FailuresOf(runner, DivergenceCases(), FirstDivergenceDifference), "");
  });
}

TEST_F(DivergenceCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  for (const int64_t rows : {2, 50}) {
    const DivergenceInput in = MakeInput({.rows = rows, .vocab = rows == 2 ? 70000 : 5000});
    const DivergenceAnswer want = runner_->Divergence(in.logits, in.reference, in.rows).value();
    ForEachThreadCount([&](OpRunner& runner) {
      const DivergenceAnswer got = runner.Divergence(in.logits, in.reference, in.rows).value();
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(DivergenceBits(got, r, in.rows[r]), DivergenceBits(want, r, in.rows[r]));
      }
    });
  }
}

struct BadRow {
  DivergenceRow row;
  const char* error;
};

TEST(CheckDivergenceTest, TellsFieldValueAndWhatIsAllowed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const BadRow bad[] = {
      {{1, 10, 1, 1}, "target: got 10 at row 1, allowed 0..9, or -1 for a row not counted"},
      {{1, -2, 1, 1}, "target: got -2 at row 1, allowed 0..9, or -1 for a row not counted"},
      {{1, 0, 0, 1}, "temperature: got 0 at row 1, allowed finite and > 0"},
      {{1, 0, 1, -1}, "reference_temperature: got -1 at row 1, allowed finite and > 0"},
      {{1, 0, 1, kInfinity}, "reference_temperature: got inf at row 1, allowed finite and > 0"},
      {{0, 0, 1, 1}, "active: got 0 at row 1, allowed 1..1"},
      {{1, 0, 1, 1, -1, 0}, "top_logprobs: got -1 at row 1, allowed 0..10"},
      {{1, 0, 1, 1, 10, 11}, "reference_top_logprobs: got 11 at row 1, allowed 0..10"},
  };
  for (const BadRow& b : bad) {
    const std::vector<DivergenceRow> rows = {kPlainDivergence, b.row};
    const absl::Status status = CheckDivergence({.vocab = 10, .params = rows});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), b.error);
  }
  EXPECT_EQ(CheckDivergence({.vocab = 0}).message(), "vocab: got 0, allowed 1..1048576");
  const std::vector<DivergenceRow> good = {kPlainDivergence, {1, 9, 0.01f, 1e30f, 10, 0}};
  EXPECT_TRUE(CheckDivergence({.vocab = 10, .params = good}).ok());
  const std::vector<DivergenceRow> most = {{1, 9, 1, 1, 1024, 1024}};
  EXPECT_TRUE(CheckDivergence({.vocab = 2000, .params = most}).ok());
  const std::vector<DivergenceRow> more = {{1, 9, 1, 1, 1025, 0}};
  EXPECT_EQ(CheckDivergence({.vocab = 2000, .params = more}).message(),
            "top_logprobs: got 1025 at row 0, allowed 0..1024");
}

}  // namespace
}  // namespace logitd::testing
