// What sample must do on every backend where edits decide which tokens are the first, and where
// top_p keeps many tokens: parity with double precision. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_SAMPLE_HEAVY_CASES_H_
#define LOGITD_TESTS_KERNELS_SAMPLE_HEAVY_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "kernels/draw.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_reference.h"

namespace logitd::testing {

// ---- Edits that decide which tokens are the first

// Rows whose penalties and masks change which tokens are the first: the history holds the row's own
// first tokens, so many that few candidates or none are left, and masks allow anything from one
// token to all. Raw and processed log-probabilities, and filters of every length.
inline std::string FirstDifferenceOfHeavyEdits(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed + r);
    const std::vector<int32_t> order =
        ReferenceSample(RowOf(tensor, r), PlainRow(), SampleBatch()).processed().order;
    const auto one_of = [&](std::initializer_list<int32_t> values) {
      return values.begin()[random() % values.size()];
    };
    SampleRow row = PlainRow();
    row.seed = random();
    row.temperature = static_cast<float>(one_of({0, 1, 1, 2, 30})) / 2;
    row.top_k = static_cast<int32_t>(
        std::min<int64_t>(one_of({1, 3, 20, 64, 128, 128, 129, 1000}), c.vocab));
    if (random() % 3 == 0) {
      row.top_k = 0;
      row.min_p = static_cast<float>(one_of({1, 50, 500, 1000})) / 1000;
    }
    if (random() % 2 == 0) row.top_p = 0.9f;
    row.logprob_mode = random() % 4 == 0 ? LogprobMode::kProcessed : LogprobMode::kRaw;
    row.want_rank = random() % 3 != 0;
    if (random() % 4 != 0) {
      row.repetition = static_cast<float>(one_of({10, 11, 20})) / 10;
      row.presence = static_cast<float>(one_of({0, 1}));
      row.frequency = static_cast<float>(one_of({0, 1, 4})) / 2;
      row.first_history = static_cast<int64_t>(batch.history.size());
      const auto first = static_cast<int64_t>(order.size());
      const int64_t tokens = std::min<int64_t>(one_of({10, 60, 150, 700, 5000}), first);
      for (int64_t i = 0; i < tokens; ++i) {
        for (int64_t n = random() % 3; n > 0; --n) batch.history.push_back(order[i]);
      }
      row.history_count = static_cast<int32_t>(batch.history.size() - row.first_history);
    }
    if (row.history_count == 0 || random() % 2 == 0) {
      row.first_mask_word = static_cast<int64_t>(batch.mask_words.size());
      const int kind = static_cast<int>(random() % 5);
      for (int64_t w = 0; w < MaskWords(c.vocab); ++w) {
        const auto bits = static_cast<uint32_t>(random());
        batch.mask_words.push_back(kind == 0   ? ~0u
                                   : kind == 1 ? bits
                                   : kind == 2 ? bits & (random() % 16 == 0 ? ~0u : 0)
                                               : 0);
      }
      const int32_t allowed = kind == 3 ? 1 : kind == 4 ? one_of({5, 100}) : 0;
      for (int32_t i = 0; i < allowed; ++i) {
        const auto id = static_cast<int64_t>(random() % c.vocab);
        batch.mask_words[row.first_mask_word + id / 32] |= 1u << id % 32;
      }
    }
    row.top_logprobs = static_cast<int32_t>(std::min<int64_t>(one_of({0, 0, 5, 20, 128}), c.vocab));
    row.first_top_entry = batch.top_entries;
    batch.top_entries += row.top_logprobs + 1;
    row.first_extra = static_cast<int64_t>(batch.extra_ids.size());
    row.extra_count = static_cast<int32_t>(random() % 3);
    for (int32_t i = 0; i < row.extra_count; ++i)
      batch.extra_ids.push_back(static_cast<int32_t>(random() % c.vocab));
    row.first_extra_entry = batch.extra_entries;
    batch.extra_entries += row.extra_count + 1;
    batch.rows.push_back(row);
  }
  return FirstWrongRow(runner, c, tensor, batch);
}

