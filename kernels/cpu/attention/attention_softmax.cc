// attention_softmax on the CPU: a row is cut into cells of 1024 keys, counted from the first key it
// sees.
//
//   weigh:   the values x = scale * score + mask of a cell go to L1 with their maximum. Then they
//            become weights 2^(x log2(e) - n), where n is the maximum's exponent: a whole number,
//            so that the subtraction loses no digit of x.
//   total:   the cells' sums are brought to one exponent in double precision; the sink is added.
//   scale:   the weights are multiplied by one factor a cell, and stored in the result's type.
//
// Weights lie in the result itself where it is f32, else in the thread's scratch: one row, 4 MiB at
// most.
//
// Cost at [16, 1024, 1024] f32: reads and writes 67 MB once each, which is the floor; causal rows
// 0.75 of that, as the zeros must be written.
//
// Limited by: memory for f32; by arithmetic for f16 and bf16 (36 instructions a vector) and for
// rows in cache; by latencies for rows of a few vectors.
//
// Measured: one core of a Sapphire Rapids at 2.6 GHz, 16 lanes, 1 GB of tensors in rotation, by
// processor time, where a bare copy loop moves 26.5 GB/s: f32 13.3, causal 9.8, rows in L2 32; bf16
// 9.1, causal 7.1, under a bool mask 8.4, rows of 131072 8.5.
//
// Tried and dropped, in GB/s for f32 and bf16: no prefetch of the next row (11.5, 8.0;
// causal 7.5, 5.4); prefetching the result for writing (12.2, 9.2; causal 10.5, 7.7); weights of
// f32 rows in scratch as well (11.8). WeighCell as a call, to compile less of it: rows of 64 keys
// take 11% longer, and compiling takes as long.
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
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/rows/lanes-inl.h"

#ifndef LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_
#define LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

namespace logitd::cpu {

// A maximum of this size or more is subtracted from x before the exponent is. Every x close enough
// to matter is then within a factor of two of it, so that the difference is exact.
inline constexpr float kLargeMax = 0x1p12f;

// One cell. A weight w stands for w * exp(shift) * 2^exponent.
struct Cell {
  float max = 0;
  float shift = 0;
  float exponent = 0;
  float sum = 0;     // of the weights; where the maximum is +inf, the number of +inf
  double scale = 0;  // of the weights, against the row's largest cell
  float factor = 0;  // from weight to probability
};

struct ForwardScratch {
  Buffer<float> weights;
  Buffer<Cell> cells;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// In place of a mask's element type where there is no mask.
struct NoMask {};

// Vectors a loop holds at once; enough to hide the latency of an addition.
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

// Writes the x of a cell of `count` keys, then -inf up to a whole vector, and their maximum.
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

// 2^(y log2(e) - n), n from `top`; 0 below 2^-125. `top` and `low` are the rounded exponents of the
// cell's maximum and of the smallest weight kept. For a y too small for the arithmetic, -inf too,
// the result is wrong and is dropped in the end.
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

// Writes the weights of x[0, count) under `weigh`. Returns their sum. Meanwhile it prefetches as
// many elements of kBytes from `next` on, which are read after these; any address is safe.
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
    const VF w = weigh(d, hn::LoadU(d, x + i));  // 0 after the end
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

// Fills `cells` and `weights`; a cell whose sum is 0 has no weights. `next_row` is the address read
// after this row, or any other. Returns the lowest key whose x is NaN, where it stops, or -1.
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
  switch (mask.kind) {
    case MaskKind::kNone:
      return Weigh<T, NoMask>(scores, nullptr, count, scale, cells, weights, next_row);
    case MaskKind::kBool:
      return under(static_cast<const uint8_t*>(mask.data));
    case MaskKind::kAdditive:
      return AsType(mask.dtype, mask.data, under);
  }
  HWY_ABORT("mask kind %d", static_cast<int>(mask.kind));  // the op's check has refused it
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

inline bool IsMasked(const AttentionMask& mask, int64_t at) {
  if (mask.kind == MaskKind::kNone) return false;
  if (mask.kind == MaskKind::kBool) return static_cast<const uint8_t*>(mask.data)[at] != 0;
  return AsType(mask.dtype, mask.data, [&](const auto* values) {
    using T = std::remove_cvref_t<decltype(*values)>;
    return std::memcmp(values + at, &ElementBits<T>::kMinusInf, sizeof(T)) == 0;
  });
}

// Writes NaN for every key of the range that is not masked. `mask_at`: the mask's element of the
// first of them.
inline void WriteNan(const AttentionSoftmaxArgs& args, int64_t row, KeyRange seen,
                     int64_t mask_at) {
  const MutableTensorView& probs = args.probs;
  Zero(probs, row, seen.begin, seen.end);
  AsType(probs.dtype, At(probs.data, probs.dtype, row * probs.row_stride), [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      if (!IsMasked(args.mask, mask_at + j - seen.begin)) to[j] = FromBits<T>(ElementBits<T>::kNan);
    }
  });
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

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ForwardRows);

namespace {

ForwardScratch& ScratchOfThisThread() {
  thread_local ForwardScratch scratch;
  return scratch;
}

}  // namespace

void AttentionSoftmax(const AttentionSoftmaxArgs& args, ThreadPool& pool) {
  ForEachPiece(pool, args.shape.keys, 0, args.shape.rows, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ForwardRows)(args, begin, end, ScratchOfThisThread());
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
