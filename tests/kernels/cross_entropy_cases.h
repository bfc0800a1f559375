// What cross_entropy and its backward must do on every backend: answers by hand, parity with double
// precision, and bits that do not depend on other rows. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CASES_H_
#define LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CASES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/cross_entropy_claims.h"
#include "tests/kernels/cross_entropy_reference.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// ---- Answers by hand

// "" where `got` is the claim's answer in the type of its logits, else what differs.
inline std::string DescribeDifference(const LossClaim& claim, const LossAnswer& got) {
  if (std::string status = DescribeStatus(got.status[0], claim.status); !status.empty()) {
    return status;
  }
  if (got.rank[0] != claim.rank) {
    return absl::StrFormat("rank: got %d, want %d", got.rank[0], claim.rank);
  }
  if (got.top_ids != claim.top_ids) return "other top ids";
  struct Floats {
    const char* name;
    std::vector<float> got, want;
  };
  for (const Floats& floats :
       {Floats{"loss", got.loss, {claim.loss}},
        Floats{"logsumexp", got.logsumexp, {claim.logsumexp}},
        Floats{"target_logprob", got.target_logprob, {claim.target_logprob}},
        Floats{"entropy", got.entropy, {claim.entropy}},
        Floats{"top_logprobs", got.top_logprobs, claim.top_logprobs},
        Floats{"extra_logprobs", got.extra_logprobs, claim.extra_logprobs}}) {
    for (size_t i = 0; i < floats.want.size(); ++i) {
      const float a = floats.got[i], b = floats.want[i];
      if (std::isnan(b) ? std::isnan(a)
                        : a == b || std::fabs(a - b) <= 4e-6f * std::max(1.0f, std::fabs(b))) {
        continue;
      }
      return absl::StrFormat("%s %d: got %.9g, want %.9g", floats.name, i, a, b);
    }
  }
  return "";
}

// "" where the claim holds in every type that holds its logits, else what does not.
inline std::string BrokenClaim(OpRunner& runner, const LossClaim& claim) {
  for (DType dtype : kAllDTypes) {
    const HostTensor logits = TensorOf(dtype, 1, claim.logits);
    bool exact = true;
    for (size_t i = 0; i < claim.logits.size(); ++i) {
      exact &= std::isnan(claim.logits[i]) || logits.At(0, i) == claim.logits[i];
    }
    if (!exact) continue;
    LossBatch batch = {.rows = {claim.ask.Row()},
                       .extra_ids = claim.extra_ids,
                       .top_entries = claim.ask.top_logprobs,
                       .extra_entries = static_cast<int64_t>(claim.extra_ids.size()),
                       .says_all_wanted = true};
    if (claim.ask.active) batch.rows[0].extra_count = static_cast<int32_t>(batch.extra_entries);
    auto got = runner.CrossEntropy(logits, batch);
    if (!got.ok()) return got.status().ToString();
    const std::string difference = DescribeDifference(claim, *got);
    if (!difference.empty()) return absl::StrFormat("%s: %s", Name(dtype), difference);
  }
  return "";
}

struct LossGradientClaim {
  const char* name;
  std::vector<float> logits;
  LossAsk ask;
  float logsumexp;
  float upstream = 1;
  std::vector<float> d_logits;
};

