// The rules of sampling parameters, against double precision and by hand.
#include "kernels/sampling_rules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernels/sample_cases.h"

namespace logitd::testing {
namespace {

SampleRow Drawn(float temperature, int32_t top_k) {
  SampleRow row = PlainRow();
  row.temperature = temperature;
  row.top_k = top_k;
  return row;
}

TEST(KeptTokensTest, AShortTopKNeedsItsTokens) {
  EXPECT_EQ(KeptTokens(Drawn(1, 1)), 1);
  EXPECT_EQ(KeptTokens(Drawn(0.5f, 50)), 50);
  EXPECT_EQ(KeptTokens(Drawn(1, 128)), 128);
}

TEST(KeptTokensTest, AGreedyRowNeedsOneWhateverItsTopK) {
  EXPECT_EQ(KeptTokens(Drawn(0, 0)), 1);
  EXPECT_EQ(KeptTokens(Drawn(0, -1)), 1);
  EXPECT_EQ(KeptTokens(Drawn(0, 5000)), 1);
}

TEST(KeptTokensTest, TopLogprobsNeedTheirTokens) {
  SampleRow row = Drawn(0, 0);
  row.top_logprobs = 20;
  EXPECT_EQ(KeptTokens(row), 20);
  row = Drawn(1, 5);
  row.top_logprobs = 7;
  EXPECT_EQ(KeptTokens(row), 7);
  row.top_logprobs = 128;
  EXPECT_EQ(KeptTokens(row), 128);
  row.top_logprobs = 129;
  EXPECT_EQ(KeptTokens(row), 0) << "more than shards keep";
}

TEST(KeptTokensTest, ARowThatMayNeedAnyTokenHasNone) {
  EXPECT_EQ(KeptTokens(Drawn(1, 0)), 0);
  EXPECT_EQ(KeptTokens(Drawn(1, -1)), 0);
  EXPECT_EQ(KeptTokens(Drawn(1, 129)), 0);
  EXPECT_EQ(KeptTokens(Drawn(1, std::numeric_limits<int32_t>::max())), 0);
  SampleRow row = Drawn(1, 0);
  row.min_p = 0.5f;
  row.top_p = 0.5f;
  EXPECT_EQ(KeptTokens(row), 0);
  row = Drawn(1, 5);
  row.top_n_sigma = 1;  // sigma is of the whole row
  EXPECT_EQ(KeptTokens(row), 0);
  row.temperature = 0;
  EXPECT_EQ(KeptTokens(row), 1);
  row = Drawn(1, 5);
  row.typical_p = 0.9f;
  EXPECT_EQ(KeptTokens(row), 0);
  row = Drawn(1, 5);
  row.xtc_probability = 0.5f;
  EXPECT_EQ(KeptTokens(row), 0);
}

TEST(KeptTokensTest, SumsOverTheRowNeedOtherTokens) {
  SampleRow row = Drawn(1, 5);
  row.want_entropy = true;
  EXPECT_EQ(KeptTokens(row), 0);
  row = Drawn(1, 5);
  row.logprob_mode = LogprobMode::kTempered;
  EXPECT_EQ(KeptTokens(row), 0);
}

TEST(KeptTokensTest, FurtherDrawsNeedOtherTokens) {
  SampleRow row = Drawn(1, 5);
  row.draws = 1;
  EXPECT_EQ(KeptTokens(row), 0);
}

TEST(KeptTokensTest, AWatermarkNeedsOtherTokensUnlessTheRowIsGreedy) {
  SampleRow row = Drawn(1, 5);
  row.watermark_width = 1;
  EXPECT_EQ(KeptTokens(row), 0);
  row.temperature = 0;
  EXPECT_EQ(KeptTokens(row), 1);
}

TEST(WhatIsOnTest, TheSeedIsOfRandomDrawsAndOfXtc) {
  SampleRow row = Drawn(1, 0);
  EXPECT_TRUE(UsesSeed(row));
  row.watermark_width = 1;
  EXPECT_FALSE(UsesSeed(row));
  row.xtc_probability = 0.5f;
  EXPECT_TRUE(UsesSeed(row));
  row.temperature = 0;
  EXPECT_FALSE(UsesSeed(row));
}

TEST(EntropyTest, IsThatOfTheSums) {
  EXPECT_DOUBLE_EQ(EntropyOf({.sum = 4, .below = 0}), std::log(4.0)) << "four equals";
  const double half = std::log(2.0) / 2;  // of the moment of one at half the weight
  EXPECT_DOUBLE_EQ(EntropyOf({.sum = 1.5, .below = half}), std::log(1.5) + half / 1.5);
  EXPECT_EQ(EntropyOf({.sum = 1 - 1e-16, .below = 0}), 0) << "not below 0 by a rounding";
}

TEST(KeptTokensTest, EditsAndAskedIdsNeedOtherTokens) {
  SampleRow row = Drawn(1, 5);
  row.extra_count = 1;
  EXPECT_EQ(KeptTokens(row), 0);
  row = Drawn(1, 5);
  row.first_mask_word = 0;
  EXPECT_EQ(KeptTokens(row), 0);
  row = Drawn(1, 5);
  row.bias_count = 1;
  EXPECT_EQ(KeptTokens(row), 0);
  row = Drawn(0, 0);
  row.history_count = 1;
  EXPECT_EQ(KeptTokens(row), 0);
}

// ---- what is on

TEST(WhatIsOnTest, EveryFilterIsKnown) {
  struct Claim {
    const char* name;
    void (*ask)(SampleRow&);
    bool distance, filtered, sums, first_tokens;  // the last one with 50 tokens
  };
  const Claim kClaims[] = {
      {"nothing", [](SampleRow&) {}, false, false, true, false},
      {"greedy", [](SampleRow& row) { row.temperature = 0; }, false, false, false, true},
      {"top_k", [](SampleRow& row) { row.top_k = 50; }, false, true, false, true},
      {"more than few", [](SampleRow& row) { row.top_k = 51; }, false, true, false, false},
      {"top_k of all", [](SampleRow& row) { row.top_k = 100; }, false, false, true, false},
      {"top_k -1", [](SampleRow& row) { row.top_k = -1; }, false, false, true, false},
      {"top_p", [](SampleRow& row) { row.top_p = 0.9f; }, false, true, true, false},
      {"min_p", [](SampleRow& row) { row.min_p = 0.1f; }, true, true, false, true},
      {"sigma", [](SampleRow& row) { row.top_n_sigma = 1; }, true, true, false, false},
      {"sigma, top_k", [](SampleRow& row) { row.top_n_sigma = 1, row.top_k = 5; }, true, true,
       false, false},
      {"typical_p", [](SampleRow& row) { row.typical_p = 0.9f; }, false, true, false, false},
      {"typical_p, top_p", [](SampleRow& row) { row.typical_p = 0.9f, row.top_p = 0.9f; }, false,
       true, true, false},
      {"xtc", [](SampleRow& row) { row.xtc_probability = 0.5f; }, false, true, false, false},
      {"xtc, top_k", [](SampleRow& row) { row.xtc_probability = 1, row.top_k = 5; }, false, true,
       false, false},
      {"greedy typical_p", [](SampleRow& row) { row.typical_p = 0.9f, row.temperature = 0; }, false,
       false, false, true},
      {"greedy sigma", [](SampleRow& row) { row.top_n_sigma = 1, row.temperature = 0; }, true, true,
       false, true},
  };
  for (const Claim& claim : kClaims) {
    SampleRow row = PlainRow();
    claim.ask(row);
    EXPECT_EQ(DistanceIsOn(row), claim.distance) << claim.name;
    EXPECT_EQ(IsFiltered(row, 100), claim.filtered) << claim.name;
    EXPECT_EQ(SumsAreOfRow(row, 100), claim.sums) << claim.name;
    EXPECT_EQ(FirstTokensTell(row, 100, 50), claim.first_tokens) << claim.name;
  }
}

TEST(WhatIsOnTest, PenaltiesNeedAHistoryAndAValue) {
  SampleRow row = PlainRow();
  row.history_count = 3;
  EXPECT_EQ(CountedHistory(row), 0);
  EXPECT_FALSE(IsEdited(row));
  for (float SampleRow::*penalty :
       {&SampleRow::repetition, &SampleRow::presence, &SampleRow::frequency}) {
    SampleRow penalised = row;
    penalised.*penalty = 0.5f;
    EXPECT_EQ(CountedHistory(penalised), 3);
    EXPECT_TRUE(HasPatches(penalised));
    EXPECT_TRUE(IsEdited(penalised));
    penalised.history_count = 0;
    EXPECT_FALSE(IsEdited(penalised));
  }
  row.bias_count = 1;
  EXPECT_TRUE(HasPatches(row));
  row.bias_count = 0;
  row.first_mask_word = 0;
  EXPECT_FALSE(HasPatches(row));
  EXPECT_TRUE(IsEdited(row));
}

// ---- edits

TEST(EditsTest, RoundAfterEveryOperation) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 10000; ++i) {
    SampleRow row = PlainRow();
    row.repetition = std::exp(normal(random));
    row.presence = normal(random);
    row.frequency = normal(random);
    const float x = 10 * normal(random);
    const auto count = static_cast<uint32_t>(random() % 100 + 1);
    // The result of one operation on floats, in double and then rounded to f32, is that of f32.
    const auto repeated =
        static_cast<float>(x > 0 ? double{x} / row.repetition : double{x} * row.repetition);
    const auto often = static_cast<float>(double{row.frequency} * count);
    const auto less = static_cast<float>(double{repeated} - often);
    ASSERT_EQ(Penalties(row).Of(x, count), static_cast<float>(double{less} - row.presence));
    ASSERT_EQ(Penalties(row).Of(x, 0), x);
    ASSERT_EQ(Biased(x, row.presence), static_cast<float>(double{x} + row.presence));
  }
}

