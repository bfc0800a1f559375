// verify on the CPU backend, and what CheckVerify says.
#include "kernels/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/draw.h"
#include "tests/kernels/chi_square.h"
#include "tests/kernels/cpu_test.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_reference.h"
#include "tests/kernels/verify_cases.h"

namespace logitd::testing {
namespace {

class VerifyCpuTest : public CpuTest {};
const bool kRegistered = RegisterChecks<VerifyCpuTest>("VerifyCpuTest", VerifyChecks());

HostTensor Tensor(const std::vector<std::vector<float>>& rows) {
  HostTensor tensor(DType::kF32, rows.size(), rows[0].size(), rows[0].size(), 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t c = 0; c < rows[r].size(); ++c) tensor.Set(r, c, rows[r][c]);
  }
  return tensor;
}

// Seed 0, position 0: coin 0.6055, bits 0.8805.
struct VerifyClaim {
  const char* name;
  std::vector<float> target;  // logits of the row with the draft
  int32_t draft;
  DraftKind kind;
  std::vector<float> q;
  float temperature = 1;
  int32_t accepted;
  int32_t token;
};

TEST_F(VerifyCpuTest, KeepsEveryClaim) {
  ASSERT_NEAR(std::ldexp(CoinBits(0, 0), -64), 0.6055, 1e-4);
  const float ln2 = std::log(2.0f);
  const std::vector<VerifyClaim> claims = {
      // clang-format off
      {.name = "a draft more likely than drafted is accepted", .target = {0, 0},
       .kind = DraftKind::kDense, .q = {0.25f, 0.75f}, .accepted = 1, .token = 0},
      {.name = "a ratio above the coin is accepted", .target = {0, 0}, .kind = DraftKind::kDense,
       .q = {0.8f, 0.2f}, .accepted = 1, .token = 0},
      {.name = "a ratio below the coin is refused", .target = {0, 0}, .kind = DraftKind::kDense,
       .q = {0.9f, 0.1f}, .accepted = 0, .token = 1},
      // p is 1/4, 1/4, 1/2; what q left is 1/3 and 2/3 of the last two, and the bits are 0.8805.
      {.name = "a refused draft is replaced from what q left", .target = {0, 0, ln2},
       .kind = DraftKind::kDense, .q = {1, 0, 0}, .accepted = 0, .token = 2},
      {.name = "a draft outside the support is refused", .target = {-kInf, 0},
       .kind = DraftKind::kDense, .q = {0.01f, 0.99f}, .accepted = 0, .token = 1},
      {.name = "a greedy target accepts its own token", .target = {1, 2}, .draft = 1,
       .kind = DraftKind::kDense, .q = {0.5f, 0.5f}, .temperature = 0, .accepted = 1, .token = 1},
      {.name = "a greedy target refuses any other token", .target = {1, 2},
       .kind = DraftKind::kDense, .q = {0.99f, 0.01f}, .temperature = 0, .accepted = 0, .token = 1},
      // The bits point at token 1.
      {.name = "a greedy draft is accepted if sample draws it", .target = {0, 0}, .draft = 1,
       .kind = DraftKind::kGreedy, .accepted = 1, .token = 1},
      {.name = "a greedy draft is refused if sample draws another", .target = {0, 0},
       .kind = DraftKind::kGreedy, .accepted = 0, .token = 1},
      {.name = "a q of NaN counts as 0", .target = {0, 0}, .kind = DraftKind::kDense,
       .q = {kNan, 1}, .accepted = 1, .token = 0},
      // clang-format on
  };
  for (const VerifyClaim& claim : claims) {
    SampleBatch batch{.rows = {PlainRow(), PlainRow()}};
    batch.rows[0].temperature = claim.temperature;
    VerifyBatch verify{.drafts = {{.token = claim.draft, .kind = claim.kind}, {}},
                       .draft_probs = claim.q,
                       .sequences = {{.first_row = 0, .rows = 2}}};
    std::vector<float> next(claim.target.size(), -kInf);
    next[0] = 0;  // the token after an accepted draft is 0
    auto got = runner_->Verify(Tensor({claim.target, next}), batch, verify).value();
    EXPECT_EQ(got.accepted[0], claim.accepted) << claim.name;
    EXPECT_EQ(got.rows.tokens[0], claim.token) << claim.name;
    EXPECT_EQ(got.rows.tokens[1], claim.accepted == 1 ? 0 : -1) << claim.name;
    EXPECT_EQ(got.rows.status[1].code, claim.accepted == 1 ? RowCode::kOk : RowCode::kNotReached)
        << claim.name;
  }
}

TEST_F(VerifyCpuTest, ARefusedRowEndsItsSequenceAndNoOther) {
  SampleBatch batch;
  batch.rows.resize(5, PlainRow());
  for (SampleRow& row : batch.rows) {
    row.want_support = 1;
    row.first_support_entry = batch.support_entries++;
  }
  const VerifyDraft zero{.token = 0};
  const VerifyBatch verify{.drafts = {zero, zero, zero, zero, zero},
                           .sequences = {{.first_row = 0, .rows = 3}, {.first_row = 3, .rows = 2}}};
  const auto got =
      runner_
          ->Verify(Tensor({{9, -kInf}, {kNan, 0}, {0, 0}, {9, -kInf}, {9, -kInf}}), batch, verify)
          .value();
  EXPECT_EQ(got.accepted, (std::vector<int32_t>{1, 1}));
  EXPECT_EQ(got.rows.tokens, (std::vector<int32_t>{0, -1, -1, 0, 0}));
  EXPECT_EQ(got.rows.support_size, (std::vector<int32_t>{1, 0, 0, 1, 1}));
  EXPECT_EQ(got.rows.support_ids, (std::vector<int32_t>{0, -1, -1, 0, 0}));
  EXPECT_EQ(got.rows.status[1].code, RowCode::kNanLogit);
  EXPECT_EQ(got.rows.status[2].code, RowCode::kNotReached);
  EXPECT_EQ(got.rows.status[4].code, RowCode::kOk);
}

// With greedy drafts the tokens are those of sample row by row, whatever the parameters.
TEST_F(VerifyCpuTest, GreedyDraftsGiveTheTokensOfSample) {
  for (const int64_t vocab : {5, 1000, 5000}) {
    const int64_t rows = 90;
    HostTensor tensor(DType::kF32, rows, vocab, vocab + 1, 1);
    SampleBatch batch;
    std::mt19937_64 random(vocab);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 11);
      AddRandomRow(batch, vocab, random);
      batch.rows.back().draws = 0;
      batch.rows.back().active = 1;
      batch.rows.back().temperature = std::max(batch.rows.back().temperature, 0.0f);
    }
    const SampleAnswer sampled = runner_->Sample(tensor, batch).value();
    VerifyBatch verify;
    for (int64_t r = 0; r < rows; ++r) {
      const bool right = random() % 3 != 0 && sampled.tokens[r] >= 0;
      verify.drafts.push_back(
          {.token = static_cast<int32_t>(right ? sampled.tokens[r] : random() % vocab)});
    }
    for (int64_t first = 0; first < rows;) {
      const auto count = static_cast<int32_t>(std::min<int64_t>(rows - first, 1 + random() % 6));
      verify.sequences.push_back({.first_row = first, .rows = count});
      first += count;
    }
    const VerifyAnswer got = runner_->Verify(tensor, batch, verify).value();
    for (size_t s = 0; s < verify.sequences.size(); ++s) {
      const VerifySequence& sequence = verify.sequences[s];
      int32_t want = 0;
      while (want + 1 < sequence.rows && verify.drafts[sequence.first_row + want].token ==
                                             sampled.tokens[sequence.first_row + want]) {
        ++want;
      }
      ASSERT_EQ(got.accepted[s], want) << "vocab " << vocab << " sequence " << s;
      for (int64_t r = sequence.first_row; r < sequence.first_row + sequence.rows; ++r) {
        if (r <= sequence.first_row + want) {
          EXPECT_EQ(SampleBits(got.rows, batch.rows[r], r), SampleBits(sampled, batch.rows[r], r));
        } else {
          EXPECT_EQ(got.rows.status[r].code, RowCode::kNotReached);
          EXPECT_EQ(got.rows.tokens[r], -1);
        }
      }
    }
  }
}

