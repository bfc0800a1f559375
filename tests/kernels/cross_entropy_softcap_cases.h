// cross_entropy and its backward under softcaps of every size, against double precision, on every
// backend.
#ifndef LOGITD_TESTS_KERNELS_CROSS_ENTROPY_SOFTCAP_CASES_H_
#define LOGITD_TESTS_KERNELS_CROSS_ENTROPY_SOFTCAP_CASES_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/cross_entropy_cases.h"

namespace logitd::testing {

// Rows of logits from -reach to reach times the softcap.
struct SoftcapCase {
  DType dtype;
  int64_t vocab;
  float softcap;
  float reach;
  float temperature;
};

inline std::string Describe(const SoftcapCase& c) {
  return absl::StrFormat("%s, V %d, softcap %g, logits up to %g of it, temperature %g",
                         Name(c.dtype), c.vocab, c.softcap, c.reach, c.temperature);
}

inline std::vector<SoftcapCase> SoftcapCases() {
  std::vector<SoftcapCase> cases;
  const auto add = [&](float softcap, float reach, float temperature) {
    for (DType dtype : kAllDTypes) {
      const float largest = softcap * reach;
      const bool holds = dtype != DType::kF16 || (largest > 1e-3f && largest < 6e4f);
      if (!holds) continue;
      for (int64_t vocab : {3, 2500, 9000})
        cases.push_back({dtype, vocab, softcap, reach, temperature});
    }
  };
  // Up to and above the reach of each way to compute tanh.
  for (float reach : {0.01f, 0.3f, 0.31f, 0.6f, 0.62f, 0.74f, 0.76f, 1.0f, 1.02f, 1.39f, 1.41f,
                      3.0f, 8.6f, 8.8f, 1000.0f}) {
    add(30, reach, 1);
  }
  for (float softcap : {0x1p-100f, 1e-20f, 0x1p-8f, 0x1p-7f, 0.5f, 55.0f, 56.0f, 177.0f, 178.0f,
                        1024.0f, 1025.0f, 1e10f, 0x1p100f}) {
    for (float reach : {0.2f, 2.0f}) add(softcap, reach, 1);
  }
  for (float softcap : {1e-40f, 1e-31f, 0x1p101f, 0x1p126f}) add(softcap, 0.9f, 1);
  add(1e-31f, 2, 1e-30f);
  add(0x1p100f, 0x1p-117f, 1e-5f);
  for (float temperature : {1e-6f, 0.01f, 0.5f, 100.0f, 1e9f}) add(50, 0.9f, temperature);
  return cases;
}

// Rows of a softcap case. Two have equal logits only, of either sign: their errors add up. One has
// infinities, one a NaN.
inline HostTensor SoftcapLogits(const SoftcapCase& c, int64_t rows) {
  HostTensor logits(c.dtype, rows, c.vocab, c.vocab + 3, 1);
  std::mt19937_64 random(7);
  const float largest = c.softcap * c.reach;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float unit = static_cast<float>(random() >> 40) / (1 << 23) - 1.0f;
      logits.Set(r, i, largest * (r == 0 ? -1.0f : r == 1 ? 1.0f : unit));
    }
  }
  logits.Set(2, c.vocab / 2, kInf);
  logits.Set(2, c.vocab - 1, -kInf);
  logits.Set(3, c.vocab - 2, kNan);
  return logits;
}

inline std::string FirstSoftcapDifference(OpRunner& runner, const SoftcapCase& c) {
  constexpr int64_t kRows = 7;
  const HostTensor logits = SoftcapLogits(c, kRows);
  LossBatch batch;
  LossBackwardCall call{.logits = logits,
                        .d_logits = HostTensor(c.dtype, kRows, c.vocab, c.vocab, 0)};
  for (int64_t r = 0; r < kRows; ++r) {
    CrossEntropyRow row = PlainLoss(static_cast<int32_t>(r * 613 % c.vocab));
    row.softcap = c.softcap;
    row.temperature = c.temperature;
    call.rows.push_back(row);
    const double logsumexp = ReferenceCrossEntropy(LogitsOf(logits, r), row, {}).logsumexp;
    call.logsumexp.push_back(static_cast<float>(logsumexp));
    const bool is_huge = r == 4 && c.dtype != DType::kF16;  // f16 does not hold such a gradient
    call.upstream.push_back(is_huge ? 1e31f : r % 2 == 0 ? 1.5f : -0.01f);
    if (r == 5) row.want = kWantRank;
    if (r == 6) {
      row.want = kWantEntropy;
      row.label_smoothing = 0.1f;
    }
    batch.rows.push_back(row);
  }
  const auto got = runner.CrossEntropy(logits, batch);
  if (!got.ok()) return got.status().ToString();
  const auto gradient = runner.CrossEntropyBackward(call);
  if (!gradient.ok()) return gradient.status().ToString();
  for (int64_t r = 0; r < kRows; ++r) {
    const std::vector<double> x = LogitsOf(logits, r);
    const std::string difference =
        DescribeDifference(ReferenceCrossEntropy(x, batch.rows[r], {}), batch.rows[r], *got, r);
    if (!difference.empty()) return absl::StrFormat("%s: row %d: %s", Describe(c), r, difference);
    // Rounded to f32, the logsumexp of larger values says little about the row.
    if (c.softcap / c.temperature > 1e8f) continue;
    const bool finite = IsFinite(x, call.logsumexp[r]);
    LossGradient want;
    if (finite) want = ReferenceGradient(x, call.rows[r], call.logsumexp[r], call.upstream[r]);
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float is = gradient->At(r, i);
      if (finite ? Agrees(c.dtype, is, want.d_logits[i], want.slack[i]) : std::isnan(is)) continue;
      return absl::StrFormat("%s: row %d: gradient %d (logit %.9g): got %.9g, want %.12g",
                             Describe(c), r, i, x[i], is, finite ? want.d_logits[i] : 0);
    }
  }
  return "";
}

inline std::vector<OpCheck> CrossEntropySoftcapChecks() {
  return {
      ForAll("SoftcapsOfEverySizeAgreeWithDoublePrecision", SoftcapCases, FirstSoftcapDifference)};
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CROSS_ENTROPY_SOFTCAP_CASES_H_
