// What softmax_topk must do on every backend: answers by hand, parity with double precision, and
// bits that do not depend on company. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_SOFTMAX_TOPK_CASES_H_
#define LOGITD_TESTS_KERNELS_SOFTMAX_TOPK_CASES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// ---- Answers by hand
// -----------------------------------------------------------------------------------------------

struct TopKClaim {
  const char* name;
  std::vector<float> logits;
  int32_t k;
  float temperature;
  std::vector<int32_t> indices;
  std::vector<float> probs;
  float logsumexp;
  RowStatus status = {};
};

inline const std::vector<TopKClaim>& TopKClaims() {
  static const auto& claims = *new std::vector<TopKClaim>{
      {"one_token_is_certain", {-3}, 1, 1, {0}, {1}, -3},
      {"largest_first", {0, std::log(3.0f)}, 2, 1, {1, 0}, {0.75f, 0.25f}, std::log(4.0f)},
      {"probabilities_are_of_the_whole_row", {0, 0, 0, 0}, 1, 1, {0}, {0.25f}, std::log(4.0f)},
      {"ties_go_to_the_lower_index",
       {1, 3, 3, 1},
       3,
       1,
       {1, 2, 0},
       {0.44039854f, 0.44039854f, 0.05960146f},
       3.8200748f},
      {"minus_zero_equals_plus_zero",
       {-0.0f, 0.0f, -0.0f},
       3,
       1,
       {0, 1, 2},
       {1 / 3.0f, 1 / 3.0f, 1 / 3.0f},
       std::log(3.0f)},
      {"temperature_divides_before_the_softmax",
       {0, 2 * std::log(3.0f)},
       2,
       2,
       {1, 0},
       {0.75f, 0.25f},
       std::log(4.0f)},
      {"cold_rows_are_certain", {1, 1.5f, 0}, 2, 1e-4f, {1, 0}, {1, 0}, 15000},
      {"far_tail_keeps_its_digits",
       {19.028f, -13.239f},
       2,
       0.498f,
       {0, 1},
       {1, 7.25574871e-29f},
       38.2088354f},
      {"minus_inf_comes_last_with_nothing", {-kInf, 0, -kInf}, 2, 1, {1, 0}, {1, 0}, 0},
      {"minus_inf_alone_has_no_support",
       {-kInf, -kInf, -kInf},
       2,
       1,
       {0, 1},
       {0, 0},
       -kInf,
       {RowCode::kEmptySupport, -1}},
      {"plus_inf_is_certain", {5, kInf, 7}, 2, 1, {1, 2}, {1, 0}, kInf},
      {"several_plus_inf_share",
       {kInf, 5, kInf, -kInf},
       4,
       1,
       {0, 2, 1, 3},
       {0.5f, 0.5f, 0, 0},
       kInf},
      {"far_apart_is_not_nan", {-3e38f, 3e38f}, 2, 1, {1, 0}, {1, 0}, 3e38f},
      {"far_apart_and_hot_is_still_a_ratio",
       {-1.5e38f, 1.5e38f},
       2,
       3e38f,
       {1, 0},
       {0.7310586f, 0.2689414f},
       0.8132617f},
      // max / temperature is far beyond what f32 holds to a unit.
      {"cold_is_still_a_ratio",
       {10.1f, 10, 10.1f},
       3,
       1e-12f,
       {0, 2, 1},
       {0.5f, 0.5f, 0},
       1.01e13f},
      {"one_nan_spoils_its_row", {1, kNan, 3}, 1, 1, {}, {}, 0, {RowCode::kNanLogit, 1}},
      {"lowest_nan_is_named", {1, 2, kNan, kNan}, 1, 1, {}, {}, 0, {RowCode::kNanLogit, 2}},
      {"infinities_of_both_signs_are_no_nan", {-kInf, kInf}, 1, 1, {1}, {1}, kInf},
      {"nan_beats_plus_inf", {kInf, -kInf, kNan}, 1, 1, {}, {}, 0, {RowCode::kNanLogit, 2}},
  };
  return claims;
}

// "" where the backend keeps the claim, else what it did instead.
inline std::string BrokenClaim(OpRunner& runner, const TopKClaim& claim) {
  HostTensor tensor(DType::kF32, 1, claim.logits.size(), claim.logits.size(), 0);
  for (size_t c = 0; c < claim.logits.size(); ++c) tensor.Set(0, c, claim.logits[c]);
  const SoftmaxTopKRow ask{.first_entry = 0, .temperature = claim.temperature, .k = claim.k};
  auto got = runner.SoftmaxTopK(tensor, {&ask, 1}, claim.k);
  if (!got.ok()) return got.status().ToString();
  TopKRowAnswer want{
      .status = claim.status, .logsumexp = claim.logsumexp, .indices = claim.indices};
  // The table's floats are rounded; the tolerance is wide enough for that.
  want.probs.assign(claim.probs.begin(), claim.probs.end());
  return DescribeDifference(want, got->status[0], got->logsumexp[0], got->indices, got->probs);
}