inline const std::vector<LossGradientClaim>& LossGradientClaims() {
  static const float ln2 = std::log(2.0f);
  static constexpr float kUnwritten = 9;
  static const auto& claims = *new std::vector<LossGradientClaim>{
      // clang-format off
      {.name = "two equal logits have one half each", .logits = {0, 0}, .logsumexp = ln2,
       .d_logits = {-0.5f, 0.5f}},
      {.name = "the target may be the last token", .logits = {0, 0}, .ask = {.target = 1},
       .logsumexp = ln2, .d_logits = {0.5f, -0.5f}},
      {.name = "upstream multiplies and the temperature divides", .logits = {0, 0},
       .ask = {.temperature = 2}, .logsumexp = ln2, .upstream = -3, .d_logits = {0.75f, -0.75f}},
      {.name = "torch smoothing moves weight from the target to all tokens", .logits = {0, 0},
       .ask = {.label_smoothing = 0.2f}, .logsumexp = ln2, .d_logits = {-0.4f, 0.4f}},
      {.name = "megatron smoothing moves weight from the target to the others", .logits = {0, 0},
       .ask = {.label_smoothing = 0.2f, .smoothing = Smoothing::kMegatron}, .logsumexp = ln2,
       .d_logits = {-0.3f, 0.3f}},
      // (1 + ln 2) / 2
      {.name = "z-loss adds its own gradient", .logits = {0, 0}, .ask = {.z_loss = 0.5f},
       .logsumexp = ln2, .d_logits = {-0.15342641f, 0.84657359f}},
      // x = {0, 1}, bent by 1 and by 3/4
      {.name = "the softcap multiplies by its derivative", .logits = {0, 1.0986123f},
       .ask = {.softcap = 2}, .logsumexp = 1.31326169f, .d_logits = {-0.73105858f, 0.54829393f}},
      {.name = "the softcap has derivative 0 at infinity", .logits = {kInf, -kInf},
       .ask = {.softcap = 2}, .logsumexp = 2.01814993f, .d_logits = {0, 0}},
      {.name = "minus inf has probability 0", .logits = {0, -kInf}, .ask = {.target = 1},
       .logsumexp = 0, .d_logits = {1, -1}},
      {.name = "zero divided by a small temperature stays zero", .logits = {0, -kInf},
       .ask = {.temperature = 1e-40f}, .logsumexp = 0, .d_logits = {0, 0}},
      {.name = "equal logits stay equal at a small temperature", .logits = {0, 0},
       .ask = {.temperature = 0x1p-130f}, .logsumexp = ln2, .upstream = 0x1p-128f,
       .d_logits = {-2, 2}},
      {.name = "the gradient of an ignored row is zeros", .logits = {1, kNan},
       .ask = {.target = kIgnoredTarget}, .logsumexp = kNan, .upstream = kNan, .d_logits = {0, 0}},
      {.name = "a logsumexp of plus inf makes the gradient NaN", .logits = {kInf, 0},
       .logsumexp = kInf, .d_logits = {kNan, kNan}},
      {.name = "a logsumexp of minus inf makes the gradient NaN", .logits = {-kInf, -kInf},
       .logsumexp = -kInf, .d_logits = {kNan, kNan}},
      {.name = "a logsumexp of NaN makes the gradient NaN", .logits = {0, kNan}, .logsumexp = kNan,
       .d_logits = {kNan, kNan}},
      {.name = "nothing is written for a skipped row", .logits = {0, 0}, .ask = {.active = 0},
       .logsumexp = ln2, .d_logits = {kUnwritten, kUnwritten}},
      // clang-format on
  };
  return claims;
}

inline std::string BrokenClaim(OpRunner& runner, const LossGradientClaim& claim) {
  const std::vector<float> nines(claim.logits.size(), 9);
  const auto got = runner.CrossEntropyBackward({.logits = TensorOf(DType::kF32, 1, claim.logits),
                                                .rows = {claim.ask.Row()},
                                                .logsumexp = {claim.logsumexp},
                                                .upstream = {claim.upstream},
                                                .d_logits = TensorOf(DType::kF32, 1, nines)});
  if (!got.ok()) return got.status().ToString();
  for (size_t i = 0; i < claim.logits.size(); ++i) {
    const float want = claim.d_logits[i], is = got->At(0, i);
    if (std::isnan(want) ? std::isnan(is) : std::fabs(is - want) <= 2e-6f) continue;
    return absl::StrFormat("element %d: got %.9g, want %.9g", i, is, want);
  }
  return "";
}

