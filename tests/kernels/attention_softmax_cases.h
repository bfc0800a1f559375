// What attention_softmax must do on every backend: parity with double precision, and bits that
// depend only on the row. One table for the CPU and the GPU.
#ifndef LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_CASES_H_
#define LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/attention_softmax_claims.h"
#include "tests/kernels/attention_softmax_reference.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// ---- Parity with double precision

// Which keys a case hides, and how.
enum class Hide {
  kNone,
  kCausal,
  kWindow,      // 40 to the left, 3 to the right
  kWideWindow,  // 5000 to the left, 0 to the right
  kBool,
  kAdditive,
  kCausalAndBool,
  kWindowAndAdditive,
};
inline constexpr Hide kAllHides[] = {
    Hide::kNone, Hide::kCausal,   Hide::kWindow,        Hide::kWideWindow,
    Hide::kBool, Hide::kAdditive, Hide::kCausalAndBool, Hide::kWindowAndAdditive};

inline std::string_view Name(Hide hide) {
  static constexpr std::string_view kNames[] = {
      "none", "causal",   "window",          "wide_window",
      "bool", "additive", "causal_and_bool", "window_and_additive"};
  return kNames[static_cast<int>(hide)];
}

inline AttentionWindow WindowOf(Hide hide) {
  if (hide == Hide::kCausal || hide == Hide::kCausalAndBool) return kCausal;
  if (hide == Hide::kWindow || hide == Hide::kWindowAndAdditive) return {40, 3};
  return hide == Hide::kWideWindow ? AttentionWindow{5000, 0} : AttentionWindow{};
}

inline MaskKind MaskOf(Hide hide) {
  if (hide == Hide::kBool || hide == Hide::kCausalAndBool) return MaskKind::kBool;
  return hide == Hide::kAdditive || hide == Hide::kWindowAndAdditive ? MaskKind::kAdditive
                                                                     : MaskKind::kNone;
}

struct AttentionCase {
  AttentionShape shape;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  Hide hide = Hide::kNone;
  DType mask_dtype = DType::kF32;
  bool finite_bans = true;  // additive masks hide some keys by -1e9 instead of -inf
  bool mask_by_batch = true, mask_by_head = true, mask_by_query = true;
  float scale = 0.7f;
  bool sinks = false;
  Fill fill = Fill::kNormal;
  int64_t stride_extra = 0;  // elements between the end of a row and the next
  int64_t offset = 0;        // elements from an aligned address to the first row
  bool in_place = false;
  uint64_t seed = 1;
};

inline std::string Describe(const AttentionCase& c) {
  const AttentionShape& s = c.shape;
  return absl::StrFormat(
      "attention_softmax [%d, %d, %d, %d] rows %d+%d %s to %s hide=%s mask=%s by %s%s%s scale=%g "
      "sinks=%d fill=%s stride=+%d offset=%d in_place=%d seed=%d",
      s.batch, s.heads, s.queries, s.keys, s.first_row, s.rows, Name(c.dtype), Name(c.out_dtype),
      Name(c.hide), Name(c.mask_dtype), c.mask_by_batch ? "b" : "", c.mask_by_head ? "h" : "",
      c.mask_by_query ? "q" : "", c.scale, c.sinks, Name(c.fill), c.stride_extra, c.offset,
      c.in_place, c.seed);
}

// A hash of two numbers.
inline uint64_t Mix(uint64_t seed, uint64_t n) {
  uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + n * 0xd1342543de82ef95u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  return x ^ x >> 32;
}

