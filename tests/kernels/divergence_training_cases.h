// linear_divergence_training on every backend: claims by hand, parity with double precision,
// finite differences, and bits that do not depend on other rows. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_DIVERGENCE_TRAINING_CASES_H_
#define LOGITD_TESTS_KERNELS_DIVERGENCE_TRAINING_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/divergence_cases.h"
#include "tests/kernels/divergence_training_reference.h"
#include "tests/kernels/linear_gradient_cases.h"

namespace logitd::testing {

inline constexpr DivergenceLoss kForward = DivergenceLoss::kForwardKl;
inline constexpr DivergenceLoss kReverse = DivergenceLoss::kReverseKl;
inline constexpr DivergenceLoss kMixed = DivergenceLoss::kJensenShannon;
inline constexpr DivergenceLoss kAllDivergenceLosses[] = {kForward, kReverse, kMixed};

inline std::string_view Name(DivergenceLoss kind) {
  return kind == kForward ? "forward_kl" : kind == kReverse ? "reverse_kl" : "jensen_shannon";
}

// ---- Answers by hand

struct DivergenceTrainingClaim {
  const char* name;
  DivergenceLoss kind;
  std::vector<float> logits, reference;  // before softcaps
  DivergenceRow ask = kPlainDivergence;
  float beta = 0.5f;
  float upstream = 1;
  float softcap = 0;  // of the student
  RowStatus status = {};
  float loss;
  std::vector<float> gradient;  // of the student's logits
};

inline const std::vector<DivergenceTrainingClaim>& DivergenceTrainingClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f);
  static constexpr DivergenceRow kSkip = {};
  static const RowStatus kEmpty = {RowCode::kEmptySupport, -1};
  static const auto& claims = *new std::vector<DivergenceTrainingClaim>{
      // clang-format off
      // p = {3/4, 1/4}, q = {1/2, 1/2}: 3/4 (ln 3/2 - KL), 1/4 (ln 1/2 - KL)
      {.name = "forward: p weighs how far ln p - ln q is above its mean", .kind = kForward,
       .logits = {ln3, 0}, .reference = {0, 0}, .loss = 0.13081204f,
       .gradient = {0.20598980f, -0.20598980f}},
      {.name = "reverse: the gradient is p - q", .kind = kReverse, .logits = {ln3, 0},
       .reference = {0, 0}, .loss = 0.14384104f, .gradient = {0.25f, -0.25f}},
      // m = {5/8, 3/8}: KL(p || m) = 3/4 ln 6/5 + 1/4 ln 2/3 = 0.03537489, KL(q || m) =
      // 1/2 ln 4/5 + 1/2 ln 4/3 = 0.03226926; 1/2 3/4 (ln 6/5 - KL(p || m))
      {.name = "jensen_shannon: both are measured from their mean", .kind = kMixed,
       .logits = {ln3, 0}, .reference = {0, 0}, .loss = 0.03382208f,
       .gradient = {0.05510500f, -0.05510500f}},
      // m = {11/16, 5/16}: KL(p || m) = 3/4 ln 12/11 + 1/4 ln 4/5 = 0.00947265, KL(q || m) =
      // 1/2 ln 8/11 + 1/2 ln 8/5 = 0.07577495; loss 1/4 of this and 3/4 of that
      {.name = "jensen_shannon: beta is the reference's share of m and of the loss",
       .kind = kMixed, .logits = {ln3, 0}, .reference = {0, 0}, .beta = 0.25f,
       .loss = 0.02604822f, .gradient = {0.04361554f, -0.04361554f}},
      {.name = "upstream multiplies only the gradient", .kind = kReverse, .logits = {ln3, 0},
       .reference = {0, 0}, .upstream = -2, .loss = 0.14384104f, .gradient = {-0.5f, 0.5f}},
      {.name = "upstream 0 measures a row without a gradient", .kind = kForward,
       .logits = {ln3, 0}, .reference = {0, 0}, .upstream = 0, .loss = 0.13081204f,
       .gradient = {0, 0}},
      {.name = "the temperature divides the gradient too", .kind = kReverse,
       .logits = {2 * ln3, 0}, .reference = {0, 0}, .ask = {1, kIgnoredTarget, 2, 1},
       .loss = 0.14384104f, .gradient = {0.125f, -0.125f}},
      {.name = "the reference's temperature divides only its logits", .kind = kReverse,
       .logits = {0, 0}, .reference = {ln3 / 2, 0}, .ask = {1, kIgnoredTarget, 1, 0.5f},
       .loss = 0.13081204f, .gradient = {-0.25f, 0.25f}},
      // 2 tanh(1.2347742 / 2) = ln 3; 1 - (ln 3 / 2)^2 = 0.69826276
      {.name = "the softcap multiplies by its derivative", .kind = kReverse,
       .logits = {1.2347742f, 0}, .reference = {0, 0}, .softcap = 2, .loss = 0.14384104f,
       .gradient = {0.17456569f, -0.25f}},
      {.name = "a shift of all logits changes nothing", .kind = kForward,
       .logits = {64 + ln3, 64}, .reference = {-32, -32}, .loss = 0.13081204f,
       .gradient = {0.20598980f, -0.20598980f}},
      {.name = "one token has no gradient", .kind = kReverse, .logits = {-7}, .reference = {5},
       .loss = 0, .gradient = {0}},
      // ln q = -2500 + ln 1: KL = 1/2 2500 - ln 2, and each token is 1250 from the mean
      {.name = "a probability that rounds to 0 in q still pulls", .kind = kForward,
       .logits = {0, 0}, .reference = {0, -2500}, .loss = 1250 - ln2, .gradient = {-625, 625}},
      {.name = "a token that only q has pushes in the reverse by its probability",
       .kind = kReverse, .logits = {0, -5000}, .reference = {0, 0}, .loss = 2500 - ln2,
       .gradient = {0.5f, -0.5f}},
      {.name = "a token that only p has makes the forward loss inf, the gradient zeros",
       .kind = kForward, .logits = {0, 0}, .reference = {0, -kInf}, .loss = kInf,
       .gradient = {0, 0}},
      {.name = "a token that only p has is an ordinary one in the reverse", .kind = kReverse,
       .logits = {0, 0}, .reference = {0, -kInf}, .loss = ln2, .gradient = {-0.5f, 0.5f}},
      {.name = "a token that only q has makes the reverse loss inf, the gradient zeros",
       .kind = kReverse, .logits = {-kInf, 0}, .reference = {0, 0}, .loss = kInf,
       .gradient = {0, 0}},
      {.name = "a token that only q has gets nothing in the forward", .kind = kForward,
       .logits = {-kInf, 0}, .reference = {0, 0}, .loss = ln2, .gradient = {0, 0}},
      // m = {3/4, 1/4}: KL(p || m) = 1/2 ln 4/3, KL(q || m) = ln 4/3; 1/4 (ln 2/3 - KL(p || m))
      {.name = "jensen_shannon is finite where q lacks a token", .kind = kMixed, .logits = {0, 0},
       .reference = {0, -kInf}, .loss = 0.21576155f, .gradient = {-0.13732654f, 0.13732654f}},
      // m = {1/4, 3/4}: p is certain of the second token
      {.name = "jensen_shannon is finite where p lacks a token", .kind = kMixed,
       .logits = {-kInf, 0}, .reference = {0, 0}, .loss = 0.21576155f, .gradient = {0, 0}},
      {.name = "jensen_shannon of rows without a common token is ln 2", .kind = kMixed,
       .logits = {0, -kInf}, .reference = {-kInf, 0}, .loss = ln2, .gradient = {0, 0}},
      {.name = "a token that neither row has adds nothing", .kind = kMixed,
       .logits = {ln3, -kInf, 0}, .reference = {0, -kInf, 0}, .loss = 0.03382208f,
       .gradient = {0.05510500f, 0, -0.05510500f}},
      {.name = "plus inf in q is certain", .kind = kReverse, .logits = {ln3, 0},
       .reference = {3, kInf}, .loss = 2 * ln2, .gradient = {0.75f, -0.75f}},
      {.name = "plus inf in p is certain", .kind = kForward, .logits = {kInf, 3},
       .reference = {0, 0}, .loss = ln2, .gradient = {0, 0}},
      {.name = "NaN of the student makes the gradient zeros", .kind = kReverse,
       .logits = {0, kNan}, .reference = {0, 0}, .status = {RowCode::kNanLogit, 1}, .loss = kNan,
       .gradient = {0, 0}},
      {.name = "NaN of the reference makes the gradient zeros", .kind = kMixed,
       .logits = {0, 0}, .reference = {kNan, 0}, .status = {RowCode::kNanLogit, 0}, .loss = kNan,
       .gradient = {0, 0}},
      {.name = "an empty student has no loss and zeros", .kind = kMixed, .logits = {-kInf, -kInf},
       .reference = {0, 0}, .status = kEmpty, .loss = kNan, .gradient = {0, 0}},
      {.name = "an empty reference has no loss and zeros", .kind = kForward, .logits = {0, 0},
       .reference = {-kInf, -kInf}, .status = kEmpty, .loss = kNan, .gradient = {0, 0}},
      {.name = "nothing is written for a skipped row, which adds nothing", .kind = kReverse,
       .logits = {ln3, 0}, .reference = {0, 0}, .ask = kSkip, .status = kUnwrittenStatus,
       .loss = kUnwrittenFloat, .gradient = {0, 0}},
      // clang-format on
  };
  return claims;
}

