// What divergence must do on every backend: answers by hand, parity with double precision, and bits
// that do not depend on other rows. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_DIVERGENCE_CASES_H_
#define LOGITD_TESTS_KERNELS_DIVERGENCE_CASES_H_

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/divergence_reference.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

inline constexpr DivergenceRow kPlainDivergence = {
    .active = 1, .target = kIgnoredTarget, .temperature = 1, .reference_temperature = 1};

// ---- Answers by hand

struct DivergenceClaim {
  const char* name;
  std::vector<float> logits, reference;
  DivergenceRow ask = kPlainDivergence;
  RowStatus status = {};
  float forward_kl, reverse_kl, entropy, reference_entropy;
  float logsumexp, reference_logsumexp;
  float target_logprob = 0, reference_target_logprob = 0;
};

inline const std::vector<DivergenceClaim>& DivergenceClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f);
  static constexpr DivergenceRow kSecond = {1, 1, 1, 1};
  static const auto& claims = *new std::vector<DivergenceClaim>{
      // clang-format off
      {.name = "a row beside itself has no divergence", .logits = {ln3, 0}, .reference = {ln3, 0},
       .forward_kl = 0, .reverse_kl = 0, .entropy = 0.56233514f, .reference_entropy = 0.56233514f,
       .logsumexp = 2 * ln2, .reference_logsumexp = 2 * ln2},
      // p = {3/4, 1/4}, q = {1/2, 1/2}: 3/4 ln 3/2 + 1/4 ln 1/2; 1/2 ln 2/3 + 1/2 ln 2
      {.name = "the two directions differ", .logits = {ln3, 0}, .reference = {0, 0}, .ask = kSecond,
       .forward_kl = 0.13081204f, .reverse_kl = 0.14384104f, .entropy = 0.56233514f,
       .reference_entropy = ln2, .logsumexp = 2 * ln2, .reference_logsumexp = ln2,
       .target_logprob = -2 * ln2, .reference_target_logprob = -ln2},
      {.name = "a shift of all logits changes no divergence", .logits = {ln3, 0},
       .reference = {64 + ln3, 64}, .forward_kl = 0, .reverse_kl = 0, .entropy = 0.56233514f,
       .reference_entropy = 0.56233514f, .logsumexp = 2 * ln2,
       .reference_logsumexp = 64 + 2 * ln2},
      {.name = "each row has its own temperature", .logits = {2 * ln3, 0},
       .reference = {ln3 / 2, 0}, .ask = {1, kIgnoredTarget, 2, 0.5f}, .forward_kl = 0,
       .reverse_kl = 0, .entropy = 0.56233514f, .reference_entropy = 0.56233514f,
       .logsumexp = 2 * ln2, .reference_logsumexp = 2 * ln2},
      {.name = "a token that neither row has adds nothing", .logits = {0, -kInf, 0},
       .reference = {0, -kInf, 0}, .ask = kSecond, .forward_kl = 0, .reverse_kl = 0,
       .entropy = ln2, .reference_entropy = ln2, .logsumexp = ln2, .reference_logsumexp = ln2,
       .target_logprob = -kInf, .reference_target_logprob = -kInf},
      {.name = "a token that only p has makes the forward divergence inf", .logits = {0, 0},
       .reference = {0, -kInf}, .ask = kSecond, .forward_kl = kInf, .reverse_kl = ln2,
       .entropy = ln2, .reference_entropy = 0, .logsumexp = ln2, .reference_logsumexp = 0,
       .target_logprob = -ln2, .reference_target_logprob = -kInf},
      {.name = "a token that only q has makes the reverse divergence inf", .logits = {-kInf, 0},
       .reference = {0, 0}, .forward_kl = ln2, .reverse_kl = kInf, .entropy = 0,
       .reference_entropy = ln2, .logsumexp = 0, .reference_logsumexp = ln2},
      {.name = "even a tiny probability that q has not makes it inf", .logits = {0, -5000},
       .reference = {0, -kInf}, .forward_kl = kInf, .reverse_kl = 0, .entropy = 0,
       .reference_entropy = 0, .logsumexp = 0, .reference_logsumexp = 0},
      {.name = "a probability that rounds to 0 in q is no zero", .logits = {0, 0},
       .reference = {0, -5000}, .forward_kl = 2500 - ln2, .reverse_kl = ln2, .entropy = ln2,
       .reference_entropy = 0, .logsumexp = ln2, .reference_logsumexp = 0},
      {.name = "rows without a common token differ by inf", .logits = {0, -kInf},
       .reference = {-kInf, 0}, .forward_kl = kInf, .reverse_kl = kInf, .entropy = 0,
       .reference_entropy = 0, .logsumexp = 0, .reference_logsumexp = 0},
      {.name = "plus inf is certain", .logits = {kInf, 3}, .reference = {0, 0}, .ask = kSecond,
       .forward_kl = ln2, .reverse_kl = kInf, .entropy = 0, .reference_entropy = ln2,
       .logsumexp = kInf, .reference_logsumexp = ln2, .target_logprob = -kInf,
       .reference_target_logprob = -ln2},
      {.name = "tokens at plus inf share the probability", .logits = {kInf, 3, kInf},
       .reference = {kInf, kInf, kInf}, .forward_kl = ln3 - ln2, .reverse_kl = kInf,
       .entropy = ln2, .reference_entropy = ln3, .logsumexp = kInf, .reference_logsumexp = kInf},
      {.name = "an empty row has no divergence from any", .logits = {-kInf, -kInf},
       .reference = {0, 0}, .ask = kSecond, .status = {RowCode::kEmptySupport, -1},
       .forward_kl = kNan, .reverse_kl = kNan, .entropy = kNan, .reference_entropy = ln2,
       .logsumexp = -kInf, .reference_logsumexp = ln2, .target_logprob = -kInf,
       .reference_target_logprob = -ln2},
      {.name = "an empty reference has none either", .logits = {0, 0},
       .reference = {-kInf, -kInf}, .status = {RowCode::kEmptySupport, -1}, .forward_kl = kNan,
       .reverse_kl = kNan, .entropy = ln2, .reference_entropy = kNan, .logsumexp = ln2,
       .reference_logsumexp = -kInf},
      {.name = "NaN in the reference is found", .logits = {0, 0, kInf}, .reference = {0, kNan, 0},
       .status = {RowCode::kNanLogit, 1}, .forward_kl = kNan, .reverse_kl = kNan, .entropy = kNan,
       .reference_entropy = kNan, .logsumexp = kNan, .reference_logsumexp = kNan,
       .target_logprob = kNan, .reference_target_logprob = kNan},
      {.name = "the lowest NaN of both rows is told", .logits = {kNan, 0, 0},
       .reference = {0, -kNan, 0}, .status = {RowCode::kNanLogit, 0}, .forward_kl = kNan,
       .reverse_kl = kNan, .entropy = kNan, .reference_entropy = kNan, .logsumexp = kNan,
       .reference_logsumexp = kNan, .target_logprob = kNan, .reference_target_logprob = kNan},
      {.name = "one token is certain in both rows", .logits = {-7}, .reference = {5},
       .ask = {1, 0, 1, 1}, .forward_kl = 0, .reverse_kl = 0, .entropy = 0,
       .reference_entropy = 0, .logsumexp = -7, .reference_logsumexp = 5},
      // In units of T: {1.5, -1.5} and {1.25, -1.25}.
      {.name = "logits may be further apart than f32's largest number",
       .logits = {0x1.8p127f, -0x1.8p127f}, .reference = {0x1.4p127f, -0x1.4p127f},
       .ask = {1, kIgnoredTarget, 0x1p127f, 0x1p127f}, .forward_kl = 0.0065894461f,
       .reverse_kl = 0.0076267073f, .entropy = 0.19086497f, .reference_entropy = 0.26853518f,
       .logsumexp = 1.5485874f, .reference_logsumexp = 1.3288897f},
      {.name = "nothing is written for a skipped row", .logits = {0, 1}, .reference = {1, 0},
       .ask = {}, .status = kUnwrittenStatus, .forward_kl = kUnwrittenFloat,
       .reverse_kl = kUnwrittenFloat, .entropy = kUnwrittenFloat,
       .reference_entropy = kUnwrittenFloat, .logsumexp = kUnwrittenFloat,
       .reference_logsumexp = kUnwrittenFloat, .target_logprob = kUnwrittenFloat,
       .reference_target_logprob = kUnwrittenFloat},
      // clang-format on
  };
  return claims;
}

