// attention_softmax and its backward by their formulas in double precision, row by row, and a
// comparison that says where and by how much.
#ifndef LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/attention_softmax.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// Row r of a call as a place in [batch, heads, queries].
struct RowIndex {
  int64_t b, h, i;
};
inline RowIndex IndexOf(const AttentionShape& shape, int64_t r) {
  const int64_t row = shape.first_row + r;
  return {row / (shape.heads * shape.queries), row / shape.queries % shape.heads,
          row % shape.queries};
}

inline bool InWindow(const AttentionShape& shape, const AttentionWindow& window, int64_t i,
                     int64_t j) {
  const __int128 aligned = __int128{i} + shape.keys - shape.queries;
  if (window.left != AttentionWindow::kUnbounded && j < aligned - window.left) return false;
  return window.right == AttentionWindow::kUnbounded || j <= aligned + window.right;
}

inline float ElementAt(DType dtype, const std::byte* from) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return dtype == DType::kF16 ? F16Value(half) : FloatOf(uint32_t{half} << 16);
}

// The answer to one row; the meaning of each field is AttentionSoftmaxArgs's.
struct AttentionRowAnswer {
  RowStatus status;
  double logsumexp = 0;
  std::vector<bool> seen;  // [keys], neither outside the window nor masked
  std::vector<float> x;    // [keys], of those
  std::vector<double> probs;
};

inline AttentionRowAnswer ReferenceAttentionRow(const AttentionCall& call, int64_t r) {
  const AttentionSoftmaxArgs& args = call.args;
  const int64_t keys = args.shape.keys;
  const RowIndex at = IndexOf(args.shape, r);
  AttentionRowAnswer answer;
  answer.seen.assign(keys, false);
  answer.x.assign(keys, -kInf);
  answer.probs.assign(keys, 0.0);
  double max = -kInf;
  for (int64_t j = 0; j < keys; ++j) {
    if (!InWindow(args.shape, args.window, at.i, j)) continue;
    const AttentionMask& mask = args.mask;
    const int64_t element = at.b * mask.batch_stride + at.h * mask.head_stride +
                            at.i * mask.query_stride + j - mask.origin;
    float x = 0;
    if (mask.kind == MaskKind::kBool) {
      if (call.mask[element] != std::byte{0}) continue;
    } else if (mask.kind == MaskKind::kAdditive) {
      x = ElementAt(mask.dtype, call.mask.data() + element * SizeOf(mask.dtype));
      if (x == -kInf) continue;
    }
    x = mask.kind == MaskKind::kAdditive ? std::fma(args.scale, call.scores.At(r, j), x)
                                         : args.scale * call.scores.At(r, j);
    answer.seen[j] = true;
    answer.x[j] = x;
    if (std::isnan(x) && answer.status.code == RowCode::kOk) {
      answer.status = {RowCode::kNanLogit, static_cast<int32_t>(j)};
    }
    max = std::max(max, double{x});
  }
  if (answer.status.code == RowCode::kNanLogit) {
    answer.logsumexp = kNan;
    for (int64_t j = 0; j < keys; ++j) answer.probs[j] = answer.seen[j] ? double{kNan} : 0.0;
    return answer;
  }
  const double sink = call.sinks.empty() ? double{-kInf} : double{call.sinks[at.h]};
  const double top = std::max(max, sink);
  if (top == -kInf) {
    answer.status.code = RowCode::kEmptySupport;
    answer.logsumexp = -kInf;
    return answer;
  }
  double sum = max == kInf ? 0.0 : std::exp(sink - top);
  for (int64_t j = 0; j < keys; ++j) {
    if (!answer.seen[j]) continue;
    const float x = answer.x[j];
    answer.probs[j] = max == kInf ? (x == kInf ? 1.0 : 0.0) : std::exp(x - top);
    sum += answer.probs[j];
  }
  for (double& p : answer.probs) p /= sum;
  answer.logsumexp = max == kInf ? double{kInf} : top + std::log(sum);
  return answer;
}

