// What the gradients of linear_cross_entropy must be on every backend, from its backward and from
// linear_cross_entropy_training. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_LINEAR_GRADIENT_CASES_H_
#define LOGITD_TESTS_KERNELS_LINEAR_GRADIENT_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/linear_cases.h"

namespace logitd::testing {

// ---- The backward pass

struct LinearGradient {
  std::vector<double> d_hidden;  // [rows, hidden]
  std::vector<double> d_weight;  // [vocab, hidden]
  std::vector<double> d_bias;    // [vocab]
  // The sums of the terms' absolute values: what an error is in proportion to.
  std::vector<double> hidden_size, weight_size, bias_size;
  // What an f16 head may add to a d_hidden (kernels/linear.h).
  std::vector<double> hidden_f16;  // [rows, hidden]
};

inline bool IsCounted(const CrossEntropyRow& row) {
  return row.active != 0 && row.target != kIgnoredTarget;
}

inline LinearGradient ReferenceLinearGradient(const LinearInput& input,
                                              const LinearBackwardCall& call) {
  const int64_t rows = input.hidden.rows(), n = input.hidden.cols();
  const int64_t vocab = input.head.weight.rows();
  LinearGradient to;
  to.d_hidden.assign(rows * n, 0);
  to.hidden_size.assign(rows * n, 0);
  to.hidden_f16.assign(rows * n, 0);
  to.d_weight.assign(vocab * n, 0);
  to.weight_size.assign(vocab * n, 0);
  to.d_bias.assign(vocab, 0);
  to.bias_size.assign(vocab, 0);
  const double scale = input.head.scale;
  for (int64_t r = 0; r < rows; ++r) {
    if (!IsCounted(call.rows[r])) continue;
    CrossEntropyRow ask = call.rows[r];
    ask.softcap = input.head.softcap;
    const std::vector<double> logits(&input.exact[r * vocab], &input.exact[r * vocab] + vocab);
    const LossGradient g = ReferenceGradient(logits, ask, call.logsumexp[r], call.upstream[r]);
    const double f16 = 0x1p-37 * std::fabs(call.upstream[r] / ask.temperature) *
                       (std::fabs(1 + 2 * ask.z_loss * call.logsumexp[r]) + 1);
    for (int64_t i = 0; i < vocab; ++i) {
      // The size of the terms of a logit's gradient, before they cancel.
      const double size = g.slack[i] / 4e-6;
      to.d_bias[i] += g.d_logits[i];
      to.bias_size[i] += size;
      for (int64_t d = 0; d < n; ++d) {
        const double w = input.head.weight.At(i, d), h = input.hidden.At(r, d);
        to.d_hidden[r * n + d] += scale * g.d_logits[i] * w;
        to.hidden_size[r * n + d] += std::fabs(scale * w) * size;
        to.hidden_f16[r * n + d] += std::fabs(scale * w) * f16;
        to.d_weight[i * n + d] += scale * g.d_logits[i] * h;
        to.weight_size[i * n + d] += std::fabs(scale * h) * size;
      }
    }
  }
  return to;
}

inline LinearBackwardCall MakeLinearBackwardCall(const LinearCase& c, const LinearInput& input,
                                                 DType d_type) {
  LinearBackwardCall call{.hidden = input.hidden,
                          .head = input.head,
                          .d_hidden = AlignedTensor(d_type, c.rows, c.hidden, c.stride_extra),
                          .d_weight = AlignedTensor(d_type, c.vocab, c.hidden, 1)};
  std::mt19937_64 random(c.seed);
  const LossBatch batch = LossBatchOf(c);
  for (int64_t r = 0; r < c.rows; ++r) {
    CrossEntropyRow ask = batch.rows[r];
    ask.top_logprobs = ask.extra_count = ask.want = 0;
    ask.temperature = ask.active == 0 ? 0 : std::max(ask.temperature, 0.7f);
    call.rows.push_back(ask);
    CrossEntropyRow capped = ask;
    capped.softcap = c.softcap;
    capped.target = kIgnoredTarget;
    const std::vector<double> logits(&input.exact[r * c.vocab],
                                     &input.exact[r * c.vocab] + c.vocab);
    call.logsumexp.push_back(
        ask.active == 0 ? 0.0f
                        : static_cast<float>(ReferenceCrossEntropy(logits, capped, {}).logsumexp));
    call.upstream.push_back(static_cast<float>(random() % 1000) / 250 - 2);
    for (int64_t d = 0; d < c.hidden; ++d) call.d_hidden.Set(r, d, 9);
    // A hidden state that is not counted adds nothing, even if it is NaN.
    if (!IsCounted(ask)) call.hidden.Set(r, c.hidden / 2, kNan);
  }
  return call;
}

inline std::vector<LinearCase> LinearGradientCases() {
  std::vector<LinearCase> cases;
  uint64_t n = 200;
  struct Shape {
    int64_t rows, vocab, hidden;
  };
  for (const Shape& shape : {Shape{1, 1, 8}, Shape{3, 7, 8}, Shape{257, 7, 100},
                             Shape{70, 300, 100}, Shape{5, 1000, 300}, Shape{300, 515, 8}}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      ++n;
      cases.push_back({dtype, shape.rows, shape.vocab, shape.hidden, n % 2 == 0, false,
                       n % 4 < 2 ? 0.0f : 30.0f, static_cast<int64_t>(n % 3), n});
    }
  }
  return cases;
}

