// cross_entropy_training on every backend: claims by hand, parity with double precision,
// and the bits of the two ops one after the other. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_CROSS_ENTROPY_TRAINING_CASES_H_
#define LOGITD_TESTS_KERNELS_CROSS_ENTROPY_TRAINING_CASES_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/cross_entropy_cases.h"

namespace logitd::testing {

// ---- Answers by hand

struct LossTrainingClaim {
  const char* name;
  std::vector<float> logits;
  LossAsk ask;
  float upstream = 1;
  float loss;
  float logsumexp;
  RowStatus status;
  std::vector<float> d_logits;
};

inline const std::vector<LossTrainingClaim>& LossTrainingClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static constexpr float kUnwritten = 9;
  static const auto& claims = *new std::vector<LossTrainingClaim>{
      // clang-format off
      {.name = "one token has no gradient", .logits = {-3}, .loss = 0, .logsumexp = -3,
       .d_logits = {0}},
      {.name = "the target has a quarter", .logits = {0, ln3}, .loss = ln4, .logsumexp = ln4,
       .d_logits = {-0.75f, 0.75f}},
      {.name = "upstream multiplies only the gradient", .logits = {0, ln3}, .upstream = -2,
       .loss = ln4, .logsumexp = ln4, .d_logits = {1.5f, -1.5f}},
      {.name = "the temperature divides logits and gradient", .logits = {0, 2 * ln3},
       .ask = {.temperature = 2}, .loss = ln4, .logsumexp = ln4, .d_logits = {-0.375f, 0.375f}},
      // 0.8 ln 4/3 + 0.2 (ln 4 - ln 3 / 2)
      {.name = "torch smoothing includes the target", .logits = {0, ln3},
       .ask = {.target = 1, .label_smoothing = 0.2f}, .loss = 0.39754330f, .logsumexp = ln4,
       .d_logits = {0.15f, -0.15f}},
      // 0.8 ln 4/3 + 0.2 ln 4
      {.name = "megatron smoothing excludes the target", .logits = {0, ln3},
       .ask = {.target = 1, .label_smoothing = 0.2f, .smoothing = Smoothing::kMegatron},
       .loss = 0.50740453f, .logsumexp = ln4, .d_logits = {0.05f, -0.05f}},
      // ln 2 + (ln 2)^2 / 2, (1 + ln 2) / 2
      {.name = "z-loss adds to both", .logits = {0, 0}, .ask = {.z_loss = 0.5f},
       .loss = 0.93337369f, .logsumexp = ln2, .d_logits = {-0.15342641f, 0.84657359f}},
      // x = {0, 1}, bent by 1 and by 3/4
      {.name = "the softcap multiplies by its derivative", .logits = {0, 1.0986123f},
       .ask = {.softcap = 2}, .loss = 1.31326169f, .logsumexp = 1.31326169f,
       .d_logits = {-0.73105858f, 0.54829393f}},
      {.name = "an ignored row has a logsumexp and a gradient of zeros", .logits = {0, ln3},
       .ask = {.target = kIgnoredTarget}, .loss = 0, .logsumexp = ln4, .d_logits = {0, 0}},
      {.name = "an ignored row with NaN has a gradient of zeros", .logits = {0, kNan},
       .ask = {.target = kIgnoredTarget}, .loss = kNan, .logsumexp = kNan,
       .status = {RowCode::kNanLogit, 1}, .d_logits = {0, 0}},
      {.name = "NaN makes the gradient NaN", .logits = {0, kNan}, .loss = kNan, .logsumexp = kNan,
       .status = {RowCode::kNanLogit, 1}, .d_logits = {kNan, kNan}},
      {.name = "plus inf makes the gradient NaN", .logits = {kInf, 0}, .loss = 0,
       .logsumexp = kInf, .d_logits = {kNan, kNan}},
      {.name = "only minus inf makes the gradient NaN", .logits = {-kInf, -kInf}, .loss = kNan,
       .logsumexp = -kInf, .status = {RowCode::kEmptySupport, -1}, .d_logits = {kNan, kNan}},
      {.name = "minus inf has a gradient of minus one as the target", .logits = {0, -kInf},
       .ask = {.target = 1}, .loss = kInf, .logsumexp = 0, .d_logits = {1, -1}},
      {.name = "nothing is written for a skipped row", .logits = {0, 0}, .ask = {.active = false},
       .loss = -77.5f, .logsumexp = -77.5f, .status = {RowCode::kOk, -77},
       .d_logits = {kUnwritten, kUnwritten}},
      // clang-format on
  };
  return claims;
}