// "" where the claim holds in every type that holds its logits, within rounding of those.
inline std::string BrokenClaim(OpRunner& runner, const DivergenceClaim& claim) {
  for (const DType dtype : kAllDTypes) {
    if (dtype == DType::kF16 && claim.ask.temperature > 65504) continue;  // so are its logits
    const auto got = runner.Divergence(TensorOf(dtype, 1, claim.logits),
                                       TensorOf(dtype, 1, claim.reference), {claim.ask});
    if (!got.ok()) return got.status().ToString();
    if (std::string status = DescribeStatus(got->status[0], claim.status); !status.empty()) {
      return status;
    }
    struct Field {
      const char* name;
      float got, want;
    };
    for (const Field& field :
         {Field{"forward_kl", got->forward_kl[0], claim.forward_kl},
          Field{"reverse_kl", got->reverse_kl[0], claim.reverse_kl},
          Field{"entropy", got->entropy[0], claim.entropy},
          Field{"reference_entropy", got->reference_entropy[0], claim.reference_entropy},
          Field{"logsumexp", got->logsumexp[0], claim.logsumexp},
          Field{"reference_logsumexp", got->reference_logsumexp[0], claim.reference_logsumexp},
          Field{"target_logprob", got->target_logprob[0], claim.target_logprob},
          Field{"reference_target_logprob", got->reference_target_logprob[0],
                claim.reference_target_logprob}}) {
      // 16 bits hold the logarithms by hand only roughly.
      const double rounding = dtype == DType::kF32 ? 4e-6 : dtype == DType::kF16 ? 2e-3 : 2e-2;
      const double more = dtype != DType::kF32 && claim.reference[0] > 60 ? 0.3 : 0;
      const double size = std::isfinite(field.want) ? std::fabs(field.want) : 0;
      if (IsWithin(field.got, field.want, rounding * std::max(1.0, size) + more)) continue;
      return absl::StrFormat("%s: %s: got %.9g, want %.9g", Name(dtype), field.name, field.got,
                             field.want);
    }
  }
  return "";
}

