// What attention_softmax and its gradient must do on every backend: answers by hand.
#ifndef LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_CLAIMS_H_
#define LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_CLAIMS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

inline constexpr int64_t kNoLimit = AttentionWindow::kUnbounded;
inline constexpr AttentionWindow kCausal = {kNoLimit, 0};

// ---- The forward pass

// f32, every row of the tensor. Logs of whole numbers make probabilities that are simple fractions.
struct AttentionClaim {
  const char* name;
  std::array<int64_t, 4> shape;  // batch, heads, queries, keys
  std::vector<float> scores;
  float scale = 1;
  AttentionWindow window;
  MaskKind mask = MaskKind::kNone;
  std::vector<float> mask_values;                 // bool: 0 or 1
  std::array<int64_t, 3> mask_shape = {1, 1, 1};  // batch, heads, queries
  std::vector<float> sinks;
  std::vector<float> probs;
  std::vector<float> logsumexp;   // [rows]
  std::vector<RowStatus> status;  // [rows]; none: all OK
};

// Scales, windows and masks.
inline const std::vector<AttentionClaim>& AttentionClaims() {
  static const float kLn2 = std::log(2.0f), kLn3 = std::log(3.0f), kLn4 = std::log(4.0f);
  static const float kMost = std::numeric_limits<float>::max();
  constexpr RowStatus kOk = {};
  constexpr RowStatus kEmpty = {RowCode::kEmptySupport, -1};
  static const auto& claims = *new std::vector<AttentionClaim>{
      // clang-format off
      {.name = "one key is certain", .shape = {1, 1, 1, 1}, .scores = {-3}, .probs = {1},
       .logsumexp = {-3}},
      {.name = "equal scores share the probability", .shape = {1, 1, 1, 4}, .scores = {5, 5, 5, 5},
       .probs = {.25f, .25f, .25f, .25f}, .logsumexp = {5 + kLn4}},
      {.name = "the scale multiplies scores", .shape = {1, 1, 1, 2}, .scores = {0, 2},
       .scale = kLn3 / 2, .probs = {.25f, .75f}, .logsumexp = {kLn4}},
      {.name = "a negative scale turns the order", .shape = {1, 1, 1, 2}, .scores = {0, kLn3},
       .scale = -1, .probs = {.75f, .25f}, .logsumexp = {std::log(4 / 3.0f)}},
      {.name = "a scale of zero makes all scores equal", .shape = {1, 1, 1, 2}, .scores = {7, 9},
       .scale = 0, .probs = {.5f, .5f}, .logsumexp = {kLn2}},
      {.name = "a causal query sees the past and itself", .shape = {1, 1, 3, 3},
       .scores = {0, kNan, kNan, 0, kLn3, kNan, 0, 0, kLn2}, .window = kCausal,
       .probs = {1, 0, 0, .25f, .75f, 0, .25f, .25f, .5f}, .logsumexp = {0, kLn4, kLn4}},
      {.name = "the last query is aligned with the last key", .shape = {1, 1, 2, 4},
       .scores = {0, 0, kLn2, kNan, 0, 0, 0, kLn3}, .window = kCausal,
       .probs = {.25f, .25f, .5f, 0, 1 / 6.0f, 1 / 6.0f, 1 / 6.0f, .5f},
       .logsumexp = {kLn4, std::log(6.0f)}},
      {.name = "causal queries before the first key see nothing", .shape = {1, 1, 4, 2},
       .scores = {1, 1, 1, 1, 3, kNan, 0, kLn3}, .window = kCausal,
       .probs = {0, 0, 0, 0, 1, 0, .25f, .75f}, .logsumexp = {-kInf, -kInf, 3, kLn4},
       .status = {kEmpty, kEmpty, kOk, kOk}},
      {.name = "a window includes both its ends", .shape = {1, 1, 4, 4},
       .scores = {0, 0, 9, 9, 0, 0, 0, 9, 9, 0, 0, 0, 9, 9, 0, 0}, .window = {1, 1},
       .probs = {.5f, .5f, 0, 0, 1 / 3.0f, 1 / 3.0f, 1 / 3.0f, 0, 0, 1 / 3.0f, 1 / 3.0f, 1 / 3.0f,
         0, 0, .5f, .5f},
       .logsumexp = {kLn2, kLn3, kLn3, kLn2}},
      {.name = "a window of 0 and 0 is the query itself", .shape = {1, 1, 2, 2},
       .scores = {4, kNan, kNan, 5}, .window = {0, 0}, .probs = {1, 0, 0, 1}, .logsumexp = {4, 5}},
      {.name = "a window with only a left limit sees the whole future", .shape = {1, 1, 3, 3},
       .scores = {0, 0, 0, 9, 0, 0, 9, 9, 0}, .window = {0, kNoLimit},
       .probs = {1 / 3.0f, 1 / 3.0f, 1 / 3.0f, 0, .5f, .5f, 0, 0, 1}, .logsumexp = {kLn3, kLn2, 0}},
      {.name = "the largest limits are no limits", .shape = {1, 1, 3, 2},
       .scores = {0, 0, 0, kLn3, 0, 0},
       .window = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()},
       .probs = {.5f, .5f, .25f, .75f, .5f, .5f}, .logsumexp = {kLn2, kLn4, kLn2}},
      {.name = "a window may lie before the first key", .shape = {1, 1, 5, 2},
       .scores = {1, 1, 1, 1, 1, 1, 1, 1, 0, 0}, .window = {1, 0},
       .probs = {0, 0, 0, 0, 0, 0, 1, 0, .5f, .5f}, .logsumexp = {-kInf, -kInf, -kInf, 1, kLn2},
       .status = {kEmpty, kEmpty, kEmpty, kOk, kOk}},
      {.name = "a bool mask hides even NaN", .shape = {1, 1, 1, 4}, .scores = {0, kNan, kLn3, kInf},
       .mask = MaskKind::kBool, .mask_values = {0, 1, 0, 1}, .probs = {.25f, 0, .75f, 0},
       .logsumexp = {kLn4}},
      {.name = "a row with no visible key is all zeros", .shape = {1, 1, 2, 2},
       .scores = {1, 2, 0, 0}, .mask = MaskKind::kBool, .mask_values = {1, 1, 0, 0},
       .mask_shape = {1, 1, 2}, .probs = {0, 0, .5f, .5f}, .logsumexp = {-kInf, kLn2},
       .status = {kEmpty, kOk}},
      {.name = "an additive mask comes after the scale", .shape = {1, 1, 1, 2}, .scores = {0, kLn3},
       .scale = 2, .mask = MaskKind::kAdditive, .mask_values = {kLn2, 0},
       .probs = {2 / 11.0f, 9 / 11.0f}, .logsumexp = {std::log(11.0f)}},
      {.name = "an additive minus inf hides even NaN and inf", .shape = {1, 1, 1, 4},
       .scores = {kNan, 0, kInf, 0}, .mask = MaskKind::kAdditive,
       .mask_values = {-kInf, 0, -kInf, 0}, .probs = {0, .5f, 0, .5f}, .logsumexp = {kLn2}},
      {.name = "an additive lowest number leaves no probability", .shape = {1, 1, 1, 3},
       .scores = {5, 0, 0}, .mask = MaskKind::kAdditive, .mask_values = {-kMost, 0, 0},
       .probs = {0, .5f, .5f}, .logsumexp = {kLn2}},
      {.name = "additive lowest numbers everywhere share the probability", .shape = {1, 1, 1, 2},
       .scores = {0, 0}, .mask = MaskKind::kAdditive, .mask_values = {-kMost, -kMost},
       .probs = {.5f, .5f}, .logsumexp = {-kMost}},
      {.name = "additive plus infs share all probability", .shape = {1, 1, 1, 3},
       .scores = {0, 5, 0}, .mask = MaskKind::kAdditive, .mask_values = {kInf, 0, kInf},
       .probs = {.5f, 0, .5f}, .logsumexp = {kInf}},
      {.name = "an additive NaN makes its row faulty", .shape = {1, 1, 1, 3}, .scores = {0, 0, 0},
       .mask = MaskKind::kAdditive, .mask_values = {-kInf, 0, kNan}, .probs = {0, kNan, kNan},
       .logsumexp = {kNan}, .status = {{RowCode::kNanLogit, 2}}},
      {.name = "a key may be hidden by the mask or by the window", .shape = {1, 1, 2, 3},
       .scores = {0, 0, 9, 9, 0, kLn3}, .window = kCausal, .mask = MaskKind::kBool,
       .mask_values = {0, 0, 0, 1, 0, 0}, .mask_shape = {1, 1, 2},
       .probs = {.5f, .5f, 0, 0, .25f, .75f}, .logsumexp = {kLn2, kLn4}},
      {.name = "a mask may differ only by batch", .shape = {2, 2, 1, 2},
       .scores = {0, 0, 0, 0, 0, 0, 0, 0}, .mask = MaskKind::kBool, .mask_values = {0, 1, 1, 0},
       .mask_shape = {2, 1, 1}, .probs = {1, 0, 1, 0, 0, 1, 0, 1}, .logsumexp = {0, 0, 0, 0}},
      {.name = "a mask may differ only by head", .shape = {2, 2, 1, 2},
       .scores = {0, 0, 0, 0, 0, 0, 0, 0}, .mask = MaskKind::kBool, .mask_values = {0, 1, 1, 0},
       .mask_shape = {1, 2, 1}, .probs = {1, 0, 0, 1, 1, 0, 0, 1}, .logsumexp = {0, 0, 0, 0}},
      // clang-format on
  };
  return claims;
}