// Calls of few and of many rows.
inline std::vector<SampleCase> HeavyEditCases() {
  std::vector<SampleCase> cases;
  uint64_t n = 1000;
  for (DType dtype : kAllDTypes) {
    for (Fill fill : {Fill::kNormal, Fill::kUniform, Fill::kManyTies, Fill::kAllEqual,
                      Fill::kMostlyMinusInf, Fill::kWithPlusInf, Fill::kWithNan}) {
      n += 100;
      cases.push_back({.dtype = dtype,
                       .rows = 70,
                       .vocab = fill == Fill::kNormal ? 20000 : 5003,
                       .stride_extra = 1,
                       .offset = 1,
                       .fill = fill,
                       .seed = n});
      cases.push_back({.dtype = dtype, .rows = 3, .vocab = 50257, .fill = fill, .seed = n + 80});
    }
    cases.push_back({.dtype = dtype, .rows = 8, .vocab = 131072, .seed = n + 90});
  }
  return cases;
}

// ---- Flat rows with top_p

// Moves the logits of row r below the first to one end of their bins, of the 4096 in which the CUDA
// backend counts them by their distance from the first: no middle of a bin tells less of its mass.
inline void MoveToEndsOfBins(HostTensor& tensor, int64_t r, const SampleRow& ask, double end) {
  const std::vector<float> sent = RowOf(tensor, r);
  const double first = *std::max_element(sent.begin(), sent.end());
  double width = 0;
  for (int round = 0; round < 4; ++round) {  // the width depends on where the logits are
    double whole = 0;
    for (size_t i = 0; i < sent.size(); ++i) {
      const double below = first - sent[i];
      const bool moves = width > 0 && below > 0 && below < 4096 * width;
      const double moved = moves ? (std::floor(below / width) + end) * width : below;
      tensor.Set(r, static_cast<int64_t>(i), static_cast<float>(first - moved));
      whole += std::exp(-moved / ask.temperature);
    }
    const double left_out = (1 - double{ask.top_p}) * whole;
    width = std::log(2 * static_cast<double>(sent.size()) / left_out) * ask.temperature / 4096;
  }
}

// Rows of which top_p keeps many tokens: of the case's kind, and ones whose runs of 4, 128 or 1024
// tokens have a level of their own, so that no sample of a few tokens of each run tells the whole.
// Some are rounded, so that hundreds or thousands of tokens near the border are equal, and some are
// at ends of bins.
inline std::string FirstDifferenceOfFlatTopP(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed + r);
    static constexpr int64_t kRuns[] = {0, 4, 128, 1024};
    const int64_t run = kRuns[random() % 4];
    float level = 0;
    for (int64_t i = 0; run > 0 && i < c.vocab; ++i) {
      if (i % run == 0) level = static_cast<float>(static_cast<int>(random() % 7)) - 3;
      tensor.Set(r, i, tensor.At(r, i) + level);
    }
    static constexpr float kSteps[] = {0, 0, 1.0f / 256, 1.0f / 4};
    const float step = kSteps[random() % 4];
    for (int64_t i = 0; step > 0 && i < c.vocab; ++i)
      tensor.Set(r, i, std::round(tensor.At(r, i) / step) * step);
    SampleRow row = PlainRow();
    row.seed = random();
    static constexpr float kTemperatures[] = {1, 1, 0.7f, 2, 50};
    row.temperature = kTemperatures[random() % 5];
    static constexpr float kTopPs[] = {0.9f, 0.5f, 0.99f, 0.1f, 0.9999f, 0.9999999f};
    row.top_p = kTopPs[random() % 6];
    if (random() % 4 == 0) MoveToEndsOfBins(tensor, r, row, random() % 2 == 0 ? 0.49 : 0.51);
    if (random() % 4 == 0) row.top_k = static_cast<int32_t>(c.vocab / (1 + random() % 3));
    if (random() % 4 == 0) row.min_p = 1e-3f;
    row.logprob_mode = random() % 2 == 0 ? LogprobMode::kProcessed : LogprobMode::kRaw;
    row.first_top_entry = batch.top_entries++;
    row.first_extra_entry = batch.extra_entries++;
    batch.rows.push_back(row);
  }
  return FirstWrongRow(runner, c, tensor, batch);
}