// ---- Top tokens by hand

struct DivergenceTopClaim {
  const char* name;
  std::vector<float> logits, reference;
  DivergenceRow ask;
  RowStatus status = {};
  // With the entry after the last.
  std::vector<int32_t> top_ids, reference_top_ids;
  std::vector<float> top_logprobs, reference_top_logprobs;
};

inline const std::vector<DivergenceTopClaim>& DivergenceTopClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f);
  static constexpr int32_t kNoId = kUnwrittenIndex;
  static constexpr float kNone = kUnwrittenFloat;
  static constexpr DivergenceRow kTwo = {1, kIgnoredTarget, 1, 1, 2, 2};
  static const auto& claims = *new std::vector<DivergenceTopClaim>{
      // clang-format off
      // p = {1/4, 3/4}, q = {1/2, 1/2}
      {.name = "each input has its own top tokens, equal logits by ascending id",
       .logits = {0, ln3}, .reference = {5, 5}, .ask = kTwo, .top_ids = {1, 0, kNoId},
       .reference_top_ids = {0, 1, kNoId}, .top_logprobs = {ln3 - 2 * ln2, -2 * ln2, kNone},
       .reference_top_logprobs = {-ln2, -ln2, kNone}},
      {.name = "top tokens of one input only", .logits = {0, ln3}, .reference = {5, 5},
       .ask = {1, kIgnoredTarget, 1, 1, 0, 1}, .top_ids = {kNoId}, .reference_top_ids = {0, kNoId},
       .top_logprobs = {kNone}, .reference_top_logprobs = {-ln2, kNone}},
      {.name = "minus zero equals zero", .logits = {-0.0f, 0, 0}, .reference = {0, -0.0f, -1e4f},
       .ask = kTwo, .top_ids = {0, 1, kNoId}, .reference_top_ids = {0, 1, kNoId},
       .top_logprobs = {-ln3, -ln3, kNone}, .reference_top_logprobs = {-ln2, -ln2, kNone}},
      {.name = "each input has its own temperature", .logits = {0, 2 * ln3},
       .reference = {ln3 / 2, 0}, .ask = {1, kIgnoredTarget, 2, 0.5f, 2, 2},
       .top_ids = {1, 0, kNoId}, .reference_top_ids = {0, 1, kNoId},
       .top_logprobs = {ln3 - 2 * ln2, -2 * ln2, kNone},
       .reference_top_logprobs = {ln3 - 2 * ln2, -2 * ln2, kNone}},
      {.name = "minus inf comes last, and has no probability", .logits = {-kInf, -kInf, 4},
       .reference = {0, -kInf, 0}, .ask = {1, kIgnoredTarget, 1, 1, 3, 3},
       .top_ids = {2, 0, 1, kNoId}, .reference_top_ids = {0, 2, 1, kNoId},
       .top_logprobs = {0, -kInf, -kInf, kNone},
       .reference_top_logprobs = {-ln2, -ln2, -kInf, kNone}},
      {.name = "plus inf is certain", .logits = {3, kInf, 5}, .reference = {kInf, 0, kInf},
       .ask = {1, kIgnoredTarget, 1, 1, 3, 3}, .top_ids = {1, 2, 0, kNoId},
       .reference_top_ids = {0, 2, 1, kNoId}, .top_logprobs = {0, -kInf, -kInf, kNone},
       .reference_top_logprobs = {-ln2, -ln2, -kInf, kNone}},
      {.name = "an empty input has the first tokens, with no probability",
       .logits = {-kInf, -kInf, -kInf}, .reference = {0, ln3, -kInf}, .ask = kTwo,
       .status = {RowCode::kEmptySupport, -1}, .top_ids = {0, 1, kNoId},
       .reference_top_ids = {1, 0, kNoId}, .top_logprobs = {-kInf, -kInf, kNone},
       .reference_top_logprobs = {ln3 - 2 * ln2, -2 * ln2, kNone}},
      {.name = "NaN in one input leaves neither a top token", .logits = {1, 0},
       .reference = {0, kNan}, .ask = kTwo, .status = {RowCode::kNanLogit, 1},
       .top_ids = {-1, -1, kNoId}, .reference_top_ids = {-1, -1, kNoId},
       .top_logprobs = {kNan, kNan, kNone}, .reference_top_logprobs = {kNan, kNan, kNone}},
      {.name = "a skipped row has none", .logits = {1, 0}, .reference = {0, 1},
       .ask = {0, kIgnoredTarget, 1, 1, 1, 1}, .status = kUnwrittenStatus,
       .top_ids = {kNoId, kNoId}, .reference_top_ids = {kNoId, kNoId},
       .top_logprobs = {kNone, kNone}, .reference_top_logprobs = {kNone, kNone}},
      // clang-format on
  };
  return claims;
}

