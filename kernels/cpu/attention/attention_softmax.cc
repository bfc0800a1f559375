// attention_softmax on the CPU: a row is cut into cells of 1024 keys, counted from the first it
// sees.
//
//   weigh:   a cell's x = scale * score + mask go to L1 with their maximum, then become weights
//            2^(x log2(e) - n): n is the maximum's exponent, a whole number, so that no digit of x
//            is lost to a subtraction.
//   total:   the cells' sums, brought to one exponent in double precision, and the sink.
//   scale:   the weights, once more, times one factor a cell, in the type of the result.
//
// Weights lie in the result itself where it is f32, else in scratch of the thread: one row, 4 MiB
// at most. Backward: one pass for sum y dy, one for the gradient.
//
// Cost at [16, 1024, 1024] f32: reads and writes 67 MB once each, which is the floor; causal rows
// 0.75 of that, as the zeros must be written.
//
// Limited by: memory for f32; by arithmetic for f16 and bf16 (36 instructions a vector) and for
// rows in cache; by latencies for rows of a few vectors.
//
// Measured: one core of a Sapphire Rapids at 2.6 GHz, 16 lanes, 1 GB of tensors in rotation, by
// processor time, where a bare copy loop moves 26.5 GB/s: f32 13.3, causal 9.8, rows in L2 32; bf16
// 9.1, causal 7.1, under a bool mask 8.4, rows of 131072 8.5. Backward: f32 15.3, bf16 13.8.
//
// Tried and dropped, as GB/s of f32 and bf16: no prefetch of the row that follows (11.5, 8.0;
// causal 7.5, 5.4); prefetching the result for writing (12.2, 9.2; causal 10.5, 7.7); weights of
// f32 rows in scratch as well (11.8).
#include "kernels/cpu/attention/attention_softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention/attention_softmax.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"

#ifndef LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_
#define LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

namespace logitd::cpu {

// Keys that one fixed code path reduces.
inline constexpr int64_t kCellKeys = 1024;

// Maxima of this size and up are taken off before the exponent is: x that are close enough to
// matter are then within a factor of two, so that the difference is exact.
inline constexpr float kLargeMax = 0x1p12f;

// What is known of a cell. A weight w stands for w * exp(shift) * 2^exponent.
struct Cell {
  float max = 0;
  float shift = 0;
  float exponent = 0;
  float sum = 0;     // of the weights; of a maximum of +inf, how many there are
  double scale = 0;  // of the weights, against the row's largest cell
  float factor = 0;  // from weight to probability
};

struct ForwardScratch {
  Buffer<float> weights;
  Buffer<Cell> cells;
};

// Keys [begin, end) a row sees, through the window alone.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// The row's place in [batch, heads, queries].
struct RowPlace {
  int64_t batch;
  int64_t head;
  int64_t query;
};

inline RowPlace PlaceOf(const AttentionShape& shape, int64_t row) {
  const int64_t all = shape.first_row + row;
  return {.batch = all / shape.queries / shape.heads,
          .head = all / shape.queries % shape.heads,
          .query = all % shape.queries};
}

// To the next row. Divisions would be a good part of a short row's time.
inline void Advance(const AttentionShape& shape, RowPlace& place) {
  if (++place.query < shape.queries) return;
  place.query = 0;
  if (++place.head < shape.heads) return;
  place.head = 0;
  ++place.batch;
}

inline KeyRange SeenKeys(const AttentionShape& shape, const AttentionWindow& window,
                         int64_t query) {
  const int64_t aligned = query + shape.keys - shape.queries;
  KeyRange seen = {0, shape.keys};
  // In this form nothing overflows, however large the window.
  if (window.left != AttentionWindow::kUnbounded && window.left < aligned) {
    seen.begin = aligned - window.left;
  }
  if (window.right != AttentionWindow::kUnbounded && window.right < shape.keys - aligned) {
    seen.end = std::max(seen.begin, aligned + window.right + 1);
  }
  return seen;
}

inline std::byte* At(void* data, DType dtype, int64_t element) {
  return static_cast<std::byte*>(data) + element * static_cast<int64_t>(SizeOf(dtype));
}
inline const std::byte* At(const void* data, DType dtype, int64_t element) {
  return static_cast<const std::byte*>(data) + element * static_cast<int64_t>(SizeOf(dtype));
}

inline void Zero(const MutableTensorView& to, int64_t row, int64_t begin, int64_t end) {
  const size_t bytes = static_cast<size_t>(end - begin) * SizeOf(to.dtype);
  std::memset(At(to.data, to.dtype, row * to.row_stride + begin), 0, bytes);
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// In place of a mask's element type where there is no mask.
struct NoMask {};

// Vectors a loop holds at once; enough to hide what an addition takes.
constexpr int64_t kUnroll = 4;

// x = scale * score + mask, -inf where masked; one vector, from key i on.
template <typename T, typename M>
HWY_INLINE VF LoadX(DF d, const T* scores, const M* mask, int64_t i, VF scale) {
  const VF score = LoadF32(d, scores + i);
  const VF minus_inf = hn::Set(d, -kInf);
  if constexpr (std::is_same_v<M, NoMask>) {
    return hn::Mul(score, scale);
  } else if constexpr (std::is_same_v<M, uint8_t>) {
    const DI di;
    const auto flags = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, DF>(), mask + i));
    const auto seen = hn::RebindMask(d, hn::Eq(flags, hn::Zero(di)));
    return hn::IfThenElse(seen, hn::Mul(score, scale), minus_inf);
  } else {
    const VF add = LoadF32(d, mask + i);
    return hn::IfThenElse(hn::Eq(add, minus_inf), minus_inf, hn::MulAdd(score, scale, add));
  }
}

