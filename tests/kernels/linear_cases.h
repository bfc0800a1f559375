// What the linear_* ops must do on every backend: the answers of the op of that name on logits that
// are known exactly, parity with double precision, and bits that do not depend on other rows. One
// table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_LINEAR_CASES_H_
#define LOGITD_TESTS_KERNELS_LINEAR_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/linear.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/softmax_topk_cases.h"

namespace logitd::testing {

struct LinearCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t hidden = 8;
  bool bias = false;
  bool norm = false;
  float softcap = 0;
  int64_t stride_extra = 0;  // of hidden states and weights, in 16 bytes
  uint64_t seed = 1;
};

inline std::string Describe(const LinearCase& c) {
  return absl::StrFormat("linear %dx%d -> %d %s%s%s softcap %g stride +%d, seed %d", c.rows,
                         c.hidden, c.vocab, Name(c.dtype), c.bias ? " bias" : "",
                         c.norm ? " norm" : "", c.softcap, c.stride_extra, c.seed);
}

// A matrix whose rows are aligned to 16 bytes.
inline HostTensor AlignedTensor(DType dtype, int64_t rows, int64_t cols, int64_t stride_extra) {
  const auto unit = static_cast<int64_t>(16 / SizeOf(dtype));
  return HostTensor(dtype, rows, cols, ((cols + unit - 1) / unit + stride_extra) * unit, 0);
}

// Hidden states, their head, and the logits before the softcap (after it in ExactInput).
struct LinearInput {
  HostTensor hidden;
  HostHead head;
  HostTensor logits;             // [rows, vocab] f32
  std::vector<double> exact;     // [rows, vocab], of the inputs as stored
  std::vector<double> absolute;  // [rows], the largest sum_d |weight g| of a row's tokens
};

// The RMSNorm of one row, rounded to `dtype`.
inline std::vector<double> NormedRow(const HostTensor& hidden, int64_t r, const HostHead& head) {
  std::vector<double> g = LogitsOf(hidden, r);
  if (head.norm.empty()) return g;
  double squares = 0;
  for (double x : g) squares += x * x / static_cast<double>(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    g[i] = RoundedTo(hidden.dtype(), g[i] / std::sqrt(squares + head.norm_epsilon) * head.norm[i]);
  }
  return g;
}

// Fills in what follows from the hidden states and the head.
inline void ComputeLogits(LinearInput& input) {
  const int64_t rows = input.hidden.rows(), vocab = input.head.weight.rows();
  const int64_t n = input.hidden.cols();
  input.exact.assign(rows * vocab, 0);
  input.absolute.assign(rows, 0);
  std::vector<float> weight(vocab * n);
  for (int64_t i = 0; i < vocab; ++i) {
    for (int64_t d = 0; d < n; ++d) weight[i * n + d] = input.head.weight.At(i, d);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<double> g = NormedRow(input.hidden, r, input.head);
    for (int64_t i = 0; i < vocab; ++i) {
      double sum = 0, absolute = 0;
      for (int64_t d = 0; d < n; ++d) {
        const double product = weight[i * n + d] * g[d];
        sum += product;
        absolute += std::fabs(product);
      }
      const double bias = input.head.bias.empty() ? 0 : input.head.bias[i];
      const double x = input.head.scale * sum + bias;
      input.exact[r * vocab + i] = x;
      input.absolute[r] =
          std::max(input.absolute[r], std::fabs(input.head.scale) * absolute + std::fabs(bias));
      input.logits.Set(r, i, static_cast<float>(x));
    }
  }
}