// "" where the claim holds in every type, within rounding of its logits.
inline std::string BrokenTopClaim(OpRunner& runner, const DivergenceTopClaim& claim) {
  for (const DType dtype : kAllDTypes) {
    const auto got = runner.Divergence(TensorOf(dtype, 1, claim.logits),
                                       TensorOf(dtype, 1, claim.reference), {claim.ask});
    if (!got.ok()) return got.status().ToString();
    if (std::string status = DescribeStatus(got->status[0], claim.status); !status.empty()) {
      return status;
    }
    if (got->top_ids != claim.top_ids) return "other top ids";
    if (got->reference_top_ids != claim.reference_top_ids) return "other top ids of the reference";
    const double rounding = dtype == DType::kF32 ? 4e-6 : dtype == DType::kF16 ? 2e-3 : 2e-2;
    for (const auto& [values, want] :
         {std::pair(got->top_logprobs, claim.top_logprobs),
          std::pair(got->reference_top_logprobs, claim.reference_top_logprobs)}) {
      for (size_t i = 0; i < want.size(); ++i) {
        if (IsWithin(values[i], want[i], rounding)) continue;
        return absl::StrFormat("%s: entry %d: got %.9g, want %.9g", Name(dtype), i, values[i],
                               want[i]);
      }
    }
  }
  return "";
}

// ---- Parity with double precision

struct DivergenceCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t stride_extra = 0;
  int64_t offset = 0;
  Fill fill = Fill::kNormal;
  Fill reference_fill = Fill::kNormal;
  uint64_t seed = 1;
};

inline std::string Describe(const DivergenceCase& c) {
  return absl::StrFormat("divergence %dx%d %s stride +%d, offset %d, %s beside %s, seed %d", c.rows,
                         c.vocab, Name(c.dtype), c.stride_extra, c.offset, Name(c.fill),
                         Name(c.reference_fill), c.seed);
}

inline DivergenceRow RandomDivergence(int64_t vocab, std::mt19937_64& random) {
  constexpr float kTemperatures[] = {1, 1, 0.5f, 2, 0.1f, 8};
  return {.active = random() % 16 == 0 ? 0 : 1,
          .target = random() % 4 == 0 ? kIgnoredTarget : static_cast<int32_t>(random() % vocab),
          .temperature = kTemperatures[random() % 6],
          .reference_temperature = kTemperatures[random() % 6]};
}

// Has rows ask for top tokens, with an entry between the answers of any two. Some ask for none.
inline void AskForTops(int64_t vocab, std::mt19937_64& random, std::vector<DivergenceRow>* rows) {
  constexpr int64_t kTops[] = {0, 1, 5, 64, kMaxDivergenceTopLogprobs, 0};
  int64_t next = 0, reference_next = 0;
  for (DivergenceRow& row : *rows) {
    row.top_logprobs = static_cast<int32_t>(std::min(vocab, kTops[random() % 6]));
    row.reference_top_logprobs = static_cast<int32_t>(std::min(vocab, kTops[random() % 6]));
    row.first_top_entry = next;
    row.first_reference_top_entry = reference_next;
    next += row.top_logprobs + 1;
    reference_next += row.reference_top_logprobs + 1;
  }
}

struct DivergenceInput {
  HostTensor logits, reference;
  std::vector<DivergenceRow> rows;
};

// Some references are the row with a little noise, as a student's are near the end of its training.
inline DivergenceInput MakeInput(const DivergenceCase& c) {
  const int64_t stride = c.vocab + c.stride_extra;
  DivergenceInput in{.logits = HostTensor(c.dtype, c.rows, c.vocab, stride, c.offset),
                     .reference = HostTensor(c.dtype, c.rows, c.vocab, stride + 5, c.offset + 1)};
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(in.logits, r, c.fill, c.seed);
    FillRow(in.reference, r, c.reference_fill, c.seed + 100);
    if (r % 3 == 1) {
      for (int64_t i = 0; i < c.vocab; ++i) {
        const float x = in.logits.At(r, i);
        const float noise = static_cast<float>(random() % 1000) * (r % 2 == 0 ? 1e-3f : 1e-5f);
        in.reference.Set(r, i, x + noise);
      }
    }
    in.rows.push_back(RandomDivergence(c.vocab, random));
    if (r % 3 == 1) in.rows[r].reference_temperature = in.rows[r].temperature;
  }
  if (c.seed % 3 != 0) AskForTops(c.vocab, random, &in.rows);
  return in;
}