// "" where row r of the answer agrees with the reference, else the first key that does not.
// `x_roundings` is how many more times than the reference the code under test may round an x to
// fp32, which costs what exp makes of it.
inline std::string DescribeDifference(const AttentionCall& call, int64_t r,
                                      const AttentionAnswer& got, int x_roundings) {
  const AttentionRowAnswer want = ReferenceAttentionRow(call, r);
  if (std::string status = DescribeStatus(got.status[r], want.status); !status.empty()) {
    return status;
  }
  double max = 0;
  for (size_t j = 0; j < want.x.size(); ++j) {
    const double x = std::fabs(double{want.x[j]});
    if (want.probs[j] > 0 && x != kInf) max = std::max(max, x);
  }
  const double slack = x_roundings * 0x1p-24 * 2 * max;
  if (call.want_logsumexp) {
    const float lse = got.logsumexp[r];
    const bool good = std::isnan(want.logsumexp) ? std::isnan(lse)
                      : std::isinf(static_cast<float>(want.logsumexp))
                          ? lse == static_cast<float>(want.logsumexp)
                          : std::fabs(lse - want.logsumexp) <=
                                2e-6 * std::max(1.0, std::fabs(want.logsumexp)) + slack;
    if (!good) return absl::StrFormat("logsumexp: got %.9g, want %.12g", lse, want.logsumexp);
  }
  const DType dtype = got.probs.dtype();
  for (size_t j = 0; j < want.probs.size(); ++j) {
    const float p = got.probs.At(r, j);
    const double w = want.probs[j];
    const bool good = !want.seen[j]   ? BitsOf(p) == 0
                      : std::isnan(w) ? std::isnan(p)
                                      : Agrees(dtype, p, w, (4e-6 + slack) * w + (w > 0) * 1e-37);
    if (!good) {
      return absl::StrFormat("key %d (%s, x %.9g): got p %.9g, want %.12g, %d ulps of f32", j,
                             want.seen[j] ? "seen" : "not seen", want.x[j], p, w,
                             UlpsApart(p, static_cast<float>(w)));
    }
  }
  return "";
}

// The gradient of one row; the meaning of each field is AttentionSoftmaxBackwardArgs's.
struct AttentionRowGradient {
  RowStatus status;
  double dot = 0;                // sum y dy
  std::vector<double> d_scores;  // [keys]
  std::vector<double> error;     // [keys], what the contract allows before rounding
};

inline AttentionRowGradient ReferenceAttentionGradient(const AttentionBackwardCall& call,
                                                       int64_t r) {
  const AttentionSoftmaxBackwardArgs& args = call.args;
  const int64_t keys = args.shape.keys;
  const RowIndex at = IndexOf(args.shape, r);
  AttentionRowGradient answer;
  answer.d_scores.assign(keys, 0.0);
  answer.error.assign(keys, 0.0);
  std::vector<int64_t> live;
  double size = 0;
  for (int64_t j = 0; j < keys; ++j) {
    if (!InWindow(args.shape, args.window, at.i, j)) continue;
    const double y = call.probs.At(r, j);
    if (y == 0) continue;
    const double dy = call.d_probs.At(r, j);
    live.push_back(j);
    answer.dot += y * dy;
    size += std::fabs(y * dy);
    if ((std::isnan(y) || std::isnan(dy)) && answer.status.code == RowCode::kOk) {
      answer.status = {RowCode::kNanLogit, static_cast<int32_t>(j)};
    }
  }
  for (int64_t j : live) {
    const double y = call.probs.At(r, j), dy = call.d_probs.At(r, j), scale = args.scale;
    answer.d_scores[j] = scale * y * (dy - answer.dot);
    answer.error[j] = 4e-6 * std::fabs(scale) * (std::fabs(y * dy) + std::fabs(y) * size);
  }
  return answer;
}

inline std::string DescribeDifference(const AttentionBackwardCall& call, int64_t r,
                                      const AttentionBackwardAnswer& got) {
  const AttentionRowGradient want = ReferenceAttentionGradient(call, r);
  if (std::string status = DescribeStatus(got.status[r], want.status); !status.empty()) {
    return status;
  }
  for (size_t j = 0; j < want.d_scores.size(); ++j) {
    const float g = got.d_scores.At(r, j);
    const double w = want.d_scores[j];
    const bool good = std::isnan(w) ? std::isnan(g)
                      : want.error[j] == 0
                          ? g == w
                          : Agrees(got.d_scores.dtype(), g, w, want.error[j] + 1e-37);
    if (!good) {
      return absl::StrFormat("key %d (y %.9g, dy %.9g): got %.9g, want %.12g +- %.3g", j,
                             call.probs.At(r, j), call.d_probs.At(r, j), g, w, want.error[j]);
    }
  }
  return "";
}

// d_sinks of a call, by the formula.
inline std::vector<double> ReferenceSinkGradient(const AttentionBackwardCall& call) {
  const AttentionShape& shape = call.args.shape;
  std::vector<double> d_sinks(shape.heads, 0.0);
  for (int64_t r = 0; r < shape.rows; ++r) {
    const int64_t h = IndexOf(shape, r).h;
    const double sink = call.sinks[h];
    const double share = sink == -kInf ? 0.0 : std::exp(sink - double{call.logsumexp[r]});
    d_sinks[h] -= share * ReferenceAttentionGradient(call, r).dot;
  }
  return d_sinks;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_REFERENCE_H_
