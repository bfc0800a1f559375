// Checks of verify and linear_verify, one table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_VERIFY_CASES_H_
#define LOGITD_TESTS_KERNELS_VERIFY_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_reference.h"
#include "tests/kernels/verify_reference.h"

namespace logitd::testing {

// Appends a draft whose q is random: of a few tokens, or of all.
inline void AddDraft(VerifyBatch& verify, DraftKind kind, int32_t token, int64_t vocab,
                     std::mt19937_64& random) {
  const auto uniform = [&random] { return static_cast<float>(random() >> 40) * 0x1p-24f; };
  VerifyDraft draft{
      .first_prob = static_cast<int64_t>(verify.draft_probs.size()), .token = token, .kind = kind};
  if (kind == DraftKind::kList) {
    draft.first_id = static_cast<int64_t>(verify.draft_ids.size());
    for (int64_t id = random() % 5; id < vocab && draft.count < 50; id += 1 + random() % 9) {
      verify.draft_ids.push_back(static_cast<int32_t>(id));
      verify.draft_probs.push_back(uniform() / 20);
      ++draft.count;
    }
  } else if (kind == DraftKind::kDense) {
    for (int64_t i = 0; i < vocab; ++i)
      verify.draft_probs.push_back(2 * uniform() / static_cast<float>(vocab));
  }
  verify.drafts.push_back(draft);
}

// The sequences of RandomDrafts that have block verification.
enum class Blocks { kNone, kSome, kAll };

// Drafts of every kind, two of three of which are the token that `sampled` has, and sequences of up
// to `longest` rows. The first has `first` rows (0: as the others), with likely drafts, which are
// greedy without block verification, so that all are accepted.
inline VerifyBatch RandomDrafts(const std::vector<int32_t>& sampled, int64_t vocab, int64_t longest,
                                int64_t first, Blocks blocks, std::mt19937_64& random) {
  VerifyBatch verify;
  const auto rows = static_cast<int64_t>(sampled.size());
  for (int64_t r = 0; r < rows;) {
    const bool is_first = r == 0 && first > 0;
    const int64_t length = is_first ? first : 1 + static_cast<int64_t>(random() % longest);
    const bool block = blocks == Blocks::kAll || (blocks == Blocks::kSome && random() % 2 == 0);
    const auto count = static_cast<int32_t>(std::min<int64_t>(rows - r, length));
    verify.sequences.push_back({.first_row = r, .rows = count, .block = block ? 1 : 0});
    for (const int64_t end = r + count; r < end; ++r) {
      const bool likely = random() % 3 != 0 || is_first;
      const uint64_t drawn = random();
      const auto other = static_cast<int32_t>(random() % vocab);
      const uint64_t kind = block ? 1 + drawn % 2 : is_first ? 0 : drawn % 3;
      AddDraft(verify, static_cast<DraftKind>(kind), likely && sampled[r] >= 0 ? sampled[r] : other,
               vocab, random);
    }
  }
  return verify;
}

// The bits of all answers.
inline std::string VerifyBits(const VerifyAnswer& got, const SampleBatch& batch) {
  std::string bits(reinterpret_cast<const char*>(got.accepted.data()),
                   got.accepted.size() * sizeof(int32_t));
  for (size_t r = 0; r < batch.rows.size(); ++r)
    bits += SampleBits(got.rows, batch.rows[r], static_cast<int64_t>(r));
  return bits;
}

// ---- linear_verify

// A block of logits has at most 64 rows on the CPU and 512 on a GPU.
inline std::vector<LinearCase> LinearVerifyCases() {
  return {{DType::kF32, 1, 7, 16, true, false, 0, 0, 1},
          {DType::kF32, 200, 1000, 40, false, false, 0, 1, 2},
          {DType::kBF16, 130, 5003, 64, true, true, 0, 0, 3},
          {DType::kF16, 1300, 300, 24, false, false, 5, 0, 4},
          {DType::kBF16, 1100, 33, 72, false, false, 0, 2, 5}};
}

// Rows that have something to draw, mostly.
inline SampleBatch VerifyRowsOf(const LinearCase& c) {
  SampleBatch batch = SampleBatchOf(c);
  for (SampleRow& row : batch.rows) {
    row.active = 1;
    row.draws = 0;
    row.temperature = std::max(row.temperature, 0.0f);
  }
  return batch;
}

// "" where the answers are those of verify on the head's logits, also of sequences that are longer
// than a block.
inline std::string BrokenLinearVerify(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = ExactInput(c);
  const SampleBatch batch = VerifyRowsOf(c);
  auto sampled = runner.Sample(input.logits, batch);
  if (!sampled.ok()) return absl::StrFormat("%s: %s", Describe(c), sampled.status().ToString());
  int place = 0;
  for (const int64_t first : {int64_t{0}, c.rows / 5 * 3, c.rows, c.rows / 2, int64_t{0}, c.rows}) {
    const auto blocks = static_cast<Blocks>(place++ / 2);
    std::mt19937_64 random(c.seed);
    const VerifyBatch verify = RandomDrafts(sampled->tokens, c.vocab, 90, first, blocks, random);
    auto want = runner.Verify(input.logits, batch, verify);
    if (!want.ok()) return absl::StrFormat("%s: %s", Describe(c), want.status().ToString());
    auto got = runner.LinearVerify(input.hidden, input.head, batch, verify);
    if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
    if (got->accepted != want->accepted || got->rows.tokens != want->rows.tokens) {
      return absl::StrFormat("%s: other tokens, call %d", Describe(c), place);
    }
    if (VerifyBits(*got, batch) != VerifyBits(*want, batch))
      return absl::StrFormat("%s: other bits, call %d", Describe(c), place);
  }
  return "";
}

// "" where greedy drafts give the bits of linear_sample.
inline std::string BrokenLinearGreedy(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = RandomInput(c);
  const SampleBatch batch = VerifyRowsOf(c);
  auto want = runner.LinearSample(input.hidden, input.head, batch);
  if (!want.ok()) return absl::StrFormat("%s: %s", Describe(c), want.status().ToString());
  std::mt19937_64 random(c.seed);
  const VerifyBatch verify = RandomDrafts(want->tokens, c.vocab, 1, c.rows, Blocks::kNone, random);
  auto got = runner.LinearVerify(input.hidden, input.head, batch, verify);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    if (SampleBits(got->rows, batch.rows[r], r) != SampleBits(*want, batch.rows[r], r))
      return absl::StrFormat("%s: row %d has other bits", Describe(c), r);
    if (want->tokens[r] < 0) break;  // the sequence ends here
  }
  return "";
}