// Fills in the mask of `call`: the part of the mask that its rows need.
inline void MakeMask(const AttentionCase& c, AttentionCall& call) {
  AttentionMask& mask = call.args.mask;
  const AttentionShape& shape = c.shape;
  mask.kind = MaskOf(c.hide);
  if (mask.kind == MaskKind::kNone) return;
  mask.dtype = c.mask_dtype;
  const int64_t mask_queries = c.mask_by_query ? shape.queries : 1;
  const int64_t mask_heads = c.mask_by_head ? shape.heads : 1;
  mask.query_stride = c.mask_by_query ? shape.keys : 0;
  mask.head_stride = c.mask_by_head ? mask_queries * shape.keys : 0;
  mask.batch_stride = c.mask_by_batch ? mask_heads * mask_queries * shape.keys : 0;
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t r = 0; r < shape.rows; ++r) {
    const RowIndex at = IndexOf(shape, r);
    const int64_t row =
        at.b * mask.batch_stride + at.h * mask.head_stride + at.i * mask.query_stride;
    begin = std::min(begin, row);
    end = std::max(end, row + shape.keys);
  }
  mask.origin = begin;
  call.mask_offset_bytes = mask.kind == MaskKind::kBool ? c.offset : c.offset * SizeOf(mask.dtype);
  for (int64_t e = begin; e < end; ++e) {
    // One row in seven hides every key, one in seven hides none, the others hide a quarter.
    const uint64_t row = Mix(c.seed, e / shape.keys) % 7;
    const uint64_t bits = Mix(c.seed + 77, e);
    const bool hidden = row == 0 || (row > 1 && bits % 4 == 0);
    if (mask.kind == MaskKind::kBool) {
      call.mask.push_back(std::byte(hidden ? 1 + bits / 4 % 255 : 0));
      continue;
    }
    const float value = static_cast<float>(bits >> 48) / (1 << 14) - 2;
    const float nothing = c.finite_bans && bits / 4 % 8 == 0 ? -1e9f : -kInf;
    AppendElement(mask.dtype, hidden ? nothing : value, call.mask);
  }
}

inline AttentionCall CallOf(const AttentionCase& c) {
  const AttentionShape& shape = c.shape;
  AttentionCall call{
      .scores = EmptyTensor(c.dtype, shape.rows, shape.keys, c.stride_extra, c.offset),
      .probs = EmptyTensor(c.out_dtype, shape.rows, shape.keys, c.stride_extra / 2, c.offset + 1),
      .in_place = c.in_place};
  for (int64_t r = 0; r < shape.rows; ++r) FillRow(call.scores, r, c.fill, c.seed);
  call.args.shape = shape;
  call.args.scale = c.scale;
  call.args.window = WindowOf(c.hide);
  MakeMask(c, call);
  if (c.sinks) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      call.sinks.push_back(h % 3 == 1 ? -kInf : static_cast<float>(h % 5) * 1.5f - 1);
    }
  }
  return call;
}

// The first place between two rows, or before the first, that was written.
inline std::string WrittenOutside(const HostTensor& before, const HostTensor& after) {
  const int64_t size = static_cast<int64_t>(SizeOf(after.dtype()));
  for (int64_t b = 0; b < static_cast<int64_t>(after.bytes().size()); ++b) {
    const int64_t element = b / size - static_cast<int64_t>(after.offset_bytes()) / size;
    if (element >= 0 && element % after.row_stride() < after.cols()) continue;
    if (after.bytes()[b] != before.bytes()[b]) {
      return absl::StrFormat("wrote element %d, which is in no row", element);
    }
  }
  return "";
}

// "" where every row agrees with the reference and nothing else was written, else the first that
// does not.
//
// `x_roundings` is DescribeDifference's: 0 where the backend rounds an x as often as the reference.
inline std::string FirstDifference(OpRunner& runner, const AttentionCase& c, int x_roundings) {
  const AttentionCall call = CallOf(c);
  const auto got = runner.AttentionSoftmax(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.shape.rows; ++r) {
    const std::string difference = DescribeDifference(call, r, *got, x_roundings);
    if (!difference.empty()) return absl::StrFormat("%s: row %d: %s", Describe(c), r, difference);
  }
  const std::string outside = WrittenOutside(c.in_place ? call.scores : call.probs, got->probs);
  return outside.empty() ? "" : absl::StrFormat("%s: %s", Describe(c), outside);
}

inline std::string FirstDifference(OpRunner& runner, const AttentionCase& c) {
  return FirstDifference(runner, c, /*x_roundings=*/0);
}