// "" where the answer is the gradient, if each logit's gradient may be rounded by `rounding` times
// the size of its terms.
inline std::string GradientDifference(const LinearCase& c, const LinearInput& input,
                                      const LinearBackwardCall& call,
                                      const LinearBackwardAnswer& got, double rounding) {
  const DType d_type = call.d_hidden.dtype();
  const LinearGradient want = ReferenceLinearGradient(input, call);
  // A logit's error moves its probability as much.
  double logit = 0;
  for (int64_t r = 0; r < c.rows; ++r) logit = std::max(logit, LogitSlack(c, input, r) / 0.7);
  const double relative = 1e-5 + 2 * logit + rounding;
  const auto describe = [&](std::string_view field, int64_t row, int64_t column, float is,
                            double should, double slack) {
    return absl::StrFormat("%s: %s[%d, %d]: got %.9g, want %.12g within %.3g", Describe(c), field,
                           row, column, is, should, slack);
  };
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      const float is = got.d_hidden.At(r, d);
      const double should = call.rows[r].active == 0 ? 9 : want.d_hidden[r * c.hidden + d];
      const double slack = relative * want.hidden_size[r * c.hidden + d] +
                           (c.dtype == DType::kF16 ? want.hidden_f16[r * c.hidden + d] : 0);
      if (!Agrees(d_type, is, should, slack)) return describe("d_hidden", r, d, is, should, slack);
    }
  }
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      const float is = got.d_weight.At(i, d);
      const double should = want.d_weight[i * c.hidden + d];
      const double slack = relative * want.weight_size[i * c.hidden + d] + 1e-30;
      if (!Agrees(d_type, is, should, slack)) return describe("d_weight", i, d, is, should, slack);
    }
    const double should = call.want_d_bias ? want.d_bias[i] : kUnwrittenFloat;
    if (!Agrees(DType::kF32, got.d_bias[i], should, relative * want.bias_size[i])) {
      return describe("d_bias", i, 0, got.d_bias[i], should, relative * want.bias_size[i]);
    }
  }
  return "";
}

// The relative error of rounding to the type once.
inline double Rounding(DType dtype) {
  return dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
}