// ---- Block verification

// Logits of rows whose p are given; 0 is -inf.
inline HostTensor RowsOfChances(const std::vector<Distribution>& p) {
  HostTensor tensor(DType::kF32, p.size(), p[0].size(), p[0].size(), 0);
  for (size_t r = 0; r < p.size(); ++r) {
    for (size_t t = 0; t < p[r].size(); ++t)
      tensor.Set(r, t, p[r][t] == 0 ? -kInf : static_cast<float>(std::log(p[r][t])));
  }
  return tensor;
}

// A sequence with block verification and dense drafts. Row i has the random bits of seed 0 at
// `position` + i.
struct BlockClaim {
  const char* name;
  std::vector<Distribution> p;
  std::vector<Distribution> q;
  std::vector<int32_t> drafts;
  uint64_t position;
  int32_t accepted;
  int32_t token;  // the bonus token; -1: the row is refused
};

// Coins of seed 0 from position 0 on: 0.6055, 0.0371, 0.2717, 0.4268, 0.9170, 0.3555, 0.0345;
// bits: 0.8805, 0.3621, 0.3194, 0.4151, 0.6937, 0.0277, 0.8074, 0.0425.
inline std::vector<BlockClaim> BlockClaims() {
  const Distribution p = {1.0 / 3, 2.0 / 3}, q = {2.0 / 3, 1.0 / 3}, even = {0.5, 0.5};
  const Distribution sure = {1, 0}, other = {0, 1}, none = {0, 0}, nan = {kNan, 1};
  // Drafts 0, 0 have s = 1/2 and 1/4; 0, 1 have 1/2 and 1; 1, 0 have 1 and 1/2. At row 1 nothing is
  // left by q with s = 1/2, and 1/3 with s = 1, all of it of token 1.
  return {
      {"the last draft's coin accepts both", {p, p, p}, {q, q}, {0, 0}, 0, 2, 0},
      {"no coin accepts", {p, p, p}, {q, q}, {0, 0}, 3, 0, 1},
      {"a likely draft makes up for an unlikely one", {p, p, p}, {q, q}, {0, 1}, 4, 2, 1},
      {"s of 1 is always chosen", {p, p, p}, {q, q}, {1, 0}, 3, 1, 1},
      {"a later choice goes before", {p, p, p}, {q, q}, {1, 0}, 1, 2, 1},
      // s_1 = 1/2 leaves 1/3 of token 1, so h_1 = 0.4; s_2 = 1/6.
      {"h between 0 and 1, above its coin", {p, p, p}, {q, sure}, {0, 0}, 2, 1, 1},
      {"h between 0 and 1, below its coin", {p, p, p}, {q, sure}, {0, 0}, 3, 0, 1},
      {"both are chosen", {p, p, p}, {q, sure}, {0, 0}, 5, 2, 0},
      {"a NaN makes the draft before it the last", {p, nan, p}, {q, q}, {0, 0}, 3, 1, -1},
      {"before a NaN a coin may refuse", {p, nan, p}, {q, q}, {0, 0}, 0, 0, 1},
      {"a row without support is the last too", {p, none, p}, {q, q}, {1, 0}, 0, 1, -1},
      {"the first row may be refused", {nan, p, p}, {q, q}, {1, 0}, 0, 0, -1},
      {"a draft outside the support ends it", {other, p, p}, {q, q}, {0, 1}, 1, 0, 1},
      {"a q of 0 is s of 1", {p, p, p}, {other, q}, {0, 0}, 3, 1, 1},
      {"equal p and q accept all", {even, even, p}, {even, even}, {0, 1}, 3, 2, 0},
      {"one draft is as token by token", {p, p}, {q}, {0}, 3, 1, 1},
      {"no draft", {p}, {}, {}, 2, 0, 0},
  };
}