// Sinks, infinities, NaN and large scores.
inline const std::vector<AttentionClaim>& AttentionValueClaims() {
  static const float kLn2 = std::log(2.0f), kLn3 = std::log(3.0f), kLn4 = std::log(4.0f);
  const auto halves = [](float first, float second) {
    std::vector<float> row(2048, first);
    std::fill(row.begin() + 1024, row.end(), second);
    return row;
  };
  constexpr RowStatus kOk = {};
  constexpr RowStatus kEmpty = {RowCode::kEmptySupport, -1};
  static const auto& claims = *new std::vector<AttentionClaim>{
      // clang-format off
      {.name = "a sink of zero is softmax off by one", .shape = {1, 1, 2, 2},
       .scores = {0, kLn2, -kInf, 0}, .sinks = {0}, .probs = {.25f, .5f, 0, .5f},
       .logsumexp = {kLn4, kLn2}},
      {.name = "each head has its own sink", .shape = {1, 2, 1, 1}, .scores = {0, 0},
       .sinks = {kLn3, -kInf}, .probs = {.25f, 1}, .logsumexp = {kLn4, 0}},
      {.name = "a sink is not scaled", .shape = {1, 1, 1, 1}, .scores = {0}, .scale = 5,
       .sinks = {kLn3}, .probs = {.25f}, .logsumexp = {kLn4}},
      {.name = "a sink takes all probability where no key is seen", .shape = {1, 2, 1, 2},
       .scores = {kNan, kNan, kNan, kNan}, .mask = MaskKind::kBool, .mask_values = {1, 1},
       .sinks = {2, -kInf}, .probs = {0, 0, 0, 0}, .logsumexp = {2, -kInf},
       .status = {kOk, kEmpty}},
      {.name = "a large sink leaves no probability", .shape = {1, 1, 1, 2}, .scores = {0, 0},
       .sinks = {3e38f}, .probs = {0, 0}, .logsumexp = {3e38f}},
      {.name = "a sink far below takes no probability", .shape = {1, 1, 1, 2}, .scores = {0, 0},
       .sinks = {-3e38f}, .probs = {.5f, .5f}, .logsumexp = {kLn2}},
      {.name = "minus inf has probability 0", .shape = {1, 1, 1, 3}, .scores = {-kInf, 0, 0},
       .probs = {0, .5f, .5f}, .logsumexp = {kLn2}},
      {.name = "a row of only minus inf has no support", .shape = {1, 1, 1, 2},
       .scores = {-kInf, -kInf}, .probs = {0, 0}, .logsumexp = {-kInf}, .status = {kEmpty}},
      {.name = "plus infs share all probability", .shape = {1, 1, 1, 4},
       .scores = {kInf, 5, kInf, -kInf}, .probs = {.5f, 0, .5f, 0}, .logsumexp = {kInf}},
      {.name = "plus inf wins over the sink", .shape = {1, 1, 1, 2}, .scores = {kInf, 0},
       .sinks = {3e38f}, .probs = {1, 0}, .logsumexp = {kInf}},
      {.name = "a scaled score beyond f32 counts as inf", .shape = {1, 1, 1, 2},
       .scores = {3e38f, 0}, .scale = 10, .probs = {1, 0}, .logsumexp = {kInf}},
      {.name = "a NaN affects only its own row", .shape = {1, 1, 3, 2},
       .scores = {0, 0, 1, kNan, 0, kLn3}, .probs = {.5f, .5f, kNan, kNan, .25f, .75f},
       .logsumexp = {kLn2, kNan, kLn4}, .status = {kOk, {RowCode::kNanLogit, 1}, kOk}},
      {.name = "a NaN outside the window is not seen, and one inside shows only there",
       .shape = {1, 1, 2, 4}, .scores = {1, kNan, kNan, 1, 1, 1, 1, 1}, .window = {1, 0},
       .probs = {0, kNan, kNan, 0, 0, 0, .5f, .5f}, .logsumexp = {kNan, 1 + kLn2},
       .status = {{RowCode::kNanLogit, 1}, kOk}},
      {.name = "NaN wins over plus inf", .shape = {1, 1, 1, 3}, .scores = {kInf, -kInf, kNan},
       .probs = {kNan, kNan, kNan}, .logsumexp = {kNan}, .status = {{RowCode::kNanLogit, 2}}},
      {.name = "a scale of zero turns an infinity into NaN", .shape = {1, 1, 1, 2},
       .scores = {1, kInf}, .scale = 0, .probs = {kNan, kNan}, .logsumexp = {kNan},
       .status = {{RowCode::kNanLogit, 1}}},
      {.name = "logits far apart do not make NaN", .shape = {1, 1, 1, 2}, .scores = {-3e38f, 3e38f},
       .probs = {0, 1}, .logsumexp = {3e38f}},
      {.name = "large scores keep their differences", .shape = {1, 1, 1, 2},
       .scores = {1048576, 1048577}, .probs = {0.26894142f, 0.73105858f},
       .logsumexp = {1048577.3f}},
      {.name = "a small probability keeps its digits", .shape = {1, 1, 1, 2}, .scores = {19, -45},
       .probs = {1, 1.60381089e-28f}, .logsumexp = {19}},
      // log2(e) times their maxima is about the largest whole number with neighbours on both sides.
      {.name = "halves keep their difference", .shape = {1, 1, 1, 2048},
       .scores = halves(5814539.5f, 5814540.5f),
       .probs = halves(0.26894142f / 1024, 0.73105858f / 1024), .logsumexp = {5814547.5f}},
      {.name = "negative halves keep their difference", .shape = {1, 1, 1, 2048},
       .scores = halves(-5814539.5f, -5814540.5f),
       .probs = halves(0.73105858f / 1024, 0.26894142f / 1024), .logsumexp = {-5814532.5f}},
      // clang-format on
  };
  return claims;
}