// The backward call of a case: probs are those of the reference, their gradients are random.
// Gradients of 16-bit probs have their type; of f32 probs, the next type by the seed.
inline AttentionBackwardCall BackwardOf(const AttentionCase& c) {
  const AttentionShape& shape = c.shape;
  const DType out_dtype = c.dtype == DType::kF32 ? kAllDTypes[c.seed / 3 % 3] : c.dtype;
  const AttentionCall forward = CallOf(c);
  AttentionBackwardCall call{
      .probs = EmptyTensor(c.dtype, shape.rows, shape.keys, c.stride_extra, c.offset),
      .d_probs =
          EmptyTensor(c.dtype, shape.rows, shape.keys, c.stride_extra + c.seed % 2, c.offset),
      .sinks = forward.sinks,
      .d_scores = EmptyTensor(out_dtype, shape.rows, shape.keys, c.stride_extra / 2, c.offset + 1)};
  for (int64_t r = 0; r < shape.rows; ++r) {
    const AttentionRowAnswer answer = ReferenceAttentionRow(forward, r);
    call.logsumexp.push_back(static_cast<float>(answer.logsumexp));
    for (int64_t j = 0; j < shape.keys; ++j) {
      call.probs.Set(r, j, static_cast<float>(answer.probs[j]));
    }
    FillRow(call.d_probs, r, Fill::kUniform, c.seed + 5);
    // The gradient of a y of 0 does not matter.
    for (int64_t j = 0; j < shape.keys; ++j) {
      if (call.probs.At(r, j) == 0 && Mix(c.seed, j) % 3 == 0) call.d_probs.Set(r, j, kNan);
    }
  }
  call.args.shape = shape;
  call.args.scale = c.scale;
  call.args.window = WindowOf(c.hide);
  if (c.in_place && c.dtype == out_dtype) {
    call.output = c.seed % 2 == 0 ? AttentionBackwardCall::Output::kOverProbs
                                  : AttentionBackwardCall::Output::kOverDProbs;
  }
  return call;
}

inline std::string FirstGradientDifference(OpRunner& runner, const AttentionCase& c) {
  const AttentionBackwardCall call = BackwardOf(c);
  const auto got = runner.AttentionSoftmaxBackward(call);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.shape.rows; ++r) {
    const std::string difference = DescribeDifference(call, r, *got);
    if (!difference.empty()) {
      return absl::StrFormat("backward of %s: row %d: %s", Describe(c), r, difference);
    }
  }
  const std::string outside = WrittenOutside(call.Before(), got->d_scores);
  if (!outside.empty()) return absl::StrFormat("backward of %s: %s", Describe(c), outside);
  if (call.sinks.empty()) return "";
  const std::vector<double> want = ReferenceSinkGradient(call);
  for (size_t h = 0; h < want.size(); ++h) {
    const bool good = std::isnan(want[h])
                          ? std::isnan(got->d_sinks[h])
                          : std::fabs(got->d_sinks[h] - want[h]) <= 4e-6 * c.shape.rows;
    if (!good) {
      return absl::StrFormat("backward of %s: d_sinks of head %d: got %.12g, want %.12g",
                             Describe(c), h, got->d_sinks[h], want[h]);
    }
  }
  return "";
}