// A head whose logits are its bias for every hidden state of {1, 0, ..}; its weights are 0 in the
// first column and 1, 2, .. in the second one.
inline HostHead HeadOfLogits(DType dtype, const std::vector<float>& logits) {
  HostHead head{.weight = AlignedTensor(dtype, static_cast<int64_t>(logits.size()), 8, 0),
                .bias = logits};
  for (int64_t i = 0; i < head.weight.rows(); ++i) {
    for (int64_t d = 0; d < 8; ++d)
      head.weight.Set(i, d, d == 1 ? static_cast<float>(i + 1) : 0.0f);
  }
  return head;
}

// "" where the claim holds under a head of the type, within the rounding of G to it. The first
// column of d_weight is G, and the second of d_hidden is its sum over tokens times 1, 2, ..
inline std::string BrokenClaimOf(OpRunner& runner, const DivergenceTrainingClaim& claim,
                                 DType dtype, bool want_d_bias) {
  const auto vocab = static_cast<int64_t>(claim.logits.size());
  HostTensor hidden = AlignedTensor(dtype, 1, 8, 0);
  for (int64_t d = 0; d < 8; ++d) hidden.Set(0, d, d == 0 ? 1.0f : 0.0f);
  DivergenceTrainingCall call{.hidden = hidden,
                              .head = HeadOfLogits(dtype, claim.logits),
                              .reference_hidden = hidden,
                              .reference_head = HeadOfLogits(dtype, claim.reference),
                              .rows = {claim.ask},
                              .upstream = {claim.upstream},
                              .kind = claim.kind,
                              .beta = claim.beta,
                              .d_hidden = AlignedTensor(DType::kF32, 1, 8, 0),
                              .d_weight = AlignedTensor(DType::kF32, vocab, 8, 0),
                              .want_d_bias = want_d_bias};
  call.head.softcap = claim.softcap;
  for (int64_t d = 0; d < 8; ++d) call.d_hidden.Set(0, d, 9);
  const auto got = runner.LinearDivergenceTraining(call);
  if (!got.ok()) return got.status().ToString();
  if (std::string status = DescribeStatus(got->status[0], claim.status); !status.empty())
    return status;
  const auto differs = [](std::string_view field, float is, double want, double slack) {
    return IsWithin(is, want, std::isfinite(want) ? slack : 0)
               ? std::string()
               : absl::StrFormat("%s: got %.9g, want %.9g", field, is, want);
  };
  std::string found = differs("loss", got->loss[0], claim.loss, 4e-6 * std::max(1.0f, claim.loss));
  const double slack = 4e-6 + Rounding(dtype);
  double sum = 0, most = 1;
  for (int64_t i = 0; i < vocab && found.empty(); ++i) {
    const double want = claim.gradient[i];
    sum += want * static_cast<double>(i + 1);
    most = std::max(most, std::fabs(want));
    found = differs("gradient", got->d_weight.At(i, 0), want, slack * most);
    if (found.empty() && want_d_bias) found = differs("d_bias", got->d_bias[i], want, slack * most);
  }
  if (claim.ask.active == 0) sum = 9;
  if (!found.empty()) return found;
  return differs("d_hidden", got->d_hidden.At(0, 1), sum, slack * 4 * most);
}

