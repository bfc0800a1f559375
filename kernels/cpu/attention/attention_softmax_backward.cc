// attention_softmax_backward on the CPU: one pass over a row for sum y dy, one for its gradient,
// which is written as the forward's results are.
//
// Cost: two reads and a write of the row; the second read is out of cache.
//
// Limited by memory. Measured as the forward (attention_softmax.cc), GB/s: f32 35, causal 21.5;
// bf16 27, causal 17. Prefetching rows that are read whole: f32 1.5 times the time.
#include <algorithm>
#include <cmath>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention/attention_softmax_backward.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/attention/attention_softmax.h"
#include "kernels/cpu/attention/keys-inl.h"
#include "kernels/cpu/attention/write-inl.h"
#include "kernels/cpu/rows/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// sum y dy over the keys whose y is not 0. Prefetches, where rows are only read in part: next_y and
// next_dy are read after these.
template <bool kPairs, typename T>
double Dot(const T* y, const T* dy, int64_t count, bool in_part, const T* next_y,
           const T* next_dy) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF zero = hn::Zero(d);
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kCellKeys) {
    const int64_t end = std::min(begin + kCellKeys, count);
    NextCell after_y, after_dy;
    if (in_part) {
      after_y = NextCell(y, end, count, next_y);
      after_dy = NextCell(dy, end, count, next_dy);
    }
    VF s[4];
    for (VF& v : s) v = zero;
    const auto add = [&](int64_t i, int64_t u) HWY_ATTR {
      VF y_a, y_b, dy_a, dy_b;
      LoadFirst<kPairs>(d, y + i, end - i, y_a, y_b);
      LoadFirst<kPairs>(d, dy + i, end - i, dy_a, dy_b);
      s[u] = hn::MulAdd(y_a, hn::IfThenZeroElse(hn::Eq(y_a, zero), dy_a), s[u]);
      s[u + 1] = hn::MulAdd(y_b, hn::IfThenZeroElse(hn::Eq(y_b, zero), dy_b), s[u + 1]);
    };
    int64_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      const int64_t bytes = 4 * lanes * static_cast<int64_t>(sizeof(T));
      after_y.ToSecondCache(bytes);
      after_dy.ToSecondCache(bytes);
      add(i, 0);
      add(i + 2 * lanes, 2);
    }
    for (; i < end; i += 2 * lanes) add(i, 0);
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
  }
  return total;
}

// The lowest key with NaN in y, or in dy where y is not 0; -1 where there is none.
template <typename T>
HWY_NOINLINE int64_t FirstNan(const T* y, const T* dy, int64_t count) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const VF vy = LoadUpTo(d, y + i, count - i), vdy = LoadUpTo(d, dy + i, count - i);
    const VF looked_at = hn::IfThenZeroElse(hn::Eq(vy, hn::Zero(d)), vdy);
    const intptr_t lane = hn::FindFirstTrue(d, hn::Or(hn::IsNaN(vy), hn::IsNaN(looked_at)));
    if (lane >= 0) return i + lane;
  }
  return -1;
}

// The gradient, as WriteRow takes results.
template <bool kPairs, typename T, typename Out>
struct Gradient {
  const T* y;
  const T* dy;
  int64_t count;
  VF scale, dot;
  bool by_instruction;

  HWY_INLINE VF Of(DF d, VF y_of, VF dy_of) const {
    const VF dx = hn::Mul(hn::Mul(scale, y_of), hn::Sub(dy_of, dot));
    return hn::IfThenZeroElse(hn::Eq(y_of, hn::Zero(d)), dx);
  }

  // From some key on, vector after vector.
  struct Cursor {
    const Gradient& gradient;
    int64_t key;

    HWY_INLINE auto Next() {
      const int64_t at = key;
      key += (kPairs ? 2 : 1) * static_cast<int64_t>(hn::Lanes(DF()));
      return gradient(at);
    }
  };
  HWY_INLINE Cursor From(int64_t key) const { return {*this, key}; }