inline std::string BrokenClaim(OpRunner& runner, const LossTrainingClaim& claim) {
  const std::vector<float> nines(claim.logits.size(), 9);
  CrossEntropyRow ask = claim.ask.Row();
  ask.want = 0;
  const auto got = runner.CrossEntropyTraining({.logits = TensorOf(DType::kF32, 1, claim.logits),
                                                .batch = {.rows = {ask}},
                                                .upstream = {claim.upstream},
                                                .d_logits = TensorOf(DType::kF32, 1, nines)});
  if (!got.ok()) return got.status().ToString();
  if (std::string status = DescribeStatus(got->loss.status[0], claim.status); !status.empty()) {
    return status;
  }
  const auto is_near = [](float a, float b) {
    return std::isnan(b) ? std::isnan(a) : a == b || std::fabs(a - b) <= 4e-6f;
  };
  if (!is_near(got->loss.loss[0], claim.loss)) {
    return absl::StrFormat("loss: got %.9g, want %.9g", got->loss.loss[0], claim.loss);
  }
  if (!is_near(got->loss.logsumexp[0], claim.logsumexp)) {
    return absl::StrFormat("logsumexp: got %.9g, want %.9g", got->loss.logsumexp[0],
                           claim.logsumexp);
  }
  for (size_t i = 0; i < claim.logits.size(); ++i) {
    const float is = got->d_logits.At(0, i);
    if (is_near(is, claim.d_logits[i])) continue;
    return absl::StrFormat("element %d: got %.9g, want %.9g", i, is, claim.d_logits[i]);
  }
  return "";
}

// ---- Parity

// A call over random rows; over the logits where the seed says so.
inline LossTrainingCall MakeTrainingCall(const LossCase& c) {
  LossTrainingCall call{
      .logits = HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset),
      .d_logits = c.seed % 3 == 1
                      ? HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset)
                      : HostTensor(c.dtype, c.rows, c.vocab, c.vocab + c.offset, c.stride_extra),
      .in_place = c.seed % 3 == 0};
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(call.logits, r, c.fill, c.seed);
    AddRandomLoss(call.batch, c.vocab, /*with_softcap=*/true, random);
    if (!c.tops) call.batch.rows.back().top_logprobs = 0;
    call.upstream.push_back(static_cast<float>(random() % 1000) / 250 - 2);
  }
  return call;
}

// "" where the call has the bits of cross_entropy and of its backward with that logsumexp, else
// what differs first. A NaN may be any.
inline std::string OtherBitsThanInTwoCalls(OpRunner& runner, const LossTrainingCall& call,
                                           const LossTrainingAnswer& got) {
  const auto loss = runner.CrossEntropy(call.logits, call.batch);
  if (!loss.ok()) return loss.status().ToString();
  const auto gradient = runner.CrossEntropyBackward({.logits = call.logits,
                                                     .rows = call.batch.rows,
                                                     .logsumexp = loss->logsumexp,
                                                     .upstream = call.upstream,
                                                     .d_logits = call.d_logits,
                                                     .in_place = call.in_place});
  if (!gradient.ok()) return gradient.status().ToString();
  for (int64_t r = 0; r < call.logits.rows(); ++r) {
    const CrossEntropyRow& ask = call.batch.rows[r];
    const std::string is = LossBits(got.loss, ask, r), want = LossBits(*loss, ask, r);
    if (is != want) {
      return absl::StrFormat("row %d (%s): got %s, in two calls %s", r, Describe(ask), is, want);
    }
    for (int64_t i = 0; i < call.logits.cols(); ++i) {
      const float a = got.d_logits.At(r, i), b = gradient->At(r, i);
      if (BitsOf(a) == BitsOf(b) || (std::isnan(a) && std::isnan(b))) continue;
      return absl::StrFormat("row %d (%s): gradient %d (logit %.9g): got %.9g, in two calls %.9g",
                             r, Describe(ask), i, call.logits.At(r, i), a, b);
    }
  }
  return "";
}