// "" where an upstream gradient of NaN gives NaN in every element, in any type and whatever the
// NaN's bits, which rounding could carry over.
inline std::string FirstLostNan(OpRunner& runner) {
  for (DType dtype : kAllDTypes) {
    for (const uint32_t bits : {0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
      const HostTensor zeros = TensorOf(dtype, 1, {0, 0, 0});
      const auto got = runner.CrossEntropyBackward({.logits = zeros,
                                                    .rows = {PlainLoss(1)},
                                                    .logsumexp = {std::log(3.0f)},
                                                    .upstream = {FloatOf(bits)},
                                                    .d_logits = zeros});
      if (!got.ok()) return got.status().ToString();
      for (int64_t i = 0; i < 3; ++i) {
        if (std::isnan(got->At(0, i))) continue;
        return absl::StrFormat("%s, upstream %#x, element %d: got %g", Name(dtype), bits, i,
                               got->At(0, i));
      }
    }
  }
  return "";
}

// ---- Parity with double precision

struct LossCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t stride_extra = 0;
  int64_t offset = 0;
  Fill fill = Fill::kNormal;
  uint64_t seed = 1;
  bool tops = true;  // some rows want top tokens
};

inline std::string Describe(const LossCase& c) {
  return absl::StrFormat("cross_entropy %dx%d %s stride +%d, offset %d, %s, seed %d%s", c.rows,
                         c.vocab, Name(c.dtype), c.stride_extra, c.offset, Name(c.fill), c.seed,
                         c.tops ? "" : ", no tops");
}

inline std::string Describe(const CrossEntropyRow& row) {
  return absl::StrFormat(
      "target %d, temperature %g, softcap %g, smoothing %g %s, z_loss %g, want %d, top %d, extra "
      "%d",
      row.target, row.temperature, row.softcap, row.label_smoothing,
      row.smoothing == Smoothing::kTorch ? "torch" : "megatron", row.z_loss, row.want,
      row.top_logprobs, row.extra_count);
}

// Any mix of what a row may ask for; one in ten is skipped, one in six ignored.
inline void AddRandomLoss(LossBatch& batch, int64_t vocab, bool with_softcap,
                          std::mt19937_64& random) {
  const auto pick = [&random](std::initializer_list<float> values) {
    return *(values.begin() + random() % values.size());
  };
  if (random() % 10 == 0) {
    batch.rows.push_back({});
    return;
  }
  CrossEntropyRow row = PlainLoss(static_cast<int32_t>(random() % vocab));
  if (random() % 6 == 0) row.target = kIgnoredTarget;
  row.temperature = pick({1, 1, 0.7f, 2.5f, 0.1f});
  const float softcap = pick({0, 0, 30, 5, 1e4f});
  if (with_softcap) row.softcap = softcap;
  row.label_smoothing = pick({0, 0, 0.1f, 0.5f, 0.99f});
  row.smoothing = random() % 2 == 0 ? Smoothing::kTorch : Smoothing::kMegatron;
  row.z_loss = pick({0, 0, 1e-4f, 0.5f});
  row.want = static_cast<int32_t>(random() % 4);
  row.top_logprobs =
      std::min(static_cast<int32_t>(pick({0, 1, 5, 128})), static_cast<int32_t>(vocab));
  row.extra_count = static_cast<int32_t>(random() % 4);
  row.first_extra = static_cast<int64_t>(batch.extra_ids.size());
  for (int32_t i = 0; i < row.extra_count; ++i) {
    batch.extra_ids.push_back(static_cast<int32_t>(random() % vocab));
  }
  row.first_top_entry = batch.top_entries;
  row.first_extra_entry = batch.extra_entries;
  // One entry more than the row asks for: writes after the row's entries show there.
  batch.top_entries += row.top_logprobs + 1;
  batch.extra_entries += row.extra_count + 1;
  batch.rows.push_back(row);
}

inline absl::Span<const int32_t> ExtrasOf(const LossBatch& batch, const CrossEntropyRow& row) {
  return absl::MakeConstSpan(batch.extra_ids).subspan(row.first_extra, row.extra_count);
}