// Drafts of every kind, from a flat q.
TEST_F(VerifyCpuTest, ATopKThatKeepsAllHasTheBitsOfNone) {
  constexpr DraftKind kKinds[] = {DraftKind::kGreedy, DraftKind::kList, DraftKind::kDense};
  for (const int64_t vocab : {5, 1000, 5000}) {
    const int64_t rows = 90;
    HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
    SampleBatch batch;
    VerifyBatch verify;
    verify.draft_probs.assign(vocab, 1 / static_cast<float>(vocab));
    verify.draft_ids.resize(vocab);
    std::iota(verify.draft_ids.begin(), verify.draft_ids.end(), 0);
    std::mt19937_64 random(vocab);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 11);
      AddRandomRow(batch, vocab, random);
      batch.rows.back().draws = 0;
      batch.rows.back().active = 1;
      batch.rows.back().temperature = std::max(batch.rows.back().temperature, 0.0f);
      verify.drafts.push_back({.token = static_cast<int32_t>(random() % vocab),
                               .count = static_cast<int32_t>(vocab),
                               .kind = kKinds[r % 3]});
      if (r % 2 == 0) verify.sequences.push_back({.first_row = r, .rows = 2});
    }
    std::vector<std::string> want(rows);
    for (const int32_t top_k : TopKsOff(vocab)) {
      for (SampleRow& row : batch.rows) row.top_k = top_k;
      const VerifyAnswer got = runner_->Verify(tensor, batch, verify).value();
      for (int64_t r = 0; r < rows; ++r) {
        std::string bits = SampleBits(got.rows, batch.rows[r], r);
        if (top_k == 0) want[r] = bits;
        EXPECT_EQ(bits, want[r]) << "vocab " << vocab << " row " << r << " top_k " << top_k;
      }
    }
  }
}

