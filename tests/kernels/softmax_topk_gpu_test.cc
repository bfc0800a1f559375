// softmax_topk on the CUDA backend: the CPU's cases, and agreement with the CPU backend itself.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "kernels/backend.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/every_plan.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/softmax_topk_cases.h"

namespace logitd::testing {
namespace {

class SoftmaxTopKGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<SoftmaxTopKGpuTest>("SoftmaxTopKGpuTest", SoftmaxTopKChecks());

TEST_F(SoftmaxTopKGpuTest, BitsAreTheSameRunAfterRunAndOnEveryStream) {
  auto other = OpRunner::Create(Cuda()->get()).value();
  for (const InvarianceCase& c : InvarianceCases()) {
    const RowBatch batch{.rows = 3, .place = 2, .others_k = 4};
    const RowBits want = BitsInBatch(*runner_, c, batch).value();
    for (OpRunner* runner : {runner_.get(), other.get()}) {
      EXPECT_TRUE(SameBits(want, BitsInBatch(*runner, c, batch).value()))
          << "vocab " << c.vocab << " " << Name(c.dtype) << " k " << c.k;
    }
  }
}

// 600001 logits are more groups of the sketch than 16 bits count in the pools of large k.
TEST_F(SoftmaxTopKGpuTest, EveryPlanHasTheSameBits) {
  constexpr InvarianceCase kCases[] = {
      {DType::kF32, 1000, 10, 1.0f, Fill::kNormal},
      {DType::kBF16, 3001, 50, 0.7f, Fill::kNormal},
      {DType::kF16, 9001, 128, 1.0f, Fill::kManyTies},
      {DType::kBF16, 12289, 100, 1.0f, Fill::kNormal},
      {DType::kF32, 32064, 300, 1.0f, Fill::kNormal},
      {DType::kF32, 131072, 64, 0.01f, Fill::kNormal},
      {DType::kBF16, 262147, 1024, 1.0f, Fill::kNormal},
      {DType::kF32, 262147, 1024, 1.0f, Fill::kNormal},
      {DType::kBF16, 600001, 1024, 1.0f, Fill::kNormal},
      {DType::kF32, 600001, 128, 1.0f, Fill::kManyTies},
      {DType::kF32, 1 << 20, 64, 1.0f, Fill::kNormal},
  };
  const RowBatch batch{.rows = 2, .place = 1, .offset = 1, .others_k = 4};
  for (const InvarianceCase& c : kCases) {
    const RowBits want = BitsInBatch(*runner_, c, {}).value();
    const int plans = UnderEveryPlan(
        [&] { return BitsInBatch(*runner_, c, batch); },
        [&](const absl::StatusOr<RowBits>& got, const std::string& plan) {
          ASSERT_TRUE(got.ok()) << got.status();
          EXPECT_TRUE(SameBits(want, *got))
              << "vocab " << c.vocab << " " << Name(c.dtype) << " k " << c.k << ": " << plan;
        });
    EXPECT_GE(plans, 2) << "vocab " << c.vocab;
  }
}

// Both are within the header's tolerance of double precision, so of each other within twice that;
// indices and status have no tolerance.
TEST_F(SoftmaxTopKGpuTest, AgreesWithTheCpuBackend) {
  auto cpu_backend = CreateBackend("cpu", {}).value();
  auto cpu = OpRunner::Create(cpu_backend.get()).value();
  for (const TopKCase& c : FillCases()) {
    const HostTensor tensor = MakeTensor(c);
    const Asks asks = MakeAsks(c);
    const TopKAnswer on_cpu = cpu->SoftmaxTopK(tensor, asks.rows, asks.entries).value();
    const TopKAnswer on_gpu = runner_->SoftmaxTopK(tensor, asks.rows, asks.entries).value();
    for (int64_t r = 0; r < c.rows; ++r) {
      ASSERT_EQ(on_cpu.status[r].code, on_gpu.status[r].code) << Describe(c) << " row " << r;
      ASSERT_EQ(on_cpu.status[r].position, on_gpu.status[r].position)
          << Describe(c) << " row " << r;
      if (on_cpu.status[r].code == RowCode::kNanLogit) continue;
      const SoftmaxTopKRow& ask = asks.rows[r];
      for (int64_t e = ask.first_entry; e < ask.first_entry + ask.k; ++e) {
        ASSERT_EQ(on_cpu.indices[e], on_gpu.indices[e])
            << Describe(c) << " row " << r << " column " << e - ask.first_entry;
        ASSERT_NEAR(on_cpu.probs[e], on_gpu.probs[e], 8e-6 * on_cpu.probs[e] + 2e-37)
            << Describe(c) << " row " << r << " column " << e - ask.first_entry << ", "
            << UlpsApart(on_cpu.probs[e], on_gpu.probs[e]) << " ulps";
      }
    }
  }
}

}  // namespace
}  // namespace logitd::testing