inline std::vector<DivergenceCase> DivergenceCases() {
  std::vector<DivergenceCase> cases;
  uint64_t seed = 0;
  for (const DType dtype : kAllDTypes) {
    for (const int64_t vocab : {1, 2, 31, 1000, 1024, 1025, 4099}) {
      for (const Fill fill : kAllFills) {
        for (const Fill reference : {fill, Fill::kNormal}) {
          ++seed;
          cases.push_back({dtype, vocab < 2000 ? 9 : 4, vocab, kStrides[seed % 5],
                           kOffsets[seed % 7], fill, reference, seed});
        }
      }
    }
    cases.push_back({dtype, 3, 131072, 0, 0, Fill::kNormal, Fill::kUniform, ++seed});
    cases.push_back({dtype, 3, 50257, 0, 1, Fill::kMostlyMinusInf, Fill::kNormal, ++seed});
    cases.push_back({dtype, 300, 2000, 8, 0, Fill::kNormal, Fill::kOneHot, ++seed});
  }
  return cases;
}

inline std::string FirstDivergenceDifference(OpRunner& runner, const DivergenceCase& c) {
  const DivergenceInput in = MakeInput(c);
  const auto got = runner.Divergence(in.logits, in.reference, in.rows);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    const DivergenceRow& ask = in.rows[r];
    if (ask.active == 0) continue;
    const auto want = ReferenceDivergence(LogitsOf(in.logits, r), LogitsOf(in.reference, r), ask);
    const auto vocab = static_cast<double>(c.vocab);
    std::string difference = DescribeDifference(want, *got, r, vocab);
    if (difference.empty()) difference = DescribeTops(want, *got, ask, vocab);
    if (difference.empty()) continue;
    return absl::StrFormat("%s: row %d (target %d, temperatures %g, %g): %s", Describe(c), r,
                           ask.target, ask.temperature, ask.reference_temperature, difference);
  }
  return "";
}

// ---- What holds of every row

// "" where rows beside themselves, which fills make of any kind, have divergences of exactly 0.
inline std::string FirstDivergenceFromItself(OpRunner& runner, const Fill& fill) {
  if (fill == Fill::kWithNan || fill == Fill::kAllMinusInf) return "";
  for (const DType dtype : kAllDTypes) {
    HostTensor logits(dtype, 5, 3001, 3001, 0);
    std::vector<DivergenceRow> rows;
    for (int64_t r = 0; r < 5; ++r) {
      FillRow(logits, r, fill, 9);
      rows.push_back({1, 7, 0.3f + static_cast<float>(r), 0.3f + static_cast<float>(r)});
    }
    const auto got = runner.Divergence(logits, logits, rows);
    if (!got.ok()) return got.status().ToString();
    for (int64_t r = 0; r < 5; ++r) {
      if (got->forward_kl[r] == 0 && got->reverse_kl[r] == 0) continue;
      return absl::StrFormat("%s %s row %d: %g, %g", Name(fill), Name(dtype), r, got->forward_kl[r],
                             got->reverse_kl[r]);
    }
  }
  return "";
}
inline std::vector<Fill> AllFills() { return {std::begin(kAllFills), std::end(kAllFills)}; }

// All bits of row r's answer.
inline std::string DivergenceBits(const DivergenceAnswer& got, int64_t r) {
  std::string bits =
      absl::StrFormat("%d %d", static_cast<int>(got.status[r].code), got.status[r].position);
  for (const auto* values :
       {&got.forward_kl, &got.reverse_kl, &got.entropy, &got.reference_entropy, &got.logsumexp,
        &got.reference_logsumexp, &got.target_logprob, &got.reference_target_logprob}) {
    absl::StrAppendFormat(&bits, " %08x", BitsOf((*values)[r]));
  }
  return bits;
}

// With those of its top tokens.
inline std::string DivergenceBits(const DivergenceAnswer& got, int64_t r,
                                  const DivergenceRow& ask) {
  std::string bits = DivergenceBits(got, r);
  const auto append = [&bits](const auto& ids, const auto& logprobs, int64_t first, int32_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      absl::StrAppendFormat(&bits, " %d %08x", ids[i], BitsOf(logprobs[i]));
    }
  };
  append(got.top_ids, got.top_logprobs, ask.first_top_entry, ask.top_logprobs);
  append(got.reference_top_ids, got.reference_top_logprobs, ask.first_reference_top_entry,
         ask.reference_top_logprobs);
  return bits;
}

// Compares each row with the same row alone, at another alignment: "" where the bits are equal.
inline std::string BrokenDivergenceInvariance(OpRunner& runner, const DivergenceCase& c) {
  const DivergenceInput in = MakeInput(c);
  const auto got = runner.Divergence(in.logits, in.reference, in.rows);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = c.rows - 1; r >= 0; r -= std::max<int64_t>(1, c.rows / 8)) {
    if (in.rows[r].active == 0) continue;
    HostTensor x(c.dtype, 1, c.vocab, c.vocab, 0), y = x;
    for (int64_t i = 0; i < c.vocab; ++i) {
      x.Set(0, i, in.logits.At(r, i));
      y.Set(0, i, in.reference.At(r, i));
    }
    DivergenceRow ask = in.rows[r];
    ask.first_top_entry = ask.first_reference_top_entry = 0;
    const auto alone = runner.Divergence(x, y, {ask});
    if (!alone.ok()) return alone.status().ToString();
    const std::string bits = DivergenceBits(*alone, 0, ask);
    const std::string among = DivergenceBits(*got, r, in.rows[r]);
    if (bits == among) continue;
    return absl::StrFormat("%s: row %d has other bits alone: %s, not %s", Describe(c), r, bits,
                           among);
  }
  return "";
}