inline std::string FirstTrainingDifference(OpRunner& runner, const LossCase& c) {
  const LossTrainingCall call = MakeTrainingCall(c);
  const auto got = runner.CrossEntropyTraining(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  const HostTensor& before = call.in_place ? call.logits : call.d_logits;
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& ask = call.batch.rows[r];
    const std::vector<double> x = LogitsOf(call.logits, r);
    if (std::string loss = RowDifference(x, call.batch, got->loss, r); !loss.empty()) {
      return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(ask), loss);
    }
    // A logsumexp of huge logits, rounded to f32, says little about the row.
    if (c.fill == Fill::kHuge) continue;
    const float logsumexp = got->loss.logsumexp[r];
    const bool finite = ask.active != 0 && IsFinite(x, logsumexp);
    LossGradient want;
    if (finite) want = ReferenceGradient(x, ask, logsumexp, call.upstream[r]);
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float is = got->d_logits.At(r, i);
      const bool good = ask.active == 0                ? BitsOf(is) == BitsOf(before.At(r, i))
                        : ask.target == kIgnoredTarget ? is == 0
                        : !finite                      ? std::isnan(is)
                                  : Agrees(c.dtype, is, want.d_logits[i], want.slack[i]);
      if (good) continue;
      return absl::StrFormat(
          "%s: row %d (%s, upstream %g): gradient %d (logit %.9g): got %.9g, want %.12g within "
          "%.3g",
          Describe(c), r, Describe(ask), call.upstream[r], i, x[i], is,
          finite ? want.d_logits[i] : 0, finite ? want.slack[i] : 0);
    }
  }
  const std::string other = OtherBitsThanInTwoCalls(runner, call, *got);
  return other.empty() ? "" : absl::StrFormat("%s: %s", Describe(c), other);
}

// "" where a call of no rows is OK, writes nothing before or after where rows would be, and leaves
// the stream as it was: a claim that comes after it is kept.
inline std::string BrokenTrainingOfNoRows(OpRunner& runner) {
  for (const DType dtype : kAllDTypes) {
    for (const bool in_place : {false, true}) {
      const LossTrainingCall call{.logits = HostTensor(dtype, 0, 1500, 1500, 3),
                                  .d_logits = HostTensor(dtype, 0, 1500, 1500, 5),
                                  .in_place = in_place};
      const auto got = runner.CrossEntropyTraining(call);
      if (!got.ok()) return absl::StrFormat("%s: %s", Name(dtype), got.status().ToString());
      if (got->d_logits.bytes() != (in_place ? call.logits : call.d_logits).bytes())
        return absl::StrFormat("%s: memory beside no rows was written", Name(dtype));
    }
  }
  return BrokenClaim(runner, LossTrainingClaims()[1]);
}

// Besides rows of every length, as many rows as end a block's work early or give it several.
inline std::vector<LossCase> LossTrainingCases() {
  std::vector<LossCase> cases = LossCasesWithoutTops();
  uint64_t n = 2000;
  for (DType dtype : kAllDTypes) {
    cases.push_back({dtype, 3, 40000, 3, 1, Fill::kNormal, ++n, false});
    cases.push_back({dtype, 2, 131072, 0, 0, Fill::kWithNan, ++n, false});
    cases.push_back({dtype, 2, 151936, 1, 5, Fill::kNormal, ++n, false});
    cases.push_back({dtype, 20, 5003, 7, 3, Fill::kMostlyMinusInf, ++n, false});
    cases.push_back({dtype, 9, 1500, 0, 0, Fill::kNormal, ++n, true});
  }
  return cases;
}

