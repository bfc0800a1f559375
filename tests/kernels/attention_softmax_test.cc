// attention_softmax on the CPU backend.
#include "kernels/attention_softmax.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "tests/kernels/attention_softmax_cases.h"
#include "tests/kernels/cpu_test.h"

namespace logitd::testing {
namespace {

class AttentionSoftmaxCpuTest : public CpuTest {};
const bool kRegistered =
    RegisterChecks<AttentionSoftmaxCpuTest>("AttentionSoftmaxCpuTest", AttentionSoftmaxChecks());

TEST_F(AttentionSoftmaxCpuTest, SixteenBitResultsAreTheF32OnesRounded) {
  for (const AttentionCase& c : AttentionFillCases()) {
    if (c.dtype == DType::kF32) continue;
    ASSERT_EQ(BrokenRounding(*runner_, c), "");
  }
}

TEST_F(AttentionSoftmaxCpuTest, LogsumexpMayBeLeftOut) {
  AttentionCall call = CallOf(AttentionClaims()[0]);
  call.want_logsumexp = false;
  const AttentionAnswer got = runner_->AttentionSoftmax(call).value();
  EXPECT_EQ(got.probs.At(0, 0), 1.0f);
  EXPECT_EQ(got.logsumexp[0], kUnwrittenFloat);
}

TEST_F(AttentionSoftmaxCpuTest, SinksOfHeadsWithoutARowHaveNoGradient) {
  AttentionCase c{
      .shape = {.batch = 1, .heads = 3, .queries = 4, .keys = 9, .first_row = 4, .rows = 4},
      .sinks = true};
  const AttentionBackwardAnswer got = runner_->AttentionSoftmaxBackward(BackwardOf(c)).value();
  EXPECT_EQ(got.d_sinks[0], 0.0);
  EXPECT_EQ(got.d_sinks[2], 0.0);
}

// The same bits, not only close numbers: the sum over rows has one order.
TEST_F(AttentionSoftmaxCpuTest, BitsDoNotDependOnTheNumberOfThreads) {
  ForEachThreadCount([&](OpRunner& runner) {
    for (const AttentionCase& c : AttentionInvarianceCases()) {
      const AttentionCall call = CallOf(c);
      const AttentionAnswer want = runner_->AttentionSoftmax(call).value();
      ASSERT_EQ(BrokenPiece(runner, c, call, want, 0, c.shape.rows, {}), "");
      const AttentionBackwardCall backward = BackwardOf(c);
      const AttentionBackwardAnswer gradient = runner_->AttentionSoftmaxBackward(backward).value();
      ASSERT_EQ(BrokenGradientPiece(runner, c, backward, gradient, 0, c.shape.rows, {}), "");
      const auto again = runner.AttentionSoftmaxBackward(backward).value();
      if (c.fill == Fill::kWithNan) continue;
      ASSERT_EQ(again.d_sinks, gradient.d_sinks);
    }
  });
}

TEST_F(AttentionSoftmaxCpuTest, StreamsOfOneBackendComputeAtOnceWithoutMixingRows) {
  const AttentionCase c = AttentionInvarianceCases().back();
  const AttentionCall call = CallOf(c);
  const AttentionAnswer want = runner_->AttentionSoftmax(call).value();
  ExpectOnFourStreams(*backend_, [&](OpRunner& runner, int stream) {
    return BrokenPiece(runner, c, call, want, stream, 2, {.offset = stream}).empty();
  });
}

// Results of 2 MiB and more pass the caches, by whole lines of memory: rows begin and end anywhere
// in a line, and see any part of their keys.
TEST_F(AttentionSoftmaxCpuTest, CallsOfManyMebibytesHaveTheBitsOfSmallOnes) {
  struct Form {
    DType dtype, out_dtype;
    int64_t keys;
    Hide hide;
    int64_t offset, stride_extra;
    Fill fill;
    bool in_place = false;
  };
  using enum DType;
  constexpr Form kForms[] = {
      {kBF16, kBF16, 1023, Hide::kCausal, 0, 0, Fill::kNormal},
      {kBF16, kBF16, 2047, Hide::kWindow, 3, 5, Fill::kNormal},
      {kBF16, kBF16, 1024, Hide::kBool, 0, 0, Fill::kWithNan},
      {kBF16, kF32, 301, Hide::kCausal, 1, 0, Fill::kNormal},
      {kF16, kF16, 4097, Hide::kWindow, 7, 0, Fill::kNormal},
      {kF16, kF16, 300, Hide::kNone, 0, 7, Fill::kWithPlusInf},
      {kF32, kF32, 129, Hide::kCausalAndBool, 0, 0, Fill::kNormal},
      {kF32, kF32, 1025, Hide::kWindowAndAdditive, 5, 3, Fill::kMostlyMinusInf},
      {kF32, kF32, 1024, Hide::kNone, 0, 0, Fill::kNormal, /*in_place=*/true},
  };
  uint64_t seed = 6000;
  for (const Form& form : kForms) {
    const int64_t row_bytes = form.keys * static_cast<int64_t>(SizeOf(form.out_dtype));
    const int64_t rows = (int64_t{9} << 20) / row_bytes;
    const AttentionCase c = {
        .shape = {.batch = 1, .heads = 1, .queries = rows, .keys = form.keys, .rows = rows},
        .dtype = form.dtype,
        .out_dtype = form.out_dtype,
        .hide = form.hide,
        .mask_by_query = false,
        .fill = form.fill,
        .stride_extra = form.stride_extra,
        .offset = form.offset,
        .in_place = form.in_place,
        .seed = ++seed};
    SCOPED_TRACE(Describe(c));
    const AttentionCall call = CallOf(c);
    const AttentionAnswer want = runner_->AttentionSoftmax(call).value();
    ASSERT_EQ(WrittenOutside(c.in_place ? call.scores : call.probs, want.probs), "");
    const AttentionBackwardCall backward = BackwardOf(c);
    const AttentionBackwardAnswer gradient = runner_->AttentionSoftmaxBackward(backward).value();
    ASSERT_EQ(WrittenOutside(backward.Before(), gradient.d_scores), "");
    constexpr int64_t kPiece = 200;
    for (int64_t first = 0; first < rows; first += kPiece) {
      const int64_t here = std::min(kPiece, rows - first);
      const RowLayout layout = {.offset = first / kPiece % 3};
      ASSERT_EQ(BrokenPiece(*runner_, c, call, want, first, here, layout), "");
      ASSERT_EQ(BrokenGradientPiece(*runner_, c, backward, gradient, first, here, layout), "");
    }
  }
}

// Pages of memory between pages whose access ends the process.
class GuardedPages {
 public:
  explicit GuardedPages(int64_t pages) : bytes_((pages + 2) * kPage) {
    base_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    Forbid(-1, 1);
    Forbid(pages, 1);
  }
  ~GuardedPages() { munmap(base_, bytes_); }
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;

