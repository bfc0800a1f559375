// cross_entropy and its backward on the CUDA backend: the checks of the CPU backend.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cross_entropy_softcap_cases.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/every_plan.h"

namespace logitd::testing {
namespace {

class CrossEntropyGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<CrossEntropyGpuTest>("CrossEntropyGpuTest", CrossEntropyChecks()) &&
    RegisterChecks<CrossEntropyGpuTest>("CrossEntropyGpuTest", CrossEntropySoftcapChecks());

TEST_F(CrossEntropyGpuTest, EveryPlanHasTheSameBits) {
  constexpr int64_t kRows = 7;
  for (const LossCase& c : LossInvarianceCases()) {
    HostTensor tensor(c.dtype, kRows, c.vocab, c.vocab + c.stride_extra, c.offset);
    for (int64_t r = 0; r < kRows; ++r)
      FillRow(tensor, r, r == 4 ? Fill::kWithNan : c.fill, c.seed + r);
    for (const bool tops : {false, true}) {
      LossBatch batch;
      std::mt19937_64 random(c.seed);
      for (int64_t r = 0; r < kRows; ++r)
        AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, random);
      for (CrossEntropyRow& row : batch.rows) row.top_logprobs *= tops;
      const auto run = [&] { return runner_->CrossEntropy(tensor, batch); };
      const auto want = run();
      ASSERT_TRUE(want.ok()) << want.status();
      const int plans = UnderEveryPlan(run, [&](const auto& got, const std::string& plan) {
        ASSERT_TRUE(got.ok()) << got.status();
        for (int64_t r = 0; r < kRows; ++r) {
          if (batch.rows[r].active == 0) continue;
          EXPECT_EQ(LossBits(*got, batch.rows[r], r), LossBits(*want, batch.rows[r], r))
              << Describe(c) << " row " << r << ": " << plan;
        }
      });
      EXPECT_GE(plans, 2) << Describe(c);
    }
  }
}

// So many vectors that a block takes several rounds of them, written over the logits.
TEST_F(CrossEntropyGpuTest, RowsOfALargeGradientHaveTheBitsOfASmallOne) {
  constexpr int64_t kRows = 2800;
  constexpr int64_t kVocab = 25003;
  constexpr CrossEntropyRow kAsks[] = {
      {.active = 1, .target = 17000, .temperature = 1},
      {.active = 1, .target = 3, .temperature = 0.5f, .softcap = 30},
      {.active = 1, .target = kVocab - 1, .temperature = 1, .softcap = 1e4f},
      {.active = 1, .target = kIgnoredTarget, .temperature = 1}};
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    HostTensor tensor(dtype, kRows, kVocab, kVocab, 1);
    LossBackwardCall large{.logits = tensor, .d_logits = tensor, .in_place = true};
    for (int64_t r = 0; r < kRows; ++r) {
      if (r < 4) {
        FillRow(large.logits, r, Fill::kNormal, 5);
      } else {
        std::memcpy(&large.logits.mutable_bytes()[(1 + r * kVocab) * SizeOf(dtype)],
                    &large.logits.mutable_bytes()[(1 + r % 4 * kVocab) * SizeOf(dtype)],
                    kVocab * SizeOf(dtype));
      }
      large.rows.push_back(kAsks[r % 4]);
      large.logsumexp.push_back(12.5f);
      large.upstream.push_back(-0.75f);
    }
    const auto got = runner_->CrossEntropyBackward(large);
    ASSERT_TRUE(got.ok()) << got.status();
    for (int64_t ask = 0; ask < 4; ++ask) {
      LossBackwardCall small{.logits = HostTensor(dtype, 1, kVocab, kVocab, 0),
                             .rows = {kAsks[ask]},
                             .logsumexp = {12.5f},
                             .upstream = {-0.75f},
                             .d_logits = HostTensor(dtype, 1, kVocab, kVocab, 0)};
      for (int64_t i = 0; i < kVocab; ++i) small.logits.Set(0, i, large.logits.At(ask, i));
      const auto want = runner_->CrossEntropyBackward(small);
      ASSERT_TRUE(want.ok()) << want.status();
      for (int64_t r = ask; r < kRows; r += r < 40 || r > kRows - 40 ? 4 : 400) {
        for (int64_t i = 0; i < kVocab; ++i) {
          ASSERT_EQ(BitsOf(got->At(r, i)), BitsOf(want->At(0, i)))
              << Name(dtype) << ", row " << r << ", element " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitd::testing
