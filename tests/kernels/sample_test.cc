// sample on the CPU backend.
#include "kernels/sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_heavy_cases.h"

namespace logitd::testing {
namespace {

class SampleCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<SampleCpuTest>("SampleCpuTest", SampleChecks());
const bool kHeavyRegistered = RegisterChecks<SampleCpuTest>("SampleCpuTest", HeavySampleChecks());

// n of 8192 equal tokens have exactly n / 8192 of the mass: the search for the last token must not
// be off by one.
TEST_F(SampleCpuTest, TopPOfEqualTokensKeepsExactlyItsShare) {
  const int64_t rows = 300, vocab = 8192, least = 4000;
  HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
  SampleBatch batch;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < vocab; ++c) tensor.Set(r, c, 1.5f);
    batch.rows.push_back(PlainRow());
    batch.rows.back().top_p = static_cast<float>(least + r) / vocab;
    batch.rows.back().logprob_mode = LogprobMode::kProcessed;
  }
  const SampleAnswer got = runner_->Sample(tensor, batch).value();
  for (int64_t r = 0; r < rows; ++r) {
    EXPECT_FLOAT_EQ(got.logprobs[r], -std::log(static_cast<float>(least + r)));
    EXPECT_LT(got.tokens[r], least + r);
  }
}

TEST_F(SampleCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  // Many rows are whole rows of a thread; of few long rows, several threads read each.
  for (const auto& [rows, vocab] : {std::pair(50, 5000), {1, 200000}, {5, 70001}, {13, 32769}}) {
    HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
    SampleBatch batch;
    std::mt19937_64 random(3);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 3);
      AddRandomRow(batch, vocab, random);
    }
    if (rows > 4) batch.rows[2].active = 0;
    std::optional<SampleAnswer> want;
    ForEachThreadCount([&](OpRunner& runner) {
      const SampleAnswer got = runner.Sample(tensor, batch).value();
      if (!want.has_value()) want = got;
      for (int64_t r = 0; r < rows; ++r) {
        if (batch.rows[r].active == 0) continue;
        EXPECT_EQ(SampleBits(got, batch.rows[r], r), SampleBits(*want, batch.rows[r], r))
            << "row " << r << " of " << rows << " x " << vocab;
      }
    });
  }
}

TEST_F(SampleCpuTest, ARowThatSeveralThreadsReadMayHoldNan) {
  const int64_t vocab = 100000;
  HostTensor tensor(DType::kF32, 2, vocab, vocab, 0);
  SampleBatch batch;
  for (int64_t r = 0; r < 2; ++r) {
    FillRow(tensor, r, Fill::kNormal, 4);
    batch.rows.push_back(PlainRow());
  }
  tensor.Set(0, 70007, std::numeric_limits<float>::quiet_NaN());
  tensor.Set(0, 99999, std::numeric_limits<float>::quiet_NaN());
  const SampleAnswer got = runner_->Sample(tensor, batch).value();
  EXPECT_EQ(got.status[0].code, RowCode::kNanLogit);
  EXPECT_EQ(got.status[0].position, 70007);
  EXPECT_EQ(got.status[1].code, RowCode::kOk);
}

TEST(SampleTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, SampleClaims(), BrokenClaim), "");
    EXPECT_EQ(FailuresOf(runner, SampleEditClaims(), BrokenClaim), "");
    uint64_t n = 0;
    for (const SampleCase& c : SampleCases()) {
      if (++n % 7 != 0 || c.vocab > 50000) continue;
      EXPECT_EQ(FirstDifference(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