inline std::string FirstLinearGradientDifference(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = RandomInput(c);
  // The weight's type, and f32.
  const DType d_type = c.seed % 2 == 0 ? DType::kF32 : c.dtype;
  LinearBackwardCall call = MakeLinearBackwardCall(c, input, d_type);
  call.want_d_bias = c.bias;
  auto got = runner.LinearCrossEntropyBackward(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  return GradientDifference(c, input, call, *got, Rounding(c.dtype));
}

// "" where the gradient is that of the reference's total loss, by central differences.
inline std::string FirstLinearFiniteDifference(OpRunner& runner, const uint64_t& seed) {
  const LinearCase c{.rows = 4,
                     .vocab = 7,
                     .hidden = 8,
                     .bias = true,
                     .softcap = seed % 2 == 0 ? 3.0f : 0.0f,
                     .seed = seed};
  LinearInput input = RandomInput(c);
  LinearBackwardCall call = MakeLinearBackwardCall(c, input, DType::kF32);
  call.hidden = input.hidden;  // without NaN: the reference looks at all rows
  auto got = runner.LinearCrossEntropyBackward(call);
  if (!got.ok()) return got.status().ToString();
  // sum upstream loss, where element (r, d) of the hidden states, the weight or the bias is moved.
  std::vector<double> weight, hidden, bias(input.head.bias.begin(), input.head.bias.end());
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (double w : LogitsOf(input.head.weight, i)) weight.push_back(w);
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    for (double h : LogitsOf(input.hidden, r)) hidden.push_back(h);
  }
  const auto total = [&] {
    double sum = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
      CrossEntropyRow ask = call.rows[r];
      if (!IsCounted(ask)) continue;
      ask.softcap = c.softcap;
      std::vector<double> x(c.vocab);
      for (int64_t i = 0; i < c.vocab; ++i) {
        for (int64_t d = 0; d < c.hidden; ++d) {
          x[i] += weight[i * c.hidden + d] * hidden[r * c.hidden + d];
        }
        x[i] = input.head.scale * x[i] + bias[i];
      }
      sum += call.upstream[r] * ReferenceCrossEntropy(x, ask, {}).loss;
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
    return std::fabs(is - want) <= 2e-4 * std::max(1.0, std::fabs(want))
               ? std::string()
               : absl::StrFormat("seed %d: %s element %d: got %.9g, want %.9g", seed, field, i, is,
                                 want);
  };
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t d = 0; d < c.hidden && call.rows[r].active != 0; ++d) {
      const int64_t i = r * c.hidden + d;
      const std::string found = differs("d_hidden", hidden[i], got->d_hidden.At(r, d), i);
      if (!found.empty()) return found;
    }
  }
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      const int64_t at = i * c.hidden + d;
      const std::string found = differs("d_weight", weight[at], got->d_weight.At(i, d), at);
      if (!found.empty()) return found;
    }
    const std::string found = differs("d_bias", bias[i], got->d_bias[i], i);
    if (!found.empty()) return found;
  }
  return "";
}

// "" where a row whose logsumexp is not finite makes its d_hidden and all sums over rows NaN, does
// not affect the d_hidden of other rows, and where a row's d_hidden has the same bits in its own
// call.
inline std::string BrokenGradientIsolation(OpRunner& runner) {
  const LinearCase c{.rows = 70, .vocab = 300, .hidden = 100, .bias = true, .seed = 9};
  const LinearInput input = RandomInput(c);
  LinearBackwardCall call = MakeLinearBackwardCall(c, input, DType::kF32);
  call.hidden = input.hidden;
  for (CrossEntropyRow& row : call.rows)
    row = PlainLoss(static_cast<int32_t>(&row - &call.rows[0]));
  call.logsumexp[5] = kInf;
  auto got = runner.LinearCrossEntropyBackward(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      if (std::isnan(got->d_hidden.At(r, d)) != (r == 5)) {
        return absl::StrFormat("d_hidden[%d, %d]: got %g", r, d, got->d_hidden.At(r, d));
      }
    }
  }
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      if (!std::isnan(got->d_weight.At(i, d))) return absl::StrFormat("d_weight[%d, %d]", i, d);
    }
    if (!std::isnan(got->d_bias[i])) return absl::StrFormat("d_bias[%d]", i);
  }
  for (const int64_t place : {0, 4, 33, 69}) {
    LinearBackwardCall own = call;
    own.hidden = AlignedTensor(c.dtype, 1, c.hidden, 2);
    own.d_hidden = AlignedTensor(DType::kF32, 1, c.hidden, 0);
    for (int64_t d = 0; d < c.hidden; ++d) own.hidden.Set(0, d, call.hidden.At(place, d));
    own.rows = {call.rows[place]};
    own.logsumexp = {call.logsumexp[place]};
    own.upstream = {call.upstream[place]};
    auto other = runner.LinearCrossEntropyBackward(own);
    if (!other.ok()) return other.status().ToString();
    for (int64_t d = 0; d < c.hidden; ++d) {
      if (BitsOf(other->d_hidden.At(0, d)) == BitsOf(got->d_hidden.At(place, d))) continue;
      return absl::StrFormat("d_hidden[%d, %d]: other bits in its own call", place, d);
    }
  }
  return "";
}