// The entropies of a row are those of what `sample` draws from, whatever its draft.
TEST_F(VerifyCpuTest, EntropiesAreThoseOfTheTarget) {
  for (const int64_t vocab : {5, 1000, 5000}) {
    const int64_t rows = 60;
    HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
    SampleBatch batch;
    VerifyBatch verify;
    verify.draft_probs.assign(vocab, 1 / static_cast<float>(vocab));
    std::mt19937_64 random(vocab);
    for (int64_t r = 0; r < rows; ++r) {
      FillRow(tensor, r, Fill::kNormal, 11);
      AddRandomRow(batch, vocab, random);
      batch.rows.back().draws = 0;
      batch.rows.back().active = 1;
      batch.rows.back().temperature = std::max(batch.rows.back().temperature, 0.0f);
      batch.rows.back().want_entropy = true;
      verify.drafts.push_back(
          {.token = static_cast<int32_t>(random() % vocab), .kind = DraftKind::kDense});
      if (r % 2 == 0) verify.sequences.push_back({.first_row = r, .rows = 2});
    }
    const SampleAnswer sampled = runner_->Sample(tensor, batch).value();
    const SampleAnswer got = runner_->Verify(tensor, batch, verify).value().rows;
    for (int64_t r = 0; r < rows; ++r) {
      if (got.status[r].code == RowCode::kNotReached) {
        EXPECT_TRUE(std::isnan(got.entropies[r]) && std::isnan(got.raw_entropies[r]));
      } else if (got.status[r].code == RowCode::kOk) {
        EXPECT_NEAR(got.entropies[r], sampled.entropies[r], 1e-5) << "vocab " << vocab;
        EXPECT_EQ(got.raw_entropies[r], sampled.raw_entropies[r]) << "vocab " << vocab;
      }
    }
  }
}