// "" where row r of a batch made by AddRandomLoss has the answer of its logits and nothing else was
// written.
inline std::string RowDifference(const std::vector<double>& logits, const LossBatch& batch,
                                 const LossAnswer& got, int64_t r, LossSlack slack = {}) {
  const CrossEntropyRow& ask = batch.rows[r];
  if (ask.active == 0) {
    const bool untouched = got.loss[r] == kUnwrittenFloat && got.logsumexp[r] == kUnwrittenFloat &&
                           got.status[r].position == kUnwrittenIndex;
    return untouched ? "" : "wrote for a skipped row";
  }
  if (got.top_ids[ask.first_top_entry + ask.top_logprobs] != kUnwrittenIndex ||
      got.extra_logprobs[ask.first_extra_entry + ask.extra_count] != kUnwrittenFloat) {
    return "wrote after its entries";
  }
  return DescribeDifference(ReferenceCrossEntropy(logits, ask, ExtrasOf(batch, ask)), ask, got, r,
                            slack);
}

inline std::string FirstDifference(OpRunner& runner, const LossCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  LossBatch batch;
  batch.says_all_wanted = c.tops && c.seed % 2 == 0;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed);
    AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, random);
    if (!c.tops) batch.rows.back().top_logprobs = 0;
  }
  auto got = runner.CrossEntropy(tensor, batch);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    const std::string difference = RowDifference(LogitsOf(tensor, r), batch, *got, r);
    if (difference.empty()) continue;
    return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(batch.rows[r]),
                           difference);
  }
  return "";
}

inline std::vector<LossCase> LossCases() {
  struct Shape {
    int64_t vocab, rows;
  };
  static constexpr Shape kShapes[] = {{1, 40},    {2, 60},    {7, 257},  {33, 60},
                                      {1000, 40}, {1023, 3},  {1024, 3}, {1025, 9},
                                      {4097, 20}, {50257, 1}, {50257, 3}};
  std::vector<LossCase> cases;
  uint64_t n = 0;
  for (const Shape& shape : kShapes) {
    for (DType dtype : kAllDTypes) {
      ++n;
      cases.push_back(
          {dtype, shape.rows, shape.vocab, kStrides[n % 5], kOffsets[n % 7], Fill::kNormal, n});
    }
  }
  for (Fill fill : kAllFills) {
    for (int64_t vocab : {33, 1025, 5000}) {
      ++n;
      const DType dtype = n % 3 == 0 ? DType::kBF16 : n % 3 == 1 ? DType::kF32 : DType::kF16;
      cases.push_back(
          {dtype, vocab > 2000 ? 12 : 40, vocab, kStrides[n % 5], kOffsets[n % 7], fill, n});
    }
  }
  cases.push_back({DType::kF32, 1, int64_t{1} << 20, 0, 1, Fill::kUniform, ++n});
  cases.push_back({DType::kBF16, 2, 131072, 1, 1, Fill::kNormal, ++n});
  return cases;
}

// Calls whose rows want no tops: kernels have paths of their own for them, by the length and the
// number of rows.
inline std::vector<LossCase> LossCasesWithoutTops() {
  std::vector<LossCase> cases = LossCases();
  uint64_t n = 1000;
  for (DType dtype : kAllDTypes) {
    cases.push_back({dtype, 6001, 7, 1, 1, Fill::kNormal, ++n});
    cases.push_back({dtype, 3001, 33, 0, 3, Fill::kWithNan, ++n});
    cases.push_back({dtype, 300, 1000, 3, 1, Fill::kWithPlusInf, ++n});
    cases.push_back({dtype, 200, 2049, 0, 0, Fill::kMostlyMinusInf, ++n});
    cases.push_back({dtype, 514, 9217, 0, 1, Fill::kManyTies, ++n});
    cases.push_back({dtype, 150, 4096, 1, 0, Fill::kNormal, ++n});
    // A few tokens above a cell's border, and more.
    cases.push_back({dtype, 70, 1029, 0, 1, Fill::kWithPlusInf, ++n});
    cases.push_back({dtype, 200, 2100, 3, 0, Fill::kNormal, ++n});
    cases.push_back({dtype, 150, 4096 + 150, 0, 1, Fill::kWithNan, ++n});
  }
  for (LossCase& c : cases) c.tops = false;
  return cases;
}

