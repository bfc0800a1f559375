// Texts drawn with a watermark are found by its key, and no others are.
//
// Every chi-square test here rings falsely once in a million: seeds are fixed, so a test that
// passes once always does, until the code or the seed changes.
#include "kernels/watermark.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "tests/kernels/chi_square.h"
#include "tests/kernels/cpu_test.h"
#include "tests/kernels/sample_cases.h"

namespace logitd::testing {
namespace {

using Text = std::vector<int32_t>;

struct Found {
  double score = 0;
  int tokens = 0;

  // The sum of n exponential variables of mean 1 is half a chi-square of 2 n degrees.
  double p_value() const { return ChiSquareTail(2 * score, 2 * tokens); }
};

// Each context with the token after it counts once; those of the first `prompt` tokens do not.
Found Detect(const Text& text, uint64_t key, int32_t width, size_t prompt = 0) {
  Found found;
  std::set<Text> seen;
  for (size_t t = prompt; t < text.size(); ++t) {
    const auto count = static_cast<int32_t>(std::min<size_t>(t, static_cast<size_t>(width)));
    if (!seen.insert(Text(text.begin() + static_cast<int64_t>(t) - count,
                          text.begin() + static_cast<int64_t>(t) + 1))
             .second) {
      continue;
    }
    const uint64_t state = WatermarkState(key, text.data() + t - count, count);
    found.score += MarkEvidence(WatermarkBits(state, text[t]));
    ++found.tokens;
  }
  return found;
}

// Scores by the Philox of sample_replay.py. The tests of logitctl and of the Python client have the
// same.
TEST(WatermarkTest, ScoresAreThoseOfTheSemanticsPage) {
  const Text text = {5, 17, 17, 5, 17, 17, 5, 100000, 0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144};
  struct Claim {
    uint64_t key;
    int32_t width;
    size_t prompt;
    double score;
    int tokens;
  };
  for (const Claim& c : {Claim{0, 1, 0, 17.389627309173395, 17},
                         Claim{0x0123456789abcdef, 4, 0, 22.07710071690334, 20},
                         Claim{~uint64_t{0}, 16, 3, 26.093049919835817, 17},
                         Claim{7, 2, 0, 11.885643065042796, 18}}) {
    const Found found = Detect(text, c.key, c.width, c.prompt);
    EXPECT_NEAR(found.score, c.score, 1e-12) << c.key;
    EXPECT_EQ(found.tokens, c.tokens) << c.key;
  }
}

TEST(WatermarkTest, ABoundIsAtLeastItsScoreAndNumbersAreInsideZeroAndOne) {
  constexpr uint64_t kMost = (uint64_t{1} << 52) - 1;
  std::mt19937_64 random(3);
  std::vector<uint64_t> all = {0, 1, kMost / 2, kMost / 2 + 1, kMost - 1, kMost};
  for (int i = 0; i < 10000; ++i) all.push_back(kMost - (random() >> (12 + i % 52)));
  for (const uint64_t bits : all) {
    EXPECT_GT(MarkUnit(bits), 0);
    EXPECT_GT(MarkUnitLeft(bits), 0);
    EXPECT_EQ(MarkUnit(bits) + MarkUnitLeft(bits), 1);
    for (const double above : {0.0, -3.5, -1e6}) {
      EXPECT_GE(MarkBound(above, bits), MarkScore(above, bits)) << bits;
      EXPECT_LE(MarkBound(above, bits), std::max(MarkScore(above, bits), above) + 1.5) << bits;
    }
  }
}

class WatermarkedTextTest : public CpuTest {
 protected:
  static constexpr int64_t kTexts = 40, kTokens = 200, kVocab = 1000;
  static constexpr int32_t kWidth = 4;

  // Texts of random logits with about 5 nats a token. The last half of them are drawn by seeds.
  std::vector<Text> Draw(uint64_t key) {
    std::vector<Text> texts(kTexts);
    std::mt19937_64 random(11);
    std::normal_distribution<float> normal(0, 2);
    HostTensor tensor(DType::kF32, kTexts, kVocab, kVocab, 0);
    for (int64_t step = 0; step < kTokens; ++step) {
      SampleBatch batch;
      for (int64_t r = 0; r < kTexts; ++r) {
        for (int64_t i = 0; i < kVocab; ++i) tensor.Set(r, i, normal(random));
        SampleRow row = PlainRow();
        row.seed = static_cast<uint64_t>(r);
        row.position = static_cast<uint64_t>(step);
        row.top_p = r % 2 == 0 ? 0.95f : 1.0f;
        row.watermark_key = key;
        row.watermark_width = r < kTexts / 2 ? kWidth : 0;
        row.first_history = static_cast<int64_t>(batch.history.size());
        row.history_count = static_cast<int32_t>(texts[r].size());
        batch.history.insert(batch.history.end(), texts[r].begin(), texts[r].end());
        batch.rows.push_back(row);
      }
      const SampleAnswer got = runner_->Sample(tensor, batch).value();
      for (int64_t r = 0; r < kTexts; ++r) texts[r].push_back(got.tokens[r]);
    }
    return texts;
  }
};

TEST_F(WatermarkedTextTest, TwoHundredTokensAreFoundByTheirKeyOnly) {
  constexpr uint64_t kKey = 0xfeedface12345678;
  const std::vector<Text> texts = Draw(kKey);
  for (int64_t r = 0; r < kTexts; ++r) {
    const double by_key = Detect(texts[r], kKey, kWidth).p_value();
    if (r < kTexts / 2) {
      EXPECT_LT(by_key, 1e-6) << r;
    } else {
      EXPECT_GT(by_key, 1e-4) << "a text without a watermark, " << r;
    }
    EXPECT_GT(Detect(texts[r], kKey + 1, kWidth).p_value(), 1e-4) << "another key, " << r;
    EXPECT_GT(Detect(texts[r], kKey, kWidth + 1).p_value(), 1e-4) << "another width, " << r;
  }
}

// A share p of texts without a watermark has a p-value below p.
TEST(WatermarkTest, FalseAlarmsComeAtTheirRate) {
  constexpr int kTexts = 1000, kBins = 20;
  std::mt19937_64 random(5);
  std::vector<int> bins(kBins);
  int below = 0;
  for (int text = 0; text < kTexts; ++text) {
    Text tokens(200);
    // From few tokens, so that pairs are repeated: each counts once.
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 12);
    const Found found = Detect(tokens, /*key=*/77 + static_cast<uint64_t>(text), /*width=*/2);
    const double p = found.p_value();
    ++bins[std::min(kBins - 1, static_cast<int>(p * kBins))];
    below += p < 0.01;
  }
  double chi_square = 0;
  const double want = static_cast<double>(kTexts) / kBins;
  for (const int got : bins) chi_square += (got - want) * (got - want) / want;
  EXPECT_GT(ChiSquareTail(chi_square, kBins - 1), 1e-6) << chi_square;
  // 10 are expected: fewer than 1 come once in 20000, more than 28 once in a million.
  EXPECT_GE(below, 1);
  EXPECT_LE(below, 28);
}

}  // namespace
}  // namespace logitd::testing
