// cross_entropy and its backward on the CPU backend.
#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <iterator>
#include <random>
#include <vector>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cross_entropy_softcap_cases.h"

namespace logitd::testing {
namespace {

class CrossEntropyCpuTest : public CpuTest {};
const bool kRegistered =
    RegisterChecks<CrossEntropyCpuTest>("CrossEntropyCpuTest", CrossEntropyChecks()) &&
    RegisterChecks<CrossEntropyCpuTest>("CrossEntropyCpuTest", CrossEntropySoftcapChecks());

TEST_F(CrossEntropyCpuTest, ARowsBitsDoNotDependOnTheNumberOfThreads) {
  for (const int64_t rows : {2, 50}) {
    const int64_t vocab = rows == 2 ? 70000 : 5000;
    HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
    LossBatch batch;
    std::mt19937_64 random(3);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 3);
      AddRandomLoss(batch, vocab, /*with_softcap=*/true, random);
    }
    const LossAnswer want = runner_->CrossEntropy(tensor, batch).value();
    ForEachThreadCount([&](OpRunner& runner) {
      const LossAnswer got = runner.CrossEntropy(tensor, batch).value();
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(LossBits(got, batch.rows[r], r), LossBits(want, batch.rows[r], r)) << r;
      }
    });
  }
}

// Rows whose plain loss is read another way than others: by sign, by range, and where NaN is.
struct PlainRow {
  const char* name;
  float (*logit)(int64_t i, float normal);
};
constexpr PlainRow kPlainRows[] = {
    {"negative", [](int64_t, float x) { return -50 + x; }},
    {"negative and one -0", [](int64_t i, float x) { return i == 77 ? -0.0f : -9 + x; }},
    {"positive", [](int64_t, float x) { return 50 + x; }},
    {"near the least weight", [](int64_t i, float x) { return i % 2 == 0 ? x : -84 + x; }},
    {"far apart", [](int64_t, float x) { return 1000 * x; }},
    {"too far apart for f32", [](int64_t i, float) { return i % 2 == 0 ? 3e38f : -3e38f; }},
    {"negative NaN", [](int64_t i, float x) { return i == 1500 ? -kNan : x; }},
    {"negative NaN in the last cell", [](int64_t i, float x) { return i == 2498 ? -kNan : x; }},
    {"NaN among -inf", [](int64_t i, float) { return i == 1500 ? kNan : -kInf; }},
    {"negative NaN among -inf", [](int64_t i, float) { return i == 1500 ? -kNan : -kInf; }},
    {"NaN after +inf", [](int64_t i, float x) { return i == 1500 ? kNan
                                                       : i == 9  ? kInf
                                                                 : x; }},
    {"NaN beside both infinities",
     [](int64_t i, float x) {
       return i == 1500 ? kNan : i == 1400 ? kInf : i == 1300 ? -kInf : x;
     }},
};

TEST(CrossEntropyTargetsTest, PlainLossesOfEverySignAndRangeAgreeWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    for (const DType dtype : kAllDTypes) {
      constexpr int64_t kVocab = 2500;
      HostTensor tensor(dtype, std::size(kPlainRows), kVocab, kVocab + 1, 1);
      LossBatch batch;
      std::mt19937_64 random(11);
      std::normal_distribution<float> normal;
      for (size_t r = 0; r < std::size(kPlainRows); ++r) {
        for (int64_t i = 0; i < kVocab; ++i) {
          tensor.Set(r, i, kPlainRows[r].logit(i, normal(random)));
        }
        batch.rows.push_back(PlainLoss(2));
      }
      const LossAnswer got = runner.CrossEntropy(tensor, batch).value();
      for (size_t r = 0; r < std::size(kPlainRows); ++r) {
        const auto want = ReferenceCrossEntropy(LogitsOf(tensor, r), batch.rows[r], {});
        EXPECT_EQ(DescribeDifference(want, batch.rows[r], got, r), "")
            << Name(dtype) << ", " << kPlainRows[r].name;
      }
    }
  });
}