inline bool IsFinite(const std::vector<double>& x, double logsumexp) {
  return std::isfinite(static_cast<float>(logsumexp)) &&
         std::none_of(x.begin(), x.end(), [](double v) { return std::isnan(v); });
}

// ---- Parity of the gradient

// A call over random rows, with the logsumexps of the reference.
inline LossBackwardCall MakeBackwardCall(const LossCase& c) {
  LossBackwardCall call{
      .logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset),
      .d_logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.offset, c.stride_extra),
      .in_place = c.seed % 3 == 0};
  LossBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(call.logits, r, c.fill, c.seed);
    AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, random);
    CrossEntropyRow ask = batch.rows.back();
    ask.top_logprobs = ask.extra_count = ask.want = 0;
    call.rows.push_back(ask);
    ask.target = kIgnoredTarget;
    call.logsumexp.push_back(
        ask.active == 0 ? 0.0f
                        : static_cast<float>(
                              ReferenceCrossEntropy(LogitsOf(call.logits, r), ask, {}).logsumexp));
    call.upstream.push_back(static_cast<float>(random() % 1000) / 250 - 2);
  }
  return call;
}

inline std::string FirstLossGradientDifference(OpRunner& runner, const LossCase& c) {
  const LossBackwardCall call = MakeBackwardCall(c);
  auto got = runner.CrossEntropyBackward(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  const HostTensor& before = call.in_place ? call.logits : call.d_logits;
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& ask = call.rows[r];
    const std::vector<double> x = LogitsOf(call.logits, r);
    const bool finite = ask.active != 0 && IsFinite(x, call.logsumexp[r]);
    LossGradient want;
    if (finite) want = ReferenceGradient(x, ask, call.logsumexp[r], call.upstream[r]);
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float is = got->At(r, i);
      const bool good = ask.active == 0                ? BitsOf(is) == BitsOf(before.At(r, i))
                        : ask.target == kIgnoredTarget ? is == 0
                        : !finite                      ? std::isnan(is)
                                  : Agrees(c.dtype, is, want.d_logits[i], want.slack[i]);
      if (good) continue;
      return absl::StrFormat(
          "%s: row %d (%s, logsumexp %.9g, upstream %g): element %d (logit %.9g): got %.9g, want "
          "%.12g within %.3g",
          Describe(c), r, Describe(ask), call.logsumexp[r], call.upstream[r], i, x[i], is,
          finite ? want.d_logits[i] : 0, finite ? want.slack[i] : 0);
    }
  }
  return "";
}

// The same, except fills whose logsumexp rounded to f32 says little about the row.
inline std::vector<LossCase> LossGradientCases() {
  std::vector<LossCase> cases;
  for (const LossCase& c : LossCases()) {
    if (c.fill != Fill::kHuge) cases.push_back(c);
  }
  return cases;
}

// "" where the gradient of a short row is that of the reference's loss by central differences.
inline std::string FirstFiniteDifference(OpRunner& runner, const uint64_t& seed) {
  LossCase c{.rows = 24, .vocab = 7, .fill = Fill::kNormal, .seed = seed};
  const LossBackwardCall call = MakeBackwardCall(c);
  auto got = runner.CrossEntropyBackward(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& ask = call.rows[r];
    if (call.in_place || ask.active == 0) continue;
    for (int64_t i = 0; i < c.vocab; ++i) {
      const double h = 1e-4;
      double loss[2];
      for (int side = 0; side < 2; ++side) {
        std::vector<double> x = LogitsOf(call.logits, r);
        x[i] += side == 0 ? -h : h;
        loss[side] = ReferenceCrossEntropy(x, ask, {}).loss;
      }
      const double want = call.upstream[r] * (loss[1] - loss[0]) / (2 * h);
      const double size = std::fabs(call.upstream[r]) / ask.temperature * (1 + 20 * ask.z_loss);
      if (std::fabs(got->At(r, i) - want) <= 2e-5 * size / ask.temperature) continue;
      return absl::StrFormat("seed %d, row %d (%s): element %d: got %.9g, want %.9g", seed, r,
                             Describe(ask), i, got->At(r, i), want);
    }
  }
  return "";
}