// The x of a cell of `count` keys, -inf behind them up to a whole vector, and their maximum.
// Returns whether one is NaN; then the maximum means nothing.
template <typename T, typename M>
HWY_INLINE bool ReadCell(const T* scores, const M* mask, int64_t count, float scale,
                         float* HWY_RESTRICT x, float* max) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vscale = hn::Set(d, scale);
  VF m[kUnroll];
  for (VF& v : m) v = hn::Set(d, -kInf);
  auto nan = hn::IsNaN(m[0]);
  int64_t i = 0;
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      const VF v = LoadX(d, scores, mask, i + u * lanes, vscale);
      hn::StoreU(v, d, x + i + u * lanes);
      m[u] = hn::Max(m[u], v);
      nan = hn::Or(nan, hn::IsNaN(v));
    }
  }
  for (; i < count; i += lanes) {
    VF v;
    if (count - i >= lanes) {
      v = LoadX(d, scores, mask, i, vscale);
    } else {
      T last_scores[kMaxLanes];
      CopyTail(scores + i, count - i, last_scores);
      if constexpr (std::is_same_v<M, NoMask>) {
        v = LoadX(d, last_scores, mask, 0, vscale);
      } else {
        M last_mask[kMaxLanes];
        CopyTail(mask + i, count - i, last_mask);
        v = LoadX(d, last_scores, last_mask, 0, vscale);
      }
      const auto inside = hn::FirstN(d, static_cast<size_t>(count - i));
      v = hn::IfThenElse(inside, v, hn::Set(d, -kInf));
    }
    hn::StoreU(v, d, x + i);
    m[0] = hn::Max(m[0], v);
    nan = hn::Or(nan, hn::IsNaN(v));
  }
  *max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m[0], m[1]), hn::Max(m[2], m[3]))));
  return !hn::AllFalse(d, nan);
}

constexpr double kLog2E = 1.4426950408889634;

// f = y log2(e) - n, at most 1/2 in size, to 2^-23; |y| up to 2^13.
HWY_INLINE VF Fraction(DF d, VF y, VF n) {
#if HWY_NATIVE_FMA
  constexpr auto kHigh = static_cast<float>(kLog2E);
  const VF f = hn::MulSub(y, hn::Set(d, kHigh), n);
#else
  // Products of halves of 12 bits are exact.
  constexpr float kHigh = 1477.0f / 1024;
  const auto high_bits = hn::BitCast(d, hn::Set(DI(), static_cast<int32_t>(0xfffff000)));
  const VF y_high = hn::And(y, high_bits);
  const VF y_low = hn::Sub(y, y_high);
  const VF high = hn::Set(d, kHigh);
  const VF f = hn::Add(hn::Sub(hn::Mul(y_high, high), n), hn::Mul(y_low, high));
#endif
  return hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E - kHigh)), f);
}