// ---- Parity with double precision
// ----------------------------------------------------------------------------------

enum class Temperatures { kOne, kMixed };  // mixed: from 1e-4 to 1e4 by row
enum class Ks { kSame, kMixed };           // mixed: k, 1, skip, some in between

struct TopKCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t stride_extra = 0;  // elements between the end of a row and the next
  int64_t offset = 0;        // elements from an aligned address to the first row
  int32_t k = 1;
  Ks ks = Ks::kSame;
  Temperatures temperatures = Temperatures::kOne;
  Fill fill = Fill::kNormal;
  uint64_t seed = 1;
};

inline std::string Describe(const TopKCase& c) {
  return absl::StrFormat("softmax_topk [%d, %d] %s k=%d%s%s fill=%s stride=+%d offset=%d seed=%d",
                         c.rows, c.vocab, Name(c.dtype), c.k, c.ks == Ks::kMixed ? " (mixed)" : "",
                         c.temperatures == Temperatures::kMixed ? " temperatures=mixed" : "",
                         Name(c.fill), c.stride_extra, c.offset, c.seed);
}

inline HostTensor MakeTensor(const TopKCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  for (int64_t r = 0; r < c.rows; ++r) FillRow(tensor, r, c.fill, c.seed);
  return tensor;
}

inline SoftmaxTopKRow AskOf(const TopKCase& c, int64_t r) {
  static constexpr float kTemperatures[] = {1e-4f, 0.7f, 1e4f, 0.05f, 1.0f, 3.5f};
  SoftmaxTopKRow ask{.temperature = 1.0f, .k = c.k};
  if (c.temperatures == Temperatures::kMixed) ask.temperature = kTemperatures[r % 6];
  if (c.ks == Ks::kMixed && r % 4 == 1) ask.k = 1;
  if (c.ks == Ks::kMixed && r % 4 == 2) ask = {.temperature = 0, .k = 0};
  if (c.ks == Ks::kMixed && r % 4 == 3) ask.k = 1 + c.k / 2;
  return ask;
}

// Rows and one entry between each two that belongs to none and must stay as it was.
struct Asks {
  std::vector<SoftmaxTopKRow> rows;
  int64_t entries = 0;
};
inline Asks MakeAsks(const TopKCase& c) {
  Asks asks;
  for (int64_t r = 0; r < c.rows; ++r) {
    SoftmaxTopKRow ask = AskOf(c, r);
    if (ask.k > 0) ask.first_entry = asks.entries;
    asks.entries += ask.k + 1;
    asks.rows.push_back(ask);
  }
  return asks;
}

// "" where every row agrees with the reference and nothing else was written, else the first that
// does not.
inline std::string FirstDifference(const TopKCase& c, const HostTensor& tensor, const Asks& asks,
                                   const TopKAnswer& got) {
  int64_t next_entry = 0;
  for (int64_t r = 0; r < c.rows; ++r) {
    const SoftmaxTopKRow& ask = asks.rows[r];
    const int64_t gap = next_entry + ask.k;
    if (got.indices[gap] != kUnwrittenIndex || got.probs[gap] != kUnwrittenFloat) {
      return absl::StrFormat("%s: wrote entry %d, behind row %d's", Describe(c), gap, r);
    }
    next_entry = gap + 1;
    if (ask.k == 0) {
      if (got.logsumexp[r] != kUnwrittenFloat || got.status[r].position != kUnwrittenIndex) {
        return absl::StrFormat("%s: wrote for row %d, which is to be skipped", Describe(c), r);
      }
      continue;
    }
    const TopKRowAnswer want = ReferenceSoftmaxTopK(tensor, r, ask);
    const std::string difference = DescribeDifference(
        want, got.status[r], got.logsumexp[r], {&got.indices[ask.first_entry], size_t(ask.k)},
        {&got.probs[ask.first_entry], size_t(ask.k)});
    if (!difference.empty()) {
      return absl::StrFormat("%s: row %d (k=%d, temperature=%g): %s", Describe(c), r, ask.k,
                             ask.temperature, difference);
    }
  }
  return "";
}