// "" where a call of only ignored rows has gradients of zeros, whatever the weights and the hidden
// states, and answers of 0 where they are left out: of the backward, and of training, also where it
// has a kernel of its own.
inline std::string BrokenGradientOfIgnored(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = RandomInput(c);
  for (const int64_t counted_rows : {-1, 0}) {
    LinearBackwardCall call = MakeLinearBackwardCall(c, input, DType::kF32);
    call.rows.assign(c.rows, PlainLoss(kIgnoredTarget));
    call.logsumexp.assign(c.rows, kNan);
    for (int64_t r = 0; r < c.rows; ++r) call.hidden.Set(r, r % c.hidden, r % 2 == 0 ? kNan : kInf);
    call.head.weight.Set(c.vocab - 1, 1, kInf);
    call.d_weight = AlignedTensor(DType::kF32, c.vocab, c.hidden, 0);
    call.want_d_bias = c.bias;
    call.counted_rows = counted_rows;
    auto backward = runner.LinearCrossEntropyBackward(call);
    if (!backward.ok()) return backward.status().ToString();
    auto training = runner.LinearCrossEntropyTraining(call);
    if (!training.ok()) return training.status().ToString();
    const auto differs = [&](std::string_view field, int64_t row, int64_t column) {
      return absl::StrFormat("%s, %d counted: %s[%d, %d]", Describe(c), counted_rows, field, row,
                             column);
    };
    for (int64_t r = 0; r < c.rows && counted_rows == 0; ++r) {
      if (!IsLeftOutAnswer(training->loss, r, /*want=*/0)) return differs("answers", r, 0);
    }
    for (const LinearBackwardAnswer* got : {&*backward, &training->gradient}) {
      for (int64_t d = 0; d < c.hidden; ++d) {
        for (int64_t r = 0; r < c.rows; ++r) {
          if (got->d_hidden.At(r, d) != 0) return differs("d_hidden", r, d);
        }
        for (int64_t i = 0; i < c.vocab; ++i) {
          if (got->d_weight.At(i, d) != 0) return differs("d_weight", i, d);
        }
      }
      for (int64_t i = 0; c.bias && i < c.vocab; ++i) {
        if (got->d_bias[i] != 0) return differs("d_bias", i, 0);
      }
    }
  }
  return "";
}
inline std::vector<LinearCase> IgnoredCases() {
  return {{.rows = 2, .vocab = 7, .bias = true, .seed = 3},
          {.dtype = DType::kBF16, .rows = 70, .vocab = 300, .hidden = 64, .seed = 4},
          {.dtype = DType::kF16, .rows = 70, .vocab = 300, .hidden = 64, .seed = 5}};
}