// "" where a token's log-probabilities have the same bits as a top token and as a target, and all
// other answers those that they have without top tokens.
inline std::string FirstTopThatIsNotItsTarget(OpRunner& runner, const DivergenceCase& c) {
  DivergenceInput in = MakeInput(c);
  for (int64_t r = 0; r < c.rows; ++r) {
    DivergenceRow& row = in.rows[r];
    const int64_t k = std::min<int64_t>(c.vocab, 3);
    row.active = 1;
    row.top_logprobs = row.reference_top_logprobs = static_cast<int32_t>(k);
    row.first_top_entry = row.first_reference_top_entry = r * k;
  }
  const auto tops = runner.Divergence(in.logits, in.reference, in.rows);
  if (!tops.ok()) return tops.status().ToString();
  std::vector<DivergenceRow> plain = in.rows;
  for (DivergenceRow& row : plain) row.top_logprobs = row.reference_top_logprobs = 0;
  const auto without = runner.Divergence(in.logits, in.reference, plain);
  if (!without.ok()) return without.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    if (DivergenceBits(*tops, r) != DivergenceBits(*without, r))
      return absl::StrFormat("%s: row %d has other bits with top tokens", Describe(c), r);
  }
  const auto as_target = [&](const std::vector<int32_t>& ids) {
    for (int64_t r = 0; r < c.rows; ++r) {
      const DivergenceRow& row = in.rows[r];
      plain[r].target = std::max(0, ids[row.first_top_entry + row.top_logprobs - 1]);
    }
    return runner.Divergence(in.logits, in.reference, plain);
  };
  const auto first = as_target(tops->top_ids), second = as_target(tops->reference_top_ids);
  if (!first.ok() || !second.ok()) return "no answer";
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t at = in.rows[r].first_top_entry + in.rows[r].top_logprobs - 1;
    const float top = tops->top_logprobs[at], reference = tops->reference_top_logprobs[at];
    if (BitsOf(top) == BitsOf(first->target_logprob[r]) &&
        BitsOf(reference) == BitsOf(second->reference_target_logprob[r])) {
      continue;
    }
    if (std::isnan(top) && std::isnan(first->target_logprob[r])) continue;
    return absl::StrFormat("%s: row %d: got %.9g and %.9g, as targets %.9g and %.9g", Describe(c),
                           r, top, reference, first->target_logprob[r],
                           second->reference_target_logprob[r]);
  }
  return "";
}

inline std::vector<DivergenceCase> DivergenceInvarianceCases() {
  return {{DType::kF32, 700, 7, 1, 1, Fill::kNormal, Fill::kUniform, 1},
          {DType::kBF16, 9, 33333, 5, 3, Fill::kWithNan, Fill::kNormal, 2},
          {DType::kF16, 9, 4097, 0, 1, Fill::kManyTies, Fill::kWithPlusInf, 3},
          {DType::kF32, 300, 5120, 3, 0, Fill::kHuge, Fill::kMostlyMinusInf, 4},
          {DType::kBF16, 1000, 2048, 0, 0, Fill::kNormal, Fill::kNormal, 5},
          {DType::kF32, 5, 131072, 1, 1, Fill::kUniform, Fill::kNormal, 7},
          {DType::kF16, 33000, 40, 1, 0, Fill::kManyTies, Fill::kNormal, 8}};
}

// ---- Hidden states

// "" where two heads of different size and type, and either beside the other's logits, give the
// answers of the op on their exact logits.
inline std::string FirstLinearDivergenceDifference(OpRunner& runner, const LinearCase& c) {
  LinearCase other = c;
  other.dtype = c.dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
  other.hidden = c.hidden + 24;
  other.bias = !c.bias;
  other.seed = c.seed + 50;
  const LinearInput x = ExactInput(c), y = ExactInput(other);
  std::vector<DivergenceRow> rows;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) rows.push_back(RandomDivergence(c.vocab, random));
  if (c.seed % 3 != 0) AskForTops(c.vocab, random, &rows);
  const auto want = runner.Divergence(x.logits, y.logits, rows);
  const auto got = runner.LinearDivergence(x.hidden, x.head, y.hidden, y.head, rows);
  const auto first = runner.MixedDivergence(x.hidden, x.head, y.logits, true, rows);
  const auto second = runner.MixedDivergence(y.hidden, y.head, x.logits, false, rows);
  if (!want.ok()) return want.status().ToString();
  for (const auto* answer : {&got, &first, &second}) {
    if (!answer->ok()) return answer->status().ToString();
    for (int64_t r = 0; r < c.rows; ++r) {
      const std::string bits = DivergenceBits(**answer, r, rows[r]);
      const std::string of_logits = DivergenceBits(*want, r, rows[r]);
      if (bits == of_logits) continue;
      return absl::StrFormat("%s: %s heads: row %d: got %s, want %s", Describe(c),
                             answer == &got     ? "two"
                             : answer == &first ? "the first of two"
                                                : "the second of two",
                             r, bits, of_logits);
    }
  }
  return "";
}

