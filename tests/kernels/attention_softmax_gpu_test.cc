// attention_softmax on the CUDA backend: the checks of the CPU backend, and masks too large for L2.
#include <gtest/gtest.h>

#include "tests/kernels/attention_softmax_cases.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class AttentionSoftmaxGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<AttentionSoftmaxGpuTest>("AttentionSoftmaxGpuTest", AttentionSoftmaxChecks());

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
