// sample on the CPU backend.
#include "kernels/sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "hwy/targets.h"
#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/sample_cases.h"

namespace logitd::testing {
namespace {

class SampleCpuTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateBackend("cpu", {.cpu_threads = 2}).value();
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(backend_.get()).value();
};

TEST_F(SampleCpuTest, KeepsEveryClaim) {
  for (const SampleClaim& claim : SampleClaims()) {
    EXPECT_EQ(BrokenClaim(*runner_, claim), "") << claim.name;
  }
}

TEST_F(SampleCpuTest, EveryMixOfParametersAgreesWithDoublePrecision) {
  for (const SampleCase& c : SampleCases()) ASSERT_EQ(FirstDifference(*runner_, c), "");
}

// n of 8192 equal tokens are n / 8192 of the mass, exactly: whatever borders the search for the
// last token has, it must not be off by one.
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

TEST_F(SampleCpuTest, BordersMoveByFarLessThanTheMassOfAToken) {
  for (const BorderCase& c : BorderCases()) EXPECT_EQ(MovedBorder(*runner_, c), "");
  for (Fill fill : {Fill::kUniform, Fill::kNormal}) {
    EXPECT_EQ(MovedNucleus(*runner_, fill, 5e-7), "");
  }
}

TEST_F(SampleCpuTest, ARowsBitsDoNotDependOnItsCompany) {
  for (const SampleCase& c : SampleInvarianceCases()) {
    ASSERT_EQ(BrokenSampleInvariance(*runner_, c), "");
  }
}

TEST_F(SampleCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  const int64_t rows = 50, vocab = 5000;
  HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
  SampleBatch batch;
  std::mt19937_64 random(3);
  for (int64_t r = 0; r < rows; ++r) {
    FillRow(tensor, r, Fill::kNormal, 3);
    AddRandomRow(batch, vocab, random);
  }
  const SampleAnswer want = runner_->Sample(tensor, batch).value();
  for (int threads : {1, 3, 7}) {
    auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
    auto runner = OpRunner::Create(backend.get()).value();
    const SampleAnswer got = runner->Sample(tensor, batch).value();
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_EQ(SampleBits(got, batch.rows[r], r), SampleBits(want, batch.rows[r], r))
          << threads << " threads, row " << r;
    }
  }
}

// Each instruction set this machine has, one after another.
TEST(SampleTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
    auto runner = OpRunner::Create(backend.get()).value();
    SCOPED_TRACE(backend->device().name);
    for (const SampleClaim& claim : SampleClaims()) {
      EXPECT_EQ(BrokenClaim(*runner, claim), "") << claim.name;
    }
    uint64_t n = 0;
    for (const SampleCase& c : SampleCases()) {
      if (++n % 7 != 0 || c.vocab > 50000) continue;
      EXPECT_EQ(FirstDifference(*runner, c), "");
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace logitd::testing