  void Forbid(int64_t first_page, int64_t pages) {
    EXPECT_EQ(mprotect(begin() + first_page * kPage, pages * kPage, PROT_NONE), 0);
  }
  std::byte* begin() const { return base_ + kPage; }
  std::byte* end() const { return base_ + bytes_ - kPage; }

  static constexpr int64_t kPage = 4096;

 private:
  size_t bytes_;
  std::byte* base_;
};

TEST(AttentionSoftmaxMemoryTest, KeysOutsideTheWindowAreNotRead) {
  auto backend = CreateBackend("cpu", {.cpu_threads = 1}).value();
  auto stream = backend->CreateStream().value();
  // One row of four pages; what it sees is the third.
  constexpr int64_t kKeys = 4096, kPageKeys = 1024;
  GuardedPages scores(4), mask(4), d_probs(4);
  for (GuardedPages* pages : {&scores, &mask, &d_probs}) {
    pages->Forbid(0, 2);
    pages->Forbid(3, 1);
  }
  std::vector<float> probs(kKeys, 1.0f);
  float logsumexp = 0;
  RowStatus status;
  const AttentionShape shape = {.batch = 1,
                                .heads = 1,
                                .queries = kKeys,
                                .keys = kKeys,
                                .first_row = 2 * kPageKeys + 500,
                                .rows = 1};
  const AttentionWindow window = {500, kPageKeys - 501};
  ASSERT_TRUE(
      stream
          ->Run(AttentionSoftmaxArgs{.shape = shape,
                                     .scores = {scores.begin(), DType::kF32, 1, kKeys, kKeys},
                                     .window = window,
                                     .mask = {.kind = MaskKind::kAdditive, .data = mask.begin()},
                                     .probs = {probs.data(), DType::kF32, 1, kKeys, kKeys},
                                     .logsumexp = &logsumexp,
                                     .status = &status})
          .ok());
  EXPECT_NEAR(logsumexp, std::log(1024.0f), 1e-5);
  for (int64_t j = 0; j < kKeys; ++j) {
    ASSERT_EQ(probs[j], j / kPageKeys == 2 ? 1 / 1024.0f : 0.0f) << j;
  }
  std::vector<float> d_scores(kKeys, 1.0f);
  ASSERT_TRUE(stream
                  ->Run(AttentionSoftmaxBackwardArgs{
                      .shape = shape,
                      .probs = {scores.begin(), DType::kF32, 1, kKeys, kKeys},
                      .d_probs = {d_probs.begin(), DType::kF32, 1, kKeys, kKeys},
                      .window = window,
                      .d_scores = {d_scores.data(), DType::kF32, 1, kKeys, kKeys},
                      .status = &status})
                  .ok());
  EXPECT_EQ(d_scores, std::vector<float>(kKeys, 0.0f));
}

// Rows that begin right after a forbidden page, or end right before one.
TEST(AttentionSoftmaxMemoryTest, NothingOutsideTheTensorsIsTouched) {
  auto backend = CreateBackend("cpu", {.cpu_threads = 1}).value();
  auto stream = backend->CreateStream().value();
  for (DType dtype : kAllDTypes) {
    for (int64_t keys : {1, 5, 31, 100, 500}) {
      for (bool at_end : {false, true}) {
        GuardedPages scores(1), mask(1), probs(1), d_probs(1);
        const auto place = [&](const GuardedPages& pages, int64_t bytes) {
          return at_end ? pages.end() - bytes : pages.begin();
        };
        const int64_t row = keys * static_cast<int64_t>(SizeOf(dtype));
        RowStatus status[2];
        const AttentionShape shape = {
            .batch = 1, .heads = 1, .queries = 2, .keys = keys, .rows = 2};
        const TensorView from = {place(scores, 2 * row), dtype, 2, keys, keys};
        const MutableTensorView to = {place(probs, 2 * row), dtype, 2, keys, keys};
        ASSERT_TRUE(stream
                        ->Run(AttentionSoftmaxArgs{.shape = shape,
                                                   .scores = from,
                                                   .mask = {.kind = MaskKind::kBool,
                                                            .data = place(mask, 2 * keys),
                                                            .query_stride = keys},
                                                   .probs = to,
                                                   .status = status})
                        .ok());
        ASSERT_TRUE(stream
                        ->Run(AttentionSoftmaxBackwardArgs{
                            .shape = shape,
                            .probs = {to.data, dtype, 2, keys, keys},
                            .d_probs = {place(d_probs, 2 * row), dtype, 2, keys, keys},
                            .d_scores = to,
                            .status = status})
                        .ok());
      }
    }
  }
}

// How a cell's weights are computed depends on its maximum: here cells of two maxima meet in a row.
TEST(AttentionSoftmaxTargetsTest, CellsOfAnyTwoMaximaAgreeWithDoublePrecision) {
  constexpr float kMaxima[] = {-5000, -90, -1, -0.0f, 0, 0.5f, 59.5f, 60, 60.5f, 86, 5000};
  constexpr int64_t kKinds = std::size(kMaxima), kRows = kKinds * kKinds, kCell = 1024;
  ForEachInstructionSet([&](OpRunner& runner) {
    for (const DType dtype : kAllDTypes) {
      AttentionCall call = CallOf(
          {.shape = {1, 1, kRows, 1500, 0, kRows}, .dtype = dtype, .out_dtype = dtype, .scale = 1});
      std::mt19937_64 random(3);
      std::normal_distribution<float> normal;
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < 1500; ++i) {
          const float max = kMaxima[i < kCell ? r / kKinds : r % kKinds];
          const float below = i == 700 || i == 1499 ? 0 : -3 * std::abs(normal(random));
          call.scores.Set(r, i, max + below);
        }
      }
      const auto got = runner.AttentionSoftmax(call).value();
      for (int64_t r = 0; r < kRows; ++r) {
        EXPECT_EQ(DescribeDifference(call, r, got, /*x_roundings=*/0), "")
            << Name(dtype) << ", maxima " << kMaxima[r / kKinds] << " and " << kMaxima[r % kKinds];
      }
    }
  });
}