// Whether the order of tokens is asked for, and what of it, changes how a row is read.
TEST(CrossEntropyTargetsTest, ALossHasTheSameBitsWithAndWithoutARankAndTopTokens) {
  ForEachInstructionSet([](OpRunner& runner) {
    constexpr int64_t kRows = 4, kVocab = 5000;
    for (const DType dtype : kAllDTypes) {
      for (const float softcap : {0.0f, 1.0f, 3.0f, 30.0f}) {
        HostTensor tensor(dtype, kRows, kVocab, kVocab, 0);
        FillRow(tensor, 0, Fill::kNormal, 5);
        LossBatch batch;
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t i = 0; i < kVocab; ++i) tensor.Set(r, i, tensor.At(0, i));
          CrossEntropyRow row = PlainLoss(7);
          row.softcap = softcap;
          if (r % 2 == 1) row.want = kWantRank;
          if (r >= 2) {
            row.top_logprobs = 3;
            row.first_top_entry = static_cast<int32_t>(batch.top_entries);
            batch.top_entries += row.top_logprobs;
          }
          batch.rows.push_back(row);
        }
        const LossAnswer got = runner.CrossEntropy(tensor, batch).value();
        for (int64_t r = 1; r < kRows; ++r) {
          EXPECT_EQ(got.loss[0], got.loss[r]) << Name(dtype) << ", softcap " << softcap;
          EXPECT_EQ(got.logsumexp[0], got.logsumexp[r]) << Name(dtype) << ", softcap " << softcap;
        }
        EXPECT_EQ(got.rank[1], got.rank[3]) << Name(dtype) << ", softcap " << softcap;
      }
    }
  });
}

// Rows of a few values: most targets have equals in cells before and after, and in their own.
TEST(CrossEntropyTargetsTest, RanksAmongEqualsZerosAndInfinitiesAreThoseOfASort) {
  constexpr int64_t kVocab = 3300;
  constexpr float kValues[] = {-kInf, -2.5f, -1, -0.0f, 0, 0.25f, 1, kInf};
  std::vector<float> logits(kVocab);
  std::mt19937_64 random(23);
  for (float& x : logits) x = kValues[random() % std::size(kValues)];
  ForEachInstructionSet([&](OpRunner& runner) {
    for (const DType dtype : kAllDTypes) {
      for (const float softcap : {0.0f, 30.0f}) {
        LossBatch batch;
        std::vector<int32_t> want;
        for (const int32_t target :
             {0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    1000, 1023,
              1024, 1025, 1026, 2047, 2048, 2500, 2501, 2502, 3071, 3072, 3298, 3299}) {
          CrossEntropyRow row = PlainLoss(target);
          row.softcap = softcap;
          row.want = kWantRank;
          batch.rows.push_back(row);
          int32_t before = 0;
          for (int32_t i = 0; i < kVocab; ++i) {
            before += logits[i] > logits[target] || (logits[i] == logits[target] && i < target);
          }
          want.push_back(1 + before);
        }
        const auto rows = static_cast<int64_t>(want.size());
        HostTensor tensor(dtype, rows, kVocab, kVocab + 1, 1);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < kVocab; ++i) tensor.Set(r, i, logits[i]);
        }
        EXPECT_EQ(runner.CrossEntropy(tensor, batch).value().rank, want)
            << Name(dtype) << ", softcap " << softcap;
      }
    }
  });
}

TEST(CrossEntropyTargetsTest, EveryInstructionSetAgreesWithDoublePrecision) {
  ForEachInstructionSet([](OpRunner& runner) {
    EXPECT_EQ(FailuresOf(runner, LossClaims(), BrokenClaim), "");
    EXPECT_EQ(FailuresOf(runner, LossGradientClaims(), BrokenClaim), "");
    for (const SoftcapCase& c : SoftcapCases()) {
      if (c.vocab >= 9000) continue;
      EXPECT_EQ(FirstSoftcapDifference(runner, c), "");
    }
    uint64_t n = 0;
    for (const LossCase& c : LossGradientCases()) {
      if (++n % 5 != 0 || c.vocab > 10000) continue;
      EXPECT_EQ(FirstDifference(runner, c), "");
      EXPECT_EQ(FirstLossGradientDifference(runner, c), "");
    }
  });
}

}  // namespace
}  // namespace logitd::testing