struct DistributionCase {
  const char* name;
  DraftKind kind;
  void (*change)(SampleRow&);
  bool peaked;  // q is far from p
};

// 2^20 sequences of two drafts from q. The first token has distribution p, so has the second where
// the first draft was accepted, and so on. Drafts are accepted at the rate sum min(p, q). Each test
// fails falsely once in a million.
TEST_F(VerifyCpuTest, TheTargetsDistributionIsUnchanged) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int64_t kSequences = int64_t{1} << 15;
#else
  constexpr int64_t kSequences = int64_t{1} << 20;
#endif
  constexpr int64_t kBatch = 1024, kVocab = 12, kRows = 3;
  const std::vector<DistributionCase> cases = {
      {"dense", DraftKind::kDense, [](SampleRow&) {}, false},
      {"dense filtered", DraftKind::kDense,
       [](SampleRow& row) {
         row.temperature = 0.8f;
         row.top_k = 6;
         row.top_p = 0.9f;
       },
       true},
      {"list", DraftKind::kList, [](SampleRow& row) { row.min_p = 0.05f; }, false},
      {"list with top_n_sigma", DraftKind::kList, [](SampleRow& row) { row.top_n_sigma = 1.5f; },
       false},
      {"dense with typical_p", DraftKind::kDense,
       [](SampleRow& row) {
         row.temperature = 2;
         row.typical_p = 0.6f;
       },
       false},
      {"greedy", DraftKind::kGreedy, [](SampleRow&) {}, true},
  };
  for (const DistributionCase& c : cases) {
    std::mt19937_64 random(77);
    const auto uniform = [&random] { return static_cast<double>(random() >> 11) * 0x1p-53; };
    HostTensor tensor(DType::kF32, kBatch * kRows, kVocab, kVocab, 0);
    std::vector<std::vector<float>> logits(kRows, std::vector<float>(kVocab));
    std::vector<std::vector<double>> p;
    SampleBatch batch;
    for (std::vector<float>& row : logits) {
      for (float& x : row) x = static_cast<float>(4 * uniform());
    }
    for (int64_t r = 0; r < kBatch * kRows; ++r) {
      for (int64_t i = 0; i < kVocab; ++i) tensor.Set(r, i, logits[r % kRows][i]);
      batch.rows.push_back(PlainRow());
      batch.rows.back().seed = 31;
      c.change(batch.rows.back());
    }
    for (const std::vector<float>& row : logits) {
      p.push_back(ReferenceSample(row, batch.rows[0], batch).Probabilities());
    }
    // One q for all: a softmax of other numbers, over every second token where it is a list.
    std::vector<float> q(kVocab);
    for (int64_t i = 0; i < kVocab; ++i) {
      const double drafted = std::exp((c.peaked ? 6 : 2) * uniform());
      q[i] = c.kind == DraftKind::kList && i % 2 == 1 ? 0.0f : static_cast<float>(drafted);
    }
    const float q_sum = std::accumulate(q.begin(), q.end(), 0.0f);
    for (float& x : q) x /= q_sum;
    VerifyBatch verify{.draft_probs = q};
    if (c.kind == DraftKind::kList) {
      verify.draft_probs.clear();
      for (int32_t i = 0; i < kVocab; i += 2) {
        verify.draft_ids.push_back(i);
        verify.draft_probs.push_back(q[i]);
      }
    }
    const auto count = static_cast<int32_t>(verify.draft_ids.size());
    verify.drafts.resize(kBatch * kRows, {.count = count, .kind = c.kind});
    for (int64_t s = 0; s < kBatch; ++s) {
      verify.sequences.push_back({.first_row = s * kRows, .rows = kRows});
    }
    std::vector<std::vector<double>> counts(kRows, std::vector<double>(kVocab));
    std::vector<double> tried(kRows), accepted(kRows);
    for (int64_t first = 0; first < kSequences; first += kBatch) {
      for (int64_t r = 0; r < kBatch * kRows; ++r) {
        batch.rows[r].position = first * kRows + r;
        double reach = uniform();
        int32_t draft = 0;
        while (draft + 1 < kVocab && (reach -= q[draft]) >= 0) ++draft;
        while (q[draft] == 0) --draft;
        verify.drafts[r].token = draft;
      }
      const VerifyAnswer got = runner_->Verify(tensor, batch, verify).value();
      for (int64_t s = 0; s < kBatch; ++s) {
        for (int32_t i = 0; i <= got.accepted[s]; ++i) {
          ++counts[i][got.rows.tokens[s * kRows + i]];
          ++tried[i];
          accepted[i] += i < got.accepted[s];
        }
      }
    }
    for (int64_t i = 0; i < kRows; ++i) {
      double chi_square = 0, overlap = 0;
      int cells = 0;
      for (int64_t t = 0; t < kVocab; ++t) {
        const double want = p[i][t] * tried[i];
        overlap += c.kind == DraftKind::kGreedy ? p[i][t] * q[t] : std::min(p[i][t], double{q[t]});
        if (want == 0) {
          EXPECT_EQ(counts[i][t], 0) << c.name << " token " << t;
          continue;
        }
        chi_square += (counts[i][t] - want) * (counts[i][t] - want) / want;
        ++cells;
      }
      EXPECT_GT(ChiSquareTail(chi_square, cells - 1), 1e-6) << c.name << " place " << i;
      if (i + 1 == kRows) continue;
      const double want = overlap * tried[i];
      const double off = accepted[i] - want;
      EXPECT_GT(ChiSquareTail(off * off / want + off * off / (tried[i] - want), 1), 1e-6)
          << c.name << " place " << i << ": accepted " << accepted[i] << " of " << want;
    }
  }
}