inline std::string BrokenClaim(OpRunner& runner, const DivergenceTrainingClaim& claim) {
  for (const DType dtype : kAllDTypes) {
    for (const bool want_d_bias : {false, true}) {
      const std::string found = BrokenClaimOf(runner, claim, dtype, want_d_bias);
      if (found.empty()) continue;
      return absl::StrFormat("%s%s: %s", Name(dtype), want_d_bias ? " with d_bias" : "", found);
    }
  }
  return "";
}

// ---- Parity with double precision

struct DivergenceTrainingCase {
  LinearCase student;
  DType reference_dtype = DType::kF32;
  int64_t reference_hidden = 8;
  bool reference_norm = false;
  DivergenceLoss kind = kReverse;
};

inline std::string Describe(const DivergenceTrainingCase& c) {
  return absl::StrFormat("%s of %s beside %d columns of %s%s", Name(c.kind), Describe(c.student),
                         c.reference_hidden, Name(c.reference_dtype),
                         c.reference_norm ? " norm" : "");
}

// The other head of a case, and its rows.
inline LinearCase ReferenceOf(const DivergenceTrainingCase& c) {
  LinearCase other = c.student;
  other.dtype = c.reference_dtype;
  other.hidden = c.reference_hidden;
  other.norm = c.reference_norm;
  other.bias = !c.student.bias;
  other.softcap = c.student.seed % 3 == 0 ? 20.0f : 0.0f;
  other.seed = c.student.seed + 50;
  return other;
}