inline HostTensor EmptyTensor(DType dtype, int64_t rows, int64_t cols, int64_t stride_extra = 0,
                              int64_t offset = 0) {
  return HostTensor(dtype, rows, cols, cols + stride_extra, offset);
}

inline void AppendElement(DType dtype, float value, std::vector<std::byte>& to) {
  const uint32_t bits = dtype == DType::kF32   ? BitsOf(value)
                        : dtype == DType::kF16 ? F16Bits(value)
                                               : Bf16Bits(value);
  for (size_t b = 0; b < SizeOf(dtype); ++b) to.push_back(std::byte(bits >> (8 * b)));
}

inline AttentionCall CallOf(const AttentionClaim& claim) {
  const auto [batch, heads, queries, keys] = claim.shape;
  const int64_t rows = batch * heads * queries;
  AttentionCall call{.scores = TensorOf(DType::kF32, rows, claim.scores),
                     .sinks = claim.sinks,
                     .probs = EmptyTensor(DType::kF32, rows, keys)};
  AttentionSoftmaxArgs& args = call.args;
  args.shape = {.batch = batch, .heads = heads, .queries = queries, .keys = keys, .rows = rows};
  args.scale = claim.scale;
  args.window = claim.window;
  args.mask.kind = claim.mask;
  const auto [mask_batch, mask_heads, mask_queries] = claim.mask_shape;
  args.mask.query_stride = mask_queries > 1 ? keys : 0;
  args.mask.head_stride = mask_heads > 1 ? mask_queries * keys : 0;
  args.mask.batch_stride = mask_batch > 1 ? mask_heads * mask_queries * keys : 0;
  for (float value : claim.mask_values) {
    if (claim.mask == MaskKind::kBool) {
      call.mask.push_back(std::byte(value == 0 ? 0 : 128));
    } else {
      AppendElement(DType::kF32, value, call.mask);
    }
  }
  return call;
}