// Adding this to a number below 2^22 in size rounds it to a whole one, which is then in the low
// bits.
constexpr float kWhole = 12582912.0f;

// 2^(y log2(e) - n of `top`), 0 below 2^-125. `top` and `low` are the rounded exponents of the
// cell's maximum and of what counts as nothing; what comes of y too small for the arithmetic, -inf
// among them, is dropped in the end.
struct Weigher {
  VF shift, low;
  hn::Vec<DI> top;

  explicit HWY_INLINE Weigher(const Cell& cell)
      : shift(hn::Set(DF(), cell.shift)),
        low(hn::Set(DF(), kWhole + cell.exponent - 125)),
        top(hn::BitCast(DI(), hn::Set(DF(), kWhole + cell.exponent))) {}

  HWY_INLINE VF operator()(DF d, VF x) const {
    const DI di;
    const VF y = hn::Sub(x, shift);
    const VF round = hn::Set(d, kWhole);
    const VF t = hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E)), round);
    const VF p = Exp2Poly(d, Fraction(d, y, hn::Sub(t, round)));
    const auto exponent = hn::ShiftLeft<23>(hn::Sub(hn::BitCast(di, t), top));
    const VF weight = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
    return hn::IfThenElseZero(hn::Ge(t, low), weight);
  }
};

HWY_INLINE void SetExponent(Cell& cell) {
  const DF d;
  cell.shift = std::fabs(cell.max) < kLargeMax ? 0.0f : cell.max;
  const VF y = hn::Set(d, cell.max - cell.shift);
  const VF round = hn::Set(d, kWhole);
  cell.exponent =
      hn::GetLane(hn::Sub(hn::MulAdd(y, hn::Set(d, static_cast<float>(kLog2E)), round), round));
}

// Weights of x[0, count) under `weigh`, and their sum. Meanwhile memory brings as many elements of
// kBytes from `next` on, which are read after these; no matter what lies there.
template <int64_t kBytes, class Weigh>
HWY_INLINE float WeighCell(const float* HWY_RESTRICT x, int64_t count, const Weigh& weigh,
                           float* HWY_RESTRICT weights, const void* next) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  VF s[kUnroll];
  for (VF& v : s) v = hn::Zero(d);
  int64_t i = 0;
  const char* ahead = static_cast<const char*>(next);
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    for (int64_t b = 0; b < kUnroll * lanes * kBytes; b += 64) {
      hwy::Prefetch(ahead + i * kBytes + b);
    }
    for (int64_t u = 0; u < kUnroll; ++u) {
      const VF w = weigh(d, hn::LoadU(d, x + i + u * lanes));
      hn::StoreU(w, d, weights + i + u * lanes);
      s[u] = hn::Add(s[u], w);
    }
  }
  for (; i < count; i += lanes) {
    const VF w = weigh(d, hn::LoadU(d, x + i));  // 0 behind the end
    if (count - i >= lanes) {
      hn::StoreU(w, d, weights + i);
    } else {
      StoreTail(d, w, count - i, weights + i);
    }
    s[0] = hn::Add(s[0], w);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
}

// 1 for +inf, 0 for all else.
struct InfinityWeigher {
  HWY_INLINE VF operator()(DF d, VF x) const {
    return hn::IfThenElseZero(hn::Eq(x, hn::Set(d, kInf)), hn::Set(d, 1.0f));
  }
};