struct DivergenceTrainingInput {
  LinearInput student, reference;
  DivergenceTrainingCall call;
};

inline DivergenceTrainingInput MakeTrainingInput(const DivergenceTrainingCase& c) {
  constexpr float kTemperatures[] = {1, 1, 0.7f, 2, 8};
  constexpr float kBetas[] = {0.5f, 0.1f, 0.9f, 0.001f};
  const LinearCase& shape = c.student;
  LinearInput student = RandomInput(shape), reference = RandomInput(ReferenceOf(c));
  const DType d_type = shape.seed % 2 == 0 ? DType::kF32 : shape.dtype;
  DivergenceTrainingCall call{
      .hidden = student.hidden,
      .head = student.head,
      .reference_hidden = reference.hidden,
      .reference_head = reference.head,
      .kind = c.kind,
      .beta = kBetas[shape.seed % 4],
      .d_hidden = AlignedTensor(d_type, shape.rows, shape.hidden, shape.stride_extra),
      .d_weight = AlignedTensor(d_type, shape.vocab, shape.hidden, shape.seed % 5 == 0 ? 1 : 0),
      .want_d_bias = shape.bias};
  std::mt19937_64 random(shape.seed);
  for (int64_t r = 0; r < shape.rows; ++r) {
    const bool active = shape.rows == 1 || random() % 16 != 0;
    call.rows.push_back(active ? DivergenceRow{1, kIgnoredTarget, kTemperatures[random() % 5],
                                               kTemperatures[random() % 5]}
                               : DivergenceRow{});
    call.upstream.push_back(static_cast<float>(random() % 1000) / 250 - 2);
    for (int64_t d = 0; d < shape.hidden; ++d) call.d_hidden.Set(r, d, 9);
    // A row with NaN, or a skipped one, adds nothing.
    if (!active || (shape.rows > 1 && random() % 16 == 0))
      call.hidden.Set(r, shape.hidden / 2, kNan);
  }
  return {
      .student = std::move(student), .reference = std::move(reference), .call = std::move(call)};
}

// The gradients of a call, and the sums of the sizes of their terms.
struct DivergenceTrainingWant {
  LinearGradient gradient;
  std::vector<double> loss;  // NaN where the row has NaN
};

inline DivergenceTrainingWant ReferenceTraining(const DivergenceTrainingCase& c,
                                                const DivergenceTrainingInput& in) {
  const int64_t rows = c.student.rows, n = c.student.hidden, vocab = c.student.vocab;
  const HostHead& head = in.call.head;
  DivergenceTrainingWant want;
  LinearGradient& to = want.gradient;
  for (auto* of_hidden : {&to.d_hidden, &to.hidden_size, &to.hidden_f16})
    of_hidden->assign(rows * n, 0);
  for (auto* of_weight : {&to.d_weight, &to.weight_size}) of_weight->assign(vocab * n, 0);
  for (auto* of_bias : {&to.d_bias, &to.bias_size}) of_bias->assign(vocab, 0);
  const double scale = head.scale;
  std::vector<double> weight;  // times scale
  for (int64_t i = 0; i < vocab; ++i) {
    for (const double w : LogitsOf(head.weight, i)) weight.push_back(scale * w);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const DivergenceRow& ask = in.call.rows[r];
    const std::vector<double> hidden = LogitsOf(in.call.hidden, r);
    want.loss.push_back(kNan);
    if (ask.active == 0 || std::isnan(in.call.hidden.At(r, n / 2))) continue;
    const auto logits = [&](const LinearInput& of) {
      return std::vector<double>(&of.exact[r * vocab], &of.exact[r * vocab] + vocab);
    };
    const double upstream = in.call.upstream[r];
    const DivergenceGradient g = ReferenceDivergenceGradient(
        logits(in.student), Capped(logits(in.reference), in.call.reference_head.softcap), ask,
        c.kind, in.call.beta, head.softcap);
    want.loss.back() = g.loss;
    for (int64_t i = 0; i < vocab; ++i) {
      const double gradient = upstream * g.d_logits[i];
      const double size = std::fabs(upstream) * g.size[i];
      to.d_bias[i] += gradient;
      to.bias_size[i] += size;
      const double f16 = std::fabs(upstream) * g.bound * 0x1p-37;
      for (int64_t d = 0; d < n; ++d) {
        const double w = weight[i * n + d], h = scale * hidden[d];
        to.d_hidden[r * n + d] += gradient * w;
        to.hidden_size[r * n + d] += std::fabs(w) * size;
        to.hidden_f16[r * n + d] += std::fabs(w) * f16;
        to.d_weight[i * n + d] += gradient * h;
        to.weight_size[i * n + d] += std::fabs(h) * size;
      }
    }
  }
  return want;
}

