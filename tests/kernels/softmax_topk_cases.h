// What softmax_topk must do on every backend: answers by hand, parity with double precision, and
// bits that do not depend on other rows. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_SOFTMAX_TOPK_CASES_H_
#define LOGITD_TESTS_KERNELS_SOFTMAX_TOPK_CASES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// ---- Answers by hand

struct TopKClaim {
  const char* name;
  std::vector<float> logits;
  int32_t k = 1;
  float temperature = 1;
  std::vector<int32_t> indices;
  std::vector<float> probs;
  float logsumexp;
  RowStatus status;
};

inline const std::vector<TopKClaim>& TopKClaims() {
  static const auto& claims = *new std::vector<TopKClaim>{
      // clang-format off
      {.name = "one token is certain", .logits = {-3}, .indices = {0}, .probs = {1},
       .logsumexp = -3},
      {.name = "the largest comes first", .logits = {0, std::log(3.0f)}, .k = 2, .indices = {1, 0},
       .probs = {0.75f, 0.25f}, .logsumexp = std::log(4.0f)},
      {.name = "probabilities are those of the whole row", .logits = {0, 0, 0, 0}, .indices = {0},
       .probs = {0.25f}, .logsumexp = std::log(4.0f)},
      {.name = "ties go to the lower index", .logits = {1, 3, 3, 1}, .k = 3, .indices = {1, 2, 0},
       .probs = {0.44039854f, 0.44039854f, 0.05960146f}, .logsumexp = 3.8200748f},
      {.name = "minus zero equals plus zero", .logits = {-0.0f, 0.0f, -0.0f}, .k = 3,
       .indices = {0, 1, 2}, .probs = {1 / 3.0f, 1 / 3.0f, 1 / 3.0f}, .logsumexp = std::log(3.0f)},
      {.name = "temperature divides before the softmax", .logits = {0, 2 * std::log(3.0f)}, .k = 2,
       .temperature = 2, .indices = {1, 0}, .probs = {0.75f, 0.25f}, .logsumexp = std::log(4.0f)},
      {.name = "a low temperature makes the highest logit certain", .logits = {1, 1.5f, 0}, .k = 2,
       .temperature = 1e-4f, .indices = {1, 0}, .probs = {1, 0}, .logsumexp = 15000},
      {.name = "a small probability keeps its digits", .logits = {19.028f, -13.239f}, .k = 2,
       .temperature = 0.498f, .indices = {0, 1}, .probs = {1, 7.25574871e-29f},
       .logsumexp = 38.2088354f},
      {.name = "minus inf comes last and has probability 0", .logits = {-kInf, 0, -kInf}, .k = 2,
       .indices = {1, 0}, .probs = {1, 0}},
      {.name = "a row of only minus inf has no support", .logits = {-kInf, -kInf, -kInf}, .k = 2,
       .indices = {0, 1}, .probs = {0, 0}, .logsumexp = -kInf,
       .status = {RowCode::kEmptySupport, -1}},
      {.name = "plus inf is certain", .logits = {5, kInf, 7}, .k = 2, .indices = {1, 2},
       .probs = {1, 0}, .logsumexp = kInf},
      {.name = "several plus inf share the probability", .logits = {kInf, 5, kInf, -kInf}, .k = 4,
       .indices = {0, 2, 1, 3}, .probs = {0.5f, 0.5f, 0, 0}, .logsumexp = kInf},
      {.name = "logits far apart do not make NaN", .logits = {-3e38f, 3e38f}, .k = 2,
       .indices = {1, 0}, .probs = {1, 0}, .logsumexp = 3e38f},
      {.name = "logits far apart keep their ratio at a high temperature",
       .logits = {-1.5e38f, 1.5e38f}, .k = 2, .temperature = 3e38f, .indices = {1, 0},
       .probs = {0.7310586f, 0.2689414f}, .logsumexp = 0.8132617f},
      // max / temperature is far beyond what f32 holds to a unit.
      {.name = "equal logits stay equal at a very low temperature", .logits = {10.1f, 10, 10.1f},
       .k = 3, .temperature = 1e-12f, .indices = {0, 2, 1}, .probs = {0.5f, 0.5f, 0},
       .logsumexp = 1.01e13f},
      {.name = "a logsumexp above f32 is plus inf", .logits = {1, 2, 1}, .k = 2,
       .temperature = 1e-39f, .indices = {1, 0}, .probs = {1, 0}, .logsumexp = kInf},
      {.name = "a logsumexp below f32 is minus inf", .logits = {-2, -1, -2}, .k = 2,
       .temperature = 1e-39f, .indices = {1, 0}, .probs = {1, 0}, .logsumexp = -kInf},
      {.name = "the logsumexp of zeros is finite at any temperature", .logits = {0, 0, -1}, .k = 3,
       .temperature = 1e-39f, .indices = {0, 1, 2}, .probs = {0.5f, 0.5f, 0},
       .logsumexp = std::log(2.0f)},
      {.name = "one NaN makes its row faulty", .logits = {1, kNan, 3},
       .status = {RowCode::kNanLogit, 1}},
      {.name = "the status names the lowest NaN", .logits = {1, 2, kNan, kNan},
       .status = {RowCode::kNanLogit, 2}},
      {.name = "infinities of both signs are not NaN", .logits = {-kInf, kInf}, .indices = {1},
       .probs = {1}, .logsumexp = kInf},
      {.name = "NaN wins over plus inf", .logits = {kInf, -kInf, kNan},
       .status = {RowCode::kNanLogit, 2}},
      // clang-format on
  };
  return claims;
}