// Tokens and drafts of Markov chains: row t is after token t, and the first row is after token 0.
struct Chain {
  const char* name;
  void (*change)(SampleRow&);
  DraftKind kind;
};

constexpr int kChainVocab = 3, kChainDrafts = 3;
constexpr float kChainLogits[kChainVocab][kChainVocab] = {{0, 1, -1}, {0.5f, -1, 1}, {1, 0, 0.3f}};
constexpr double kDenseQ[kChainVocab][kChainVocab] = {
    {0.5, 0.25, 0.25}, {0.25, 0.625, 0.125}, {0.125, 0.375, 0.5}};
constexpr double kListQ[kChainVocab][kChainVocab] = {
    {0.75, 0, 0.25}, {0.5, 0, 0.5}, {0.125, 0, 0.875}};

// Three tokens: accepted drafts, the bonus token, and where these are fewer more tokens from the
// target. Their joint distribution is the target's. Drafts are accepted as often as the formula
// says, which is more often than token by token. Each test fails falsely once in a million.
TEST_F(VerifyCpuTest, BlockVerificationKeepsTheJointDistributionAndAcceptsMore) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int64_t kSequences = int64_t{1} << 14;
#else
  constexpr int64_t kSequences = int64_t{1} << 18;
#endif
  constexpr int64_t kBatch = 1024, kRows = kChainDrafts + 1, kTriples = 27;
  const std::vector<Chain> chains = {
      {"dense", [](SampleRow&) {}, DraftKind::kDense},
      {"list", [](SampleRow& row) { row.temperature = 0.6f; }, DraftKind::kList},
      {"dense with top_k", [](SampleRow& row) { row.top_k = 2; }, DraftKind::kDense}};
  for (const Chain& chain : chains) {
    SCOPED_TRACE(chain.name);
    const auto& q_rows = chain.kind == DraftKind::kList ? kListQ : kDenseQ;
    SampleBatch batch;
    VerifyBatch verify;
    for (int64_t r = 0; r < kBatch * kRows; ++r) {
      batch.rows.push_back(PlainRow());
      batch.rows.back().seed = 41;
      chain.change(batch.rows.back());
    }
    for (int64_t s = 0; s < kBatch; ++s)
      verify.sequences.push_back({.first_row = s * kRows, .rows = kRows});
    // The probabilities of q after each token.
    for (const auto& row : q_rows) {
      for (int32_t t = 0; t < kChainVocab; ++t) {
        if (chain.kind == DraftKind::kList && row[t] == 0) continue;
        if (chain.kind == DraftKind::kList) verify.draft_ids.push_back(t);
        verify.draft_probs.push_back(static_cast<float>(row[t]));
      }
    }
    const auto per_row = static_cast<int32_t>(verify.draft_probs.size() / kChainVocab);
    std::vector<Distribution> p_rows;
    for (const auto& row : kChainLogits) {
      p_rows.push_back(
          ReferenceSample({std::begin(row), std::end(row)}, batch.rows[0], batch).Probabilities());
    }
    using Prefix = std::vector<int32_t>;
    const auto last = [](const Prefix& prefix) { return prefix.empty() ? 0 : prefix.back(); };
    const std::function<Distribution(const Prefix&)> p = [&](const Prefix& prefix) {
      return p_rows[last(prefix)];
    };
    const std::function<Distribution(const Prefix&)> q = [&](const Prefix& prefix) {
      return Distribution(std::begin(q_rows[last(prefix)]), std::end(q_rows[last(prefix)]));
    };
    std::mt19937_64 random(78);
    const auto draw = [&random](const auto& distribution) {
      double reach = static_cast<double>(random() >> 11) * 0x1p-53;
      int32_t token = -1, likely = 0;
      while (token + 1 < kChainVocab && reach >= 0) {
        reach -= distribution[++token];
        if (distribution[token] > 0) likely = token;
      }
      return likely;
    };
    HostTensor tensor(DType::kF32, kBatch * kRows, kChainVocab, kChainVocab, 0);
    double want[2], mean[2] = {0, 0}, squares[2] = {0, 0};
    for (const bool block : {false, true}) {
      SCOPED_TRACE(block ? "block" : "token by token");
      want[block] = MeanAccepted(p, q, kChainDrafts, block);
      for (VerifySequence& sequence : verify.sequences) sequence.block = block ? 1 : 0;
      std::vector<double> counts(kTriples);
      for (int64_t first = 0; first < kSequences; first += kBatch) {
        verify.drafts.clear();
        for (int64_t r = 0; r < kBatch * kRows; ++r) {
          const int32_t before = r % kRows == 0 ? 0 : verify.drafts.back().token;
          for (int64_t t = 0; t < kChainVocab; ++t) tensor.Set(r, t, kChainLogits[before][t]);
          const int64_t at = int64_t{before} * per_row;
          verify.drafts.push_back({.first_id = at,
                                   .first_prob = at,
                                   .token = draw(q_rows[before]),
                                   .count = per_row,
                                   .kind = chain.kind});
          batch.rows[r].position = static_cast<uint64_t>(first * kRows + r);
        }
        const VerifyAnswer got = runner_->Verify(tensor, batch, verify).value();
        for (int64_t s = 0; s < kBatch; ++s) {
          const auto accepted = static_cast<double>(got.accepted[s]);
          mean[block] += accepted / kSequences;
          squares[block] += accepted * accepted / kSequences;
          int32_t before = 0;
          int64_t triple = 0;
          for (int64_t i = 0; i < 3; ++i) {
            before = i <= got.accepted[s] ? got.rows.tokens[s * kRows + i] : draw(p_rows[before]);
            triple = triple * kChainVocab + before;
          }
          ++counts[triple];
        }
      }
      double chi_square = 0;
      int cells = 0;
      for (int64_t i = 0; i < kTriples; ++i) {
        const int64_t a = i / 9, b = i / 3 % 3, c = i % 3;
        const double expected = kSequences * p_rows[0][a] * p_rows[a][b] * p_rows[b][c];
        if (expected == 0) {
          EXPECT_EQ(counts[i], 0) << i;
          continue;
        }
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
        ++cells;
      }
      EXPECT_GT(ChiSquareTail(chi_square, cells - 1), 1e-6);
      const double variance = (squares[block] - mean[block] * mean[block]) / kSequences;
      const double off = mean[block] - want[block];
      EXPECT_GT(ChiSquareTail(off * off / variance, 1), 1e-6)
          << "accepted " << mean[block] << ", want " << want[block];
    }
    EXPECT_GT(want[true], want[false] + 0.01);
    EXPECT_GT(mean[true], mean[false]);
  }
}