// Fills `cells` and `weights`; a cell whose sum is 0 has no weights. `next_row` is what is read
// after this row, or any other address. Returns the lowest key whose x is NaN, at which it stops,
// or -1.
template <typename T, typename M>
int64_t Weigh(const T* scores, const M* mask, int64_t count, float scale, Cell* cells,
              float* weights, const void* next_row) {
  HWY_ALIGN float x[kCellKeys];
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t n = std::min(kCellKeys, count - begin);
    Cell& cell = cells[begin / kCellKeys];
    cell = Cell();
    const void* ahead = begin + n < count ? static_cast<const void*>(scores + begin + n) : next_row;
    const M* cell_mask = mask;
    if constexpr (!std::is_same_v<M, NoMask>) cell_mask += begin;
    if (HWY_UNLIKELY(ReadCell(scores + begin, cell_mask, n, scale, x, &cell.max))) {
      return begin + (std::find_if(x, x + n, [](float v) { return std::isnan(v); }) - x);
    }
    if (HWY_LIKELY(std::isfinite(cell.max))) {
      SetExponent(cell);
      cell.sum = WeighCell<sizeof(T)>(x, n, Weigher(cell), weights + begin, ahead);
    } else if (cell.max > 0) {
      cell.sum = WeighCell<sizeof(T)>(x, n, InfinityWeigher(), weights + begin, ahead);
    }
  }
  return -1;
}

template <typename T>
int64_t WeighUnder(const AttentionMask& mask, int64_t at, const T* scores, int64_t count,
                   float scale, Cell* cells, float* weights, const void* next_row) {
  const auto under = [&](const auto* data) {
    return Weigh(scores, data + at, count, scale, cells, weights, next_row);
  };
  if (mask.kind == MaskKind::kNone) {
    return Weigh<T, NoMask>(scores, nullptr, count, scale, cells, weights, next_row);
  }
  if (mask.kind == MaskKind::kBool) return under(static_cast<const uint8_t*>(mask.data));
  switch (mask.dtype) {
    case DType::kF32:
      return under(static_cast<const float*>(mask.data));
    case DType::kF16:
      return under(static_cast<const hwy::float16_t*>(mask.data));
    case DType::kBF16:
      return under(static_cast<const hwy::bfloat16_t*>(mask.data));
  }
  return -1;
}

template <typename Out>
void Scale(const float* weights, int64_t count, const Cell* cells, Out* to) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t n = std::min(kCellKeys, count - begin);
    const float factor = cells[begin / kCellKeys].factor;
    if (factor == 0) {
      std::memset(static_cast<void*>(to + begin), 0, static_cast<size_t>(n) * sizeof(Out));
      continue;
    }
    const VF vfactor = hn::Set(d, factor);
    // Results below f32's normal range are 0: computing a subnormal takes a hundred times as long.
    const VF least = hn::Set(d, std::numeric_limits<float>::min() / factor);
    const auto scale = [&](int64_t i, int64_t left) HWY_ATTR {
      VF w;
      if (HWY_LIKELY(left >= lanes)) {
        w = hn::LoadU(d, weights + begin + i);
      } else {
        float last[kMaxLanes];
        CopyTail(weights + begin + i, left, last);
        w = hn::LoadU(d, last);
      }
      const VF p = hn::IfThenElseZero(hn::Ge(w, least), hn::Mul(w, vfactor));
      StoreAs(d, p, left, to + begin + i);
    };
    for (int64_t i = 0; i < n; i += lanes) scale(i, n - i);
  }
}

// Turns the cells' sums into factors. Returns ln of the denominator.
inline double Total(Cell* cells, int64_t count, float sink) {
  constexpr double kLn2 = 0.6931471805599453;
  const Cell* top = nullptr;
  for (Cell* cell = cells; cell < cells + count; ++cell) {
    if (cell->max > (top == nullptr ? -kInf : top->max)) top = cell;
  }
  if (top == nullptr) return sink;
  const Cell reference = *top;
  double total = 0;
  if (reference.max == kInf) {
    for (const Cell* cell = cells; cell < cells + count; ++cell) {
      if (cell->max == kInf) total += cell->sum;
    }
    for (Cell* cell = cells; cell < cells + count; ++cell) {
      if (cell->max == kInf) cell->factor = static_cast<float>(1 / total);
    }
    return kInf;
  }
  const double unit = reference.shift + reference.exponent * kLn2;
  const double share = std::exp(sink - unit);
  for (Cell* cell = cells; cell < cells + count; ++cell) {
    if (cell->sum == 0) continue;
    const double steps = double{cell->exponent} - reference.exponent;
    cell->scale = cell->shift == reference.shift
                      ? std::exp2(steps)
                      : std::exp(double{cell->shift} - reference.shift + steps * kLn2);
    total += cell->scale * cell->sum;
  }
  total += share;
  for (Cell* cell = cells; cell < cells + count; ++cell) {
    cell->factor = static_cast<float>(cell->scale / total);
  }
  return std::isinf(share) ? sink : unit + std::log(total);
}