// ---- Rows that are left out

// Makes an active row one that asks for nothing. Its other parameters stay.
inline void AskForNothing(CrossEntropyRow& row) {
  if (row.active == 0) return;
  row.target = kIgnoredTarget;
  row.want = row.top_logprobs = row.extra_count = 0;
}

inline int64_t CountedRows(absl::Span<const CrossEntropyRow> rows) {
  return std::count_if(rows.begin(), rows.end(), [](const CrossEntropyRow& row) {
    return row.active != 0 && !AsksForNothing(row);
  });
}

// The answers that a call with this batch has arrays for.
inline int32_t WantOf(const LossBatch& batch) {
  int32_t want = batch.says_all_wanted ? kWantRank | kWantEntropy : 0;
  for (const CrossEntropyRow& row : batch.rows) want |= row.want;
  return want;
}

// True where row r has the answer of a row that is left out. `want`: as WantOf().
inline bool IsLeftOutAnswer(const LossAnswer& got, int64_t r, int32_t want) {
  const auto is_zero = [](float x) { return BitsOf(x) == 0; };
  return is_zero(got.loss[r]) && is_zero(got.logsumexp[r]) && is_zero(got.target_logprob[r]) &&
         got.status[r].code == RowCode::kOk && got.status[r].position == -1 &&
         ((want & kWantRank) == 0 || got.rank[r] == 0) &&
         ((want & kWantEntropy) == 0 || is_zero(got.entropy[r]));
}

// ---- Bits that depend only on the row

// All bits of row r's answer.
inline std::string LossBits(const LossAnswer& got, const CrossEntropyRow& ask, int64_t r) {
  std::string bits = absl::StrFormat("%08x %08x %08x %d %d", BitsOf(got.loss[r]),
                                     BitsOf(got.logsumexp[r]), BitsOf(got.target_logprob[r]),
                                     static_cast<int>(got.status[r].code), got.status[r].position);
  if ((ask.want & kWantRank) != 0) absl::StrAppendFormat(&bits, " %d", got.rank[r]);
  if ((ask.want & kWantEntropy) != 0) absl::StrAppendFormat(&bits, " %08x", BitsOf(got.entropy[r]));
  for (int64_t i = 0; i < ask.top_logprobs; ++i) {
    absl::StrAppendFormat(&bits, " %d %08x", got.top_ids[ask.first_top_entry + i],
                          BitsOf(got.top_logprobs[ask.first_top_entry + i]));
  }
  for (int64_t i = 0; i < ask.extra_count; ++i) {
    absl::StrAppendFormat(&bits, " %08x", BitsOf(got.extra_logprobs[ask.first_extra_entry + i]));
  }
  return bits;
}

inline std::vector<LossCase> LossInvarianceCases() {
  return {{DType::kF32, 700, 7, 1, 1, Fill::kNormal, 1},
          {DType::kF32, 40, 1000, 3, 7, Fill::kNormal, 2},
          {DType::kBF16, 9, 33333, 5, 3, Fill::kNormal, 3},
          {DType::kBF16, 30, 3500, 0, 5, Fill::kNormal, 6},
          {DType::kF16, 9, 4097, 0, 1, Fill::kManyTies, 4},
          {DType::kBF16, 40, 1300, 1, 0, Fill::kNormal, 7},
          {DType::kBF16, 514, 9217, 1, 0, Fill::kNormal, 8},
          {DType::kBF16, 200, 5120 + 40, 1, 0, Fill::kNormal, 9},
          {DType::kF32, 200, 4096 + 60, 0, 3, Fill::kNormal, 10},
          {DType::kF16, 300, 7168 + 7, 0, 1, Fill::kManyTies, 11},
          {DType::kF32, 5, 131072, 1, 1, Fill::kUniform, 5}};
}