// Small whole numbers, so that every sum in any order is exact in f32; a norm is exact too, as all
// of a row's elements are +-2, and a softcap, as every logit is 0 or so far beyond that it becomes
// the softcap: many are equal then.
inline LinearInput ExactInput(const LinearCase& c) {
  LinearInput input{.hidden = AlignedTensor(c.dtype, c.rows, c.hidden, c.stride_extra),
                    .head = {.weight = AlignedTensor(c.dtype, c.vocab, c.hidden, c.stride_extra)},
                    .logits = HostTensor(DType::kF32, c.rows, c.vocab, c.vocab, 0)};
  std::mt19937_64 random(c.seed);
  const auto whole = [&random] { return static_cast<float>(random() % 5) - 2; };
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      input.hidden.Set(r, d, c.norm ? (random() % 2 == 0 ? -2.0f : 2.0f) : whole());
    }
  }
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) input.head.weight.Set(i, d, whole());
  }
  // Logits of a few in size, or of 16 times the softcap: tanh of that is 1 in f32.
  const bool capped = c.softcap > 0;
  input.head.scale = capped
                         ? 16 * c.softcap
                         : std::ldexp(1.0f, -std::ilogb(std::sqrt(static_cast<float>(c.hidden))));
  for (int64_t i = 0; i < (c.bias ? c.vocab : 0); ++i) {
    input.head.bias.push_back(whole() * (capped ? input.head.scale : 0.25f));
  }
  for (int64_t d = 0; d < (c.norm ? c.hidden : 0); ++d) input.head.norm.push_back(whole());
  input.head.softcap = c.softcap;
  ComputeLogits(input);
  for (int64_t r = 0; r < (capped ? c.rows : 0); ++r) {
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float x = input.logits.At(r, i);
      if (x != 0) input.logits.Set(r, i, std::copysign(c.softcap, x));
    }
  }
  return input;
}

// Without the logits.
inline LinearInput RandomTensors(const LinearCase& c) {
  LinearInput input{.hidden = AlignedTensor(c.dtype, c.rows, c.hidden, c.stride_extra),
                    .head = {.weight = AlignedTensor(c.dtype, c.vocab, c.hidden, c.stride_extra)},
                    .logits = HostTensor(DType::kF32, c.rows, c.vocab, c.vocab, 0)};
  std::mt19937_64 random(c.seed);
  const auto uniform = [&random] { return static_cast<float>(random() >> 40) / (1 << 23) - 1.0f; };
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t d = 0; d < c.hidden; ++d) input.hidden.Set(r, d, 3 * uniform());
  }
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) input.head.weight.Set(i, d, uniform());
  }
  for (int64_t i = 0; i < (c.bias ? c.vocab : 0); ++i) input.head.bias.push_back(uniform());
  for (int64_t d = 0; d < (c.norm ? c.hidden : 0); ++d) input.head.norm.push_back(uniform());
  input.head.norm_epsilon = 1e-5f;
  input.head.scale = 2.5f / std::sqrt(static_cast<float>(c.hidden));
  input.head.softcap = c.softcap;
  return input;
}

inline LinearInput RandomInput(const LinearCase& c) {
  LinearInput input = RandomTensors(c);
  ComputeLogits(input);
  return input;
}

// ---- The answers of the unfused ops

inline std::vector<LinearCase> ExactCases() {
  std::vector<LinearCase> cases;
  uint64_t n = 0;
  for (const int64_t vocab : {1, 7, 1000, 5003}) {
    for (const int64_t hidden : {8, 100, 300}) {
      for (const int64_t rows : {1, 3, 70}) {
        if (rows * vocab > 100000) continue;
        ++n;
        const DType dtype = n % 3 == 0 ? DType::kF32 : n % 3 == 1 ? DType::kBF16 : DType::kF16;
        cases.push_back(
            {dtype, rows, vocab, hidden, n % 2 == 0, n % 4 < 2, 0, static_cast<int64_t>(n % 3), n});
      }
    }
  }
  cases.push_back({DType::kBF16, 257, 33, 8, true, false, 0, 0, ++n});
  cases.push_back({DType::kBF16, 2, 50257, 8, true, true, 0, 1, ++n});
  cases.push_back({DType::kF32, 3, 7, 4096, false, false, 0, 0, ++n});
  for (const float softcap : {0.5f, 2.0f, 30.0f}) {
    cases.push_back({DType::kF32, 70, 1000, 100, false, true, softcap, 1, ++n});
    cases.push_back({DType::kF16, 3, 5003, 8, true, false, softcap, 0, ++n});
    cases.push_back({DType::kBF16, 1, 50257, 8, false, false, softcap, 0, ++n});
    cases.push_back({DType::kBF16, 33, 7, 300, true, true, softcap, 2, ++n});
  }
  return cases;
}