TEST(EditsTest, PenaltiesOfATokenInThePromptAreRepetitionsOnly) {
  SampleRow row = PlainRow();
  row.repetition = 2;
  row.presence = 1;
  row.frequency = 0.5f;
  EXPECT_EQ(Penalties(row).Of(8, kMaxHistory), 4 - 0.5f * kMaxHistory - 1);
  row.prompt_tokens = 3;
  EXPECT_EQ(SightingAt(2, row.prompt_tokens), kSeenInPrompt);
  EXPECT_EQ(SightingAt(3, row.prompt_tokens), 1u);
  EXPECT_EQ(Penalties(row).Of(8, 0), 8);
  EXPECT_EQ(Penalties(row).Of(8, kSeenInPrompt), 4);
  EXPECT_EQ(Penalties(row).Of(8, kSeenInPrompt | 2), 2);
  EXPECT_EQ(Penalties(row).Of(8, 2), 2);
  EXPECT_EQ(Penalties(row).Of(-kInf, kSeenInPrompt), -kInf);
}

TEST(EditsTest, ABanWins) {
  EXPECT_EQ(Biased(kInf, -kInf), -kInf);
  EXPECT_EQ(Biased(-kInf, kInf), -kInf);
  SampleRow row = PlainRow();
  row.frequency = std::numeric_limits<float>::max();
  EXPECT_EQ(Penalties(row).Of(kInf, 2), -kInf);  // the product is +inf
  row.frequency = -std::numeric_limits<float>::max();
  EXPECT_EQ(Penalties(row).Of(-kInf, 2), -kInf);
}