// The example of the paper, by hand: with p = (1/3, 2/3) and q the other way round two drafts are
// accepted 2/3 + 5/9 times on average, and 2/3 + 4/9 token by token.
TEST(MeanAcceptedTest, IsThatOfThePapersExample) {
  const auto p = [](const std::vector<int32_t>&) { return Distribution{1.0 / 3, 2.0 / 3}; };
  const auto q = [](const std::vector<int32_t>&) { return Distribution{2.0 / 3, 1.0 / 3}; };
  using Next = std::function<Distribution(const std::vector<int32_t>&)>;
  EXPECT_NEAR(MeanAccepted<Next>(p, q, 2, /*block=*/true), 11.0 / 9, 1e-12);
  EXPECT_NEAR(MeanAccepted<Next>(p, q, 2, /*block=*/false), 10.0 / 9, 1e-12);
}

struct Asked {
  VerifyRequest request;
  std::vector<SampleRow> params;
  std::vector<VerifyDraft> drafts;
  std::vector<int32_t> draft_ids = {1, 5, 9};
  std::vector<float> draft_probs = std::vector<float>(10, 0.1f);
  std::vector<VerifySequence> sequences = {{.first_row = 0, .rows = 2},
                                           {.first_row = 2, .rows = 1}};
};

struct CheckCase {
  const char* name;
  std::function<void(Asked&)> change;
  std::string want;  // "" = allowed
};

