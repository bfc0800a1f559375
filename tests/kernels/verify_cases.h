// What verify and linear_verify must do on every backend. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_VERIFY_CASES_H_
#define LOGITD_TESTS_KERNELS_VERIFY_CASES_H_

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/sample_cases.h"

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

// Drafts of every kind, two of three of which are the token that `sampled` has, and sequences of up
// to `longest` rows. The first has `first` rows (0: as the others), with greedy drafts that are all
// accepted.
inline VerifyBatch RandomDrafts(const std::vector<int32_t>& sampled, int64_t vocab, int64_t longest,
                                int64_t first, std::mt19937_64& random) {
  VerifyBatch verify;
  const auto rows = static_cast<int64_t>(sampled.size());
  for (int64_t r = 0; r < rows; ++r) {
    const bool likely = random() % 3 != 0 || r < first;
    const auto kind = static_cast<DraftKind>(random() % 3);
    const auto other = static_cast<int32_t>(random() % vocab);
    AddDraft(verify, r < first ? DraftKind::kGreedy : kind,
             likely && sampled[r] >= 0 ? sampled[r] : other, vocab, random);
  }
  for (int64_t r = 0; r < rows;) {
    const int64_t length =
        r == 0 && first > 0 ? first : 1 + static_cast<int64_t>(random() % longest);
    const auto count = static_cast<int32_t>(std::min<int64_t>(rows - r, length));
    verify.sequences.push_back({.first_row = r, .rows = count});
    r += count;
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
  for (const int64_t first : {int64_t{0}, c.rows / 5 * 3, c.rows}) {
    std::mt19937_64 random(c.seed);
    const VerifyBatch verify = RandomDrafts(sampled->tokens, c.vocab, 90, first, random);
    auto want = runner.Verify(input.logits, batch, verify);
    if (!want.ok()) return absl::StrFormat("%s: %s", Describe(c), want.status().ToString());
    auto got = runner.LinearVerify(input.hidden, input.head, batch, verify);
    if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
    if (got->accepted != want->accepted || got->rows.tokens != want->rows.tokens) {
      return absl::StrFormat("%s: other tokens, with %d rows at first", Describe(c), first);
    }
    if (VerifyBits(*got, batch) != VerifyBits(*want, batch))
      return absl::StrFormat("%s: other bits, with %d rows at first", Describe(c), first);
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
  const VerifyBatch verify = RandomDrafts(want->tokens, c.vocab, 1, c.rows, random);
  auto got = runner.LinearVerify(input.hidden, input.head, batch, verify);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    if (SampleBits(got->rows, batch.rows[r], r) != SampleBits(*want, batch.rows[r], r))
      return absl::StrFormat("%s: row %d has other bits", Describe(c), r);
    if (want->tokens[r] < 0) break;  // the sequence ends here
  }
  return "";
}

inline std::vector<OpCheck> VerifyChecks() {
  return {
      ForAll("ThroughAHeadHasTheBitsOfItsLogits", LinearVerifyCases, BrokenLinearVerify),
      ForAll("GreedyDraftsThroughAHeadGiveTheBitsOfSample", LinearVerifyCases, BrokenLinearGreedy),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_VERIFY_CASES_H_