inline std::string FirstTrainingDifference(OpRunner& runner, const DivergenceTrainingCase& c) {
  const DivergenceTrainingInput in = MakeTrainingInput(c);
  const DivergenceTrainingWant want = ReferenceTraining(c, in);
  const auto got = runner.LinearDivergenceTraining(in.call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  const int64_t n = c.student.hidden;
  const LinearCase other = ReferenceOf(c);
  const DType dtype = c.student.dtype, d_type = in.call.d_hidden.dtype();
  const auto describe = [&](std::string_view field, int64_t row, int64_t column, float is,
                            double should, double slack) {
    return absl::StrFormat("%s: %s[%d, %d]: got %.9g, want %.12g within %.3g", Describe(c), field,
                           row, column, is, should, slack);
  };
  double logit = 0;  // how far ln p and ln q of any token may be off because logits are
  for (int64_t r = 0; r < c.student.rows; ++r) {
    const DivergenceRow& ask = in.call.rows[r];
    if (ask.active == 0) {
      if (BitsOf(got->loss[r]) == BitsOf(kUnwrittenFloat) &&
          got->status[r].position == kUnwrittenIndex) {
        continue;
      }
      return describe("loss of a skipped row", r, 0, got->loss[r], kUnwrittenFloat, 0);
    }
    const double off = 2 * LogitSlack(c.student, in.student, r) / ask.temperature +
                       2 * LogitSlack(other, in.reference, r) / ask.reference_temperature;
    logit = std::max(logit, off);
    const bool is_nan = std::isnan(want.loss[r]);
    const RowStatus status = is_nan ? RowStatus{RowCode::kNanLogit, 0} : RowStatus{};
    if (std::string differs = DescribeStatus(got->status[r], status); !differs.empty())
      return absl::StrFormat("%s: row %d: %s", Describe(c), r, differs);
    const double ln_vocab = std::log(static_cast<double>(c.student.vocab));
    const double slack = 4e-6 * std::max({1.0, ln_vocab, is_nan ? 0.0 : want.loss[r]}) + off;
    if (!IsWithin(got->loss[r], want.loss[r], is_nan ? 0 : slack))
      return describe("loss", r, 0, got->loss[r], want.loss[r], slack);
  }
  const LinearGradient& gradient = want.gradient;
  const double relative = 1e-5 + logit + Rounding(dtype);
  for (int64_t r = 0; r < c.student.rows; ++r) {
    for (int64_t d = 0; d < n; ++d) {
      const int64_t at = r * n + d;
      const double should = in.call.rows[r].active == 0 ? 9 : gradient.d_hidden[at];
      const double slack = relative * gradient.hidden_size[at] +
                           (dtype == DType::kF16 ? gradient.hidden_f16[at] : 0);
      const float is = got->d_hidden.At(r, d);
      if (!Agrees(d_type, is, should, slack)) return describe("d_hidden", r, d, is, should, slack);
    }
  }
  for (int64_t i = 0; i < c.student.vocab; ++i) {
    for (int64_t d = 0; d < n; ++d) {
      const double should = gradient.d_weight[i * n + d];
      const double slack = relative * gradient.weight_size[i * n + d] + 1e-30;
      const float is = got->d_weight.At(i, d);
      if (!Agrees(d_type, is, should, slack)) return describe("d_weight", i, d, is, should, slack);
    }
    const double should = in.call.want_d_bias ? gradient.d_bias[i] : kUnwrittenFloat;
    const double slack = relative * gradient.bias_size[i] + 1e-30;
    if (!Agrees(DType::kF32, got->d_bias[i], should, slack))
      return describe("d_bias", i, 0, got->d_bias[i], should, slack);
  }
  return "";
}

inline std::vector<DivergenceTrainingCase> DivergenceTrainingCases() {
  std::vector<DivergenceTrainingCase> cases;
  struct Shape {
    int64_t rows, vocab, hidden;
  };
  uint64_t n = 500;
  for (const Shape& shape :
       {Shape{1, 1, 8}, Shape{3, 7, 8}, Shape{257, 7, 100}, Shape{70, 300, 100},
        Shape{5, 1000, 300}, Shape{300, 515, 8}, Shape{2, 20001, 24}, Shape{65, 257, 64},
        Shape{150, 301, 96}, Shape{9, 5000, 128}, Shape{3, 40000, 64}}) {
    for (const DType dtype : kAllDTypes) {
      for (const DivergenceLoss kind : kAllDivergenceLosses) {
        ++n;
        // A norm rounded to 16 bits moves a logit more than everything else here.
        const DType other = kAllDTypes[n / 2 % 3];
        cases.push_back(
            {.student = {dtype, shape.rows, shape.vocab, shape.hidden, n % 2 == 0, false,
                         n % 4 < 2 ? 0.0f : 30.0f, static_cast<int64_t>(n % 3), n},
             .reference_dtype = other,
             .reference_hidden = shape.hidden + (n % 5 == 0 ? 0 : 24),
             .reference_norm = other == DType::kF32 && n % 2 == 0,
             .kind = kind});
      }
    }
  }
  // More rows than the gradients of a chunk's weights have columns.
  for (const DType dtype : {DType::kBF16, DType::kF16})
    cases.push_back({.student = {dtype, 70, 33000, 64, false, false, 0, 0, ++n}, .kind = kMixed});
  return cases;
}

// ---- Finite differences

// "" where the gradient is that of the total loss in double precision, by central differences.
inline std::string FirstDivergenceFiniteDifference(OpRunner& runner, const uint64_t& seed) {
  DivergenceTrainingCase c{.student = {.rows = 4,
                                       .vocab = 7,
                                       .hidden = 8,
                                       .bias = true,
                                       .softcap = seed % 2 == 0 ? 3.0f : 0.0f,
                                       .seed = seed},
                           .reference_hidden = 16,
                           .kind = kAllDivergenceLosses[seed % 3]};
  DivergenceTrainingInput in = MakeTrainingInput(c);
  in.call.hidden = in.student.hidden;  // without NaN
  in.call.d_hidden = AlignedTensor(DType::kF32, 4, 8, 0);
  in.call.d_weight = AlignedTensor(DType::kF32, 7, 8, 0);
  const auto got = runner.LinearDivergenceTraining(in.call);
  if (!got.ok()) return got.status().ToString();
  const LinearCase& shape = c.student;
  std::vector<double> weight, hidden;
  std::vector<double> bias(in.call.head.bias.begin(), in.call.head.bias.end());
  for (int64_t i = 0; i < shape.vocab; ++i) {
    for (double w : LogitsOf(in.call.head.weight, i)) weight.push_back(w);
  }
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (double h : LogitsOf(in.call.hidden, r)) hidden.push_back(h);
  }
  const auto total = [&] {
    double sum = 0;
    for (int64_t r = 0; r < shape.rows; ++r) {
      if (in.call.rows[r].active == 0) continue;
      std::vector<double> x(shape.vocab);
      for (int64_t i = 0; i < shape.vocab; ++i) {
        for (int64_t d = 0; d < shape.hidden; ++d)
          x[i] += weight[i * shape.hidden + d] * hidden[r * shape.hidden + d];
        x[i] = in.call.head.scale * x[i] + bias[i];
      }
      const double* const y = &in.reference.exact[r * shape.vocab];
      sum += in.call.upstream[r] *
             ReferenceDivergenceGradient(
                 x, Capped(std::vector<double>(y, y + shape.vocab), in.call.reference_head.softcap),
                 in.call.rows[r], c.kind, in.call.beta, shape.softcap)
                 .loss;
    }
    return sum;
  };
  const auto differs = [&](std::string_view field, double& at, float is, int64_t i) {
    constexpr double kStep = 1e-4;
    const double was = at;
    at = was + kStep;
    const double above = total();
    at = was - kStep;
    const double below = total();
    at = was;
    const double want = (above - below) / (2 * kStep);
    return std::fabs(is - want) <= 1e-5 * std::max(1.0, std::fabs(want))
               ? std::string()
               : absl::StrFormat("seed %d, %s: %s element %d: got %.9g, want %.9g", seed,
                                 Name(c.kind), field, i, is, want);
  };
  for (int64_t i = 0; i < shape.rows * shape.hidden; ++i) {
    const int64_t r = i / shape.hidden, d = i % shape.hidden;
    if (in.call.rows[r].active == 0) continue;
    std::string found = differs("d_hidden", hidden[i], got->d_hidden.At(r, d), i);
    if (!found.empty()) return found;
  }
  for (int64_t i = 0; i < shape.vocab * shape.hidden; ++i) {
    const float is = got->d_weight.At(i / shape.hidden, i % shape.hidden);
    std::string found = differs("d_weight", weight[i], is, i);
    if (!found.empty()) return found;
  }
  for (int64_t i = 0; i < shape.vocab; ++i) {
    std::string found = differs("d_bias", bias[i], got->d_bias[i], i);
    if (!found.empty()) return found;
  }
  return "";
}