// "" where the backend keeps the claim, else what it did instead. The table's floats are rounded;
// the tolerance is wide enough for that.
inline std::string BrokenClaim(OpRunner& runner, const AttentionClaim& claim) {
  const auto got = runner.AttentionSoftmax(CallOf(claim));
  if (!got.ok()) return got.status().ToString();
  const int64_t keys = claim.shape[3];
  for (size_t r = 0; r < claim.logsumexp.size(); ++r) {
    const RowStatus want = claim.status.empty() ? RowStatus{} : claim.status[r];
    if (std::string status = DescribeStatus(got->status[r], want); !status.empty()) {
      return absl::StrFormat("row %d: %s", r, status);
    }
    const auto agrees = [](float a, float b, double error) {
      if (std::isnan(b)) return std::isnan(a);
      return std::isinf(b) || b == 0 ? a == b : std::fabs(double{a} - b) <= error;
    };
    const float lse = claim.logsumexp[r];
    if (!agrees(got->logsumexp[r] + 0.0f, lse, 2e-6 * std::max(1.0f, std::fabs(lse))) &&
        !(lse == 0 && std::fabs(got->logsumexp[r]) <= 2e-6)) {
      return absl::StrFormat("row %d: logsumexp: got %.9g, want %.9g", r, got->logsumexp[r], lse);
    }
    for (int64_t j = 0; j < keys; ++j) {
      const float p = got->probs.At(r, j), w = claim.probs[r * keys + j];
      if (!agrees(p, w, 4e-6 * w)) {
        return absl::StrFormat("row %d key %d: got p %.9g, want %.9g, %d ulps", r, j, p, w,
                               UlpsApart(p, w));
      }
    }
  }
  return "";
}

