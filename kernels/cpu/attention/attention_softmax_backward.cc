// attention_softmax_backward on the CPU: one pass over a row for sum y dy, one for its gradient.
//
// Cost: two reads and a write of the row; the second read is out of cache.
//
// Limited by and measured as the forward (attention_softmax.cc), GB/s: f32 15.3, bf16 13.8.
#include <algorithm>
#include <cmath>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention/attention_softmax_backward.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/attention/attention_softmax.h"
#include "kernels/cpu/rows/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors a loop holds at once; enough to hide the latency of an addition.
constexpr int64_t kUnroll = 4;

// Calls body(y, dy, i, left) for every vector of `count` keys; zeros follow the last key.
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

// The lowest key with NaN in y, or in dy where y is not 0; -1 where there is none.
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
  if (HWY_UNLIKELY(std::isnan(dot))) {  // or infinities of both signs met, which is no fault
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

HWY_EXPORT(BackwardRows);

// Rows whose parts of d_sinks are held at once.
constexpr int64_t kSinkRows = 65536;

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