// "" where the claim is kept. Without a token the row's status says why, and rows after the bonus
// token are not reached.
inline std::string BrokenBlockClaim(OpRunner& runner, const BlockClaim& c) {
  SampleBatch batch;
  VerifyBatch verify;
  const auto rows = static_cast<int32_t>(c.p.size());
  for (int32_t r = 0; r < rows; ++r) {
    batch.rows.push_back(PlainRow());
    batch.rows.back().seed = 0;
    batch.rows.back().position = c.position + static_cast<uint64_t>(r);
    verify.drafts.push_back({.kind = DraftKind::kDense});
    if (r + 1 == rows) break;
    verify.drafts.back().first_prob = static_cast<int64_t>(verify.draft_probs.size());
    verify.drafts.back().token = c.drafts[r];
    for (const double q : c.q[r]) verify.draft_probs.push_back(static_cast<float>(q));
  }
  verify.sequences = {{.first_row = 0, .rows = rows, .block = 1}};
  auto got = runner.Verify(RowsOfChances(c.p), batch, verify);
  if (!got.ok()) return got.status().ToString();
  if (got->accepted[0] != c.accepted)
    return absl::StrFormat("accepted %d, want %d", got->accepted[0], c.accepted);
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t want = r < c.accepted ? c.drafts[r] : r == c.accepted ? c.token : -1;
    const RowCode code = got->rows.status[r].code;
    if (got->rows.tokens[r] != want || (code == RowCode::kOk) != (want >= 0) ||
        (code == RowCode::kNotReached) != (r > c.accepted)) {
      return absl::StrFormat("row %d: token %d, want %d; status %d", r, got->rows.tokens[r], want,
                             static_cast<int>(code));
    }
  }
  return "";
}