// Two heads of one 16-bit type, whose logits are known exactly.
enum class PairFill : uint8_t {
  kPlain,
  kNorm,
  kSame,
  kInfinities,
  kMinusInfinities,
  kFar,
  kThirds
};
struct HeadPairCase {
  DType dtype = DType::kBF16;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t hidden = 8;
  int64_t reference_hidden = 8;
  PairFill fill = PairFill::kPlain;
  uint64_t seed = 1;
};

inline std::string Describe(const HeadPairCase& c) {
  return absl::StrFormat("two heads, %dx%d and %d -> %d %s, fill %d, seed %d", c.rows, c.hidden,
                         c.reference_hidden, c.vocab, Name(c.dtype), static_cast<int>(c.fill),
                         c.seed);
}

// Rows have +inf, -inf or NaN at a token whose weight is inf at an element of the hidden state that
// is above 0, below or 0.
inline LinearInput HalfOfPair(const HeadPairCase& c, int64_t hidden, uint64_t seed) {
  LinearInput input = ExactInput({.dtype = c.dtype,
                                  .rows = c.rows,
                                  .vocab = c.vocab,
                                  .hidden = hidden,
                                  .norm = c.fill == PairFill::kNorm,
                                  .seed = seed});
  std::mt19937_64 random(seed);
  const auto set_inf = [&](int64_t token, float value) {
    input.head.weight.Set(token, static_cast<int64_t>(random() % 2), value);
  };
  if (c.fill == PairFill::kInfinities) {
    for (int64_t token : {c.vocab - 1, c.vocab / 2, int64_t{0}}) {
      if (random() % 2 == 0) set_inf(token, kInf);
    }
  } else if (c.fill == PairFill::kMinusInfinities) {
    // The first element is the same in all rows, and never 0.
    for (int64_t r = 0; r < c.rows; ++r) input.hidden.Set(r, 0, 1);
    for (int64_t i = 0; i < c.vocab; ++i) {
      if (random() % 3 == 0) input.head.weight.Set(i, 0, -kInf);
    }
  } else if (c.fill == PairFill::kThirds) {
    input.head.scale *= 3;
  } else if (c.fill == PairFill::kFar) {
    input.head.scale = std::ldexp(input.head.scale, seed % 2 == 0 ? 100 : 22);
  } else {
    return input;
  }
  ComputeLogits(input);
  return input;
}

inline std::vector<HeadPairCase> HeadPairCases() {
  using enum PairFill;
  std::vector<HeadPairCase> cases;
  uint64_t seed = 300;
  for (const PairFill fill : {kPlain, kNorm, kSame, kInfinities, kMinusInfinities, kFar, kThirds}) {
    for (const int64_t vocab : {1, 255, 1000, 2304}) {
      for (const int64_t rows : {1, 70, 130, 300}) {
        seed += 3;
        const DType dtype = seed % 2 == 0 ? DType::kBF16 : DType::kF16;
        cases.push_back({dtype, rows, vocab, 40, fill == kSame ? 40 : 24, fill, seed});
      }
    }
  }
  cases.push_back({DType::kBF16, 2, 50257, 8, 16, kPlain, ++seed});
  cases.push_back({DType::kBF16, 700, 2000, 72, 136, kPlain, ++seed});
  cases.push_back({DType::kF16, 17000, 300, 8, 16, kPlain, ++seed});  // more than one pass
  return cases;
}

// A matrix of one row: row r of the hidden states.
inline HostTensor StatesOf(const LinearInput& input, int64_t r) {
  HostTensor row = AlignedTensor(input.hidden.dtype(), 1, input.hidden.cols(), 0);
  for (int64_t d = 0; d < input.hidden.cols(); ++d) row.Set(0, d, input.hidden.At(r, d));
  return row;
}