// NaN for every key of the range that is not masked. `at` is the mask's element at its begin.
inline void WriteNan(const AttentionSoftmaxArgs& args, int64_t row, KeyRange seen, int64_t at) {
  const MutableTensorView& probs = args.probs;
  Zero(probs, row, seen.begin, seen.end);
  for (int64_t j = seen.begin; j < seen.end; ++j, ++at) {
    bool masked = false;
    if (args.mask.kind == MaskKind::kBool) {
      masked = static_cast<const uint8_t*>(args.mask.data)[at] != 0;
    } else if (args.mask.kind == MaskKind::kAdditive) {
      uint32_t bits = 0;
      std::memcpy(&bits, At(args.mask.data, args.mask.dtype, at), SizeOf(args.mask.dtype));
      masked = bits == (args.mask.dtype == DType::kF32   ? 0xff800000u
                        : args.mask.dtype == DType::kF16 ? 0xfc00u
                                                         : 0xff80u);
    }
    if (masked) continue;
    const uint32_t nan = probs.dtype == DType::kF32   ? 0x7fc00000u
                         : probs.dtype == DType::kF16 ? 0x7e00u
                                                      : 0x7fc0u;
    std::memcpy(At(probs.data, probs.dtype, row * probs.row_stride + j), &nan, SizeOf(probs.dtype));
  }
}

void ForwardRow(const AttentionSoftmaxArgs& args, int64_t row, const RowPlace& place,
                ForwardScratch& scratch) {
  const MutableTensorView& probs = args.probs;
  const KeyRange seen = SeenKeys(args.shape, args.window, place.query);
  const int64_t count = seen.end - seen.begin;
  const int64_t mask_at = place.batch * args.mask.batch_stride +
                          place.head * args.mask.head_stride +
                          place.query * args.mask.query_stride + seen.begin - args.mask.origin;
  const void* scores =
      At(args.scores.data, args.scores.dtype, row * args.scores.row_stride + seen.begin);
  void* to = At(probs.data, probs.dtype, row * probs.row_stride + seen.begin);
  float* weights =
      probs.dtype == DType::kF32 ? static_cast<float*>(to) : scratch.weights.Get(args.shape.keys);
  const int64_t cell_count = (count + kCellKeys - 1) / kCellKeys;
  Cell* cells = scratch.cells.Get((args.shape.keys + kCellKeys - 1) / kCellKeys);

  const void* next_row = static_cast<const std::byte*>(scores) +
                         args.scores.row_stride * static_cast<int64_t>(SizeOf(args.scores.dtype));
  const int64_t nan = AsType(args.scores.dtype, scores, [&](const auto* typed) {
    return WeighUnder(args.mask, mask_at, typed, count, args.scale, cells, weights, next_row);
  });
  double logsumexp = std::numeric_limits<double>::quiet_NaN();
  RowStatus status;
  if (HWY_UNLIKELY(nan >= 0)) {
    status = {RowCode::kNanLogit, static_cast<int32_t>(seen.begin + nan)};
    WriteNan(args, row, seen, mask_at);
  } else {
    logsumexp = Total(cells, cell_count, args.sinks == nullptr ? -kInf : args.sinks[place.head]);
    if (logsumexp == -kInf) status.code = RowCode::kEmptySupport;
    AsType(probs.dtype, to, [&](auto* typed) { Scale(weights, count, cells, typed); });
  }
  Zero(probs, row, 0, seen.begin);
  Zero(probs, row, seen.end, args.shape.keys);
  if (args.logsumexp != nullptr) args.logsumexp[row] = static_cast<float>(logsumexp);
  args.status[row] = status;
}