// Scores that no query sees are NaN and infinite; a scale of 0 or below turns infinities around.
TEST(AttentionSoftmaxTargetsTest, ScoresOfMaskedKeysHaveNoEffectWhateverTheScale) {
  constexpr float kScales[] = {0, -1, 1, 0.125f, -0.3f, 0x1p-30f, 0x1p15f};
  constexpr float kSpecial[] = {kNan, kInf, -kInf, 3e38f, -3e38f};
  ForEachInstructionSet([&](OpRunner& runner) {
    uint64_t seed = 7000;
    for (const float scale : kScales) {
      for (const DType dtype : kAllDTypes) {
        for (const Hide hide : {Hide::kBool, Hide::kAdditive}) {
          constexpr int64_t kRows = 9, kKeys = 1100;
          const AttentionCase c = {
              .shape = {.batch = 1, .heads = 1, .queries = kRows, .keys = kKeys, .rows = kRows},
              .dtype = dtype,
              .out_dtype = dtype,
              .hide = hide,
              .mask_dtype = ++seed % 2 == 0 ? dtype : DType::kF32,
              .finite_bans = false,
              .scale = scale,
              .seed = seed};
          AttentionCall call = CallOf(c);
          for (int64_t r = 0; r < kRows; ++r) {
            const AttentionRowAnswer want = ReferenceAttentionRow(call, r);
            // Where the reference has 0, the key is masked: x differ by far less than 80.
            if (std::fabs(scale) > 1) break;
            for (int64_t j = 0; j < kKeys; ++j) {
              if (want.probs[j] == 0) call.scores.Set(r, j, kSpecial[(r + j) % 5]);
            }
          }
          const auto got = runner.AttentionSoftmax(call).value();
          for (int64_t r = 0; r < kRows; ++r) {
            ASSERT_EQ(DescribeDifference(call, r, got, /*x_roundings=*/1), "") << Describe(c);
          }
        }
      }
    }
  });
}