// ---- What holds of every row

inline std::vector<DivergenceTrainingCase> DivergenceTrainingOfEachType() {
  std::vector<DivergenceTrainingCase> cases;
  uint64_t n = 700;
  for (const DType dtype : kAllDTypes) {
    for (const DivergenceLoss kind : kAllDivergenceLosses) {
      ++n;
      cases.push_back({.student = {dtype, 70, 600, 72, n % 2 == 0, false, 0, 0, n},
                       .reference_dtype = dtype,
                       .reference_hidden = 72,
                       .kind = kind});
    }
  }
  return cases;
}

// "" where a student under its reference's own head has a loss and gradients of exactly 0.
inline std::string BrokenTrainingBesideItself(OpRunner& runner, const DivergenceTrainingCase& c) {
  DivergenceTrainingInput in = MakeTrainingInput(c);
  DivergenceTrainingCall& call = in.call;
  call.hidden = call.reference_hidden = in.student.hidden;
  call.reference_head = call.head;
  for (DivergenceRow& row : call.rows) row = {1, kIgnoredTarget, 0.7f, 0.7f};
  const auto got = runner.LinearDivergenceTraining(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.student.rows; ++r) {
    if (got->loss[r] != 0) return absl::StrFormat("%s: loss %g", Describe(c), got->loss[r]);
  }
  for (int64_t d = 0; d < c.student.hidden; ++d) {
    for (int64_t r = 0; r < c.student.rows; ++r) {
      if (got->d_hidden.At(r, d) != 0) return absl::StrFormat("%s: d_hidden", Describe(c));
    }
    for (int64_t i = 0; i < c.student.vocab; ++i) {
      if (got->d_weight.At(i, d) != 0) return absl::StrFormat("%s: d_weight", Describe(c));
    }
  }
  return "";
}