struct BlockCase {
  int64_t vocab;
  int64_t sequences;
  DType dtype = DType::kF32;
  uint64_t seed = 1;
};

inline std::vector<BlockCase> BlockCases() {
  return {{2, 300, DType::kF32, 1},   {7, 300, DType::kBF16, 2},   {1000, 60, DType::kF32, 3},
          {1025, 60, DType::kF16, 4}, {5000, 30, DType::kBF16, 5}, {50257, 4, DType::kF32, 6}};
}

// "" where every sequence agrees with double precision. q is a softmax near the target's, of all
// tokens or of every third; drafts are drawn from it.
inline std::string BrokenBlock(OpRunner& runner, const BlockCase& c) {
  std::mt19937_64 random(c.seed);
  std::normal_distribution<float> normal;
  const auto uniform = [&random] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  SampleBatch batch;
  VerifyBatch verify;
  std::vector<std::vector<float>> logits;
  std::vector<Distribution> qs;
  while (static_cast<int64_t>(verify.sequences.size()) < c.sequences) {
    const auto count = static_cast<int32_t>(1 + random() % 6);
    verify.sequences.push_back(
        {.first_row = static_cast<int64_t>(logits.size()), .rows = count, .block = 1});
    for (int32_t i = 0; i < count; ++i) {
      SampleRow row = PlainRow();
      row.seed = c.seed;
      row.position = logits.size();
      static constexpr float kTemperatures[] = {1, 0.7f, 1.5f, 0};
      row.temperature = kTemperatures[random() % 4];
      if (random() % 3 == 0) row.top_k = static_cast<int32_t>(1 + random() % c.vocab);
      batch.rows.push_back(row);
      std::vector<float> x(c.vocab);
      for (float& value : x) value = static_cast<float>(RoundedTo(c.dtype, 2 * normal(random)));
      // q, and a token of it.
      const bool list = random() % 2 == 0;
      Distribution q(c.vocab);
      double sum = 0;
      for (int64_t t = 0; t < c.vocab; ++t) {
        if (!list || t % 3 == 0) q[t] = std::exp(x[t] + 0.7 * normal(random));
        sum += q[t];
      }
      VerifyDraft draft{.first_id = static_cast<int64_t>(verify.draft_ids.size()),
                        .first_prob = static_cast<int64_t>(verify.draft_probs.size()),
                        .kind = list ? DraftKind::kList : DraftKind::kDense};
      double reach = uniform() * sum;
      for (int64_t t = 0; t < c.vocab; ++t) {
        if (q[t] == 0 && list) continue;
        if (reach >= 0) draft.token = static_cast<int32_t>(t);
        reach -= q[t];
        if (list) verify.draft_ids.push_back(static_cast<int32_t>(t));
        verify.draft_probs.push_back(static_cast<float>(q[t] / sum));
        q[t] = verify.draft_probs.back();
        draft.count += list ? 1 : 0;
      }
      verify.drafts.push_back(draft);
      logits.push_back(std::move(x));
      qs.push_back(std::move(q));
    }
  }
  HostTensor tensor(c.dtype, logits.size(), c.vocab, c.vocab + 1, 1);
  for (size_t r = 0; r < logits.size(); ++r) {
    for (int64_t t = 0; t < c.vocab; ++t) tensor.Set(r, t, logits[r][t]);
  }
  auto got = runner.Verify(tensor, batch, verify);
  if (!got.ok()) return got.status().ToString();
  for (size_t s = 0; s < verify.sequences.size(); ++s) {
    const VerifySequence& sequence = verify.sequences[s];
    std::vector<Distribution> p, q;
    std::vector<int32_t> drafts;
    std::vector<double> coins, bits;
    for (int64_t r = sequence.first_row; r < sequence.first_row + sequence.rows; ++r) {
      p.push_back(ReferenceSample(logits[r], batch.rows[r], batch).Probabilities());
      coins.push_back(UnitOf(CoinBits(c.seed, r)));
      bits.push_back(UnitOf(UniformBits(c.seed, r)));
      if (r + 1 == sequence.first_row + sequence.rows) break;
      q.push_back(qs[r]);
      drafts.push_back(verify.drafts[r].token);
    }
    const int32_t accepted = got->accepted[s];
    const std::string difference =
        ReferenceBlock(p, q, drafts)
            .Difference(coins, bits, accepted, got->rows.tokens[sequence.first_row + accepted]);
    if (!difference.empty())
      return absl::StrFormat("vocab %d sequence %d: %s", c.vocab, s, difference);
  }
  return "";
}

