#include "kernels/sampling_rules.h"

#include <gtest/gtest.h>

#include <limits>

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

}  // namespace
}  // namespace logitd::testing