inline std::vector<SampleCase> FlatTopPCases() {
  std::vector<SampleCase> cases;
  uint64_t n = 9000;
  for (DType dtype : kAllDTypes) {
    for (Fill fill : {Fill::kNormal, Fill::kUniform, Fill::kManyTies, Fill::kAllEqual,
                      Fill::kAscending, Fill::kMostlyMinusInf}) {
      n += 100;
      for (const int64_t vocab : {9001, 33333}) {
        cases.push_back({.dtype = dtype,
                         .rows = 66,
                         .vocab = vocab,
                         .stride_extra = 1,
                         .offset = 1,
                         .fill = fill,
                         .seed = n + vocab});
      }
      cases.push_back({.dtype = dtype, .rows = 6, .vocab = 131072, .fill = fill, .seed = n + 80});
    }
  }
  return cases;
}

// ---- Refused drafts

struct RefusedDraft {
  int64_t vocab;
  DraftKind kind;
  float min_p;  // above 0, the row is filtered; every token is kept
};

// Rows of equal logits. Every third token was drafted with twice its probability, the others never.
// So a coin above one half refuses the draft, and each of the others is drawn with one share of
// them: token floor(u n) of the n others, counted in index order.
inline std::string WrongTokenOfRefusedDraft(OpRunner& runner, const RefusedDraft& c) {
  SampleBatch batch;
  VerifyBatch verify;
  std::vector<int32_t> others;
  for (int32_t i = 0; i < c.vocab; ++i) {
    const bool drafted = i % 3 == 0;
    if (!drafted) others.push_back(i);
    if (c.kind == DraftKind::kList && !drafted) continue;
    if (c.kind == DraftKind::kList) verify.draft_ids.push_back(i);
    verify.draft_probs.push_back(drafted ? 2.0f / static_cast<float>(c.vocab) : 0.0f);
  }
  // Sequences of a draft and a last row.
  for (uint64_t seed = 0; verify.sequences.size() < 5; ++seed) {
    if (CoinBits(seed, 0) >> 60 < 9) continue;  // below 9/16
    SampleRow row = PlainRow();
    row.seed = seed;
    row.min_p = c.min_p;
    verify.sequences.push_back({.first_row = static_cast<int64_t>(batch.rows.size()), .rows = 2});
    batch.rows.insert(batch.rows.end(), 2, row);
    verify.drafts.push_back({.token = static_cast<int32_t>((c.vocab - 1) / 3 * 3),
                             .count = static_cast<int32_t>(verify.draft_ids.size()),
                             .kind = c.kind});
    verify.drafts.emplace_back();
  }
  const auto rows = static_cast<int64_t>(batch.rows.size());
  HostTensor tensor(DType::kF32, rows, c.vocab, c.vocab, 0);
  for (int64_t r = 0; r < rows; ++r) FillRow(tensor, r, Fill::kAllEqual, 1);
  const auto got = runner.Verify(tensor, batch, verify);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < rows; r += 2) {
    const uint64_t seed = batch.rows[r].seed;
    const int32_t want = others[MulHigh(UniformBits(seed, 0), others.size())];
    if (got->accepted[r / 2] != 0 || got->rows.tokens[r] != want) {
      return absl::StrFormat(
          "vocab %d kind %d min_p %g seed %d: accepted %d, token %d, expected %d", c.vocab,
          static_cast<int>(c.kind), c.min_p, seed, got->accepted[r / 2], got->rows.tokens[r], want);
    }
  }
  return "";
}

inline std::vector<RefusedDraft> RefusedDrafts() {
  std::vector<RefusedDraft> cases;
  for (const int64_t vocab : {1000, 33333, 131072}) {
    for (const DraftKind kind : {DraftKind::kList, DraftKind::kDense}) {
      for (const float min_p : {0.0f, 0.5f})
        cases.push_back({.vocab = vocab, .kind = kind, .min_p = min_p});
    }
  }
  return cases;
}

inline std::vector<OpCheck> HeavySampleChecks() {
  return {
      ForAll("HeavyEditsAgreeWithDoublePrecision", HeavyEditCases, FirstDifferenceOfHeavyEdits),
      ForAll("FlatTopPAgreesWithDoublePrecision", FlatTopPCases, FirstDifferenceOfFlatTopP),
      ForAll("ARefusedDraftIsReplacedFromWhatItsDistributionLeft", RefusedDrafts,
             WrongTokenOfRefusedDraft),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SAMPLE_HEAVY_CASES_H_