void ForwardRows(const AttentionSoftmaxArgs& args, int64_t begin, int64_t end,
                 ForwardScratch& scratch) {
  RowPlace place = PlaceOf(args.shape, begin);
  for (int64_t row = begin; row < end; ++row, Advance(args.shape, place)) {
    ForwardRow(args, row, place, scratch);
  }
}

// Calls body(y, dy, i, left) for every vector of the keys [begin, begin + count), zeros behind the
// last.
template <typename T, class Body>
HWY_INLINE void ForEachVector(const T* y, const T* dy, int64_t count, const Body& body) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(LoadF32(d, y + i), LoadF32(d, dy + i), i, lanes);
  if (i == count) return;
  T last_y[kMaxLanes], last_dy[kMaxLanes];
  CopyTail(y + i, count - i, last_y);
  CopyTail(dy + i, count - i, last_dy);
  body(LoadF32(d, last_y), LoadF32(d, last_dy), i, count - i);
}

// sum y dy over the keys whose y is not 0.
template <typename T>
double Dot(const T* y, const T* dy, int64_t count) {
  const DF d;
  const VF zero = hn::Zero(d);
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    VF s[kUnroll];
    for (VF& v : s) v = zero;
    const int64_t lanes = hn::Lanes(d);
    const int64_t n = std::min(kCellKeys, count - begin);
    const auto add = [&](VF vy, VF vdy, VF& sum) HWY_ATTR {
      sum = hn::MulAdd(vy, hn::IfThenZeroElse(hn::Eq(vy, zero), vdy), sum);
    };
    int64_t i = 0;
    for (; i + kUnroll * lanes <= n; i += kUnroll * lanes) {
      for (int64_t u = 0; u < kUnroll; ++u) {
        const int64_t at = begin + i + u * lanes;
        add(LoadF32(d, y + at), LoadF32(d, dy + at), s[u]);
      }
    }
    ForEachVector(y + begin + i, dy + begin + i, n - i,
                  [&](VF vy, VF vdy, int64_t, int64_t) HWY_ATTR { add(vy, vdy, s[0]); });
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
  }
  return total;
}

// The lowest key whose y is NaN, or whose dy is where y is not 0; -1 where there is none.
template <typename T>
HWY_NOINLINE int64_t FirstNan(const T* y, const T* dy, int64_t count) {
  const DF d;
  int64_t first = -1;
  ForEachVector(y, dy, count, [&](VF vy, VF vdy, int64_t i, int64_t) HWY_ATTR {
    const VF looked_at = hn::IfThenZeroElse(hn::Eq(vy, hn::Zero(d)), vdy);
    const intptr_t lane = hn::FindFirstTrue(d, hn::Or(hn::IsNaN(vy), hn::IsNaN(looked_at)));
    if (first < 0 && lane >= 0) first = i + lane;
  });
  return first;
}

template <typename T, typename Out>
void Spread(const T* y, const T* dy, int64_t count, float scale, float dot, Out* to) {
  const DF d;
  const VF vscale = hn::Set(d, scale), vdot = hn::Set(d, dot), zero = hn::Zero(d);
  ForEachVector(y, dy, count, [&](VF vy, VF vdy, int64_t i, int64_t left) HWY_ATTR {
    const VF dx = hn::Mul(hn::Mul(vscale, vy), hn::Sub(vdy, vdot));
    StoreAs(d, hn::IfThenZeroElse(hn::Eq(vy, zero), dx), left, to + i);
  });
}