inline SampleBatch SampleBatchOf(const LinearCase& c) {
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) AddRandomRow(batch, c.vocab, random);
  return batch;
}

inline LossBatch LossBatchOf(const LinearCase& c) {
  LossBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    AddRandomLoss(batch, c.vocab, /*with_softcap=*/false, random);
  }
  batch.says_all_wanted = c.seed % 2 == 0;
  return batch;
}

inline TopKCase TopKCaseOf(const LinearCase& c) {
  return {.dtype = DType::kF32,
          .rows = c.rows,
          .vocab = c.vocab,
          .k = static_cast<int32_t>(std::min<int64_t>(c.vocab, 40)),
          .ks = Ks::kMixed,
          .temperatures = Temperatures::kMixed,
          .seed = c.seed};
}

// "" where all three ops give the answers of the known logits.
inline std::string FirstExactDifference(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = ExactInput(c);
  const TopKCase topk = TopKCaseOf(c);
  const Asks asks = MakeAsks(topk);
  auto top = runner.LinearTopK(input.hidden, input.head, asks.rows, asks.entries);
  if (!top.ok()) return absl::StrFormat("%s: %s", Describe(c), top.status().ToString());
  if (std::string difference = FirstDifference(topk, input.logits, asks, *top);
      !difference.empty()) {
    return absl::StrFormat("%s: %s", Describe(c), difference);
  }
  const SampleBatch samples = SampleBatchOf(c);
  auto drawn = runner.LinearSample(input.hidden, input.head, samples);
  if (!drawn.ok()) return absl::StrFormat("%s: %s", Describe(c), drawn.status().ToString());
  const LossBatch losses = LossBatchOf(c);
  auto scored = runner.LinearCrossEntropy(input.hidden, input.head, losses);
  if (!scored.ok()) return absl::StrFormat("%s: %s", Describe(c), scored.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    if (samples.rows[r].active != 0) {
      const std::string difference =
          ReferenceSample(RowOf(input.logits, r), samples.rows[r], samples)
              .Difference(*drawn, r, samples);
      if (!difference.empty()) {
        return absl::StrFormat("%s: sample, row %d (%s): %s", Describe(c), r,
                               Describe(samples.rows[r]), difference);
      }
    }
    const std::string difference = RowDifference(LogitsOf(input.logits, r), losses, *scored, r);
    if (!difference.empty()) {
      return absl::StrFormat("%s: cross_entropy, row %d (%s): %s", Describe(c), r,
                             Describe(losses.rows[r]), difference);
    }
  }
  return "";
}

// ---- Parity of losses with double precision

// How far a logit may be off: the contract's bound with about the square root of `hidden` in place
// of `hidden`, as in practice, plus the rounding of the softcap.
inline double LogitSlack(const LinearCase& c, const LinearInput& input, int64_t r) {
  const double root = std::sqrt(static_cast<double>(c.hidden));
  return 0x1p-24 * (4 + 2 * std::min(static_cast<double>(c.hidden), 4 * root)) * input.absolute[r] +
         4e-7 * c.softcap;
}

inline std::vector<LinearCase> LinearLossCases() {
  std::vector<LinearCase> cases;
  uint64_t n = 100;
  for (const int64_t vocab : {1, 7, 1000}) {
    for (const int64_t hidden : {8, 100, 4096}) {
      for (const int64_t rows : {1, 3, 65}) {
        if (rows * vocab * hidden > 20'000'000) continue;
        for (const float softcap : {0.0f, 30.0f}) {
          ++n;
          const DType dtype = n % 3 == 0 ? DType::kF32 : n % 3 == 1 ? DType::kBF16 : DType::kF16;
          // A norm rounded to 16 bits moves a logit more than everything else here.
          const bool norm = dtype == DType::kF32 && n % 2 == 0;
          cases.push_back({dtype, rows, vocab, hidden, n % 4 < 2, norm, softcap,
                           static_cast<int64_t>(n % 3), n});
        }
      }
    }
  }
  cases.push_back({DType::kF32, 1, 50257, 100, true, true, 5, 1, ++n});
  return cases;
}