// Every number of keys x what is hidden x type; output types, strides, offsets, sinks, scales and
// fills take turns. A call has only a few rows of a large tensor, among them the last of one head
// and the first of the next.
inline std::vector<AttentionCase> AttentionShapeCases() {
  static constexpr int64_t kKeys[] = {1,    3,    16,    17,    63,    64,     65,    100,  129,
                                      257,  513,  600,   1000,  1024,  1025,   2049,  4096, 4097,
                                      8192, 8193, 16384, 32767, 65537, 131072, 300001};
  static constexpr float kScales[] = {0.7f, 1, 0.08838835f, -0.5f};
  static constexpr Fill kFills[] = {Fill::kNormal,      Fill::kUniform,        Fill::kNormal,
                                    Fill::kWithNan,     Fill::kMostlyMinusInf, Fill::kNormal,
                                    Fill::kWithPlusInf, Fill::kAllEqual,       Fill::kOneHot};
  std::vector<AttentionCase> cases;
  uint64_t n = 0;
  for (int64_t keys : kKeys) {
    for (Hide hide : kAllHides) {
      for (DType dtype : kAllDTypes) {
        ++n;
        AttentionCase c{.dtype = dtype, .hide = hide, .seed = n};
        if (keys <= 100) {
          const int64_t queries[] = {keys, keys + 3, std::max<int64_t>(1, keys / 2), 1};
          c.shape = {.batch = 2, .heads = 3, .queries = queries[n % 4], .keys = keys};
          if (c.shape.queries > 20) c.shape.batch = c.shape.heads = 1;
          c.shape.rows = c.shape.batch * c.shape.heads * c.shape.queries;
        } else {
          const int64_t queries = n % 4 == 1 ? keys / 2 : n % 4 == 2 ? keys + 5 : keys;
          const int64_t rows = keys < 8000 ? 5 : 3;
          c.shape = {.batch = 2, .heads = 2, .queries = queries, .keys = keys};
          const int64_t firsts[] = {0, queries / 2, 2 * queries - 2, 4 * queries - rows};
          c.shape.first_row = firsts[n % 4];
          c.shape.rows = rows;
          c.mask_by_query = keys < 8000;  // else the part between two heads is gigabytes
        }
        c.out_dtype = n % 3 == 0 ? DType::kF32 : dtype;
        c.in_place = c.out_dtype == dtype && n % 5 == 0;
        c.mask_dtype = kAllDTypes[n / 2 % 3];
        c.mask_by_batch = n % 5 != 1;
        c.mask_by_head = n % 7 != 1;
        c.scale = kScales[n % 4];
        c.sinks = n % 3 == 1;
        c.fill = kFills[n % std::size(kFills)];
        c.stride_extra = kStrides[n % 5];
        c.offset = kOffsets[n % 7];
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Every way to share a mask over batch, heads and queries, of every kind.
inline std::vector<AttentionCase> BroadcastCases() {
  std::vector<AttentionCase> cases;
  uint64_t n = 1000;
  for (Hide hide : {Hide::kBool, Hide::kAdditive, Hide::kCausalAndBool}) {
    for (DType mask_dtype : kAllDTypes) {
      if (MaskOf(hide) == MaskKind::kBool && mask_dtype != DType::kF32) continue;
      for (int shared = 0; shared < 8; ++shared) {
        AttentionCase c{.shape = {.batch = 2, .heads = 3, .queries = 5, .keys = 70, .rows = 30},
                        .dtype = kAllDTypes[n % 3],
                        .out_dtype = DType::kF32,
                        .hide = hide,
                        .mask_dtype = mask_dtype,
                        .mask_by_batch = (shared & 1) == 0,
                        .mask_by_head = (shared & 2) == 0,
                        .mask_by_query = (shared & 4) == 0,
                        .offset = static_cast<int64_t>(n % 5),
                        .seed = ++n};
        cases.push_back(c);
      }
    }
  }
  return cases;
}

inline std::vector<AttentionCase> LongestRowCases() {
  std::vector<AttentionCase> cases;
  for (Hide hide : {Hide::kNone, Hide::kWideWindow}) {
    cases.push_back({.shape = {.batch = 1,
                               .heads = 1,
                               .queries = kMaxKeys,
                               .keys = kMaxKeys,
                               .first_row = kMaxKeys - 1,
                               .rows = 1},
                     .dtype = DType::kBF16,
                     .out_dtype = DType::kBF16,
                     .hide = hide});
  }
  return cases;
}

// More rows than a backend holds parts of d_sinks at once.
inline std::vector<AttentionCase> ManySinkRows() {
  return {{.shape = {.batch = 30, .heads = 5, .queries = 1000, .keys = 3, .rows = 150000},
           .sinks = true}};
}

// Every kind of row x type: short, over several cells, and with a window.
inline std::vector<AttentionCase> AttentionFillCases() {
  std::vector<AttentionCase> cases;
  uint64_t n = 2000;
  for (Fill fill : kAllFills) {
    for (DType dtype : kAllDTypes) {
      for (int64_t keys : {33, 1025, 5000}) {
        for (Hide hide : {Hide::kNone, Hide::kCausal, Hide::kAdditive}) {
          AttentionCase c{.shape = {.batch = 2, .heads = 2, .queries = 2, .keys = keys, .rows = 8},
                          .dtype = dtype,
                          .out_dtype = n % 2 == 0 ? DType::kF32 : dtype,
                          .hide = hide,
                          .scale = n % 3 == 0 ? -1.0f : 1.0f,
                          .sinks = n % 2 == 0,
                          .fill = fill,
                          .stride_extra = static_cast<int64_t>(n % 3),
                          .seed = n};
          cases.push_back(c);
          ++n;
        }
      }
    }
  }
  return cases;
}

// ---- Gradients by small steps

// "" where the backend's gradients are those of sum w y by small steps of every score and sink. The
// steps and the scale are powers of two, so that no x is rounded.
inline std::string BrokenFiniteDifferences(OpRunner& runner, const AttentionCase& c) {
  constexpr double kStep = 0x1p-10;
  AttentionCall forward = CallOf(c);
  const AttentionShape& shape = c.shape;
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (int64_t j = 0; j < shape.keys; ++j) {
      forward.scores.Set(r, j,
                         static_cast<float>(Mix(c.seed, r * shape.keys + j) % 4096) * 0x1p-10f);
    }
  }
  AttentionBackwardCall backward{.probs = EmptyTensor(DType::kF32, shape.rows, shape.keys),
                                 .d_probs = EmptyTensor(DType::kF32, shape.rows, shape.keys),
                                 .sinks = forward.sinks,
                                 .d_scores = EmptyTensor(DType::kF32, shape.rows, shape.keys)};
  backward.args.shape = shape;
  backward.args.scale = c.scale;
  backward.args.window = forward.args.window;
  for (int64_t r = 0; r < shape.rows; ++r) {
    FillRow(backward.d_probs, r, Fill::kUniform, c.seed);
    const AttentionRowAnswer answer = ReferenceAttentionRow(forward, r);
    backward.logsumexp.push_back(static_cast<float>(answer.logsumexp));
    for (int64_t j = 0; j < shape.keys; ++j) {
      backward.probs.Set(r, j, static_cast<float>(answer.probs[j]));
    }
  }
  const auto row_loss = [&](int64_t r) {
    const AttentionRowAnswer answer = ReferenceAttentionRow(forward, r);
    double loss = 0;
    for (int64_t j = 0; j < shape.keys; ++j) {
      loss += answer.probs[j] * backward.d_probs.At(r, j);
    }
    return loss;
  };
  const auto loss = [&] {
    double all = 0;
    for (int64_t r = 0; r < shape.rows; ++r) all += row_loss(r);
    return all;
  };
  const auto got = runner.AttentionSoftmaxBackward(backward);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (int64_t j = 0; j < shape.keys; ++j) {
      const float score = forward.scores.At(r, j);
      forward.scores.Set(r, j, static_cast<float>(score + kStep));
      const double above = row_loss(r);
      forward.scores.Set(r, j, static_cast<float>(score - kStep));
      const double want = (above - row_loss(r)) / (2 * kStep);
      forward.scores.Set(r, j, score);
      const float g = got->d_scores.At(r, j);
      if (std::fabs(g - want) <= 1e-5) continue;
      return absl::StrFormat("%s: row %d key %d: got %.9g, by steps %.9g", Describe(c), r, j, g,
                             want);
    }
  }
  for (size_t h = 0; h < forward.sinks.size(); ++h) {
    const float sink = forward.sinks[h];
    forward.sinks[h] = static_cast<float>(sink + kStep);
    const double above = loss();
    forward.sinks[h] = static_cast<float>(sink - kStep);
    const double want = (above - loss()) / (2 * kStep);
    forward.sinks[h] = sink;
    if (std::fabs(got->d_sinks[h] - want) <= 1e-5) continue;
    return absl::StrFormat("%s: d_sinks of head %d: got %.9g, by steps %.9g", Describe(c), h,
                           got->d_sinks[h], want);
  }
  return "";
}

inline std::vector<AttentionCase> FiniteDifferenceCases() {
  std::vector<AttentionCase> cases;
  uint64_t n = 3000;
  for (Hide hide : kAllHides) {
    for (bool sinks : {false, true}) {
      for (int64_t queries : {3, 9}) {
        cases.push_back(
            {.shape = {.batch = 2, .heads = 2, .queries = queries, .keys = 6, .rows = 4 * queries},
             .hide = hide,
             .finite_bans = false,
             .scale = queries == 3 ? 0.5f : -2.0f,
             .sinks = sinks,
             .seed = ++n});
      }
    }
  }
  return cases;
}

// ---- Bits that depend only on the row

// The memory layout of a piece of a tensor's rows.
struct RowLayout {
  int64_t stride_extra = 0;
  int64_t offset = 0;
  bool in_place = false;
};

inline void CopyRow(const HostTensor& from, int64_t from_row, HostTensor& to, int64_t to_row) {
  for (int64_t j = 0; j < from.cols(); ++j) to.Set(to_row, j, from.At(from_row, j));
}

inline HostTensor RowsOf(const HostTensor& from, int64_t first, int64_t rows,
                         const RowLayout& layout) {
  HostTensor to = EmptyTensor(from.dtype(), rows, from.cols(), layout.stride_extra, layout.offset);
  for (int64_t r = 0; r < rows; ++r) CopyRow(from, first + r, to, r);
  return to;
}

inline bool SameRow(const HostTensor& a, int64_t a_row, const HostTensor& b, int64_t b_row) {
  for (int64_t j = 0; j < a.cols(); ++j) {
    const float x = a.At(a_row, j), y = b.At(b_row, j);
    if (BitsOf(x) != BitsOf(y) && !(std::isnan(x) && std::isnan(y))) return false;
  }
  return true;
}

inline bool SameStatus(RowStatus a, RowStatus b) {
  return a.code == b.code && a.position == b.position;
}

inline bool SameNumber(float a, float b) {
  return BitsOf(a) == BitsOf(b) || (std::isnan(a) && std::isnan(b));
}

// "" where the rows [first, first + rows) of the case, as a call of their own, have the bits they
// have in `whole`, the answer to all.
inline std::string BrokenPiece(OpRunner& runner, const AttentionCase& c, const AttentionCall& all,
                               const AttentionAnswer& whole, int64_t first, int64_t rows,
                               const RowLayout& layout) {
  AttentionCase piece = c;
  piece.shape.first_row += first;
  piece.shape.rows = rows;
  piece.offset = layout.offset;
  AttentionCall call{
      .args = all.args,
      .scores = RowsOf(all.scores, first, rows, layout),
      .sinks = all.sinks,
      .probs = EmptyTensor(c.out_dtype, rows, c.shape.keys, layout.stride_extra, layout.offset),
      .in_place = layout.in_place && c.dtype == c.out_dtype,
      .want_logsumexp = true};
  call.args.shape = piece.shape;
  MakeMask(piece, call);
  const auto got = runner.AttentionSoftmax(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < rows; ++r) {
    if (SameRow(whole.probs, first + r, got->probs, r) &&
        SameNumber(whole.logsumexp[first + r], got->logsumexp[r]) &&
        SameStatus(whole.status[first + r], got->status[r])) {
      continue;
    }
    return absl::StrFormat(
        "%s: row %d has other bits in a call of rows %d+%d, stride +%d, offset "
        "%d, in place %d",
        Describe(c), first + r, first, rows, layout.stride_extra, layout.offset, layout.in_place);
  }
  return "";
}

inline std::string BrokenGradientPiece(OpRunner& runner, const AttentionCase& c,
                                       const AttentionBackwardCall& all,
                                       const AttentionBackwardAnswer& whole, int64_t first,
                                       int64_t rows, const RowLayout& layout) {
  AttentionBackwardCall call{
      .args = all.args,
      .probs = RowsOf(all.probs, first, rows, layout),
      .d_probs = RowsOf(all.d_probs, first, rows, layout),
      .sinks = all.sinks,
      .logsumexp = {all.logsumexp.begin() + first, all.logsumexp.begin() + first + rows},
      .d_scores = EmptyTensor(all.d_scores.dtype(), rows, c.shape.keys, layout.stride_extra + 1,
                              layout.offset + 1)};
  if (layout.in_place && all.d_scores.dtype() == c.dtype) {
    call.output = AttentionBackwardCall::Output::kOverDProbs;
  }
  call.args.shape.first_row += first;
  call.args.shape.rows = rows;
  const auto got = runner.AttentionSoftmaxBackward(call);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < rows; ++r) {
    if (SameRow(whole.d_scores, first + r, got->d_scores, r) &&
        SameStatus(whole.status[first + r], got->status[r])) {
      continue;
    }
    return absl::StrFormat("backward of %s: row %d has other bits in a call of rows %d+%d",
                           Describe(c), first + r, first, rows);
  }
  return "";
}

// "" where rows have the same bits in one call as in calls of `rows` rows, forward and backward.
inline std::string BrokenChunks(OpRunner& runner, const AttentionCase& c, int64_t rows,
                                const RowLayout& layout) {
  const AttentionCall all = CallOf(c);
  const AttentionBackwardCall backward = BackwardOf(c);
  const auto whole = runner.AttentionSoftmax(all);
  if (!whole.ok()) return whole.status().ToString();
  const auto gradient = runner.AttentionSoftmaxBackward(backward);
  if (!gradient.ok()) return gradient.status().ToString();
  for (int64_t first = 0; first < c.shape.rows; first += rows) {
    const int64_t here = std::min(rows, c.shape.rows - first);
    std::string broken = BrokenPiece(runner, c, all, *whole, first, here, layout);
    if (broken.empty()) {
      broken = BrokenGradientPiece(runner, c, backward, *gradient, first, here, layout);
    }
    if (!broken.empty()) return broken;
  }
  return "";
}

inline std::vector<AttentionCase> AttentionInvarianceCases() {
  std::vector<AttentionCase> cases;
  uint64_t n = 4000;
  for (int64_t keys : {5, 100, 129, 513, 1000, 1500, 4097, 20000}) {
    for (Hide hide : kAllHides) {
      const int64_t queries = keys < 1000 ? 7 : 3;
      ++n;
      AttentionCase c{
          .shape = {.batch = 2, .heads = keys < 1000 ? 3 : 1, .queries = queries, .keys = keys},
          .dtype = kAllDTypes[n % 3],
          .out_dtype = n % 2 == 0 ? DType::kF32 : kAllDTypes[n % 3],
          .hide = hide,
          .mask_dtype = kAllDTypes[n / 2 % 3],
          .mask_by_batch = n % 4 != 0,
          .sinks = n % 2 == 0,
          .fill = n % 4 == 3 ? Fill::kWithNan : Fill::kNormal,
          .seed = n};
      c.shape.rows = c.shape.batch * c.shape.heads * queries;
      cases.push_back(c);
    }
  }
  return cases;
}

// "" where the rows of one batch and head have the same bits in a tensor of their own as between
// those of others.
inline std::string BrokenIsolation(OpRunner& runner, const AttentionCase& c) {
  const AttentionCall all = CallOf(c);
  const auto whole = runner.AttentionSoftmax(all);
  if (!whole.ok()) return whole.status().ToString();
  const AttentionShape& shape = c.shape;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t first = (b * shape.heads + h) * shape.queries;
      AttentionCall own{.args = all.args,
                        .scores = RowsOf(all.scores, first, shape.queries, {.offset = 1}),
                        .mask = all.mask,
                        .mask_offset_bytes = all.mask_offset_bytes,
                        .probs = EmptyTensor(c.out_dtype, shape.queries, shape.keys, 0, 2)};
      own.args.shape.batch = own.args.shape.heads = 1;
      own.args.shape.rows = shape.queries;
      // The mask's element of (0, 0, i, j) is now that of (b, h, i, j).
      own.args.mask.origin -= b * all.args.mask.batch_stride + h * all.args.mask.head_stride;
      if (!all.sinks.empty()) own.sinks = {all.sinks[h]};
      const auto got = runner.AttentionSoftmax(own);
      if (!got.ok()) return got.status().ToString();
      for (int64_t i = 0; i < shape.queries; ++i) {
        if (!SameRow(whole->probs, first + i, got->probs, i) ||
            !SameNumber(whole->logsumexp[first + i], got->logsumexp[i]) ||
            !SameStatus(whole->status[first + i], got->status[i])) {
          return absl::StrFormat("%s: row %d of batch %d, head %d has other bits in its own call",
                                 Describe(c), i, b, h);
        }
      }
    }
  }
  return "";
}