// "" where the answers are those of the known logits, and a row has the same bits on its own, and
// in a call that wants top tokens.
inline std::string FirstHeadPairDifference(OpRunner& runner, const HeadPairCase& c) {
  const LinearInput x = HalfOfPair(c, c.hidden, c.seed);
  const LinearInput y =
      HalfOfPair(c, c.reference_hidden, c.fill == PairFill::kSame ? c.seed : c.seed + 51);
  std::vector<DivergenceRow> rows;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    rows.push_back(RandomDivergence(c.vocab, random));
    if (c.fill == PairFill::kThirds && r % 3 == 0) rows[r].temperature = 0.01f;
    if (c.fill == PairFill::kSame) rows[r].reference_temperature = rows[r].temperature;
  }
  std::vector<DivergenceRow> asking = rows;
  AskForTops(c.vocab, random, &asking);
  const auto got = runner.LinearDivergence(x.hidden, x.head, y.hidden, y.head, rows);
  const auto with_tops = runner.LinearDivergence(x.hidden, x.head, y.hidden, y.head, asking);
  if (!got.ok() || !with_tops.ok()) return Describe(c) + ": fails";
  for (int64_t r = 0; r < c.rows; ++r) {
    if (rows[r].active == 0) continue;
    const auto vocab = static_cast<double>(c.vocab);
    const auto want = ReferenceDivergence(LogitsOf(x.logits, r), LogitsOf(y.logits, r), asking[r]);
    std::string difference = DescribeDifference(want, *got, r, vocab);
    if (difference.empty()) difference = DescribeTops(want, *with_tops, asking[r], vocab);
    if (difference.empty() && DivergenceBits(*with_tops, r) != DivergenceBits(*got, r))
      difference = "other bits with top tokens";
    const bool is_same = c.fill == PairFill::kSame;
    if (is_same && (got->forward_kl[r] != 0 || got->reverse_kl[r] != 0)) difference = "not 0";
    if (difference.empty() && r % 41 == 0) {
      const auto alone =
          runner.LinearDivergence(StatesOf(x, r), x.head, StatesOf(y, r), y.head, {rows[r]});
      if (!alone.ok()) return alone.status().ToString();
      if (DivergenceBits(*alone, 0) != DivergenceBits(*got, r)) difference = "other bits alone";
    }
    if (difference.empty()) continue;
    return absl::StrFormat("%s: row %d (target %d, temperatures %g, %g): %s", Describe(c), r,
                           rows[r].target, rows[r].temperature, rows[r].reference_temperature,
                           difference);
  }
  return "";
}

// Two heads with sums that depend on their order.
inline std::vector<HeadPairCase> RoundedPairCases() {
  std::vector<HeadPairCase> cases;
  uint64_t seed = 900;
  for (const int64_t rows : {1, 16, 17, 64, 65, 130, 300, 520}) {
    const DType dtype = rows % 2 == 0 ? DType::kBF16 : DType::kF16;
    cases.push_back({dtype, rows, 2300, 520, 328, PairFill::kPlain, ++seed});
  }
  return cases;
}

inline std::string BrokenPairInvariance(OpRunner& runner, const HeadPairCase& c) {
  std::mt19937_64 random(c.seed);
  const auto half = [&](int64_t hidden) {
    LinearInput input = HalfOfPair(c, hidden, random());
    std::normal_distribution<float> normal;
    for (HostTensor* const tensor : {&input.hidden, &input.head.weight}) {
      for (int64_t r = 0; r < tensor->rows(); ++r) {
        for (int64_t d = 0; d < hidden; ++d) tensor->Set(r, d, normal(random));
      }
    }
    return input;
  };
  const LinearInput x = half(c.hidden), y = half(c.reference_hidden);
  std::vector<DivergenceRow> rows;
  for (int64_t r = 0; r < c.rows; ++r) rows.push_back(RandomDivergence(c.vocab, random));
  const auto got = runner.LinearDivergence(x.hidden, x.head, y.hidden, y.head, rows);
  for (int64_t r = 0; got.ok() && r < c.rows; r += 7) {
    const auto alone =
        runner.LinearDivergence(StatesOf(x, r), x.head, StatesOf(y, r), y.head, {rows[r]});
    if (!alone.ok()) return alone.status().ToString();
    if (DivergenceBits(*alone, 0) != DivergenceBits(*got, r))
      return absl::StrFormat("%s: row %d has other bits alone", Describe(c), r);
  }
  return got.ok() ? "" : got.status().ToString();
}

inline std::vector<OpCheck> DivergenceChecks() {
  return {
      ForAll("KeepsEveryClaim", DivergenceClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfTopTokens", DivergenceTopClaims, BrokenTopClaim),
      ForAll("AgreesWithDoublePrecision", DivergenceCases, FirstDivergenceDifference),
      ForAll("ARowBesideItselfHasNoDivergence", AllFills, FirstDivergenceFromItself),
      ForAll("ARowsBitsDoNotDependOnOtherRows", DivergenceInvarianceCases,
             BrokenDivergenceInvariance),
      ForAll("ATopTokenHasTheBitsOfATarget", DivergenceInvarianceCases, FirstTopThatIsNotItsTarget),
      ForAll("TwoHeadsGiveTheAnswersOfTheirLogits", ExactCases, FirstLinearDivergenceDifference),
      ForAll("TwoHeadsOfOneTypeAgreeWithDoublePrecision", HeadPairCases, FirstHeadPairDifference),
      ForAll("ARowOfTwoHeadsHasItsBitsBesideAnyOthers", RoundedPairCases, BrokenPairInvariance),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_DIVERGENCE_CASES_H_