// Writes one row's gradient and status. Returns sum y dy.
template <typename T>
double BackwardRow(const AttentionSoftmaxBackwardArgs& args, int64_t row, KeyRange seen, const T* y,
                   const T* dy) {
  const MutableTensorView& dx = args.d_scores;
  const int64_t count = seen.end - seen.begin;
  const double dot = Dot(y, dy, count);
  RowStatus status;
  if (HWY_UNLIKELY(std::isnan(dot))) {  // or infinities of both signs met
    const int64_t nan = FirstNan(y, dy, count);
    if (nan >= 0) status = {RowCode::kNanLogit, static_cast<int32_t>(seen.begin + nan)};
  }
  void* to = At(dx.data, dx.dtype, row * dx.row_stride + seen.begin);
  const auto spread = [&](auto* typed) {
    Spread(y, dy, count, args.scale, static_cast<float>(dot), typed);
  };
  if constexpr (std::is_same_v<T, float>) {
    AsType(dx.dtype, to, spread);
  } else {
    spread(static_cast<T*>(to));
  }
  Zero(dx, row, 0, seen.begin);
  Zero(dx, row, seen.end, args.shape.keys);
  args.status[row] = status;
  return dot;
}

// Rows [begin, end); where there are sinks, sink_terms[row - first] is the row's part of d_sinks.
void BackwardRows(const AttentionSoftmaxBackwardArgs& args, int64_t begin, int64_t end,
                  int64_t first, double* sink_terms) {
  RowPlace place = PlaceOf(args.shape, begin);
  for (int64_t row = begin; row < end; ++row, Advance(args.shape, place)) {
    const KeyRange seen = SeenKeys(args.shape, args.window, place.query);
    const auto* y = At(args.probs.data, args.probs.dtype, row * args.probs.row_stride + seen.begin);
    const auto* dy =
        At(args.d_probs.data, args.d_probs.dtype, row * args.d_probs.row_stride + seen.begin);
    const double dot = AsType(args.probs.dtype, y, [&](const auto* typed) {
      return BackwardRow(args, row, seen, typed, reinterpret_cast<decltype(typed)>(dy));
    });
    if (args.sinks == nullptr) continue;
    const double sink = args.sinks[place.head];
    const double share = sink == -kInf ? 0 : std::exp(sink - double{args.logsumexp[row]});
    sink_terms[row - first] = share * dot;
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);

namespace {

// Keys handed to a thread at once: few enough to balance, enough to hide taking them.
constexpr int64_t kItemKeys = 32768;

// Rows whose parts of d_sinks are held at once.
constexpr int64_t kSinkRows = 65536;

ForwardScratch& ScratchOfThisThread() {
  thread_local ForwardScratch scratch;
  return scratch;
}

// Calls body(begin, end) for pieces of the rows [first, last), on all threads.
template <class Body>
void ForEachPiece(ThreadPool& pool, int64_t keys, int64_t first, int64_t last, const Body& body) {
  const int64_t per_item = std::max<int64_t>(1, kItemKeys / keys);
  pool.ParallelFor((last - first + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t begin = first + item * per_item;
    body(begin, std::min(last, begin + per_item));
  });
}

}  // namespace

void AttentionSoftmax(const AttentionSoftmaxArgs& args, ThreadPool& pool) {
  ForEachPiece(pool, args.shape.keys, 0, args.shape.rows, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ForwardRows)(args, begin, end, ScratchOfThisThread());
  });
}

void AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args, ThreadPool& pool,
                              Buffer<double>& scratch) {
  const int64_t rows = args.shape.rows;
  const bool sinks = args.sinks != nullptr;
  const int64_t at_once = sinks ? std::min(rows, kSinkRows) : rows;
  double* sink_terms = sinks ? scratch.Get(at_once) : nullptr;
  if (sinks) std::fill(args.d_sinks, args.d_sinks + args.shape.heads, 0.0);
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t last = std::min(rows, first + at_once);
    ForEachPiece(pool, args.shape.keys, first, last, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(BackwardRows)(args, begin, end, first, sink_terms);
    });
    if (!sinks) continue;
    RowPlace place = PlaceOf(args.shape, first);
    for (int64_t row = first; row < last; ++row, Advance(args.shape, place)) {
      args.d_sinks[place.head] -= sink_terms[row - first];
    }
  }
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