// ---- Rows that are left out

inline std::vector<LossCase> LeftOutCases() {
  std::vector<LossCase> cases;
  uint64_t n = 3000;
  for (DType dtype : kAllDTypes) {
    cases.push_back({dtype, 257, 7, 1, 1, Fill::kNormal, ++n});
    cases.push_back({dtype, 60, 33, 0, 3, Fill::kNormal, ++n});
    cases.push_back({dtype, 40, 1000, 3, 1, Fill::kWithNan, ++n});
    cases.push_back({dtype, 20, 4097, 1, 0, Fill::kNormal, ++n});
    cases.push_back({dtype, 200, 2100, 0, 0, Fill::kMostlyMinusInf, ++n, false});
    cases.push_back({dtype, 140, 9217, 0, 1, Fill::kNormal, ++n, false});
    cases.push_back({dtype, 4, 70001, 1, 5, Fill::kNormal, ++n, n % 2 == 0});
  }
  return cases;
}

// "" where rows that ask for nothing have answers of 0, whatever their logits hold, and where all
// other answers, and all gradients, have the bits of a call that leaves out no row. Every third row
// asks for nothing, then every row does.
inline std::string FirstLeftOutLossDifference(OpRunner& runner, const LossCase& c) {
  for (const int64_t every : {3, 1}) {
    LossTrainingCall call = MakeTrainingCall(c);
    call.batch.says_all_wanted = c.tops && c.seed % 2 == 0;
    for (int64_t r = every / 2; r < c.rows; r += every) {
      AskForNothing(call.batch.rows[r]);
      call.logits.Set(r, r % c.vocab, kNan);
    }
    const auto differs = [&](std::string_view field, int64_t r) {
      return absl::StrFormat("%s: %s of row %d, where every %d asks for nothing", Describe(c),
                             field, r, every);
    };
    const auto whole = runner.CrossEntropyTraining(call);
    if (!whole.ok()) return absl::StrFormat("%s: %s", Describe(c), whole.status().ToString());
    for (const int64_t said : {CountedRows(call.batch.rows), c.rows}) {
      call.batch.counted_rows = said;
      const auto loss = runner.CrossEntropy(call.logits, call.batch);
      if (!loss.ok()) return absl::StrFormat("%s: %s", Describe(c), loss.status().ToString());
      const auto training = runner.CrossEntropyTraining(call);
      if (!training.ok())
        return absl::StrFormat("%s: %s", Describe(c), training.status().ToString());
      for (int64_t r = 0; r < c.rows; ++r) {
        const CrossEntropyRow& row = call.batch.rows[r];
        for (const LossAnswer* got : {&*loss, &training->loss}) {
          if (row.active != 0 && AsksForNothing(row)
                  ? !IsLeftOutAnswer(*got, r, WantOf(call.batch))
                  : LossBits(*got, row, r) != LossBits(whole->loss, row, r)) {
            return differs(got == &*loss ? "answers" : "answers of training", r);
          }
        }
        for (int64_t i = 0; i < c.vocab; ++i) {
          const float is = training->d_logits.At(r, i), was = whole->d_logits.At(r, i);
          if (BitsOf(is) != BitsOf(was) && !(std::isnan(is) && std::isnan(was)))
            return differs("gradient", r);
        }
      }
    }
  }
  return "";
}

inline std::vector<OpCheck> CrossEntropyTrainingChecks() {
  return {
      ForAll("TrainingKeepsEveryClaim", LossTrainingClaims, BrokenClaim),
      ForAll("TrainingAgreesWithDoublePrecisionAndWithTwoCalls", LossTrainingCases,
             FirstTrainingDifference),
      {"ACallOfNoRowsDoesNothing", BrokenTrainingOfNoRows},
      ForAll("LeftOutRowsChangeNoOtherRow", LeftOutCases, FirstLeftOutLossDifference),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CROSS_ENTROPY_TRAINING_CASES_H_