inline std::string FirstLossDifference(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = RandomInput(c);
  LossBatch batch = LossBatchOf(c);
  // Rounding decides which of two close logits is larger.
  for (CrossEntropyRow& row : batch.rows) {
    if (row.active == 0) continue;
    row.want &= kWantEntropy;
    row.first_top_entry += row.top_logprobs;
    row.top_logprobs = 0;
  }
  auto got = runner.LinearCrossEntropy(input.hidden, input.head, batch);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    std::vector<double> logits(&input.exact[r * c.vocab], &input.exact[r * c.vocab] + c.vocab);
    for (double& x : logits) {
      if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
    }
    const std::string difference =
        RowDifference(logits, batch, *got, r, {.logit = LogitSlack(c, input, r)});
    if (!difference.empty()) {
      return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(batch.rows[r]),
                             difference);
    }
  }
  return "";
}

// ---- Bits that depend only on the row

inline std::vector<LinearCase> LinearInvarianceCases() {
  return {{DType::kF32, 257, 7, 100, true, true, 0, 0, 1},
          {DType::kBF16, 65, 1000, 100, false, true, 30, 1, 2},
          {DType::kF16, 70, 33, 4096, true, false, 0, 0, 3},
          {DType::kBF16, 257, 1, 8, true, false, 0, 0, 4},
          {DType::kF32, 9, 50257, 8, false, false, 5, 2, 5},
          {DType::kBF16, 3, 50257, 100, false, false, 0, 0, 6},
          {DType::kBF16, 440, 3000, 72, false, false, 0, 0, 7},
          {DType::kF16, 128, 5003, 200, false, false, 0, 0, 8},
          {DType::kBF16, 17, 65, 72, true, false, 0, 0, 9},
          {DType::kF16, 300, 1200, 200, true, false, 5, 0, 10}};
}

// The bits of one row's answers from every op, among other rows, some with NaN and infinities.
inline absl::StatusOr<std::string> LinearBits(OpRunner& runner, const LinearCase& c, int64_t rows,
                                              int64_t place) {
  const LinearInput own = RandomTensors([&] {
    LinearCase one_row = c;
    one_row.rows = 1;
    one_row.stride_extra = 0;
    return one_row;
  }());
  HostHead head = own.head;
  const int64_t extra = rows > 1 ? c.stride_extra : 0;
  head.weight = AlignedTensor(c.dtype, c.vocab, c.hidden, extra);
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) head.weight.Set(i, d, own.head.weight.At(i, d));
  }
  HostTensor hidden = AlignedTensor(c.dtype, rows, c.hidden, extra);
  std::mt19937_64 others(rows * 1000 + place), mine(c.seed);
  SampleBatch samples;
  LossBatch losses;
  std::vector<SoftmaxTopKRow> asks;
  int64_t entries = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (r != place) FillRow(hidden, r, r % 3 == 0 ? Fill::kWithNan : Fill::kWithPlusInf, rows);
    for (int64_t d = 0; r == place && d < c.hidden; ++d) hidden.Set(r, d, own.hidden.At(0, d));
    std::mt19937_64& random = r == place ? mine : others;
    AddRandomRow(samples, c.vocab, random);
    AddRandomLoss(losses, c.vocab, /*with_softcap=*/false, random);
    if (r == place) {
      samples.rows.back().active = 1;
      samples.rows.back().temperature = 0.75f;
      losses.rows.back().active = 1;
      losses.rows.back().temperature = 0.75f;
    }
    const auto k = static_cast<int32_t>(r == place ? std::min<int64_t>(c.vocab, 20) : r % 2);
    asks.push_back({.first_entry = entries, .temperature = 0.5f, .k = k});
    entries += k;
  }
  auto top = runner.LinearTopK(hidden, head, asks, entries);
  if (!top.ok()) return top.status();
  auto drawn = runner.LinearSample(hidden, head, samples);
  if (!drawn.ok()) return drawn.status();
  auto scored = runner.LinearCrossEntropy(hidden, head, losses);
  if (!scored.ok()) return scored.status();
  std::string bits = absl::StrFormat("%08x", BitsOf(top->logsumexp[place]));
  for (int64_t i = 0; i < asks[place].k; ++i) {
    const int64_t at = asks[place].first_entry + i;
    absl::StrAppendFormat(&bits, " %d %08x", top->indices[at], BitsOf(top->probs[at]));
  }
  return bits + SampleBits(*drawn, samples.rows[place], place) +
         LossBits(*scored, losses.rows[place], place);
}