// "" where rows have the same bits in one call and in calls of 1, 4 and all rows.
inline std::string BrokenChunks(OpRunner& runner, const AttentionCase& c) {
  std::string broken = BrokenChunks(runner, c, 1, {.stride_extra = 3, .offset = 5});
  if (broken.empty()) broken = BrokenChunks(runner, c, 4, {.offset = 1, .in_place = true});
  if (broken.empty()) broken = BrokenChunks(runner, c, c.shape.rows, {.stride_extra = 8});
  return broken;
}

// "" where 16-bit probs are f32 probs, rounded.
inline std::string BrokenRounding(OpRunner& runner, AttentionCase c) {
  c.in_place = false;
  c.out_dtype = c.dtype;
  const auto narrow = runner.AttentionSoftmax(CallOf(c));
  if (!narrow.ok()) return narrow.status().ToString();
  c.out_dtype = DType::kF32;
  const auto wide = runner.AttentionSoftmax(CallOf(c));
  if (!wide.ok()) return wide.status().ToString();
  for (int64_t r = 0; r < c.shape.rows; ++r) {
    for (int64_t j = 0; j < c.shape.keys; ++j) {
      const float p = wide->probs.At(r, j), q = narrow->probs.At(r, j);
      if (SameNumber(RoundedTo(c.dtype, p), q)) continue;
      return absl::StrFormat("%s: row %d key %d: %.9g became %.9g", Describe(c), r, j, p, q);
    }
  }
  return "";
}