TEST(EditsTest, EditsOnlyLowerWhereNoLogitRises) {
  constexpr float kLogits[] = {-kInf, -1e30f, -2, -1e-30f, 0, 1e-30f, 2, 1e30f, kInf};
  for (const float repetition : {0.5f, 1.0f, 2.0f}) {
    for (const float presence : {-1.0f, 0.0f, 1.0f}) {
      for (const float frequency : {-1.0f, 0.0f, 1.0f}) {
        SampleRow row = PlainRow();
        row.repetition = repetition;
        row.presence = presence;
        row.frequency = frequency;
        EXPECT_TRUE(EditsOnlyLower(row)) << "no history";
        row.history_count = 1;
        const bool rises = std::ranges::any_of(kLogits, [&](float x) {
          return Penalties(row).Of(x, 1) > x || Penalties(row).Of(x, 1000) > x;
        });
        EXPECT_EQ(EditsOnlyLower(row), !rises)
            << repetition << ", " << presence << ", " << frequency;
      }
    }
  }
  SampleRow row = PlainRow();
  row.first_mask_word = 0;
  EXPECT_TRUE(EditsOnlyLower(row));
  row.bias_count = 1;
  EXPECT_FALSE(EditsOnlyLower(row)) << "a bias may be of any sign";
}

// ---- borders

constexpr float kLargest = std::numeric_limits<float>::max();

float Below(float x) { return std::nextafter(x, -kInf); }

// How far double's roundings may move a border.
double Slack(double distance, double max) { return 0x1p-51 * (distance + std::abs(max)); }

TEST(BordersTest, RoundedUpIsTheLowestFloatThatIsNotBelow) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 100000; ++i) {
    const double x = std::ldexp(normal(random), static_cast<int>(random() % 270) - 145);
    if (std::abs(x) > kLargest) continue;
    const float up = RoundedUp(x);
    ASSERT_GE(up, x);
    ASSERT_LT(Below(up), x);
    const auto exact = static_cast<float>(x);
    ASSERT_EQ(RoundedUp(exact), exact);
  }
  EXPECT_EQ(RoundedUp(0), 0);
  EXPECT_EQ(RoundedUp(1e-60), std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(RoundedUp(-1e-60), 0);
  EXPECT_EQ(RoundedUp(kLargest), kLargest);
  EXPECT_EQ(RoundedUp(-1e60), -kLargest) << "-inf is in no support";
}