// "" where the gradients of a weight and a bias are zeros in a call of no rows.
inline std::string BrokenGradientOfNoRows(OpRunner& runner) {
  const LinearCase c{.rows = 0, .vocab = 7, .hidden = 8, .bias = true, .seed = 4};
  const LinearInput input = RandomInput(c);
  const LinearBackwardCall call = MakeLinearBackwardCall(c, input, DType::kF32);
  auto backward = runner.LinearCrossEntropyBackward(call);
  if (!backward.ok()) return backward.status().ToString();
  auto training = runner.LinearCrossEntropyTraining(call);
  if (!training.ok()) return training.status().ToString();
  for (const LinearBackwardAnswer* got : {&*backward, &training->gradient}) {
    for (int64_t i = 0; i < c.vocab; ++i) {
      for (int64_t d = 0; d < c.hidden; ++d) {
        if (got->d_weight.At(i, d) != 0) return absl::StrFormat("d_weight[%d, %d]", i, d);
      }
      if (got->d_bias[i] != 0) return absl::StrFormat("d_bias[%d]", i);
    }
  }
  return "";
}

// ---- Losses and gradient in one call

inline std::vector<LinearCase> LinearTrainingCases() {
  std::vector<LinearCase> cases = LinearGradientCases();
  uint64_t n = 300;
  struct Shape {
    int64_t rows, vocab, hidden;
  };
  // One tile of tokens and many; rows that fit into d_weight, of one type or both, and that do not.
  for (const Shape& shape : {Shape{1, 1, 64}, Shape{33, 256, 64}, Shape{64, 257, 64},
                             Shape{65, 300, 64}, Shape{150, 300, 96}, Shape{50, 1000, 256},
                             Shape{300, 515, 512}, Shape{9, 5000, 1024}, Shape{9, 40000, 64}}) {
    for (int i = 0; i < 4; ++i) {
      cases.push_back({i < 2 ? DType::kBF16 : DType::kF16, shape.rows, shape.vocab, shape.hidden,
                       false, false, 0, static_cast<int64_t>(n % 3), ++n});
    }
  }
  return cases;
}

// "" where losses and gradient are those of the reference and nothing is written between the rows
// of d_weight.
inline std::string TrainingDifference(OpRunner& runner, const LinearCase& c,
                                      const LinearInput& input) {
  const DType d_type = c.seed % 2 == 0 ? DType::kF32 : c.dtype;
  LinearBackwardCall call = MakeLinearBackwardCall(c, input, d_type);
  call.want_d_bias = c.bias;
  if (!c.bias) call.d_weight = AlignedTensor(d_type, c.vocab, c.hidden, c.seed % 8 == 0 ? 1 : 0);
  auto got = runner.LinearCrossEntropyTraining(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    const CrossEntropyRow& ask = call.rows[r];
    if (ask.active == 0) {
      if (got->loss.loss[r] == kUnwrittenFloat && got->loss.logsumexp[r] == kUnwrittenFloat &&
          got->loss.status[r].position == kUnwrittenIndex) {
        continue;
      }
      return absl::StrFormat("%s: wrote for row %d, which is skipped", Describe(c), r);
    }
    std::vector<double> logits(&input.exact[r * c.vocab], &input.exact[r * c.vocab] + c.vocab);
    for (double& x : logits) {
      if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
      // An ignored row has the status of its logits.
      if (std::isnan(call.hidden.At(r, c.hidden / 2))) x = kNan;
    }
    const std::string difference =
        DescribeDifference(ReferenceCrossEntropy(logits, ask, {}), ask, got->loss, r,
                           {.logit = LogitSlack(c, input, r)});
    if (!difference.empty()) {
      return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(ask), difference);
    }
  }
  for (int64_t i = 0; i + 1 < c.vocab; ++i) {
    for (int64_t d = c.hidden; d < call.d_weight.row_stride(); ++d) {
      if (!std::isnan(got->gradient.d_weight.At(i, d))) {
        return absl::StrFormat("%s: wrote between rows %d and %d of d_weight", Describe(c), i,
                               i + 1);
      }
    }
  }
  // Probabilities may be rounded, and then the gradient that is made of them.
  return GradientDifference(c, input, call, got->gradient, 2 * Rounding(c.dtype));
}

inline std::string FirstLinearTrainingDifference(OpRunner& runner, const LinearCase& c) {
  return TrainingDifference(runner, c, RandomInput(c));
}