// ---- The gradient

// f32, [1, heads, queries, keys], every row.
struct GradientClaim {
  const char* name;
  std::array<int64_t, 3> shape;  // heads, queries, keys
  std::vector<float> probs;
  std::vector<float> d_probs;
  float scale = 1;
  AttentionWindow window;
  std::vector<float> sinks;
  std::vector<float> logsumexp;
  std::vector<float> d_scores;
  std::vector<double> d_sinks;
  std::vector<RowStatus> status;  // [rows]; none: all OK
};

inline const std::vector<GradientClaim>& GradientClaims() {
  static const float kLn2 = std::log(2.0f), kLn4 = std::log(4.0f);
  constexpr RowStatus kOk = {};
  static const auto& claims = *new std::vector<GradientClaim>{
      // clang-format off
      {.name = "a certain row has a gradient of zero", .shape = {1, 1, 1}, .probs = {1},
       .d_probs = {5}, .d_scores = {0}},
      {.name = "what one key gains the others lose", .shape = {1, 1, 2}, .probs = {.25f, .75f},
       .d_probs = {1, 0}, .d_scores = {.1875f, -.1875f}},
      {.name = "the scale multiplies scores", .shape = {1, 1, 2}, .probs = {.25f, .75f},
       .d_probs = {1, 0}, .scale = -2, .d_scores = {-.375f, .375f}},
      {.name = "a constant gradient of probs gives zero", .shape = {1, 1, 2}, .probs = {.5f, .5f},
       .d_probs = {3, 3}, .d_scores = {0, 0}},
      {.name = "the gradient of a prob that is zero is not read", .shape = {1, 1, 4},
       .probs = {.25f, 0, .75f, 0}, .d_probs = {1, kNan, 0, kInf},
       .d_scores = {.1875f, 0, -.1875f, 0}},
      {.name = "a row of zeros has a gradient of zeros", .shape = {1, 1, 2}, .probs = {0, 0},
       .d_probs = {kNan, kInf}, .d_scores = {0, 0}},
      {.name = "keys outside the window are not read", .shape = {1, 2, 2},
       .probs = {1, kNan, .25f, .75f}, .d_probs = {0, kNan, 1, 0}, .window = {-1, 0},
       .d_scores = {0, 0, .1875f, -.1875f}},
      {.name = "a NaN prob affects only its own row", .shape = {1, 3, 2},
       .probs = {.25f, .75f, .5f, kNan, .25f, .75f}, .d_probs = {1, 0, 0, 0, 1, 0},
       .d_scores = {.1875f, -.1875f, kNan, kNan, .1875f, -.1875f},
       .status = {kOk, {RowCode::kNanLogit, 1}, kOk}},
      {.name = "a NaN gradient shows at every prob that is not zero", .shape = {1, 1, 4},
       .probs = {0, .5f, .5f, 0}, .d_probs = {kNan, 1, kNan, kNan}, .d_scores = {0, kNan, kNan, 0},
       .status = {{RowCode::kNanLogit, 2}}},
      {.name = "infinities of both signs make NaN but the row is not flagged", .shape = {1, 1, 3},
       .probs = {0, .5f, .5f}, .d_probs = {0, kInf, -kInf}, .d_scores = {0, kNan, kNan}},
      // Softmax off by one of {0, ln 2}: 1/4 and 1/2, the sink has the last 1/4.
      {.name = "the sink loses what all keys gain", .shape = {1, 1, 2}, .probs = {.25f, .5f},
       .d_probs = {4, 2}, .sinks = {0}, .logsumexp = {kLn4}, .d_scores = {.5f, 0},
       .d_sinks = {-.5}},
      {.name = "the sink's own score is not scaled", .shape = {1, 1, 2}, .probs = {.25f, .5f},
       .d_probs = {4, 2}, .scale = 3, .sinks = {0}, .logsumexp = {kLn4}, .d_scores = {1.5f, 0},
       .d_sinks = {-.5}},
      {.name = "a sink's gradient is the sum over its head's rows, and 0 for minus inf",
       .shape = {2, 2, 1}, .probs = {.5f, .5f, 1, 1}, .d_probs = {2, 4, 1, 1}, .sinks = {0, -kInf},
       .logsumexp = {kLn2, kLn2, 0, 0}, .d_scores = {.5f, 1, 0, 0}, .d_sinks = {-1.5, 0}},
      {.name = "rows with no key or an infinite one add nothing to a sink", .shape = {1, 2, 1},
       .probs = {0, 1}, .d_probs = {5, 7}, .sinks = {2}, .logsumexp = {2, kInf}, .d_scores = {0, 0},
       .d_sinks = {0}},
      {.name = "a NaN affects only its own head's sink", .shape = {2, 1, 1}, .probs = {kNan, .5f},
       .d_probs = {1, 2}, .sinks = {0, 0}, .logsumexp = {kNan, kLn2}, .d_scores = {kNan, .5f},
       .d_sinks = {kNan, -.5}, .status = {{RowCode::kNanLogit, 0}, kOk}},
      // clang-format on
  };
  return claims;
}