inline std::string FirstDifference(OpRunner& runner, const TopKCase& c) {
  const HostTensor tensor = MakeTensor(c);
  const Asks asks = MakeAsks(c);
  auto got = runner.SoftmaxTopK(tensor, asks.rows, asks.entries);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  return FirstDifference(c, tensor, asks, *got);
}

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Ks worth trying with a vocabulary: around the variants' borders, and all of it.
inline std::vector<int32_t> KsFor(int64_t vocab) {
  std::set<int32_t> ks;
  for (int32_t k : {1, 2, 10, 64, 65, 100, 1000, 1024, 1025}) {
    if (k <= vocab) ks.insert(k);
  }
  ks.insert(static_cast<int32_t>(vocab));
  return {ks.begin(), ks.end()};
}

// Every vocabulary x row count x type x k; fills, strides, offsets, temperatures and mixes take
// turns.
inline std::vector<TopKCase> ShapeCases() {
  struct Shape {
    int64_t vocab;
    std::vector<int64_t> rows;
  };
  const std::vector<Shape> shapes = {
      {1, {1, 2, 3, 64, 257}},  {2, {1, 2, 3, 64, 257}},  {7, {1, 2, 3, 64, 257}},
      {31, {1, 2, 3, 64, 257}}, {32, {1, 2, 3, 64, 257}}, {33, {1, 2, 3, 64, 257}},
      {1000, {1, 3, 64, 257}},  {1023, {1, 2, 64}},       {1024, {1, 3, 64, 257}},
      {1025, {1, 2, 64}},       {2048, {1, 3, 64}},       {4097, {1, 2, 64}},
      {32000, {1, 3}},          {50257, {2, 3}},          {131072, {1, 2}},
      {int64_t{1} << 20, {1}},
  };
  static constexpr int64_t kStrides[] = {0, 1, 3, 17, 64};
  static constexpr int64_t kOffsets[] = {0, 1, 3, 6, 9, 13, 32};
  std::vector<TopKCase> cases;
  uint64_t n = 0;
  for (const Shape& shape : shapes) {
    for (int64_t rows : shape.rows) {
      for (DType dtype : kAllDTypes) {
        for (int32_t k : KsFor(shape.vocab)) {
          TopKCase c{.dtype = dtype, .rows = rows, .vocab = shape.vocab, .k = k, .seed = ++n};
          c.stride_extra = kStrides[n % 5];
          c.offset = kOffsets[n % 7];
          c.temperatures = n % 2 == 0 ? Temperatures::kMixed : Temperatures::kOne;
          c.ks = n % 3 == 0 ? Ks::kMixed : Ks::kSame;
          c.fill = n % 2 == 0 ? Fill::kNormal : kAllFills[n / 2 % std::size(kAllFills)];
          cases.push_back(c);
        }
      }
    }
  }
  cases.push_back(
      {.rows = 64, .vocab = 50257, .stride_extra = 1, .offset = 1, .k = 10, .seed = ++n});
  cases.push_back({.dtype = DType::kBF16,
                   .rows = 64,
                   .vocab = 50257,
                   .stride_extra = 3,
                   .k = 64,
                   .ks = Ks::kMixed,
                   .temperatures = Temperatures::kMixed,
                   .seed = ++n});
  return cases;
}

// Every kind of row x type, short, one over a cell, and long.
inline std::vector<TopKCase> FillCases() {
  std::vector<TopKCase> cases;
  uint64_t n = 1000;
  for (Fill fill : kAllFills) {
    for (DType dtype : kAllDTypes) {
      for (int64_t vocab : {33, 1025, 50257}) {
        for (int32_t k : {1, 33, 64, 1024, static_cast<int32_t>(vocab)}) {
          if (k > vocab) continue;
          for (Temperatures temperatures : {Temperatures::kOne, Temperatures::kMixed}) {
            cases.push_back({.dtype = dtype,
                             .rows = vocab > 10000 ? 2 : 6,
                             .vocab = vocab,
                             .stride_extra = static_cast<int64_t>(n % 3),
                             .k = k,
                             .temperatures = temperatures,
                             .fill = fill,
                             .seed = ++n});
          }
        }
      }
    }
  }
  return cases;
}

// ---- Bits that depend on the row alone
// -----------------------------------------------------------------------------

struct InvarianceCase {
  DType dtype;
  int64_t vocab;
  int32_t k;
  float temperature;
  Fill fill;
};

