// softmax_topk on the CPU backend.
#include "kernels/softmax_topk.h"

#include <gtest/gtest.h>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/softmax_topk_cases.h"

namespace logitd::testing {
namespace {

class SoftmaxTopKCpuTest : public CpuTest {};
const bool kRegistered =
    RegisterChecks<SoftmaxTopKCpuTest>("SoftmaxTopKCpuTest", SoftmaxTopKChecks());

TEST_F(SoftmaxTopKCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  for (const InvarianceCase& c : InvarianceCases()) {
    const RowBatch batch{.rows = 3, .place = 1, .others_k = 2};
    const RowBits want = BitsInBatch(*runner_, c, batch).value();
    ForEachThreadCount([&](OpRunner& runner) {
      EXPECT_TRUE(SameBits(want, BitsInBatch(runner, c, batch).value()))
          << "vocab " << c.vocab << " " << Name(c.dtype) << " k " << c.k;
    });
  }
}

TEST_F(SoftmaxTopKCpuTest, StreamsOfOneBackendComputeAtOnceWithoutMixingRows) {
  const InvarianceCase c{DType::kF32, 33333, 65, 1.0f, Fill::kNormal};
  const RowBits want = BitsInBatch(*runner_, c, {}).value();
  ExpectOnFourStreams(*backend_, [&](OpRunner& runner, int stream) {
    const auto got =
        BitsInBatch(runner, c, {.rows = 1 + stream * 3, .place = stream, .others_k = 3});
    return got.ok() && SameBits(want, *got);
  });
}

// Every 512th token begins a run of 16 high ones, and a sample of the row for a large k is of just
// such runs: at most 4096 tokens reach the floor that it suggests.
TEST_F(SoftmaxTopKCpuTest, ASampleThatOverstatesTheRowIsCorrected) {
  const TopKCase c{.rows = 1, .vocab = 131072, .k = 20000, .seed = 5};
  HostTensor tensor = MakeTensor(c);
  for (int64_t i = 0; i < c.vocab; ++i) {
    if (i % 512 < 16) tensor.Set(0, i, 10);
  }
  const Asks asks = MakeAsks(c);
  const auto got = runner_->SoftmaxTopK(tensor, asks.rows, asks.entries);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(FirstDifference(c, tensor, asks, *got), "");
}

// Widths differ between instruction sets, and so does the order inside a cell.
TEST(SoftmaxTopKTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, TopKClaims(), BrokenClaim), "");
    uint64_t n = 0;
    for (const TopKCase& c : FillCases()) {
      if (c.vocab > 10000 && ++n % 5 != 0) continue;
      EXPECT_EQ(FirstDifference(runner, c), "");
    }
    for (const InvarianceCase& c : InvarianceCases()) {
      if (c.vocab > 40000) continue;
      EXPECT_EQ(BrokenInvariance(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