// "" where the row's bits are the same in a call of its own and at every place of a batch.
inline std::string BrokenLinearInvariance(OpRunner& runner, const LinearCase& c) {
  auto want = LinearBits(runner, c, 1, 0);
  if (!want.ok()) return want.status().ToString();
  struct Place {
    int64_t rows, row;
  };
  for (const Place& place :
       {Place{1, 0}, Place{3, 1}, Place{c.rows, 0}, Place{c.rows, c.rows - 1},
        Place{c.rows, c.rows / 2}, Place{c.rows, std::min<int64_t>(c.rows - 1, 5)}}) {
    auto got = LinearBits(runner, c, place.rows, place.row);
    if (!got.ok()) return got.status().ToString();
    if (*got == *want) continue;
    return absl::StrFormat("%s: other bits as row %d of %d", Describe(c), place.row, place.rows);
  }
  return "";
}

// ---- Claims by hand

// "" where the norm is rounded to the weight's type: 1 + 2^-10 is 1 in bf16, 1 + 2^-7 is not.
inline std::string BrokenNormRounding(OpRunner& runner) {
  HostTensor hidden = AlignedTensor(DType::kBF16, 1, 2, 0);
  HostHead head{.weight = AlignedTensor(DType::kBF16, 2, 2, 0),
                .norm = {1 + 0x1p-10f, 1 + 0x1p-7f}};
  for (int64_t d = 0; d < 2; ++d) {
    hidden.Set(0, d, 4);
    for (int64_t i = 0; i < 2; ++i) head.weight.Set(i, d, i == d ? 8 : 0);
  }
  const std::vector<SoftmaxTopKRow> rows = {{.first_entry = 0, .temperature = 1, .k = 2}};
  auto got = runner.LinearTopK(hidden, head, rows, 2);
  if (!got.ok()) return got.status().ToString();
  // Logits 8 and 8 + 1/16.
  const double want = 8.0625 + std::log1p(std::exp(-0.0625));
  if (got->indices == std::vector<int32_t>{1, 0} && std::fabs(got->logsumexp[0] - want) < 2e-5) {
    return "";
  }
  return absl::StrFormat("got ids %d %d, logsumexp %.9g, want %.9g", got->indices[0],
                         got->indices[1], got->logsumexp[0], want);
}

