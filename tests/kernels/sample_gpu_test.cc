// sample and verify on the CUDA backend: the CPU's cases, and agreement with the CPU backend
// itself.
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "kernels/backend.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_heavy_cases.h"

namespace logitd::testing {
namespace {

class SampleGpuTest : public CudaTest {
 protected:
  std::unique_ptr<Backend> cpu_backend_ = CreateBackend("cpu", {}).value();
  std::unique_ptr<OpRunner> cpu_ = OpRunner::Create(cpu_backend_.get()).value();
};

const bool kRegistered = RegisterChecks<SampleGpuTest>("SampleGpuTest", SampleChecks());
const bool kHeavyRegistered = RegisterChecks<SampleGpuTest>("SampleGpuTest", HeavySampleChecks());

// Random sequences, drafts of every kind. Rounding may decide a few in a million draws; here it
// decides none, so the tokens are those of the CPU backend.
TEST_F(SampleGpuTest, VerifyAgreesWithTheCpuBackend) {
  for (const int64_t vocab : {5, 1000, 5000, 50257}) {
    const int64_t rows = vocab > 10000 ? 24 : 120;
    HostTensor tensor(DType::kF32, rows, vocab, vocab + 1, 1);
    SampleBatch batch;
    VerifyBatch verify;
    std::mt19937_64 random(vocab);
    const auto uniform = [&random] { return static_cast<float>(random() >> 40) * 0x1p-24f; };
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 11);
      AddRandomRow(batch, vocab, random);
      batch.rows.back().draws = 0;
      batch.rows.back().active = 1;
      batch.rows.back().temperature = std::max(batch.rows.back().temperature, 0.0f);
    }
    const SampleAnswer sampled = cpu_->Sample(tensor, batch).value();
    for (int64_t r = 0; r < rows; ++r) {
      const bool likely = random() % 3 != 0 && sampled.tokens[r] >= 0;
      VerifyDraft draft{
          .token = static_cast<int32_t>(likely ? sampled.tokens[r] : random() % vocab),
          .kind = static_cast<DraftKind>(random() % 3)};
      if (draft.kind == DraftKind::kList) {
        draft.first_id = static_cast<int64_t>(verify.draft_ids.size());
        draft.first_prob = static_cast<int64_t>(verify.draft_probs.size());
        for (int64_t id = random() % 5; id < vocab && draft.count < 50; id += 1 + random() % 9) {
          verify.draft_ids.push_back(static_cast<int32_t>(id));
          verify.draft_probs.push_back(uniform() / 20);
          ++draft.count;
        }
      } else if (draft.kind == DraftKind::kDense) {
        draft.first_prob = static_cast<int64_t>(verify.draft_probs.size());
        for (int64_t i = 0; i < vocab; ++i) {
          verify.draft_probs.push_back(2 * uniform() / static_cast<float>(vocab));
        }
      }
      verify.drafts.push_back(draft);
    }
    for (int64_t first = 0; first < rows;) {
      const auto count = static_cast<int32_t>(std::min<int64_t>(rows - first, 1 + random() % 6));
      verify.sequences.push_back({.first_row = first, .rows = count});
      first += count;
    }
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
