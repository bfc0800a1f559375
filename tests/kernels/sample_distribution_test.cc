// Tokens are drawn at their true rates: chi-square over 2^20 draws for every filter, and the far
// tail.
//
// Every chi-square test here rings falsely once in a million: seeds are fixed, so a test that
// passes once always does, until the code or the seed changes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/draw.h"
#include "kernels/sample.h"
#include "tests/kernels/chi_square.h"
#include "tests/kernels/cpu_test.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_reference.h"

namespace logitd::testing {
namespace {

constexpr double kFalseAlarm = 1e-6;
// A sanitizer looks for other faults, at a tenth of the speed.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kDraws = int64_t{1} << 16;
#else
constexpr int64_t kDraws = int64_t{1} << 20;
#endif
constexpr int64_t kBatchRows = 256;  // whose copies stay in the cache

TEST(ChiSquareTailTest, AgreesWithTables) {
  EXPECT_NEAR(ChiSquareTail(3.841459, 1), 0.05, 1e-7);
  EXPECT_NEAR(ChiSquareTail(18.307038, 10), 0.05, 1e-7);
  EXPECT_NEAR(ChiSquareTail(29.588298, 10), 0.001, 1e-8);
  EXPECT_NEAR(ChiSquareTail(2.0, 2), std::exp(-1.0), 1e-12);
}

class SampleDistributionTest : public CpuTest {
 protected:
  // How often each token comes in `draws` draws at positions 0, 1, ... of `seed`. -1s are not
  // expected.
  std::vector<int64_t> Count(const std::vector<float>& logits, SampleBatch batch, int64_t draws) {
    const auto vocab = static_cast<int64_t>(logits.size());
    HostTensor tensor(DType::kF32, kBatchRows, vocab, vocab, 0);
    for (int64_t r = 0; r < kBatchRows; ++r) {
      for (int64_t c = 0; c < vocab; ++c) tensor.Set(r, c, logits[c]);
    }
    batch.rows.resize(kBatchRows, batch.rows[0]);
    std::vector<int64_t> counts(vocab);
    for (int64_t first = 0; first < draws; first += kBatchRows) {
      for (int64_t r = 0; r < kBatchRows; ++r) batch.rows[r].position = first + r;
      const SampleAnswer got = runner_->Sample(tensor, batch).value();
      for (int32_t token : got.tokens) ++counts.at(token);
    }
    return counts;
  }

  // Draws a row 2^20 times and compares with `p`; what has probability 0 must not come at all.
  void ExpectDistribution(const std::string& name, const std::vector<float>& logits,
                          const SampleBatch& batch, const std::vector<double>& p) {
    ExpectCounts(name, Count(logits, batch, kDraws), p);
  }