// DivergenceTrainingOfEachType with d_bias, and 16-bit students of more tokens without it.
inline std::vector<DivergenceTrainingCase> DivergenceIsolationCases() {
  std::vector<DivergenceTrainingCase> cases = DivergenceTrainingOfEachType();
  for (DivergenceTrainingCase& c : cases) c.student.bias = true;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    cases.push_back({.student = {dtype, 100, 20000, 192, false, false, 0, 0, 720},
                     .reference_dtype = dtype,
                     .reference_hidden = 192,
                     .kind = kMixed});
  }
  return cases;
}

// "" where rows have the same loss and d_hidden in a call of their own, and rows with NaN or
// infinities have gradients of zeros and leave d_weight and d_bias as they are where their upstream
// is 0.
inline std::string BrokenTrainingIsolation(OpRunner& runner, const DivergenceTrainingCase& c) {
  DivergenceTrainingInput in = MakeTrainingInput(c);
  DivergenceTrainingCall& call = in.call;
  call.hidden = in.student.hidden;
  for (DivergenceRow& row : call.rows) row = {1, kIgnoredTarget, 1, 0.7f};
  DivergenceTrainingCall without = call;
  for (const int64_t r : {5, 33, 64}) {
    without.upstream[r] = 0;
    (r == 33 ? call.reference_hidden : call.hidden).Set(r, 3, r == 64 ? kInf : kNan);
  }
  const auto got = runner.LinearDivergenceTraining(call);
  const auto want = runner.LinearDivergenceTraining(without);
  if (!got.ok() || !want.ok()) return "the op failed";
  const auto differs = [&](std::string_view what, int64_t at) {
    return absl::StrFormat("%s: %s %d", Describe(c), what, at);
  };
  for (int64_t i = 0; i < c.student.vocab; ++i) {
    if (call.want_d_bias && got->d_bias[i] != want->d_bias[i]) return differs("d_bias", i);
    for (int64_t d = 0; d < c.student.hidden; ++d) {
      if (got->d_weight.At(i, d) != want->d_weight.At(i, d)) return differs("d_weight", i);
    }
  }
  for (int64_t r = 0; r < c.student.rows; ++r) {
    const bool is_broken = r == 5 || r == 33 || r == 64;
    const bool is_measured = r == 64 ? std::isfinite(got->loss[r]) : !is_broken;
    if (std::isfinite(got->loss[r]) != is_measured) return differs("loss", r);
    for (int64_t d = 0; d < c.student.hidden; ++d) {
      const float is = got->d_hidden.At(r, d);
      if (is_broken ? is != 0 : BitsOf(is) != BitsOf(want->d_hidden.At(r, d)))
        return differs("d_hidden", r);
    }
  }
  for (const int64_t r : {0, 4, 34, 69}) {
    DivergenceTrainingCall own = call;
    const auto only = [r](const HostTensor& from) {
      HostTensor to = AlignedTensor(from.dtype(), 1, from.cols(), 2);
      for (int64_t d = 0; d < from.cols(); ++d) to.Set(0, d, from.At(r, d));
      return to;
    };
    own.hidden = only(call.hidden);
    own.reference_hidden = only(call.reference_hidden);
    own.d_hidden = only(call.d_hidden);
    own.rows = {call.rows[r]};
    own.upstream = {call.upstream[r]};
    const auto other = runner.LinearDivergenceTraining(own);
    if (!other.ok()) return other.status().ToString();
    if (BitsOf(other->loss[0]) != BitsOf(got->loss[r])) return differs("loss of its own call", r);
    for (int64_t d = 0; d < c.student.hidden; ++d) {
      if (BitsOf(other->d_hidden.At(0, d)) != BitsOf(got->d_hidden.At(r, d)))
        return differs("d_hidden of its own call", r);
    }
  }
  return "";
}

