// softmax_topk on the CUDA backend: the CPU's cases, and agreement with the CPU backend itself.
#include <gtest/gtest.h>

#include <memory>

#include "kernels/backend.h"
#include "tests/kernels/cuda_test.h"
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
