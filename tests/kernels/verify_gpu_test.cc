// verify on the CUDA backend: the CPU's cases, and agreement with the CPU backend itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "kernels/backend.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/verify_cases.h"

namespace logitd::testing {
namespace {

class VerifyGpuTest : public CudaTest {
 protected:
  std::unique_ptr<Backend> cpu_backend_ = CreateBackend("cpu", {}).value();
  std::unique_ptr<OpRunner> cpu_ = OpRunner::Create(cpu_backend_.get()).value();
};

const bool kRegistered = RegisterChecks<VerifyGpuTest>("VerifyGpuTest", VerifyChecks());

// Random sequences, drafts of every kind. Rounding may decide a few in a million draws; here it
// decides none, so the tokens are those of the CPU backend.
TEST_F(VerifyGpuTest, AgreesWithTheCpuBackend) {
  for (const int64_t vocab : {5, 1000, 5000, 50257}) {
    const int64_t rows = vocab > 10000 ? 24 : 120;
    HostTensor tensor(DType::kF32, rows, vocab, vocab + 1, 1);
    SampleBatch batch;
    std::mt19937_64 random(vocab);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 11);
      AddRandomRow(batch, vocab, random);
      batch.rows.back().active = 1;
      batch.rows.back().draws = 0;
      batch.rows.back().temperature = std::max(batch.rows.back().temperature, 0.0f);
    }
    const SampleAnswer sampled = cpu_->Sample(tensor, batch).value();
    const VerifyBatch verify =
        RandomDrafts(sampled.tokens, vocab, /*longest=*/6, /*first=*/0, Blocks::kSome, random);
    const VerifyAnswer want = cpu_->Verify(tensor, batch, verify).value();
    const VerifyAnswer got = runner_->Verify(tensor, batch, verify).value();
    EXPECT_EQ(got.accepted, want.accepted) << "vocab " << vocab;
    EXPECT_EQ(got.rows.tokens, want.rows.tokens) << "vocab " << vocab;
    EXPECT_EQ(got.rows.ranks, want.rows.ranks) << "vocab " << vocab;
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_EQ(got.rows.status[r].code, want.rows.status[r].code) << "vocab " << vocab;
      if (want.rows.tokens[r] < 0) continue;
      EXPECT_NEAR(got.rows.logprobs[r], want.rows.logprobs[r],
                  8e-6 * std::max(1.0f, std::abs(want.rows.logprobs[r])))
          << "vocab " << vocab << " row " << r;
      EXPECT_NEAR(got.rows.entropies[r], want.rows.entropies[r],
                  8e-6 * std::max(1.0f, want.rows.entropies[r]))
          << "vocab " << vocab << " row " << r;
    }
  }
}

}  // namespace
}  // namespace logitd::testing