TEST(CheckVerifyTest, SaysFieldRowValueAndAllowedRange) {
  const std::vector<CheckCase> cases = {
      {"greedy", [](Asked&) {}, ""},
      {"list", [](Asked& a) { a.drafts[0] = {.token = 5, .count = 3, .kind = DraftKind::kList}; },
       ""},
      {"dense", [](Asked& a) { a.drafts[0] = {.token = 9, .kind = DraftKind::kDense}; }, ""},
      {"last rows have no draft", [](Asked& a) { a.drafts[1].token = a.drafts[2].token = -9; }, ""},
      {"sample is checked too", [](Asked& a) { a.params[2].top_p = 0; },
       "top_p: got 0 at row 2, allowed > 0 and <= 1"},
      {"a draft for each row", [](Asked& a) { a.drafts.pop_back(); },
       "drafts: got 2 values, allowed 3 (rows)"},
      {"token outside the vocabulary", [](Asked& a) { a.drafts[0].token = 10; },
       "drafts: got token 10 at row 0, allowed 0..9"},
      {"unknown kind", [](Asked& a) { a.drafts[0].kind = static_cast<DraftKind>(3); },
       "draft_kind: got 3 at row 0, allowed greedy, list, dense"},
      {"empty list", [](Asked& a) { a.drafts[0].kind = DraftKind::kList; },
       "draft_count: got 0 at row 0, allowed 1..10"},
      {"list without ids",
       [](Asked& a) { a.drafts[0] = {.token = 5, .count = 4, .kind = DraftKind::kList}; },
       "draft_ids: got entries [0, 0 + 4) at row 0, allowed inside the 3 sent"},
      {"dense without all",
       [](Asked& a) { a.drafts[0] = {.first_prob = 1, .kind = DraftKind::kDense}; },
       "draft_probs: got entries [1, 1 + 10) at row 0, allowed inside the 10 sent"},
      {"list not ascending",
       [](Asked& a) {
         a.draft_ids = {1, 5, 5};
         a.drafts[0] = {.token = 5, .count = 3, .kind = DraftKind::kList};
       },
       "draft_ids: got token 5 at row 0, allowed ascending, here 6..9"},
      {"list without its token",
       [](Asked& a) { a.drafts[0] = {.token = 2, .count = 3, .kind = DraftKind::kList}; },
       "drafts: got token 2 at row 0, allowed one of its 3 draft_ids"},
      {"a watermark with a list",
       [](Asked& a) {
         a.drafts[0] = {.token = 5, .count = 3, .kind = DraftKind::kList};
         a.params[0].watermark_width = 4;
       },
       "watermark_width: got 4 at row 0, allowed 0 with a draft of kind list or dense"},
      {"a watermark with a greedy draft", [](Asked& a) { a.params[0].watermark_width = 4; }, ""},
      {"a watermark at a row without a draft",
       [](Asked& a) {
         a.drafts[0] = {.token = 9, .kind = DraftKind::kDense};
         a.params[1].watermark_width = 4;
       },
       ""},
      {"draws", [](Asked& a) { a.params[2].draws = 2; },
       "draws: got 2 at row 2, allowed 0: a sequence has one token at a row"},
      {"xtc with a list",
       [](Asked& a) {
         a.drafts[0] = {.token = 5, .count = 3, .kind = DraftKind::kList};
         a.params[0].xtc_probability = 0.5f;
       },
       "xtc_probability: got 0.5 at row 0, allowed 0 with a draft of kind list or dense"},
      {"xtc with a dense draft",
       [](Asked& a) {
         a.drafts[0] = {.token = 9, .kind = DraftKind::kDense};
         a.params[0].xtc_probability = 1;
       },
       "xtc_probability: got 1 at row 0, allowed 0 with a draft of kind list or dense"},
      {"xtc with a greedy draft", [](Asked& a) { a.params[0].xtc_probability = 1; }, ""},
      {"xtc at a row without a draft",
       [](Asked& a) {
         a.drafts[0] = {.token = 9, .kind = DraftKind::kDense};
         a.params[1].xtc_probability = 1;
       },
       ""},
      {"a greedy draft with block verification", [](Asked& a) { a.sequences[0].block = 1; },
       "draft_kind: got greedy at row 0, allowed list, dense with block_verification"},
      {"a dense draft with block verification",
       [](Asked& a) {
         a.drafts[0] = {.token = 9, .kind = DraftKind::kDense};
         for (VerifySequence& sequence : a.sequences) sequence.block = 1;
       },
       ""},
      {"a gap between sequences", [](Asked& a) { a.sequences[1].first_row = 3; },
       "sequences: got rows [3, 3 + 1) at sequence 1, allowed from row 2, 1..1 of them"},
      {"rows of no sequence", [](Asked& a) { a.sequences.pop_back(); },
       "sequences: got 2 rows, allowed 3 (rows)"},
  };
  for (const CheckCase& c : cases) {
    Asked asked;
    asked.request.sample = {.vocab = 10};
    asked.params.resize(3, PlainRow());
    asked.drafts.resize(3);
    c.change(asked);
    asked.request.sample.params = asked.params;
    asked.request.drafts = asked.drafts;
    asked.request.draft_ids = asked.draft_ids;
    asked.request.draft_probs = asked.draft_probs;
    asked.request.sequences = asked.sequences;
    const absl::Status got = CheckVerify(asked.request);
    EXPECT_EQ(std::string(got.message()), c.want) << c.name;
  }
}

}  // namespace
}  // namespace logitd::testing
