// cross_entropy and its backward on the CUDA backend: the checks of the CPU backend.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cross_entropy_softcap_cases.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class CrossEntropyGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<CrossEntropyGpuTest>("CrossEntropyGpuTest", CrossEntropyChecks()) &&
    RegisterChecks<CrossEntropyGpuTest>("CrossEntropyGpuTest", CrossEntropySoftcapChecks());

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