// "" where a row and its gradient have the same bits in a call of their own and as the last row of
// every batch.
inline std::string BrokenLossInvariance(OpRunner& runner, const LossCase& c) {
  const uint64_t seeds = c.vocab > 10000 ? 4 : 10;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    std::string want, want_gradient;
    for (const int64_t rows : {int64_t{1}, int64_t{2}, c.rows}) {
      const int64_t extra = rows > 1 ? c.stride_extra : 0, offset = rows > 1 ? c.offset : 0;
      HostTensor tensor(c.dtype, rows, c.vocab, c.vocab + extra, offset);
      LossBatch batch;
      std::mt19937_64 others(seed * 100 + rows), own(seed);
      HostTensor row(c.dtype, 1, c.vocab, c.vocab, 0);
      FillRow(row, 0, c.fill, c.seed + seed);
      for (int64_t r = 0; r + 1 < rows; ++r) {
        FillRow(tensor, r, r % 5 == 4 ? Fill::kWithNan : Fill::kUniform, seed);
        AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, others);
      }
      for (int64_t i = 0; i < c.vocab; ++i) tensor.Set(rows - 1, i, row.At(0, i));
      do AddRandomLoss(batch, c.vocab, /*with_softcap=*/true, own);
      while (batch.rows.back().active == 0 && (batch.rows.pop_back(), true));
      batch.says_all_wanted = rows == 2;
      auto got = runner.CrossEntropy(tensor, batch);
      if (!got.ok()) return got.status().ToString();
      const std::string bits = LossBits(*got, batch.rows.back(), rows - 1);

      LossBackwardCall call{.logits = tensor,
                            .rows = batch.rows,
                            .logsumexp = std::vector<float>(rows, 3.5f),
                            .upstream = std::vector<float>(rows, -1.25f),
                            .d_logits = tensor,
                            .in_place = rows == 2};
      auto gradient = runner.CrossEntropyBackward(call);
      if (!gradient.ok()) return gradient.status().ToString();
      std::string gradient_bits(c.vocab * sizeof(float), 0);
      for (int64_t i = 0; i < c.vocab; ++i) {
        const float value = gradient->At(rows - 1, i);
        std::memcpy(&gradient_bits[i * sizeof(float)], &value, sizeof(float));
      }
      if (rows == 1) {
        want = bits;
        want_gradient = gradient_bits;
      }
      if (bits == want && gradient_bits == want_gradient) continue;
      return absl::StrFormat("%s: other bits of the %s as the last of %d rows (%s)", Describe(c),
                             bits == want ? "gradient" : "answer", rows,
                             Describe(batch.rows.back()));
    }
  }
  return "";
}

inline std::vector<OpCheck> CrossEntropyChecks() {
  return {
      ForAll("KeepsEveryClaim", LossClaims, BrokenClaim),
      ForAll("GradientKeepsEveryClaim", LossGradientClaims, BrokenClaim),
      {"ANanUpstreamIsSeenInEveryType", FirstLostNan},
      ForAll("EveryMixOfParametersAgreesWithDoublePrecision", LossCases, FirstDifference),
      ForAll("EveryMixWithoutTopsAgreesWithDoublePrecision", LossCasesWithoutTops, FirstDifference),
      ForAll("GradientAgreesWithDoublePrecision", LossGradientCases, FirstLossGradientDifference),
      ForAll("GradientIsThatOfTheLossByFiniteDifferences", Seeds<20>, FirstFiniteDifference),
      ForAll("ARowsBitsDoNotDependOnOtherRows", LossInvarianceCases, BrokenLossInvariance),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CASES_H_