inline const std::vector<InvarianceCase>& InvarianceCases() {
  static const auto& cases = *new std::vector<InvarianceCase>{
      {DType::kF32, 7, 3, 1.0f, Fill::kNormal},
      {DType::kF32, 1000, 10, 0.7f, Fill::kNormal},
      {DType::kF32, 50257, 10, 1.0f, Fill::kNormal},
      {DType::kF32, 131072, 64, 1.3f, Fill::kUniform},
      {DType::kF32, 131072, 1024, 1.0f, Fill::kNormal},
      {DType::kBF16, 131072, 64, 0.7f, Fill::kNormal},
      {DType::kF16, 32001, 100, 1e4f, Fill::kNormal},
      {DType::kBF16, 4097, 4097, 1.0f, Fill::kNormal},
      {DType::kF32, 33333, 65, 0.01f, Fill::kManyTies},
      {DType::kF32, 1 << 20, 64, 1.0f, Fill::kNormal},
  };
  return cases;
}

// The bits of one row's answer.
struct RowBits {
  std::vector<int32_t> indices;
  std::vector<float> probs;
  float logsumexp;
  RowStatus status;
};

inline bool SameBits(const RowBits& a, const RowBits& b) {
  return a.indices == b.indices && a.probs.size() == b.probs.size() &&
         std::memcmp(a.probs.data(), b.probs.data(), a.probs.size() * sizeof(float)) == 0 &&
         BitsOf(a.logsumexp) == BitsOf(b.logsumexp) && a.status.code == b.status.code &&
         a.status.position == b.status.position;
}

// Where a row travels.
struct Company {
  int64_t rows = 1;
  int64_t place = 0;  // of the row in the batch
  int64_t stride_extra = 0;
  int64_t offset = 0;
  int32_t others_k = 1;
};

// The row of `c`, computed in company of rows of another kind, k and temperature.
inline absl::StatusOr<RowBits> BitsInCompany(OpRunner& runner, const InvarianceCase& c,
                                             const Company& company) {
  HostTensor tensor(c.dtype, company.rows, c.vocab, c.vocab + company.stride_extra, company.offset);
  HostTensor row(c.dtype, 1, c.vocab, c.vocab, 0);
  FillRow(row, 0, c.fill, /*seed=*/5);
  std::vector<SoftmaxTopKRow> asks;
  int64_t entries = 0;
  for (int64_t r = 0; r < company.rows; ++r) {
    if (r == company.place) {
      for (int64_t i = 0; i < c.vocab; ++i) tensor.Set(r, i, row.At(0, i));
      asks.push_back({.first_entry = entries, .temperature = c.temperature, .k = c.k});
    } else {
      FillRow(tensor, r, r % 5 == 4 ? Fill::kWithNan : Fill::kNormal, /*seed=*/77);
      asks.push_back({.first_entry = entries, .temperature = 0.5f + r, .k = company.others_k});
    }
    entries += asks.back().k;
  }
  auto got = runner.SoftmaxTopK(tensor, asks, entries);
  if (!got.ok()) return got.status();
  const int64_t first = asks[company.place].first_entry;
  return RowBits{.indices = {&got->indices[first], &got->indices[first] + c.k},
                 .probs = {&got->probs[first], &got->probs[first] + c.k},
                 .logsumexp = got->logsumexp[company.place],
                 .status = got->status[company.place]};
}

// "" where the row's bits are the same alone, twice, and in every company; else the company that
// changed them.
inline std::string BrokenInvariance(OpRunner& runner, const InvarianceCase& c) {
  std::vector<Company> companies = {
      {.rows = 1},
      {.rows = 1, .offset = 1},
      {.rows = 2, .place = 1, .others_k = 1},
      {.rows = 3,
       .place = 1,
       .stride_extra = 5,
       .offset = 3,
       .others_k = static_cast<int32_t>(c.vocab)},
      {.rows = 9, .place = 8, .stride_extra = 1, .others_k = 2},
  };
  if (c.vocab <= 50257)
    companies.push_back({.rows = 40, .place = 17, .stride_extra = 3, .offset = 7, .others_k = 5});
  if (c.vocab <= 1000) companies.push_back({.rows = 700, .place = 333, .others_k = 7});
  auto alone = BitsInCompany(runner, c, {});
  if (!alone.ok()) return alone.status().ToString();
  for (const Company& company : companies) {
    auto got = BitsInCompany(runner, c, company);
    if (!got.ok()) return got.status().ToString();
    if (!SameBits(*alone, *got)) {
      return absl::StrFormat(
          "softmax_topk vocab=%d %s k=%d: other bits as row %d of %d, stride +%d, offset %d, "
          "others' k %d",
          c.vocab, Name(c.dtype), c.k, company.place, company.rows, company.stride_extra,
          company.offset, company.others_k);
    }
  }
  return "";
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SOFTMAX_TOPK_CASES_H_