  // Compares how often tokens came with `p`; what has probability 0 must not come at all.
  void ExpectCounts(const std::string& name, const std::vector<int64_t>& counts,
                    const std::vector<double>& p) {
    const auto draws =
        static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    double chi_square = 0, pooled_want = 0, pooled_got = 0;
    int cells = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      const double want = p[i] * draws;
      if (p[i] == 0) {
        EXPECT_EQ(counts[i], 0) << name << ": token " << i << " cannot come";
      } else if (want < 10) {  // too rare for the chi-square's normal cells
        pooled_want += want;
        pooled_got += static_cast<double>(counts[i]);
      } else {
        chi_square += std::pow(static_cast<double>(counts[i]) - want, 2) / want;
        ++cells;
      }
    }
    if (pooled_want >= 5) {
      chi_square += std::pow(pooled_got - pooled_want, 2) / pooled_want;
      ++cells;
    }
    ASSERT_GT(cells, 1) << name;
    EXPECT_GT(ChiSquareTail(chi_square, cells - 1), kFalseAlarm)
        << name << ": chi-square " << chi_square << " of " << cells << " cells";
  }
};

TEST_F(SampleDistributionTest, FiltersByHand) {
  for (const FilterCase& c : FilterCases()) {
    SampleBatch batch{.rows = {PlainRow()}};
    batch.rows[0].seed = 2024;
    c.change(batch.rows[0]);
    std::vector<double> p = c.weights;
    double sum = 0;
    for (double w : p) sum += w;
    for (double& w : p) w /= sum;
    ExpectDistribution(c.name, FilterCaseLogits(), batch, p);
  }
}

// Over keys, and over what comes before, a watermark changes no rate.
TEST_F(SampleDistributionTest, WatermarksKeepTheRatesOfTokens) {
  const std::vector<float> logits = FilterCaseLogits();
  const auto vocab = static_cast<int64_t>(logits.size());
  HostTensor tensor(DType::kF32, kBatchRows, vocab, vocab, 0);
  for (int64_t r = 0; r < kBatchRows; ++r) {
    for (int64_t c = 0; c < vocab; ++c) tensor.Set(r, c, logits[c]);
  }
  constexpr int32_t kWidth = 9;  // 6^9 contexts
  for (const FilterCase& c : FilterCases()) {
    if (std::string_view(c.name).starts_with("xtc half")) continue;  // its coin is the seed's
    double sum = 0;
    for (double w : c.weights) sum += w;
    std::vector<double> p = c.weights;
    for (double& w : p) w /= sum;
    for (const bool by_key : {true, false}) {
      std::vector<int64_t> counts(vocab);
      for (int64_t first = 0; first < kDraws / 8; first += kBatchRows) {
        SampleBatch batch;
        for (int64_t r = 0; r < kBatchRows; ++r) {
          SampleRow row = PlainRow();
          c.change(row);
          row.watermark_key = static_cast<uint64_t>(by_key ? first + r : 2024);
          row.watermark_width = kWidth;
          row.first_history = static_cast<int64_t>(batch.history.size());
          row.history_count = by_key ? 0 : kWidth;
          for (int64_t i = 0, left = first + r; i < row.history_count; ++i, left /= vocab)
            batch.history.push_back(static_cast<int32_t>(left % vocab));
          batch.rows.push_back(row);
        }
        const SampleAnswer got = runner_->Sample(tensor, batch).value();
        for (int32_t token : got.tokens) ++counts.at(token);
      }
      ExpectCounts(absl::StrFormat("%s by %s", c.name, by_key ? "key" : "context"), counts, p);
    }
  }
}

// Many tokens, over two cells, against the reference's probabilities.
TEST_F(SampleDistributionTest, EditsAndFiltersOverSeveralCells) {
  const int64_t vocab = 1500;
  HostTensor row(DType::kF32, 1, vocab, vocab, 0);
  FillRow(row, 0, Fill::kNormal, 9);
  const std::vector<float> logits = RowOf(row, 0);
  struct Case {
    const char* name;
    void (*change)(SampleRow&);
  };
  const std::vector<Case> cases = {
      {"unfiltered", [](SampleRow&) {}},
      {"everything",
       [](SampleRow& row) {
         row.temperature = 1.2f;
         row.top_k = 500;
         row.top_p = 0.95f;
         row.min_p = 1e-3f;
         row.repetition = 1.3f;
         row.presence = 0.2f;
         row.frequency = 0.1f;
         row.history_count = 300;
         row.bias_count = 2;
         row.first_mask_word = 0;
       }},
      {"flat_top_p",
       [](SampleRow& row) {
         row.temperature = 3;
         row.top_p = 0.9f;
       }},
  };
  std::mt19937_64 random(4);
  SampleBatch batch{.rows = {PlainRow()}, .bias = {{3, 4.0f}, {1200, -kInf}}};
  for (int i = 0; i < 300; ++i) batch.history.push_back(static_cast<int32_t>(random() % 100));
  for (int64_t w = 0; w < MaskWords(vocab); ++w) {
    batch.mask_words.push_back(static_cast<uint32_t>(random()));
  }
  for (const Case& c : cases) {
    batch.rows = {PlainRow()};
    batch.rows[0].seed = 99;
    c.change(batch.rows[0]);
    ExpectDistribution(c.name, logits, batch,
                       ReferenceSample(logits, batch.rows[0], batch).Probabilities());
  }
}

// 2048 tokens of 2^-26 each next to a heavy one: too rare to test one by one, but together they
// have 2^-15, of which 2^20 draws hold 32. The heavy token is in the cell of half of them, so a sum
// in f32, or weights cut at 2^-24, loses those.
TEST_F(SampleDistributionTest, TailTokensComeAtTheirTrueRate) {
  std::vector<float> logits(1 + 2048, -26 * std::log(2.0f));
  logits[500] = 0;
  SampleBatch batch{.rows = {PlainRow()}};
  batch.rows[0].seed = 5;
  const double draws = static_cast<double>(kDraws);
  for (const bool filtered : {false, true}) {
    batch.rows[0].min_p = filtered ? 0x1p-30f : 0;
    const std::vector<int64_t> counts = Count(logits, batch, kDraws);
    const double tail = 2048 * 0x1p-26 / (1 + 2048 * 0x1p-26) * draws;
    const double here = tail * 1023 / 2048;
    const double got = draws - static_cast<double>(counts[500]);
    double got_here = -static_cast<double>(counts[500]);
    for (int i = 0; i < 1024; ++i) got_here += static_cast<double>(counts[i]);
    const double chi_square = std::pow(got_here - here, 2) / here +
                              std::pow(got - got_here - (tail - here), 2) / (tail - here);
    EXPECT_GT(ChiSquareTail(chi_square, 2), kFalseAlarm)
        << "filtered " << filtered << ": " << got_here << " of " << here << " in the heavy cell, "
        << got << " of " << tail << " in all";
  }
}

// A token with a share of 2^-26 is drawn exactly where the bits say so: at positions of seed 7
// whose bits are on either side of the token's border, found once by trying 2^28 of them.
TEST_F(SampleDistributionTest, ATokenOfTwoToTheMinus26IsDrawnWhereItsBitsSaySo) {
  struct Place {
    uint64_t position, bits;
  };
  // Among all positions below 2^28, those with bits below 2^39 or in the last 2^39.
  constexpr Place kPlaces[] = {
      {168868563, 0x000000072ee0f88e}, {13061623, 0x000000156503af35},
      {232449661, 0x00000016a70fe553}, {255684751, 0x00000031bfc34d89},
      {169703559, 0x00000037386866d9}, {58386680, 0x0000004b8d335c2f},
      {19583770, 0x000000655d7349a0},  {254072581, 0x00000073c2eb8c71},
      {122675293, 0x00000073e11f04a5}, {161866831, 0x0000007fae4ad49e},
      {25266344, 0xffffff86a41caba6},  {163098141, 0xffffff8c3529ddb8},
      {161115296, 0xffffff976e86189f}, {44848615, 0xffffffadb0abad0f},
      {151919219, 0xffffffb55e6354bc}, {45545258, 0xffffffb5a73864d4},
      {185016467, 0xffffffd70978a013},
  };
  const double share = 0x1p-26 / (1 + 0x1p-26);
  const float rare = -26 * std::log(2.0f);
  int first_drawn = 0, last_drawn = 0;
  for (const auto& [position, bits] : kPlaces) {
    ASSERT_EQ(UniformBits(7, position), bits);
    const double reach = std::ldexp(static_cast<double>(bits), -64);
    const double left = std::ldexp(static_cast<double>(~bits), -64);
    for (const bool filtered : {false, true}) {
      // In one cell, and in two.
      for (const int64_t vocab : {int64_t{2}, int64_t{3000}}) {
        HostTensor tensor(DType::kF32, 2, vocab, vocab, 0);
        for (int64_t c = 0; c < vocab; ++c) {
          tensor.Set(0, c, c == 0 ? rare : c + 1 == vocab ? 0 : -kInf);
          tensor.Set(1, c, c == 0 ? 0 : c + 1 == vocab ? rare : -kInf);
        }
        SampleBatch batch{.rows = {PlainRow(), PlainRow()}};
        for (SampleRow& row : batch.rows) {
          row.seed = 7;
          row.position = position;
          row.min_p = filtered ? 0x1p-30f : 0;
        }
        const SampleAnswer got = runner_->Sample(tensor, batch).value();
        EXPECT_EQ(got.tokens[0] == 0, reach < share) << position << " filtered " << filtered;
        EXPECT_EQ(got.tokens[1] != 0, left < share) << position << " filtered " << filtered;
      }
    }
    first_drawn += reach < share;
    last_drawn += left < share;
  }
  // 4 are expected at each end; 0 comes once in 54, more than 15 once in 10^5.
  EXPECT_TRUE(first_drawn >= 1 && first_drawn <= 15) << first_drawn;
  EXPECT_TRUE(last_drawn >= 1 && last_drawn <= 15) << last_drawn;
}

// Different seeds, one position: as good as one seed and many positions.
TEST_F(SampleDistributionTest, SeedsAreIndependent) {
  HostTensor tensor(DType::kF32, kBatchRows, 4, 4, 0);
  for (int64_t r = 0; r < kBatchRows; ++r) {
    for (int64_t c = 0; c < 4; ++c) tensor.Set(r, c, 1.0f);
  }
  SampleBatch batch;
  batch.rows.resize(kBatchRows, PlainRow());
  // Pairs of neighbouring seeds' tokens: 16 cells.
  std::vector<double> pairs(16);
  for (int64_t first = 0; first < kDraws; first += kBatchRows) {
    for (int64_t r = 0; r < kBatchRows; ++r) batch.rows[r].seed = first + r;
    const SampleAnswer got = runner_->Sample(tensor, batch).value();
    for (int64_t r = 0; r < kBatchRows; r += 2) ++pairs[got.tokens[r] * 4 + got.tokens[r + 1]];
  }
  double chi_square = 0;
  const double want = kDraws / 2 / 16.0;
  for (double got : pairs) chi_square += (got - want) * (got - want) / want;
  EXPECT_GT(ChiSquareTail(chi_square, 15), kFalseAlarm);
}

// The draws of one row: as good as many positions, and neighbours independent of each other.
TEST_F(SampleDistributionTest, DrawsOfARowAreIndependent) {
  struct Case {
    const char* name;
    void (*change)(SampleRow&);
    std::vector<double> p;
  };
  const std::vector<Case> cases = {
      {"unfiltered",
       [](SampleRow&) {},
       {4 / 32.0, 16 / 32.0, 1 / 32.0, 8 / 32.0, 2 / 32.0, 1 / 32.0}},
      {"top_k", [](SampleRow& row) { row.top_k = 3; }, {4 / 28.0, 16 / 28.0, 0, 8 / 28.0, 0, 0}}};
  const auto vocab = static_cast<int64_t>(FilterCaseLogits().size());
  HostTensor tensor(DType::kF32, kBatchRows, vocab, vocab, 0);
  SampleBatch batch;
  for (int64_t r = 0; r < kBatchRows; ++r) {
    for (int64_t c = 0; c < vocab; ++c) tensor.Set(r, c, FilterCaseLogits()[c]);
    batch.rows.push_back(PlainRow());
    batch.rows[r].seed = 77;
    batch.rows[r].draws = kMaxDraws;
    batch.rows[r].first_draw_entry = r * kMaxDraws;
  }
  batch.draw_entries = kBatchRows * kMaxDraws;
  for (const Case& c : cases) {
    std::vector<double> pairs(vocab * vocab);
    for (int64_t first = 0; first < kDraws; first += batch.draw_entries) {
      for (int64_t r = 0; r < kBatchRows; ++r) {
        c.change(batch.rows[r]);
        batch.rows[r].position = first / kMaxDraws + r;
      }
      const SampleAnswer got = runner_->Sample(tensor, batch).value();
      for (int64_t i = 0; i < batch.draw_entries; i += 2)
        ++pairs[got.draw_tokens[i] * vocab + got.draw_tokens[i + 1]];
    }
    const double count = std::accumulate(pairs.begin(), pairs.end(), 0.0);
    double chi_square = 0;
    int cells = 0;
    for (int64_t i = 0; i < vocab * vocab; ++i) {
      const double want = c.p[i / vocab] * c.p[i % vocab] * count;
      if (want == 0) {
        EXPECT_EQ(pairs[i], 0) << c.name;
        continue;
      }
      ASSERT_GE(want, 10) << c.name;
      chi_square += (pairs[i] - want) * (pairs[i] - want) / want;
      ++cells;
    }
    EXPECT_GT(ChiSquareTail(chi_square, cells - 1), kFalseAlarm) << c.name << " " << chi_square;
  }
}

}  // namespace
}  // namespace logitd::testing