// The same where a row's logits, or some of them, are far below or above those of other rows.
inline std::string FirstShiftedTrainingDifference(OpRunner& runner, const LinearCase& c) {
  constexpr float kShifts[] = {0, -45, 55, 0, -45, 20};    // of all logits of row r % 6
  constexpr float kOfMiddle[] = {0, 0, 0, -45, 60, -100};  // of those of tokens 250 to 519
  LinearInput input = RandomTensors(c);
  for (int64_t i = 0; i < c.vocab; ++i) {
    input.head.weight.Set(i, 0, 1);
    input.head.weight.Set(i, 1, i >= 250 && i < 520 ? 1 : 0);
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    input.hidden.Set(r, 0, kShifts[r % 6] / input.head.scale);
    input.hidden.Set(r, 1, kOfMiddle[r % 6] / input.head.scale);
  }
  ComputeLogits(input);
  return TrainingDifference(runner, c, input);
}
inline std::vector<LinearCase> ShiftedTrainingCases() {
  std::vector<LinearCase> cases;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    cases.push_back({.dtype = seed <= 4 ? DType::kBF16 : DType::kF16,
                     .rows = 70,
                     .vocab = 900,
                     .hidden = 72,
                     .seed = seed});
  }
  return cases;
}

// "" where a NaN shows only in its row and in sums over rows, its position is reported, and a row
// has the same bits in its own call.
inline std::string BrokenTrainingIsolation(OpRunner& runner, const DType& dtype) {
  // More rows than one product is chosen for, and as many as the gradients of the weights hold.
  const LinearCase c{.dtype = dtype, .rows = 190, .vocab = 40000, .hidden = 192, .seed = 9};
  const LinearInput input = RandomTensors(c);
  LinearBackwardCall call{.hidden = input.hidden,
                          .head = input.head,
                          .upstream = std::vector<float>(c.rows, 0.5f),
                          .d_hidden = AlignedTensor(DType::kF32, c.rows, c.hidden, 0),
                          .d_weight = AlignedTensor(c.dtype, c.vocab, c.hidden, 0),
                          .want_d_bias = false};
  for (int64_t r = 0; r < c.rows; ++r)
    call.rows.push_back(PlainLoss(static_cast<int32_t>((r * 331 + 17) % c.vocab)));
  call.rows[7].target = kIgnoredTarget;
  const auto differs = [](std::string_view field, int64_t row, int64_t column, float is) {
    return absl::StrFormat("%s[%d, %d]: got %g", field, row, column, is);
  };

  LinearBackwardCall broken = call;
  broken.hidden.Set(5, 3, kNan);
  broken.hidden.Set(7, 3, kNan);
  auto with_nan = runner.LinearCrossEntropyTraining(broken);
  if (!with_nan.ok()) return with_nan.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    const bool is_broken = r == 5 || r == 7;
    const RowStatus want = is_broken ? RowStatus{RowCode::kNanLogit, 0} : RowStatus{};
    const RowStatus is = with_nan->loss.status[r];
    if (is.code != want.code || is.position != want.position ||
        std::isnan(with_nan->loss.loss[r]) != is_broken) {
      return absl::StrFormat("row %d: code %d position %d loss %g", r, static_cast<int>(is.code),
                             is.position, with_nan->loss.loss[r]);
    }
    for (int64_t d = 0; d < c.hidden; ++d) {
      const float x = with_nan->gradient.d_hidden.At(r, d);
      if (std::isnan(x) != (r == 5) || (r == 7 && x != 0)) return differs("d_hidden", r, d, x);
    }
  }
  for (int64_t i = 0; i < c.vocab; ++i) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      const float x = with_nan->gradient.d_weight.At(i, d);
      if (!std::isnan(x)) return differs("d_weight", i, d, x);
    }
  }

  for (const int64_t place : {0, 6, 33, 119}) {
    LinearBackwardCall own = call;
    own.hidden = AlignedTensor(c.dtype, 1, c.hidden, 2);
    own.d_hidden = AlignedTensor(DType::kF32, 1, c.hidden, 0);
    for (int64_t d = 0; d < c.hidden; ++d) own.hidden.Set(0, d, call.hidden.At(place, d));
    own.rows = {call.rows[place]};
    own.upstream = {call.upstream[place]};
    auto other = runner.LinearCrossEntropyTraining(own);
    if (!other.ok()) return other.status().ToString();
    bool same =
        BitsOf(other->loss.loss[0]) == BitsOf(with_nan->loss.loss[place]) &&
        BitsOf(other->loss.logsumexp[0]) == BitsOf(with_nan->loss.logsumexp[place]) &&
        BitsOf(other->loss.target_logprob[0]) == BitsOf(with_nan->loss.target_logprob[place]);
    for (int64_t d = 0; d < c.hidden; ++d) {
      same = same && BitsOf(other->gradient.d_hidden.At(0, d)) ==
                         BitsOf(with_nan->gradient.d_hidden.At(place, d));
    }
    if (!same) return absl::StrFormat("row %d: other bits in its own call", place);
  }

  LinearBackwardCall bad_weight = call;
  bad_weight.head.weight.Set(30001, 3, kNan);
  bad_weight.head.weight.Set(30002, 3, kNan);
  auto placed = runner.LinearCrossEntropyTraining(bad_weight);
  if (!placed.ok()) return placed.status().ToString();
  for (int64_t r = 0; r < c.rows; ++r) {
    if (placed->loss.status[r].position == 30001) continue;
    return absl::StrFormat("row %d: NaN at %d", r, placed->loss.status[r].position);
  }

  for (CrossEntropyRow& row : bad_weight.rows) row.target = kIgnoredTarget;
  auto ignored = runner.LinearCrossEntropyTraining(bad_weight);
  if (!ignored.ok()) return ignored.status().ToString();
  for (int64_t d = 0; d < c.hidden; ++d) {
    for (int64_t r = 0; r < c.rows; ++r) {
      const float x = ignored->gradient.d_hidden.At(r, d);
      if (x != 0) return differs("ignored: d_hidden", r, d, x);
    }
    for (int64_t i = 0; i < c.vocab; ++i) {
      const float x = ignored->gradient.d_weight.At(i, d);
      if (x != 0) return differs("ignored: d_weight", i, d, x);
    }
  }
  return "";
}