// One key has all the weight: so the gradient of the other is y dy, which is subnormal.
TEST(AttentionSoftmaxTargetsTest, SubnormalGradientsAreNotLost) {
  ForEachInstructionSet([](OpRunner& runner) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t keys : {2, 40, 70}) {
        AttentionBackwardCall call =
            BackwardOf({.shape = {.batch = 1, .heads = 1, .queries = 1, .keys = keys, .rows = 1},
                        .dtype = dtype,
                        .scale = 1});
        for (int64_t j = 0; j < keys; ++j) {
          call.probs.Set(0, j, j == 0 ? 1 : 0x1p-100f);
          call.d_probs.Set(0, j, j == 0 ? 0 : 0x1p-30f);
        }
        const auto got = runner.AttentionSoftmaxBackward(call).value();
        for (int64_t j = 1; j < keys; ++j) ASSERT_EQ(got.d_scores.At(0, j), 0x1p-130f) << j;
      }
    }
  });
}

// Instruction sets without a fused multiply-add round a masked x once more.
TEST(AttentionSoftmaxTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, AttentionClaims(), BrokenClaim), "");
    EXPECT_EQ(FailuresOf(runner, AttentionValueClaims(), BrokenClaim), "");
    EXPECT_EQ(FailuresOf(runner, GradientClaims(), BrokenClaim), "");
    for (const AttentionCase& c : AttentionShapeCases()) {
      if (c.shape.keys > 5000) continue;
      ASSERT_EQ(FirstDifference(runner, c, /*x_roundings=*/1), "");
      ASSERT_EQ(FirstGradientDifference(runner, c), "");
    }
    for (const AttentionCase& c : AttentionFillCases()) {
      if (c.shape.keys >= 5000) continue;
      ASSERT_EQ(BrokenRounding(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