TEST(BordersTest, MinPKeepsItsDistance) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 10000; ++i) {
    SampleRow row = PlainRow();
    row.temperature = std::exp(3 * normal(random));
    row.min_p = std::exp(-std::abs(8 * normal(random)));
    const float max = 20 * normal(random);
    const long double share = std::max(std::log(static_cast<long double>(row.min_p)),
                                       -44 * std::log(2.0L));  // a lower weight rounds to 0
    const auto distance = static_cast<double>(-row.temperature * share);
    const double border = max - distance, slack = Slack(distance, max);
    ASSERT_GE(LeastKept(row, max), border - slack);
    ASSERT_LT(Below(LeastKept(row, max)), border + slack);
  }
  SampleRow row = PlainRow();
  row.min_p = 1;
  EXPECT_EQ(LeastKept(row, 3), 3) << "every tie of the largest";
  EXPECT_EQ(LeastKept(row, kInf), kInf);
  row.temperature = 1e-40f;  // acts as kLeastTemperature
  EXPECT_EQ(ActingTemperature(row), kLeastTemperature);
  row.temperature = kLargest;
  row.min_p = 0;
  EXPECT_EQ(LeastKept(row, -kLargest), -kLargest) << "above -inf";
}

SigmaSums SumsOf(const std::vector<float>& row, float max) {
  SigmaSums sums = {};
  for (const float x : row) {
    const double below = BelowMax(max, x);
    sums.below += below;
    sums.squares += below * below;
    if (x > -kInf) ++sums.count;
  }
  return sums;
}

TEST(BordersTest, SigmaIsThatOfTheRowsFiniteLogits) {
  SampleRow row = PlainRow();
  row.top_n_sigma = 1.5f;
  EXPECT_EQ(SigmaBorder(row, 2, SumsOf({2, 0}, 2)), 0.5f);
  EXPECT_EQ(SigmaBorder(row, 2, SumsOf({2, -kInf, 0, -kInf}, 2)), 0.5f);
  EXPECT_EQ(SigmaBorder(row, 7, SumsOf({7, 7, 7}, 7)), 7) << "sigma is 0";
  row.top_n_sigma = kLargest;
  EXPECT_EQ(SigmaBorder(row, 2, SumsOf({2, 0}, 2)), -kLargest);

  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 1000; ++i) {
    std::vector<float> x(random() % 1000 + 1);
    const float scale = std::exp(5 * normal(random));
    for (float& each : x) each = scale * normal(random);
    const float max = *std::ranges::max_element(x);
    long double mean = 0, variance = 0;
    for (const float each : x) mean += each;
    mean /= static_cast<long double>(x.size());
    for (const float each : x) variance += (each - mean) * (each - mean);
    variance /= static_cast<long double>(x.size());
    row.top_n_sigma = std::exp(normal(random));
    const auto distance = static_cast<double>(row.top_n_sigma * std::sqrt(variance));
    // Some hundred roundings of sums of equal signs, and a difference of like size.
    const double border = max - distance, slack = 1e-11 * (distance + std::abs(max));
    const float got = SigmaBorder(row, max, SumsOf(x, max));
    ASSERT_GE(got, border - slack);
    ASSERT_LT(Below(got), border + slack);
  }
}

TEST(BordersTest, AVarianceThatRoundsBelowZeroCountsAsZero) {
  SampleRow row = PlainRow();
  row.top_n_sigma = 1e9f;
  // The variance of three equal distances is only what is rounded.
  std::mt19937_64 random(6);
  std::uniform_real_distribution<double> uniform;
  int below_zero = 0;
  for (int i = 0; i < 1000; ++i) {
    const double d = uniform(random);
    const SigmaSums sums = {.below = 3 * d, .squares = 3 * (d * d), .count = 3};
    const double mean = sums.below / 3;
    if (std::fma(-mean, mean, sums.squares / 3) >= 0) continue;
    ++below_zero;
    ASSERT_EQ(SigmaBorder(row, 5, sums), 5);
  }
  EXPECT_GT(below_zero, 0);
}

// ---- log-probabilities

TEST(LogprobOfTest, InfiniteLogitsShareTheMass) {
  EXPECT_DOUBLE_EQ(LogprobOf(1, 3, 0.5, std::log(4.0)), -4 - std::log(4.0));
  EXPECT_EQ(LogprobOf(-kInf, 3, 0.5, 1), -kInf);
  EXPECT_DOUBLE_EQ(LogprobOf(kInf, kInf, 0.5, std::log(3.0)), -std::log(3.0));
  EXPECT_EQ(LogprobOf(1e30f, kInf, 0.5, std::log(3.0)), -kInf);
}

}  // namespace
}  // namespace logitd::testing