// "" where gradients that are not wanted are not written, and leave the bits of the others, among
// calls that all want d_weight and no d_bias, and among the other calls.
inline std::string BrokenTrainingOfSome(OpRunner& runner, const DivergenceTrainingCase& c) {
  constexpr int kHidden = 1, kWeight = 2, kBias = 4;
  DivergenceTrainingCall call = MakeTrainingInput(c).call;
  const auto run = [&](int wanted) {
    call.want_d_hidden = (wanted & kHidden) != 0;
    call.want_d_weight = (wanted & kWeight) != 0;
    call.want_d_bias = (wanted & kBias) != 0;
    return runner.LinearDivergenceTraining(call);
  };
  const auto all = run(kHidden | kWeight | kBias), weights = run(kHidden | kWeight);
  if (!all.ok() || !weights.ok()) return "the op failed";
  const std::vector<float> no_bias(c.student.vocab, kUnwrittenFloat);
  for (int wanted = 0; wanted < 8; ++wanted) {
    const auto got = run(wanted);
    if (!got.ok()) return got.status().ToString();
    const DivergenceTrainingAnswer& want =
        call.want_d_weight && !call.want_d_bias ? *weights : *all;
    const auto same = [](const HostTensor& a, const HostTensor& b) {
      return a.bytes() == b.bytes();
    };
    if (!same(got->d_hidden, call.want_d_hidden ? want.d_hidden : call.d_hidden) ||
        !same(got->d_weight, call.want_d_weight ? want.d_weight : call.d_weight) ||
        got->d_bias != (call.want_d_bias ? want.d_bias : no_bias)) {
      return absl::StrFormat("%s, wanted %d", Describe(c), wanted);
    }
  }
  return "";
}

// "" where a call of no rows has sums over rows of zeros.
inline std::string BrokenDivergenceTrainingOfNoRows(OpRunner& runner) {
  DivergenceTrainingCase c;
  c.student = {.rows = 0, .vocab = 7, .hidden = 8, .bias = true, .seed = 4};
  const auto got = runner.LinearDivergenceTraining(MakeTrainingInput(c).call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t i = 0; i < 7; ++i) {
    if (got->d_bias[i] != 0) return "d_bias";
    for (int64_t d = 0; d < 8; ++d) {
      if (got->d_weight.At(i, d) != 0) return "d_weight";
    }
  }
  return "";
}

inline std::vector<OpCheck> DivergenceTrainingChecks() {
  return {
      ForAll("KeepsEveryClaim", DivergenceTrainingClaims, BrokenClaim),
      ForAll("AgreesWithDoublePrecision", DivergenceTrainingCases, FirstTrainingDifference),
      ForAll("GradientIsThatOfTheLossByFiniteDifferences", Seeds<12>,
             FirstDivergenceFiniteDifference),
      ForAll("AStudentBesideItselfHasNoGradient", DivergenceTrainingOfEachType,
             BrokenTrainingBesideItself),
      ForAll("ARowDependsOnlyOnItself", DivergenceIsolationCases, BrokenTrainingIsolation),
      ForAll("UnwantedGradientsAreNotWritten", DivergenceTrainingOfEachType, BrokenTrainingOfSome),
      {"GradientsOfNoRowsAreZeros", BrokenDivergenceTrainingOfNoRows},
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_DIVERGENCE_TRAINING_CASES_H_