inline std::vector<DType> SixteenBitTypes() { return {DType::kBF16, DType::kF16}; }

// ---- Rows that are left out

// "" where rows that ask for nothing have answers and gradients of zeros, whatever their hidden
// states hold, and other rows have the bits that they have in a call that leaves none out.
inline std::string FirstLeftOutDifference(OpRunner& runner, const LinearCase& c) {
  const auto differs = [&](std::string_view what, int64_t r) {
    return absl::StrFormat("%s: %s of row %d", Describe(c), what, r);
  };
  const LinearInput input = RandomInput(c);
  LossBatch batch = LossBatchOf(c);
  HostTensor hidden = input.hidden;
  for (int64_t r = 1; r < c.rows; r += 3) {
    AskForNothing(batch.rows[r]);
    hidden.Set(r, c.hidden / 2, kNan);
  }
  auto all = runner.LinearCrossEntropy(input.hidden, input.head, batch);
  if (!all.ok()) return absl::StrFormat("%s: %s", Describe(c), all.status().ToString());
  for (const int64_t said : {CountedRows(batch.rows), c.rows}) {
    batch.counted_rows = said;
    auto some = runner.LinearCrossEntropy(hidden, input.head, batch);
    if (!some.ok()) return absl::StrFormat("%s: %s", Describe(c), some.status().ToString());
    for (int64_t r = 0; r < c.rows; ++r) {
      const CrossEntropyRow& row = batch.rows[r];
      const bool left_out = row.active != 0 && AsksForNothing(row);
      if (left_out ? !IsLeftOutAnswer(*some, r, WantOf(batch))
                   : LossBits(*some, row, r) != LossBits(*all, row, r)) {
        return differs("answers", r);
      }
    }
  }

  const DType d_type = c.seed % 2 == 0 ? DType::kF32 : c.dtype;
  LinearBackwardCall call = MakeLinearBackwardCall(c, input, d_type);
  call.want_d_bias = c.bias;
  call.d_weight = AlignedTensor(d_type, c.vocab, c.hidden, 0);
  auto whole = runner.LinearCrossEntropyTraining(call);
  if (!whole.ok()) return absl::StrFormat("%s: %s", Describe(c), whole.status().ToString());
  for (const int64_t said : {CountedRows(call.rows), c.rows}) {
    call.counted_rows = said;
    auto got = runner.LinearCrossEntropyTraining(call);
    if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
    for (int64_t r = 0; r < c.rows; ++r) {
      const CrossEntropyRow& row = call.rows[r];
      const bool left_out = row.active != 0 && AsksForNothing(row);
      if (left_out ? !IsLeftOutAnswer(got->loss, r, /*want=*/0)
                   : LossBits(got->loss, row, r) != LossBits(whole->loss, row, r)) {
        return differs("answers of training", r);
      }
      for (int64_t d = 0; d < c.hidden; ++d) {
        if (BitsOf(got->gradient.d_hidden.At(r, d)) != BitsOf(whole->gradient.d_hidden.At(r, d)))
          return differs("d_hidden", r);
      }
    }
    const std::string difference =
        GradientDifference(c, input, call, got->gradient, 2 * Rounding(c.dtype));
    if (!difference.empty()) return difference;
  }
  return "";
}