// "" where sequences with block verification, and those without, have the bits that they have in a
// call without the others.
inline std::string BrokenMix(OpRunner& runner, const BlockCase& c) {
  const int64_t rows = std::min<int64_t>(4 * c.sequences, 120);
  HostTensor tensor(c.dtype, rows, c.vocab, c.vocab + 1, 1);
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < rows; ++r) {
    FillRow(tensor, r, Fill::kNormal, c.seed);
    AddRandomRow(batch, c.vocab, random);
    batch.rows.back().active = 1;
    batch.rows.back().draws = 0;
    batch.rows.back().temperature = std::max(batch.rows.back().temperature, 0.0f);
  }
  auto sampled = runner.Sample(tensor, batch);
  if (!sampled.ok()) return sampled.status().ToString();
  const VerifyBatch mixed =
      RandomDrafts(sampled->tokens, c.vocab, /*longest=*/6, /*first=*/0, Blocks::kSome, random);
  auto want = runner.Verify(tensor, batch, mixed);
  if (!want.ok()) return want.status().ToString();
  for (const int32_t block : {0, 1}) {
    SampleBatch kept_rows = batch;
    VerifyBatch kept = mixed;
    for (VerifySequence& sequence : kept.sequences) {
      if (sequence.block == block) continue;
      for (int32_t i = 0; i < sequence.rows; ++i) kept_rows.rows[sequence.first_row + i].active = 0;
      sequence = {};
    }
    auto got = runner.Verify(tensor, kept_rows, kept);
    if (!got.ok()) return got.status().ToString();
    for (size_t s = 0; s < kept.sequences.size(); ++s) {
      const VerifySequence& sequence = kept.sequences[s];
      bool same = sequence.rows == 0 || got->accepted[s] == want->accepted[s];
      for (int64_t r = sequence.first_row; r < sequence.first_row + sequence.rows; ++r)
        same &= SampleBits(got->rows, batch.rows[r], r) == SampleBits(want->rows, batch.rows[r], r);
      if (!same)
        return absl::StrFormat("vocab %d seed %d sequence %d, block %d: other bits", c.vocab,
                               c.seed, s, block);
    }
  }
  return "";
}

inline std::vector<OpCheck> VerifyChecks() {
  return {
      ForAll("ThroughAHeadHasTheBitsOfItsLogits", LinearVerifyCases, BrokenLinearVerify),
      ForAll("GreedyDraftsThroughAHeadGiveTheBitsOfSample", LinearVerifyCases, BrokenLinearGreedy),
      ForAll("BlockVerificationKeepsEveryClaim", BlockClaims, BrokenBlockClaim),
      ForAll("BlockVerificationAgreesWithDoublePrecision", BlockCases, BrokenBlock),
      ForAll("BlockVerificationOfOtherSequencesChangesNoBits", BlockCases, BrokenMix),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_VERIFY_CASES_H_