// "" where linear_topk and linear_sample are of the logits after the head's softcap, which comes
// after scale and bias and before the temperature.
inline std::string BrokenSoftcap(OpRunner& runner) {
  HostTensor hidden = AlignedTensor(DType::kF32, 1, 1, 0);
  HostHead head{.weight = AlignedTensor(DType::kF32, 4, 1, 0),
                .bias = {0, 1, 0, 0},
                .scale = 2,
                .softcap = 2};
  hidden.Set(0, 0, 1);
  const float weight[] = {1, 1, 4, -1};
  for (int64_t i = 0; i < 4; ++i) head.weight.Set(i, 0, weight[i]);
  // Before the softcap 2, 3, 8, -2.
  const double logits[] = {2 * std::tanh(1.0), 2 * std::tanh(1.5), 2 * std::tanh(4.0),
                           2 * std::tanh(-1.0)};
  constexpr double kTemperature = 0.5;
  double sum = 0, raw_sum = 0;
  for (double x : logits) {
    sum += std::exp(x / kTemperature);
    raw_sum += std::exp(x);
  }
  const auto close = [](float is, double should) { return std::fabs(is - should) <= 1e-5; };

  const std::vector<SoftmaxTopKRow> asks = {
      {.first_entry = 0, .temperature = static_cast<float>(kTemperature), .k = 4}};
  auto top = runner.LinearTopK(hidden, head, asks, 4);
  if (!top.ok()) return top.status().ToString();
  const int32_t order[] = {2, 1, 0, 3};
  if (!close(top->logsumexp[0], std::log(sum))) {
    return absl::StrFormat("topk: logsumexp %.9g, want %.9g", top->logsumexp[0], std::log(sum));
  }
  for (int i = 0; i < 4; ++i) {
    const double want = std::exp(logits[order[i]] / kTemperature) / sum;
    if (top->indices[i] == order[i] && close(top->probs[i], want)) continue;
    return absl::StrFormat("topk: token %d of %.9g, want %d of %.9g", top->indices[i],
                           top->probs[i], order[i], want);
  }

  // Shares end at 0.251, 0.585, 0.988 and 1; without the softcap at 0.002, 0.009, 1 and 1.
  struct Draw {
    uint64_t position;
    int32_t token;
    int32_t rank;
  };
  const Draw draws[] = {{kAt003, 0, 3}, {kAt036, 1, 2}, {kAt088, 2, 1}};
  for (const Draw& draw : draws) {
    SampleBatch batch;
    batch.rows = {PlainRow()};
    batch.rows[0].position = draw.position;
    auto drawn = runner.LinearSample(hidden, head, batch);
    if (!drawn.ok()) return drawn.status().ToString();
    const double want = logits[draw.token] - std::log(raw_sum);
    if (drawn->tokens[0] == draw.token && drawn->ranks[0] == draw.rank &&
        close(drawn->logprobs[0], want) && close(drawn->logsumexp[0], std::log(raw_sum))) {
      continue;
    }
    return absl::StrFormat("sample: token %d of rank %d, logprob %.9g, want %d of %d, %.9g",
                           drawn->tokens[0], drawn->ranks[0], drawn->logprobs[0], draw.token,
                           draw.rank, want);
  }
  return "";
}

// "" where a NaN in a hidden state is the status of its row, at token 0, and of no other.
inline std::string BrokenNanIsolation(OpRunner& runner) {
  LinearCase c{.rows = 7, .vocab = 20, .hidden = 16};
  LinearInput input = ExactInput(c);
  input.hidden.Set(2, 15, kNan);
  LossBatch batch;
  for (int64_t r = 0; r < c.rows; ++r) batch.rows.push_back(PlainLoss(static_cast<int32_t>(r)));
  auto got = runner.LinearCrossEntropy(input.hidden, input.head, batch);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    const RowStatus want = r == 2 ? RowStatus{RowCode::kNanLogit, 0} : RowStatus{};
    if (got->status[r].code == want.code && got->status[r].position == want.position &&
        std::isnan(got->loss[r]) == (r == 2)) {
      continue;
    }
    return absl::StrFormat("row %d: code %d position %d loss %g", r,
                           static_cast<int>(got->status[r].code), got->status[r].position,
                           got->loss[r]);
  }
  return "";
}

inline std::vector<OpCheck> LinearChecks() {
  return {
      ForAll("GivesTheAnswersOfTheUnfusedOps", ExactCases, FirstExactDifference),
      ForAll("LossAgreesWithDoublePrecision", LinearLossCases, FirstLossDifference),
      ForAll("ARowsBitsDoNotDependOnOtherRows", LinearInvarianceCases, BrokenLinearInvariance),
      {"NormIsRoundedToTheWeightsType", BrokenNormRounding},
      {"TopKAndSampleUseLogitsAfterTheSoftcap", BrokenSoftcap},
      {"NanStaysInItsRow", BrokenNanIsolation},
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_LINEAR_CASES_H_