// "" where the backward gives a row the d_hidden that it has in a call that leaves out no row, to
// the bit, and the other gradients are those of the reference: they may sum rows in another order.
inline std::string FirstLeftOutBackwardDifference(OpRunner& runner, const LinearCase& c) {
  const LinearInput input = RandomInput(c);
  LinearBackwardCall call = MakeLinearBackwardCall(c, input, c.dtype);
  call.want_d_bias = c.bias;
  auto whole = runner.LinearCrossEntropyBackward(call);
  if (!whole.ok()) return absl::StrFormat("%s: %s", Describe(c), whole.status().ToString());
  call.counted_rows = CountedRows(call.rows);
  auto got = runner.LinearCrossEntropyBackward(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t d = 0; d < c.hidden; ++d) {
      if (BitsOf(got->d_hidden.At(r, d)) == BitsOf(whole->d_hidden.At(r, d))) continue;
      return absl::StrFormat("%s: other bits of d_hidden[%d, %d]", Describe(c), r, d);
    }
  }
  return GradientDifference(c, input, call, *got, Rounding(c.dtype));
}

inline std::vector<OpCheck> LinearGradientChecks() {
  return {
      ForAll("GradientAgreesWithDoublePrecision", LinearGradientCases,
             FirstLinearGradientDifference),
      ForAll("GradientIsThatOfTheLossByFiniteDifferences", Seeds<12>, FirstLinearFiniteDifference),
      {"GradientOfARowDependsOnlyOnTheRow", BrokenGradientIsolation},
      ForAll("IgnoredRowsAddNothing", IgnoredCases, BrokenGradientOfIgnored),
      {"GradientsOfNoRowsAreZeros", BrokenGradientOfNoRows},
      ForAll("TrainingAgreesWithDoublePrecision", LinearTrainingCases,
             FirstLinearTrainingDifference),
      ForAll("TrainingOfShiftedLogitsAgreesWithDoublePrecision", ShiftedTrainingCases,
             FirstShiftedTrainingDifference),
      ForAll("TrainingOfARowDependsOnlyOnTheRow", SixteenBitTypes, BrokenTrainingIsolation),
      ForAll("LeftOutRowsChangeNoOtherRow", LinearTrainingCases, FirstLeftOutDifference),
      ForAll("LeftOutRowsChangeNoOtherRowOfTheBackward", LinearGradientCases,
             FirstLeftOutBackwardDifference),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_LINEAR_GRADIENT_CASES_H_