// "" where the backend keeps the claim for every type that holds its logits, else what it did
// instead.
inline std::string BrokenClaim(OpRunner& runner, const TopKClaim& claim) {
  for (DType dtype : kAllDTypes) {
    const HostTensor logits = TensorOf(dtype, 1, claim.logits);
    bool exact = true;
    for (size_t i = 0; i < claim.logits.size(); ++i) {
      exact &= std::isnan(claim.logits[i]) || logits.At(0, i) == claim.logits[i];
    }
    if (!exact) continue;
    const SoftmaxTopKRow ask{.first_entry = 0, .temperature = claim.temperature, .k = claim.k};
    const auto got = runner.SoftmaxTopK(logits, {&ask, 1}, claim.k);
    if (!got.ok()) return got.status().ToString();
    TopKRowAnswer want{
        .status = claim.status, .logsumexp = claim.logsumexp, .indices = claim.indices};
    // The table's floats are rounded; the tolerance is wide enough for that.
    want.probs.assign(claim.probs.begin(), claim.probs.end());
    const std::string difference =
        DescribeDifference(want, got->status[0], got->logsumexp[0], got->indices, got->probs);
    if (!difference.empty()) return absl::StrFormat("%s: %s", Name(dtype), difference);
  }
  return "";
}

// ---- Parity with double precision

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

// Rows, and one unused entry after the entries of each, which must stay as it was.
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
      return absl::StrFormat("%s: wrote entry %d, after those of row %d", Describe(c), gap, r);
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
      {1, {1, 2, 3, 64, 257}},
      {2, {1, 2, 3, 64, 257}},
      {7, {1, 2, 3, 64, 257}},
      {31, {1, 2, 3, 64, 257}},
      {32, {1, 2, 3, 64, 257}},
      {33, {1, 2, 3, 64, 257}},
      {1000, {1, 3, 64, 257}},
      {1023, {1, 2, 64}},
      {1024, {1, 3, 64, 257}},
      {1025, {1, 2, 64, 65}},
      {2048, {1, 3, 64, 129}},
      {3001, {66}},
      {4096, {70}},
      {4097, {1, 2, 64, 65}},
      {8192, {65}},
      {32000, {1, 3}},
      {50257, {2, 3}},
      {131072, {1, 2}},
      {int64_t{1} << 20, {1}},
  };
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

// Every kind of row x type, short, one over a cell, and long; and more short rows than share
// blocks, also of lengths just above a cell's border.
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
      for (int64_t vocab : {1000, 3001, 8000}) {
        for (int32_t k : {3, 64}) {
          cases.push_back({.dtype = dtype,
                           .rows = 66,
                           .vocab = vocab,
                           .stride_extra = static_cast<int64_t>(n % 3),
                           .k = k,
                           .ks = Ks::kMixed,
                           .temperatures = Temperatures::kMixed,
                           .fill = fill,
                           .seed = ++n});
        }
      }
    }
  }
  for (int64_t vocab : {2049, 5000, 9217}) {
    for (DType dtype : kAllDTypes) {
      for (int32_t k : {1, 16, 64}) {
        cases.push_back({.dtype = dtype,
                         .rows = 514,
                         .vocab = vocab,
                         .stride_extra = static_cast<int64_t>(n % 3),
                         .k = k,
                         .ks = Ks::kMixed,
                         .temperatures = Temperatures::kMixed,
                         .fill = kAllFills[n % std::size(kAllFills)],
                         .seed = ++n});
      }
    }
  }
  return cases;
}

