// What sample must do on every backend: answers by hand, parity with double precision, and bits
// that do not depend on company. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_SAMPLE_CASES_H_
#define LOGITD_TESTS_KERNELS_SAMPLE_CASES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_reference.h"

namespace logitd::testing {

// A row that draws from the whole of its logits at temperature 1.
inline SampleRow PlainRow() {
  return {.first_mask_word = -1, .active = 1, .temperature = 1, .top_p = 1, .repetition = 1};
}

// ---- Answers by hand

// With seed 0: UniformBits / 2^64 by position.
//   0: 0.8805   1: 0.3621   4: 0.6937   5: 0.0277
inline constexpr uint64_t kAt088 = 0, kAt036 = 1, kAt069 = 4, kAt003 = 5;

struct SampleClaim {
  const char* name;
  std::vector<float> logits;
  SampleRow row;
  std::vector<int32_t> history;
  std::vector<SampleBias> bias;
  std::vector<uint32_t> mask_words;
  int32_t token;
  float logprob;
  int32_t rank;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  RowStatus status = {};
};

inline SampleRow With(
    uint64_t position, void (*change)(SampleRow&) = [](SampleRow&) {}) {
  SampleRow row = PlainRow();
  row.position = position;
  change(row);
  return row;
}

inline const std::vector<SampleClaim>& SampleClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      {"one_token_is_certain", {-3}, With(kAt088), {}, {}, {}, 0, 0, 1, {}, {}},
      {"halves_split_at_one_half_low", {5, 5}, With(kAt036), {}, {}, {}, 0, -ln2, 1, {}, {}},
      {"halves_split_at_one_half_high", {5, 5}, With(kAt069), {}, {}, {}, 1, -ln2, 2, {}, {}},
      // Prefix sums 0.25, 1: in index order, not by probability.
      {"prefix_sums_go_by_index", {0, ln3}, With(kAt003), {}, {}, {}, 0, -ln4, 2, {}, {}},
      {"first_prefix_above_the_bits", {0, ln3}, With(kAt036), {}, {}, {}, 1, ln3 - ln4, 1, {}, {}},
      {"minus_inf_is_never_drawn",
       {-kInf, 0, -kInf, 0, -kInf},
       With(kAt088),
       {},
       {},
       {},
       3,
       -ln2,
       2,
       {},
       {}},
      {"plus_inf_is_certain", {5, kInf, 7}, With(kAt003), {}, {}, {}, 1, 0, 1, {}, {}},
      {"several_plus_inf_share",
       {kInf, 5, kInf},
       With(kAt088, [](SampleRow& row) { row.top_logprobs = 3; }),
       {},
       {},
       {},
       2,
       -ln2,
       2,
       {0, 2, 1},
       {-ln2, -ln2, -kInf}},
      {"greedy_takes_the_lowest_index_of_equals",
       {1, 3, 3},
       With(kAt088, [](SampleRow& row) { row.temperature = 0; }),
       {},
       {},
       {},
       1,
       -0.75862378f,
       1,
       {},
       {}},
      {"greedy_takes_minus_zero_for_zero",
       {-0.0f, 0.0f},
       With(kAt088, [](SampleRow& row) { row.temperature = 0; }),
       {},
       {},
       {},
       0,
       -ln2,
       1,
       {},
       {}},
      {"greedy_is_certain_of_itself",
       {1, 3, 3},
       With(kAt088,
            [](SampleRow& row) {
              row.temperature = 0;
              row.top_logprobs = 3;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       1,
       0,
       1,
       {1, 2, 0},
       {0, -kInf, -kInf}},
      {"temperature_divides",
       {0, 2 * ln3},
       With(kAt003,
            [](SampleRow& row) {
              row.temperature = 2;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       0,
       -ln4,
       2,
       {},
       {}},
      {"cold_rows_are_all_but_certain",
       {1, 1.5f, 0},
       With(kAt003, [](SampleRow& row) { row.temperature = 1e-4f; }),
       {},
       {},
       {},
       1,
       -0.60413155f,
       1,
       {},
       {}},
      {"hot_rows_are_flat",
       {1, 5, 0},
       With(kAt088, [](SampleRow& row) { row.temperature = 1e4f; }),
       {},
       {},
       {},
       2,
       -5.024745f,
       3,
       {},
       {}},
      {"far_apart_is_not_nan", {-3e38f, 3e38f}, With(kAt003), {}, {}, {}, 1, 0, 1, {}, {}},
      {"top_k_cuts_ties_by_index",
       {1, 1, 1, 1},
       With(kAt088,
            [](SampleRow& row) {
              row.top_k = 2;
              row.top_logprobs = 3;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       1,
       -ln2,
       2,
       {0, 1, 2},
       {-ln2, -ln2, -kInf}},
      {"top_p_keeps_the_token_that_reaches_it",
       // 0.5, 0.25, 0.25
       {ln2, 0, 0},
       With(kAt088,
            [](SampleRow& row) {
              row.top_p = 0.6f;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       1,
       -ln3,
       2,
       {},
       {}},
      {"top_p_stops_when_it_is_reached_exactly",
       {0, 0, 0, 0},
       With(kAt088, [](SampleRow& row) { row.top_p = 0.5f; }),
       {},
       {},
       {},
       1,
       -ln4,
       2,
       {},
       {}},
      {"top_p_keeps_one_token_at_least",
       {0, 1},
       With(kAt003, [](SampleRow& row) { row.top_p = 1e-45f; }),
       {},
       {},
       {},
       1,
       -0.31326169f,
       1,
       {},
       {}},
      {"top_p_keeps_one_token_at_least_of_more_than_are_listed",
       std::vector<float>(200, 0.0f),
       With(kAt088,
            [](SampleRow& row) {
              row.min_p = 0.5f;
              row.top_p = 1e-45f;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       0,
       0,
       1,
       {},
       {}},
      // Their difference is no f32.
      {"hot_and_far_apart_keeps_its_mass",
       {3e38f, -3e38f},
       With(kAt088,
            [](SampleRow& row) {
              row.temperature = 1e38f;
              row.min_p = 0.001f;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       0,
       -0.00247568f,
       1,
       {},
       {}},
      // Of the first two, 0.5 and 0.25, the first has 2/3: enough. Of the whole row it would not
      // be.
      {"top_p_is_of_what_top_k_left",
       {ln2, 0, 0},
       With(kAt088,
            [](SampleRow& row) {
              row.top_k = 2;
              row.top_p = 0.6f;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       0,
       0,
       1,
       {},
       {}},
      {"min_p_one_keeps_every_tie_of_the_highest",
       {3, 1, 3},
       With(kAt088,
            [](SampleRow& row) {
              row.min_p = 1;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       2,
       -ln2,
       2,
       {},
       {}},
      {"min_p_looks_after_the_temperature",
       // Ratios 1 and 1/16; at temperature 4, 1 and 1/2.
       {0, 4 * ln2, 4 * ln2},
       With(kAt003,
            [](SampleRow& row) {
              row.temperature = 4;
              row.min_p = 0.49f;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {},
       0,
       -1.6094379f,
       3,
       {},
       {}},
      {"bias_adds",
       {0, 0},
       With(kAt003, [](SampleRow& row) { row.logprob_mode = LogprobMode::kProcessed; }),
       {},
       {{0, ln3}},
       {},
       0,
       ln3 - ln4,
       1,
       {},
       {}},
      {"raw_logprobs_are_of_the_row_as_sent",
       {0, 0},
       With(kAt088,
            [](SampleRow& row) {
              row.temperature = 0.5f;
              row.top_logprobs = 2;
            }),
       {},
       {{1, 10}},
       {},
       1,
       -ln2,
       2,
       {0, 1},
       {-ln2, -ln2}},
      {"a_ban_beats_plus_inf", {kInf, 0}, With(kAt003), {}, {{0, -kInf}}, {}, 1, -kInf, 2, {}, {}},
      {"plus_inf_does_not_lift_minus_inf",
       {-kInf, 0},
       With(kAt003),
       {},
       {{0, kInf}},
       {},
       1,
       0,
       1,
       {},
       {}},
      // 4 / 2, -1 * 2, untouched 0.
      {"repetition_divides_above_zero_and_multiplies_below",
       {4, -1, 0},
       With(kAt003,
            [](SampleRow& row) {
              row.repetition = 2;
              row.top_logprobs = 3;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {1, 0, 0, 1},
       {},
       {},
       0,
       -0.14293163f,
       1,
       {0, 2, 1},
       {-0.14293163f, -2.1429316f, -4.1429316f}},
      // 2 - 0.5 * 2 - 0.25, 1 - 0.5 - 0.25, 0.
      {"frequency_counts_and_presence_does_not",
       {2, 1, 0},
       With(kAt003,
            [](SampleRow& row) {
              row.frequency = 0.5f;
              row.presence = 0.25f;
              row.top_logprobs = 3;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {0, 1, 0},
       {},
       {},
       0,
       -0.73183757f,
       1,
       {0, 1, 2},
       {-0.73183757f, -1.2318376f, -1.4818376f}},
      {"bias_comes_before_repetition",
       {-1, 1},
       With(kAt003,
            [](SampleRow& row) {
              row.repetition = 2;
              row.top_logprobs = 1;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {0},
       {{0, 3}},  // (-1 + 3) / 2 = 1
       {},
       0,
       -ln2,
       1,
       {0},
       {-ln2}},
      {"mask_allows_where_the_bit_is_one",
       {9, 0, 9, 0},
       With(kAt088,
            [](SampleRow& row) {
              row.first_mask_word = 0;
              row.logprob_mode = LogprobMode::kProcessed;
            }),
       {},
       {},
       {0b1010},
       3,
       -ln2,
       2,
       {},
       {}},
      {"mask_is_not_lifted_by_a_bias",
       {0, 0},
       With(kAt003, [](SampleRow& row) { row.first_mask_word = 0; }),
       {},
       {{0, kInf}},
       {0b10},
       1,
       -ln2,
       2,
       {},
       {}},
      {"everything_masked_is_empty",
       {1, 2},
       With(kAt003,
            [](SampleRow& row) {
              row.first_mask_word = 0;
              row.top_logprobs = 1;
            }),
       {},
       {},
       {0},
       -1,
       -kInf,
       0,
       {-1},
       {-kInf},
       {RowCode::kEmptySupport, -1}},
      {"minus_inf_alone_is_empty",
       {-kInf, -kInf},
       With(kAt003, [](SampleRow& row) { row.temperature = 0; }),
       {},
       {},
       {},
       -1,
       -kInf,
       0,
       {},
       {},
       {RowCode::kEmptySupport, -1}},
      {"lowest_nan_is_named",
       {1, kNan, kNan},
       With(kAt003),
       {},
       {},
       {},
       -1,
       -kInf,
       0,
       {},
       {},
       {RowCode::kNanLogit, 1}},
      {"a_masked_nan_is_a_nan",
       {1, kNan},
       With(kAt003, [](SampleRow& row) { row.first_mask_word = 0; }),
       {},
       {},
       {0b01},
       -1,
       -kInf,
       0,
       {},
       {},
       {RowCode::kNanLogit, 1}},
  };
  return claims;
}

// "" where the backend keeps the claim, else what it did instead.
inline std::string BrokenClaim(OpRunner& runner, const SampleClaim& claim) {
  HostTensor tensor(DType::kF32, 1, claim.logits.size(), claim.logits.size(), 0);
  for (size_t c = 0; c < claim.logits.size(); ++c) tensor.Set(0, c, claim.logits[c]);
  SampleBatch batch{.rows = {claim.row},
                    .history = claim.history,
                    .bias = claim.bias,
                    .mask_words = claim.mask_words,
                    .top_entries = claim.row.top_logprobs};
  batch.rows[0].history_count = static_cast<int32_t>(claim.history.size());
  batch.rows[0].bias_count = static_cast<int32_t>(claim.bias.size());
  auto got = runner.Sample(tensor, batch);
  if (!got.ok()) return got.status().ToString();
  const auto near = [](float a, float b) {
    return a == b || std::fabs(a - b) <= 2e-6f * (1 + std::fabs(b));
  };
  if (got->status[0].code != claim.status.code ||
      got->status[0].position != claim.status.position) {
    return absl::StrFormat("status: got code %d position %d", static_cast<int>(got->status[0].code),
                           got->status[0].position);
  }
  if (got->tokens[0] != claim.token || got->ranks[0] != claim.rank ||
      !near(got->logprobs[0], claim.logprob)) {
    return absl::StrFormat("got token %d rank %d logprob %.9g, want %d %d %.9g", got->tokens[0],
                           got->ranks[0], got->logprobs[0], claim.token, claim.rank, claim.logprob);
  }
  for (size_t i = 0; i < claim.top_ids.size(); ++i) {
    if (got->top_ids[i] == claim.top_ids[i] && near(got->top_logprobs[i], claim.top_logprobs[i])) {
      continue;
    }
    return absl::StrFormat("top %d: got %d %.9g, want %d %.9g", i, got->top_ids[i],
                           got->top_logprobs[i], claim.top_ids[i], claim.top_logprobs[i]);
  }
  return "";
}

// ---- Parity with double precision

struct SampleCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t stride_extra = 0;
  int64_t offset = 0;
  Fill fill = Fill::kNormal;
  uint64_t seed = 1;
};

inline std::string Describe(const SampleCase& c) {
  return absl::StrFormat("sample [%d, %d] %s fill=%s stride=+%d offset=%d seed=%d", c.rows, c.vocab,
                         Name(c.dtype), Name(c.fill), c.stride_extra, c.offset, c.seed);
}

inline std::string Describe(const SampleRow& row) {
  return absl::StrFormat(
      "temperature=%g top_k=%d top_p=%.9g min_p=%g repetition=%g presence=%g frequency=%g "
      "history=%d bias=%d mask=%d mode=%d",
      row.temperature, row.top_k, row.top_p, row.min_p, row.repetition, row.presence, row.frequency,
      row.history_count, row.bias_count, row.first_mask_word >= 0,
      static_cast<int>(row.logprob_mode));
}

// Appends a row with a random mix of parameters, and one entry behind its answers that belongs to
// nobody.
inline void AddRandomRow(SampleBatch& batch, int64_t vocab, std::mt19937_64& random) {
  const auto one_in = [&](int n) { return random() % n == 0; };
  const auto id = [&] { return static_cast<int32_t>(random() % vocab); };
  SampleRow row = PlainRow();
  row.seed = random();
  row.position = random() >> (random() % 64);
  static constexpr float kTemperatures[] = {0, 1, 1, 0.7f, 1.3f, 0.05f, 1e-4f, 1e4f};
  row.temperature = kTemperatures[random() % 8];
  if (one_in(2)) {
    const int64_t most = one_in(3) ? vocab : std::min<int64_t>(vocab, 100);
    row.top_k = static_cast<int32_t>(random() % (most + 1));
  }
  static constexpr float kTopPs[] = {0.9f, 0.5f, 0.99f, 0.1f, 1e-6f, 0.9999999f};
  if (one_in(2)) row.top_p = kTopPs[random() % 6];
  static constexpr float kMinPs[] = {0.05f, 0.5f, 1e-3f, 1.0f, 1e-20f};
  if (one_in(3)) row.min_p = kMinPs[random() % 5];
  if (one_in(3)) {
    row.repetition = one_in(2) ? 1.2f : 0.7f;
    row.presence = one_in(2) ? 0.6f : 0;
    row.frequency = one_in(2) ? -0.3f : 0.1f;
    row.first_history = static_cast<int64_t>(batch.history.size());
    const uint64_t most = vocab > 4096 && one_in(3) ? 20000 : 300;
    const bool crowded = vocab > 20000 && one_in(2);  // all of them in one cell
    row.history_count = static_cast<int32_t>(random() % most);
    const int32_t favourite = id();
    for (int32_t i = 0; i < row.history_count; ++i) {
      batch.history.push_back(one_in(3) ? favourite
                              : crowded ? static_cast<int32_t>(15 * 1024 + random() % 1024)
                                        : id());
    }
  }
  if (one_in(3)) {
    row.first_bias = static_cast<int64_t>(batch.bias.size());
    row.bias_count = static_cast<int32_t>(std::min<int64_t>(vocab, 1 + random() % 20));
    const int32_t first = id();
    static constexpr float kBiases[] = {5, -5, 0.1f, -kInf, 100, -100};
    for (int32_t i = 0; i < row.bias_count; ++i) {
      batch.bias.push_back(
          {static_cast<int32_t>((first + 7 * int64_t{i}) % vocab), kBiases[random() % 6]});
      // 7 i meets itself where 7 divides the vocabulary.
      if (vocab % 7 == 0) batch.bias.back().id = static_cast<int32_t>((first + i) % vocab);
    }
  }
  if (one_in(3)) {
    row.first_mask_word = static_cast<int64_t>(batch.mask_words.size());
    const int sparse = static_cast<int>(random() % 3);
    for (int64_t w = 0; w < MaskWords(vocab); ++w) {
      uint64_t bits = random();
      if (sparse > 0) bits &= random();
      if (sparse > 1) bits &= random() & random() & random();
      batch.mask_words.push_back(static_cast<uint32_t>(bits));
    }
  }
  row.logprob_mode = one_in(2) ? LogprobMode::kRaw : LogprobMode::kProcessed;
  if (one_in(2)) {
    row.top_logprobs =
        static_cast<int32_t>(random() % (std::min<int64_t>(kMaxTopLogprobs, vocab) + 1));
  }
  row.first_top_entry = batch.top_entries;
  batch.top_entries += row.top_logprobs + 1;
  if (one_in(2)) {
    row.first_extra = static_cast<int64_t>(batch.extra_ids.size());
    row.extra_count = static_cast<int32_t>(random() % 9);
    for (int32_t i = 0; i < row.extra_count; ++i) batch.extra_ids.push_back(id());
  }
  row.first_extra_entry = batch.extra_entries;
  batch.extra_entries += row.extra_count + 1;
  if (one_in(10)) {
    row.active = 0;
    row.temperature = -1;  // a skipped row's parameters are not looked at
  }
  batch.rows.push_back(row);
}

// "" where every row agrees with the reference and nothing else was written.
inline std::string FirstDifference(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed);
    AddRandomRow(batch, c.vocab, random);
  }
  auto got = runner.Sample(tensor, batch);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    const SampleRow& row = batch.rows[r];
    std::string difference;
    const bool skipped = row.active == 0;
    if (got->top_ids[row.first_top_entry + row.top_logprobs] != kUnwrittenIndex ||
        got->extra_logprobs[row.first_extra_entry + row.extra_count] != kUnwrittenFloat) {
      difference = "wrote behind its entries";
    } else if (skipped) {
      if (got->tokens[r] != kUnwrittenIndex) difference = "wrote for a skipped row";
    } else {
      difference = ReferenceSample(RowOf(tensor, r), row, batch).Difference(*got, r, batch);
    }
    if (!difference.empty()) {
      return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(row), difference);
    }
  }
  return "";
}

// Every type and kind of row at lengths around the cells' borders; parameters are random in each.
inline std::vector<SampleCase> SampleCases() {
  struct Shape {
    int64_t vocab, rows;
  };
  static constexpr Shape kShapes[] = {{1, 20},    {2, 40},    {7, 60},    {31, 60},
                                      {33, 60},   {1000, 30}, {1024, 30}, {1025, 30},
                                      {4097, 20}, {32000, 8}, {50257, 6}};
  static constexpr int64_t kStrides[] = {0, 1, 3, 17, 64};
  static constexpr int64_t kOffsets[] = {0, 1, 3, 6, 9, 13, 32};
  std::vector<SampleCase> cases;
  uint64_t n = 0;
  for (const Shape& shape : kShapes) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (Fill fill : kAllFills) {
        ++n;
        cases.push_back({.dtype = dtype,
                         .rows = shape.rows,
                         .vocab = shape.vocab,
                         .stride_extra = kStrides[n % 5],
                         .offset = kOffsets[n % 7],
                         .fill = fill,
                         .seed = n});
      }
    }
  }
  cases.push_back({.rows = 12, .vocab = 131072, .seed = ++n});
  cases.push_back({.rows = 6, .vocab = 131072, .fill = Fill::kUniform, .seed = ++n});
  cases.push_back({.dtype = DType::kBF16, .rows = 3, .vocab = kMaxVocab, .seed = ++n});
  return cases;
}

// ---- Bits that depend on the row alone

// The bits of one row's answer.
inline std::string SampleBits(const SampleAnswer& got, const SampleRow& row, int64_t r) {
  std::string bits;
  const auto add = [&bits](const auto* values, int64_t count) {
    bits.append(reinterpret_cast<const char*>(values), count * sizeof(*values));
  };
  add(&got.tokens[r], 1);
  add(&got.logprobs[r], 1);
  add(&got.ranks[r], 1);
  add(&got.logsumexp[r], 1);
  add(&got.status[r], 1);
  add(got.top_ids.data() + row.first_top_entry, row.top_logprobs);
  add(got.top_logprobs.data() + row.first_top_entry, row.top_logprobs);
  add(got.extra_logprobs.data() + row.first_extra_entry, row.extra_count);
  return bits;
}

// Row 0 of a batch of `rows`, and again as the last row of a batch of others.
inline std::string BrokenSampleInvariance(OpRunner& runner, const SampleCase& c) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    std::string want;
    for (const int64_t rows : {int64_t{1}, int64_t{2}, c.rows}) {
      HostTensor tensor(c.dtype, rows, c.vocab, c.vocab + (rows > 1 ? c.stride_extra : 0),
                        rows > 1 ? c.offset : 0);
      SampleBatch batch;
      std::mt19937_64 others(seed * 100 + rows), own(seed);
      HostTensor row(c.dtype, 1, c.vocab, c.vocab, 0);
      FillRow(row, 0, c.fill, c.seed + seed);
      for (int64_t r = 0; r + 1 < rows; ++r) {
        FillRow(tensor, r, r % 5 == 4 ? Fill::kWithNan : Fill::kUniform, seed);
        AddRandomRow(batch, c.vocab, others);
      }
      for (int64_t i = 0; i < c.vocab; ++i) tensor.Set(rows - 1, i, row.At(0, i));
      AddRandomRow(batch, c.vocab, own);
      batch.rows.back().active = 1;
      if (batch.rows.back().temperature < 0) batch.rows.back().temperature = 1;
      batch.says_edited = rows == 2;
      auto got = runner.Sample(tensor, batch);
      if (!got.ok()) return got.status().ToString();
      const std::string bits = SampleBits(*got, batch.rows.back(), rows - 1);
      if (rows == 1) want = bits;
      if (bits != want) {
        return absl::StrFormat("%s: other bits as the last of %d rows (%s)", Describe(c), rows,
                               Describe(batch.rows.back()));
      }
    }
  }
  return "";
}

inline std::vector<SampleCase> SampleInvarianceCases() {
  return {{.rows = 700, .vocab = 7, .stride_extra = 1, .offset = 1},
          {.rows = 40, .vocab = 1000, .stride_extra = 3, .offset = 7},
          {.dtype = DType::kBF16, .rows = 9, .vocab = 33333, .stride_extra = 5, .offset = 3},
          {.dtype = DType::kF16, .rows = 9, .vocab = 4097, .offset = 1, .fill = Fill::kManyTies},
          {.rows = 5, .vocab = 131072, .stride_extra = 1, .offset = 1, .fill = Fill::kUniform}};
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SAMPLE_CASES_H_
