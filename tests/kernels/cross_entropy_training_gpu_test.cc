// cross_entropy_training on the CUDA backend: the checks of the CPU backend, and many rows.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/kernels/cross_entropy_training_cases.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/every_plan.h"

namespace logitd::testing {
namespace {

class CrossEntropyTrainingGpuTest : public CudaTest {};
const bool kRegistered = RegisterChecks<CrossEntropyTrainingGpuTest>("CrossEntropyTrainingGpuTest",
                                                                     CrossEntropyTrainingChecks());

// More rows than the device takes at once, of every length that has a kernel of its own.
struct ManyRows {
  DType dtype;
  int64_t rows;
  int64_t vocab;
};
constexpr ManyRows kManyRows[] = {
    {DType::kBF16, 9000, 1003}, {DType::kF32, 8000, 900},   {DType::kF16, 2500, 7001},
    {DType::kBF16, 900, 25003}, {DType::kBF16, 500, 50257}, {DType::kF32, 450, 25003},
    {DType::kBF16, 2200, 2040}, {DType::kF32, 1700, 1025},  {DType::kF16, 6000, 4001},
    {DType::kF16, 220, 131073}, {DType::kF32, 90, 130001},  {DType::kBF16, 70, 300001},
};

// Random asks, the same few rows of logits over and over. 16 bits with a softcap take two calls.
TEST_F(CrossEntropyTrainingGpuTest, RowAfterRowHasTheBitsOfTwoCalls) {
  for (const ManyRows& c : kManyRows) {
    for (const bool in_place : {false, true}) {
      const LossCase few{c.dtype, 7, c.vocab, 0, 1, Fill::kNormal, in_place ? 3u : 5u, false};
      const LossTrainingCall source = MakeTrainingCall(few);
      LossTrainingCall call{.logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab, 1),
                            .d_logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab, 1),
                            .in_place = in_place};
      std::mt19937_64 random(17);
      const size_t size = SizeOf(c.dtype);
      for (int64_t r = 0; r < c.rows; ++r) {
        for (int64_t i = 0; i < c.vocab && r < 7; ++i) {
          call.logits.Set(r, i, r == 6 && i == c.vocab / 3 ? kNan : source.logits.At(r, i));
        }
        if (r >= 7) {
          std::byte* bytes = call.logits.mutable_bytes().data() + size;
          std::memcpy(bytes + r * c.vocab * size, bytes + r % 7 * c.vocab * size, c.vocab * size);
        }
        AddRandomLoss(call.batch, c.vocab, /*with_softcap=*/c.dtype == DType::kF32, random);
        call.batch.rows.back().top_logprobs = 0;
        call.upstream.push_back(static_cast<float>(r % 100) / 50 - 1);
      }
      const auto got = runner_->CrossEntropyTraining(call);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(OtherBitsThanInTwoCalls(*runner_, call, *got), "")
          << Name(c.dtype) << ", " << c.rows << " x " << c.vocab << (in_place ? ", in place" : "");
    }
  }
}

TEST_F(CrossEntropyTrainingGpuTest, EveryPlanHasTheBitsOfTwoCalls) {
  for (const DType dtype : kAllDTypes) {
    for (const uint64_t seed : {3, 5}) {  // in place, and not
      LossTrainingCall call = MakeTrainingCall({dtype, 7, 70001, 3, 1, Fill::kNormal, seed, false});
      call.logits.Set(4, 50000, kNan);
      for (CrossEntropyRow& row : call.batch.rows) row.softcap *= dtype == DType::kF32;
      const auto run = [&] { return runner_->CrossEntropyTraining(call); };
      const int plans = UnderEveryPlan(run, [&](const auto& got, const std::string& plan) {
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_EQ(OtherBitsThanInTwoCalls(*runner_, call, *got), "") << Name(dtype) << ' ' << plan;
      });
      EXPECT_GE(plans, 8) << Name(dtype);
    }
  }
}

}  // namespace
}  // namespace logitd::testing