// ---- Bits that depend only on the row

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
      {DType::kF32, 1000, 50, 0.7f, Fill::kNormal},
      {DType::kF32, 2048, 64, 1.0f, Fill::kNormal},
      {DType::kF32, 3001, 33, 1.3f, Fill::kNormal},
      {DType::kBF16, 4096, 50, 0.9f, Fill::kNormal},
      {DType::kF16, 8000, 20, 1.0f, Fill::kNormal},
      {DType::kBF16, 1025, 10, 0.9f, Fill::kNormal},
      {DType::kF32, 2049, 16, 1.1f, Fill::kManyTies},
      {DType::kF32, 5000, 60, 1.0f, Fill::kNormal},
      {DType::kBF16, 9217, 64, 1.0f, Fill::kNormal},
      {DType::kF32, 4096, 64, 1.0f, Fill::kManyTies},
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

// Which batch a row is computed in.
struct RowBatch {
  int64_t rows = 1;
  int64_t place = 0;  // of the row in the batch
  int64_t stride_extra = 0;
  int64_t offset = 0;
  int32_t others_k = 1;
};

// The row of `c`, computed in a batch with rows of another kind, k and temperature.
inline absl::StatusOr<RowBits> BitsInBatch(OpRunner& runner, const InvarianceCase& c,
                                           const RowBatch& batch) {
  HostTensor tensor(c.dtype, batch.rows, c.vocab, c.vocab + batch.stride_extra, batch.offset);
  HostTensor row(c.dtype, 1, c.vocab, c.vocab, 0);
  FillRow(row, 0, c.fill, /*seed=*/5);
  std::vector<SoftmaxTopKRow> asks;
  int64_t entries = 0;
  for (int64_t r = 0; r < batch.rows; ++r) {
    if (r == batch.place) {
      for (int64_t i = 0; i < c.vocab; ++i) tensor.Set(r, i, row.At(0, i));
      asks.push_back({.first_entry = entries, .temperature = c.temperature, .k = c.k});
    } else {
      FillRow(tensor, r, r % 5 == 4 ? Fill::kWithNan : Fill::kNormal, /*seed=*/77);
      asks.push_back({.first_entry = entries, .temperature = 0.5f + r, .k = batch.others_k});
    }
    entries += asks.back().k;
  }
  auto got = runner.SoftmaxTopK(tensor, asks, entries);
  if (!got.ok()) return got.status();
  const int64_t first = asks[batch.place].first_entry;
  return RowBits{.indices = {&got->indices[first], &got->indices[first] + c.k},
                 .probs = {&got->probs[first], &got->probs[first] + c.k},
                 .logsumexp = got->logsumexp[batch.place],
                 .status = got->status[batch.place]};
}

// "" where the row's bits are the same in a batch of one, twice, and in every batch; else the batch
// that changed them.
inline std::string BrokenInvariance(OpRunner& runner, const InvarianceCase& c) {
  std::vector<RowBatch> batches = {
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
    batches.push_back({.rows = 40, .place = 17, .stride_extra = 3, .offset = 7, .others_k = 5});
  if (c.vocab <= 1000) batches.push_back({.rows = 700, .place = 333, .others_k = 7});
  if (c.vocab <= 8192)
    batches.push_back({.rows = 150, .place = 141, .stride_extra = 1, .offset = 1, .others_k = 7});
  if (c.vocab > 1000 && c.vocab <= 9217)
    batches.push_back({.rows = 530, .place = 401, .stride_extra = 1, .offset = 1, .others_k = 7});
  auto alone = BitsInBatch(runner, c, {});
  if (!alone.ok()) return alone.status().ToString();
  for (const RowBatch& batch : batches) {
    auto got = BitsInBatch(runner, c, batch);
    if (!got.ok()) return got.status().ToString();
    if (!SameBits(*alone, *got)) {
      return absl::StrFormat(
          "softmax_topk vocab=%d %s k=%d: other bits as row %d of %d, stride +%d, offset %d, "
          "others' k %d",
          c.vocab, Name(c.dtype), c.k, batch.place, batch.rows, batch.stride_extra, batch.offset,
          batch.others_k);
    }
  }
  return "";
}

inline std::vector<OpCheck> SoftmaxTopKChecks() {
  return {
      ForAll("KeepsEveryClaim", TopKClaims, BrokenClaim),
      ForAll("EveryShapeAgreesWithDoublePrecision", ShapeCases, FirstDifference),
      ForAll("EveryKindOfRowAgreesWithDoublePrecision", FillCases, FirstDifference),
      ForAll("ARowsBitsDoNotDependOnOtherRows", InvarianceCases, BrokenInvariance),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SOFTMAX_TOPK_CASES_H_