inline std::vector<OpCheck> AttentionSoftmaxChecks() {
  return {
      ForAll("KeepsEveryClaim", AttentionClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfValues", AttentionValueClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfGradients", GradientClaims, BrokenClaim),
      ForAll("EveryShapeAgreesWithDoublePrecision", AttentionShapeCases, FirstDifference),
      ForAll("EveryGradientAgreesWithDoublePrecision", AttentionShapeCases,
             FirstGradientDifference),
      ForAll("EveryKindOfRowAgreesWithDoublePrecision", AttentionFillCases, FirstDifference),
      ForAll("EveryGradientOfEveryKindOfRowAgreesWithDoublePrecision", AttentionFillCases,
             FirstGradientDifference),
      ForAll("AMaskMayBeSharedOverBatchHeadsAndQueries", BroadcastCases, FirstDifference),
      ForAll("TheLongestRowAgreesWithDoublePrecision", LongestRowCases, FirstDifference),
      ForAll("TheLongestGradientAgreesWithDoublePrecision", LongestRowCases,
             FirstGradientDifference),
      ForAll("GradientsAreWhatSmallStepsFind", FiniteDifferenceCases, BrokenFiniteDifferences),
      ForAll("SinkGradientsOfManyRowsAddUp", ManySinkRows, FirstGradientDifference),
      ForAll("ChunksHaveTheBitsOfOneCall", AttentionInvarianceCases, BrokenChunks),
      ForAll("ARowsBitsDoNotDependOnOtherRows", AttentionInvarianceCases, BrokenIsolation),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_ATTENTION_SOFTMAX_CASES_H_
