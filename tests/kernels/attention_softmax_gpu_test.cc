// attention_softmax on the CUDA backend: the checks of the CPU backend, and masks too large for L2.
#include <gtest/gtest.h>

#include "kernels/cuda/attention/reads.h"
#include "tests/kernels/attention_softmax_cases.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class AttentionSoftmaxGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<AttentionSoftmaxGpuTest>("AttentionSoftmaxGpuTest", AttentionSoftmaxChecks());

TEST_F(AttentionSoftmaxGpuTest, RowsReadTwiceHaveTheBitsOfRowsReadOnce) {
  using cuda::attention::ForceReads;
  using cuda::attention::Reads;
  uint64_t seed = 7100;
  for (const int64_t keys : {1537, 4096, 9001, 40000, 40001, 262144, 300007}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const Hide hide : {Hide::kNone, Hide::kCausal, Hide::kWindowAndAdditive}) {
        const AttentionCase c{
            .shape = {.batch = 1, .heads = 1, .queries = 5, .keys = keys, .rows = 5},
            .dtype = dtype,
            .out_dtype = seed % 3 == 0 ? DType::kF32 : dtype,
            .hide = hide,
            .sinks = seed % 2 == 0,
            .fill = seed % 4 == 0 ? Fill::kWithNan : Fill::kNormal,
            .stride_extra = static_cast<int64_t>(seed % 5 == 0),
            .offset = static_cast<int64_t>(seed % 7 == 0),
            .seed = seed};
        ++seed;
        AttentionCall call = CallOf(c);
        call.want_logsumexp = true;
        ForceReads(Reads::kOnce);
        const auto once = runner_->AttentionSoftmax(call);
        ForceReads(Reads::kTwice);
        const auto twice = runner_->AttentionSoftmax(call);
        ForceReads(Reads::kChosen);
        ASSERT_TRUE(once.ok()) << once.status();
        ASSERT_TRUE(twice.ok()) << twice.status();
        for (int64_t r = 0; r < c.shape.rows; ++r) {
          EXPECT_TRUE(SameRow(once->probs, r, twice->probs, r) &&
                      SameNumber(once->logsumexp[r], twice->logsumexp[r]) &&
                      SameStatus(once->status[r], twice->status[r]))
              << Describe(c) << " row " << r;
        }
      }
    }
  }
}

// Blocks take rows of such heads in another order than those of one head.
TEST_F(AttentionSoftmaxGpuTest, HeadsThatShareALargeMaskHaveTheBitsOfTheirOwnCalls) {
  using enum DType;
  const AttentionCase kCases[] = {
      {.shape = {.batch = 2, .heads = 3, .queries = 2049, .keys = 4096, .rows = 12294},
       .dtype = kBF16,
       .out_dtype = kBF16,
       .hide = Hide::kBool,
       .mask_by_head = false,
       .seed = 7001},
      {.shape = {.batch = 1, .heads = 2, .queries = 1030, .keys = 4097, .rows = 2060},
       .dtype = kF16,
       .out_dtype = kF32,
       .hide = Hide::kWindowAndAdditive,
       .mask_dtype = kF16,
       .mask_by_head = false,
       .sinks = true,
       .fill = Fill::kWithNan,
       .seed = 7002},
      {.shape = {.batch = 1, .heads = 2, .queries = 40, .keys = 300000, .rows = 80},
       .dtype = kBF16,
       .out_dtype = kBF16,
       .hide = Hide::kCausalAndBool,
       .mask_by_head = false,
       .seed = 7003},
  };
  for (const AttentionCase& c : kCases) EXPECT_EQ(BrokenIsolation(*runner_, c), "");
}

}  // namespace
}  // namespace logitd::testing