  HWY_INLINE auto operator()(int64_t key) const {
    const DF d;
    if constexpr (kPairs) {
      VF y_a, y_b, dy_a, dy_b;
      LoadAround<kPairs>(d, y, key, count, y_a, y_b);
      LoadAround<kPairs>(d, dy, key, count, dy_a, dy_b);
      return RoundAnyTwo(d, Of(d, y_a, dy_a), Of(d, y_b, dy_b), by_instruction);
    } else {
      VF y_of, dy_of;
      LoadAround<kPairs>(d, y, key, count, y_of, y_of);
      LoadAround<kPairs>(d, dy, key, count, dy_of, dy_of);
      const VF dx = Of(d, y_of, dy_of);
      if constexpr (std::is_same_v<Out, float>) {
        return dx;
      } else {
        return RoundTo(Out(), d, dx);
      }
    }
  }
};

// Rows [begin, end) of a call whose tensors have these types; where there are sinks,
// sink_terms[row - first] is the row's part of d_sinks.
template <typename T, typename Out>
void BackwardRowsOf(const AttentionSoftmaxBackwardArgs& args, int64_t begin, int64_t end,
                    int64_t first, const Writing& how, double* sink_terms) {
  constexpr bool kPairs = std::is_same_v<T, hwy::bfloat16_t>;
  using D = typename OutOf<kPairs, Out>::D;
  const AttentionShape& shape = args.shape;
  const int64_t keys = shape.keys;
  RowPlace place = PlaceOf(shape, begin);
  for (int64_t row = begin; row < end; ++row, Advance(shape, place)) {
    const KeyRange seen = SeenKeys(shape, args.window, place.query);
    const int64_t count = seen.end - seen.begin;
    const T* y = static_cast<const T*>(args.probs.data) + row * args.probs.row_stride + seen.begin;
    const T* dy =
        static_cast<const T*>(args.d_probs.data) + row * args.d_probs.row_stride + seen.begin;
    Out* to = static_cast<Out*>(args.d_scores.data) + row * args.d_scores.row_stride;
    if (how.stream) PrefetchEnds(to, keys);
    const double dot = Dot<kPairs>(y, dy, count, count < keys, y + args.probs.row_stride,
                                   dy + args.d_probs.row_stride);
    RowStatus status;
    if (HWY_UNLIKELY(std::isnan(dot))) {  // or infinities of both signs met, which is no fault
      const int64_t nan = FirstNan(y, dy, count);
      if (nan >= 0) status = {RowCode::kNanLogit, static_cast<int32_t>(seen.begin + nan)};
    }
    const DF d;
    const Gradient<kPairs, T, Out> gradient = {.y = y,
                                               .dy = dy,
                                               .count = count,
                                               .scale = hn::Set(d, args.scale),
                                               .dot = hn::Set(d, static_cast<float>(dot)),
                                               .by_instruction = how.by_instruction};
    if (how.stream) {
      WriteRow<D, true>(gradient, to, keys, seen);
    } else {
      WriteRow<D, false>(gradient, to, keys, seen);
    }
    args.status[row] = status;
    if (args.sinks == nullptr) continue;
    const double sink = args.sinks[place.head];
    const double share = sink == -kInf ? 0 : std::exp(sink - double{args.logsumexp[row]});
    sink_terms[row - first] = share * dot;
  }
}

void BackwardRows(const AttentionSoftmaxBackwardArgs& args, int64_t begin, int64_t end,
                  int64_t first, const Writing& how, double* sink_terms) {
  AsType(args.probs.dtype, args.probs.data, [&](const auto* y) {
    using T = std::remove_cvref_t<decltype(*y)>;
    if constexpr (std::is_same_v<T, float>) {
      AsType(args.d_scores.dtype, args.d_scores.data, [&](auto* to) {
        using Out = std::remove_pointer_t<decltype(to)>;
        BackwardRowsOf<T, Out>(args, begin, end, first, how, sink_terms);
      });
    } else {
      BackwardRowsOf<T, T>(args, begin, end, first, how, sink_terms);
    }
  });
  if (how.stream) hwy::FlushStream();
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
  const void* to = args.d_scores.data;
  const Writing how =
      WritingOf(args.shape, args.d_scores, to == args.probs.data || to == args.d_probs.data);
  const int64_t at_once = sinks ? std::min(rows, kSinkRows) : rows;
  double* sink_terms = sinks ? scratch.Get(at_once) : nullptr;
  if (sinks) std::fill(args.d_sinks, args.d_sinks + args.shape.heads, 0.0);
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t last = std::min(rows, first + at_once);
    ForEachPiece(pool, args.shape.keys, first, last, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(BackwardRows)(args, begin, end, first, how, sink_terms);
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