inline std::string BrokenClaim(OpRunner& runner, const GradientClaim& claim) {
  const auto [heads, queries, keys] = claim.shape;
  const int64_t rows = heads * queries;
  AttentionBackwardCall call{.probs = TensorOf(DType::kF32, rows, claim.probs),
                             .d_probs = TensorOf(DType::kF32, rows, claim.d_probs),
                             .sinks = claim.sinks,
                             .logsumexp = claim.logsumexp,
                             .d_scores = EmptyTensor(DType::kF32, rows, keys)};
  call.args.shape = {.batch = 1, .heads = heads, .queries = queries, .keys = keys, .rows = rows};
  call.args.scale = claim.scale;
  call.args.window = claim.window;
  const auto got = runner.AttentionSoftmaxBackward(call);
  if (!got.ok()) return got.status().ToString();
  const auto agrees = [](double a, double b) {
    return std::isnan(b) ? std::isnan(a) : b == 0 ? a == b : std::fabs(a - b) <= 1e-6;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const RowStatus want = claim.status.empty() ? RowStatus{} : claim.status[r];
    if (std::string status = DescribeStatus(got->status[r], want); !status.empty()) {
      return absl::StrFormat("row %d: %s", r, status);
    }
    for (int64_t j = 0; j < keys; ++j) {
      const float g = got->d_scores.At(r, j), w = claim.d_scores[r * keys + j];
      if (!agrees(g, w)) return absl::StrFormat("row %d key %d: got %.9g, want %.9g", r, j, g, w);
    }
  }
  for (size_t h = 0; h < claim.d_sinks.size(); ++h) {
    if (agrees(got->d_sinks[h], claim.d_sinks[h])) continue;
    return absl::StrFormat("d_sinks of head %d: got %.12g, want %.12g", h, got->d_sinks[h],
                           claim.d_sinks[h]);
  }
  return "";
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_CLAIMS_H_
