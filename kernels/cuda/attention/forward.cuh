// The forward pass of a lane: its part of a row as logits, exponentials and probabilities. What the
// kernels of narrow and wide rows share.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_FORWARD_CUH_
#define LOGITD_KERNELS_CUDA_ATTENTION_FORWARD_CUH_

#include <algorithm>
#include <limits>

#include "kernels/cuda/attention/mask.cuh"
#include "kernels/cuda/attention/row_threads.cuh"
#include "kernels/cuda/attention/rows.cuh"
#include "kernels/cuda/attention/vectors.cuh"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/rows/exponential.cuh"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda::attention {

// What is known before a kernel runs, so that it need not look.
enum class Form {
  kWhole,        // no mask; scores and probs are whole aligned vectors
  kWholeMasked,  // a mask, of whole aligned vectors too
  kAny,          // no mask; at any alignment
  kAnyMasked,
};

constexpr bool IsWhole(Form form) { return form == Form::kWhole || form == Form::kWholeMasked; }
constexpr bool IsMasked(Form form) {
  return form == Form::kWholeMasked || form == Form::kAnyMasked;
}

struct Params {
  PassRows rows;
  RowOrder order;  // of wide rows
  Matrix scores;
  Matrix probs;
  float scale;
  AttentionMask mask;
  const float* sinks;
  float* logsumexp;
  RowStatus* status;
};

// ---- launchers ---------------------------------------------------------------------------------

struct KernelTypes {
  DType scores;
  DType probs;  // the scores' type, or kF32
  Form form;
};

constexpr int64_t kLeastStagedKeys = 65;
constexpr int64_t kMaxStagedKeys = 192;
constexpr int64_t kMaxNarrowKeys = 1536;

// Whether LaunchStagedRows() takes these rows: 16-bit ones that are not whole vectors, without a
// window. It does not depend on where they are.
inline bool AreStaged(const KernelTypes& types, const Params& p) {
  const int elements = ElementsOf(types.scores, types.probs);
  return p.rows.keys >= kLeastStagedKeys && p.rows.keys <= kMaxStagedKeys && elements == 8 &&
         p.rows.keys % elements != 0 && !p.rows.windowed;
}

// Rows that are staged; others of up to kMaxNarrowKeys keys, several in a warp; and longer ones,
// each in a block or a cluster.
cudaError_t LaunchStagedRows(const KernelTypes& types, const Params& p, cudaStream_t stream);
cudaError_t LaunchNarrowRows(const KernelTypes& types, const Params& p, cudaStream_t stream);
cudaError_t LaunchWideRows(const KernelTypes& types, const Params& p, const Scratch& scratch,
                           cudaStream_t stream);

// Calls launch.operator()<In, Out, kForm>() with these types.
template <class Launch>
cudaError_t VisitTypes(const KernelTypes& types, const Launch& launch) {
  return VisitDType(types.scores, [&]<class In>() {
    const auto visit_form = [&]<class Out>() {
      switch (types.form) {
        case Form::kWhole:
          return launch.template operator()<In, Out, Form::kWhole>();
        case Form::kWholeMasked:
          return launch.template operator()<In, Out, Form::kWholeMasked>();
        case Form::kAny:
          return launch.template operator()<In, Out, Form::kAny>();
        case Form::kAnyMasked:
          return launch.template operator()<In, Out, Form::kAnyMasked>();
      }
      __builtin_unreachable();
    };
    return types.probs == types.scores ? visit_form.template operator()<In>()
                                       : visit_form.template operator()<float>();
  });
}

// ---- a row's sums ------------------------------------------------------------------------------

// exp(x - max) as 2^(x log2(e) - n), n the whole number next to max log2(e). So factors between
// different maxima are exact. Holds for any maximum, huge and infinite ones too.
struct ExpFrom {
  // Beyond it n has no exact neighbours. There x - max is exact wherever its exponential is not 0.
  static constexpr float kMostWhole = 0x1p23f;
  static constexpr float kLog2ERest = 1.925963033500e-8f;  // log2(e) - kLog2E
  static constexpr float kNothing = -1000.0f;              // an exponent of 0

  float max;
  float shift;  // -n
  bool plain;   // n is exact; else exponentials are relative to the maximum itself

  __device__ explicit ExpFrom(float row_max) : max(row_max) {
    // Relative to 0 where all x are -inf: the exponentials are 0 either way.
    shift = max == -kInfinity ? 0.0f : -rintf(__fmul_rn(max, kLog2E));
    plain = fabsf(shift) < kMostWhole;
  }
  // The same, of a row that all lanes of a warp hold: they go one way in Choose().
  __device__ static ExpFrom OfWarp(float row_max) {
    ExpFrom from(row_max);
    from.plain = __all_sync(kFullWarp, from.plain);
    return from;
  }
  __device__ float Plain(float x) const { return Exp2(fmaf(x, kLog2E, shift)); }
  __device__ float Careful(float x) const {
    if (x == max) return 1.0f;
    const float d = x - max;
    if (d < kNothing) return 0.0f;
    return Exp2(fmaf(d, kLog2E, d * kLog2ERest));
  }
  __device__ float operator()(float x) const { return plain ? Plain(x) : Careful(x); }

  // The factor from sums relative to another maximum, <= this one, to sums relative to this one.
  __device__ float Factor(const ExpFrom& other) const {
    if (other.max == -kInfinity) return 0.0f;
    if (plain) return other.plain ? Exp2(shift - other.shift) : Plain(other.max);
    const float careful = Careful(other.max);
    return other.plain ? careful * Exp2(-fmaf(other.max, kLog2E, other.shift)) : careful;
  }
  // The natural logarithm of a sum relative to this maximum.
  __device__ float Log(float sum) const {
    return plain ? (log2f(sum) - shift) * kLn2 : max + logf(sum);
  }

  // Calls over(exponential) with the variant that holds here.
  template <class Over>
  __device__ void Choose(Over over) const {
    if (plain) {
      over([&](float x) { return Plain(x); });
    } else {
      over([&](float x) { return Careful(x); });
    }
  }
};

// The sum of exp(x - max) over some of a row's keys. Where it is NaN, the lowest key whose x is.
struct Part {
  float max;
  float sum;
  int nan_key;
};

// The factor from exponentials relative to all.max to probabilities.
__device__ inline float WeightOf(const Part& all) {
  if (isnan(all.sum)) return 1.0f;  // SetNan() has written the row
  return all.sum > 0.0f ? __frcp_rn(all.sum) : 0.0f;
}

// Writes the row's logsumexp and status, by one thread.
__device__ inline void WriteRow(const Params& p, uint32_t row, const ExpFrom& from,
                                const Part& all) {
  if (p.logsumexp != nullptr) p.logsumexp[row] = from.Log(all.sum);
  RowStatus status{RowCode::kOk, -1};
  if (isnan(all.sum)) {
    status = {RowCode::kNanLogit, all.nan_key};
  } else if (all.max == -kInfinity) {
    status.code = RowCode::kEmptySupport;
  }
  p.status[row] = status;
}

// The largest divisor of n that is at most `most`; 1 where there is none.
constexpr int LargestDivisor(int n, int most) {
  int divisor = std::clamp(most, 1, n);
  while (n % divisor != 0) --divisor;
  return divisor;
}

// ---- a lane's part of a row --------------------------------------------------------------------

// Pointers to the row's tensors are computed where they are used: a thread may hold several rows.
struct ForwardRow : Row {
  float sink;
  const std::byte* mask;  // of key 0
};

template <Form kForm>
__device__ inline ForwardRow ForwardRowAt(const Params& p, uint32_t index) {
  ForwardRow row{RowAt(p.rows, index), -kInfinity, nullptr};
  if (IsMasked(kForm) || p.sinks != nullptr) {
    const Place place = p.rows.PlaceOf(row.index);
    if (p.sinks != nullptr) row.sink = p.sinks[place.head];
    if constexpr (IsMasked(kForm)) {
      const int64_t first = place.batch * p.mask.batch_stride + place.head * p.mask.head_stride +
                            place.query * p.mask.query_stride - p.mask.origin;
      row.mask = static_cast<const std::byte*>(p.mask.data) + first * MaskBytes(p.mask);
    }
  }
  return row;
}

// Masks are loaded by words too: with both, a warp that holds whole rows has too many loads under
// way. A lane with many elements has no registers for the words after them. `held`: elements of a
// lane.
constexpr Access ForwardAccessOf(Form form, int elements, int lanes, int held, bool one_warp) {
  const bool blocks = (IsMasked(form) && one_warp) || held > 48;
  return blocks ? Access::kBlocks : AccessOf(elements, lanes);
}

template <class In, class Out, Form kForm, int kLanes, int kCount, bool kOneWarp>
using ForwardLanes = LaneVectors<In, Out, IsWhole(kForm),
                                 ForwardAccessOf(kForm, kElements<In, Out>, kLanes,
                                                 kCount* kElements<In, Out>, kOneWarp),
                                 kLanes, kCount, kOneWarp>;

template <class In, class Out, Form kForm, int kLanes, int kCount, bool kOneWarp>
struct ForwardVectors : ForwardLanes<In, Out, kForm, kLanes, kCount, kOneWarp> {
  using Base = ForwardLanes<In, Out, kForm, kLanes, kCount, kOneWarp>;
  using Base::Base;
  using Base::E;
  using Base::Index;
  static constexpr int kHeld = kCount * E;
  using Raw = typename Base::Raw;

  // Starts the loads of what the query sees.
  __device__ void Load(const Params& p, const ForwardRow& row, Raw& raw) const {
    const In* scores = p.scores.Row<const In>(row.index);
    if constexpr (!IsWhole(kForm)) {
      raw.Load(scores, row.seen, Base::first);
    } else {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (row.seen.Some<E>(Index(v))) LoadAligned<true>(scores + Index(v), raw.words[v]);
      }
    }
  }

  // Turns what was loaded into vectors. Logits() and MaxLogit() do it too.
  __device__ void Align(const Params& p, const ForwardRow& row, Raw& raw) const {
    if constexpr (!IsWhole(kForm))
      raw.Align(p.scores.Row<const In>(row.index), Base::TurnsOf(p.rows, row));
  }

  // Computes x of the vectors that the query sees a part of; -inf for keys it does not see. Returns
  // the largest.
  __device__ float Logits(const Params& p, const ForwardRow& row, Raw& raw,
                          float (&x)[kHeld]) const {
    Align(p, row, raw);
    if constexpr (IsMasked(kForm))
      return VisitMask(p.mask, [&]<class M>() { return MaskedLogits<M>(p, row, raw, x); });
    float max = -kInfinity;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!row.seen.Some<E>(Index(v))) continue;
      ScaledLogits(p, row, raw, v, x + v * E);
      max = fmaxf(max, MaxOf(x + v * E));
    }
    return max;
  }

  // Turns x into exponentials relative to `from` and returns their sum.
  __device__ float Exponentials(const ExpFrom& from, const ForwardRow& row,
                                float (&x)[kHeld]) const {
    float sums[4] = {};
    from.Choose([&](auto exponential) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (!row.seen.Some<E>(Index(v))) continue;
#pragma unroll
        for (int e = 0; e < E; ++e) {
          x[v * E + e] = exponential(x[v * E + e]);
          sums[e % 4] += x[v * E + e];
        }
      }
    });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // The next four are for rows without a mask. They keep only what was loaded: fewer registers, but
  // exponentials are taken twice.
  __device__ float MaxLogit(const Params& p, const ForwardRow& row, Raw& raw) const {
    static_assert(sizeof(In) == 2);
    using Pair = PairOf<In>;
    Align(p, row, raw);
    // Two scores at once, unscaled; negated where the scale is negative.
    const uint32_t flip = p.scale < 0.0f ? 0x80008000u : 0u;
    Pair pair = {static_cast<In>(-kInfinity), static_cast<In>(-kInfinity)};
    float max = -kInfinity;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (row.seen.All<E>(Index(v))) {
#pragma unroll
        for (int w = 0; w < kWords<In, E>; ++w) {
          const uint32_t word = raw.words[v][w] ^ flip;
          pair = __hmax2(pair, reinterpret_cast<const Pair&>(word));
        }
      } else if (row.seen.Some<E>(Index(v))) {
        float x[E];
        ScaledLogits(p, row, raw, v, x);
        max = fmaxf(max, MaxOf(x));
      }
    }
    const float of_pair = fmaxf(ToFloat(pair.x), ToFloat(pair.y));
    return fmaxf(max, __fmul_rn(fabsf(p.scale), of_pair));
  }
  __device__ float SumOfExponentials(const Params& p, const ExpFrom& from, const ForwardRow& row,
                                     Raw& raw) const {
    Forget(raw);
    float sums[4] = {};
    from.Choose([&](auto exponential) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (!row.seen.Some<E>(Index(v))) continue;
        float x[E];
        ScaledLogits(p, row, raw, v, x);
#pragma unroll
        for (int e = 0; e < E; ++e) sums[e % 4] += exponential(x[e]);
      }
    });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  __device__ int NanKey(const Params& p, const ForwardRow& row, Raw& raw) const {
    Forget(raw);
    int key = kNoPosition;
#pragma unroll
    for (int v = kCount - 1; v >= 0; --v) {
      if (!row.seen.Some<E>(Index(v))) continue;
      float x[E];
      ScaledLogits(p, row, raw, v, x);
#pragma unroll
      for (int e = E - 1; e >= 0; --e) {
        if (isnan(x[e])) key = Index(v) + e;
      }
    }
    return key;
  }
  // `nan`: the row holds a NaN.
  __device__ void StoreExponentials(const Params& p, const ExpFrom& from, const ForwardRow& row,
                                    Raw& raw, float weight, bool nan) const {
    Forget(raw);
    Base::Store(p.rows, row, p.probs.Row<Out>(row.index), [&](int v, float(&x)[E]) {
      ScaledLogits(p, row, raw, v, x);
      if (nan) {
#pragma unroll
        for (int e = 0; e < E; ++e) {
          x[e] = row.seen.Has(Index(v) + e) ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        }
      } else {
        from.Choose([&](auto exponential) {
#pragma unroll
          for (int e = 0; e < E; ++e) x[e] = exponential(x[e]) * weight;
        });
      }
    });
  }

  // The lowest key whose exponential is NaN.
  __device__ int NanKey(const ForwardRow& row, const float (&x)[kHeld]) const {
    int key = kNoPosition;
#pragma unroll
    for (int i = kHeld - 1; i >= 0; --i) {
      if (row.seen.Some<E>(Index(i / E)) && isnan(x[i])) key = Index(i / E) + i % E;
    }
    return key;
  }

  // Sets x of a row with NaN: NaN for every key the query sees, else 0.
  __device__ void SetNan(const Params& p, const ForwardRow& row, float (&x)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int key = Index(i / E) + i % E;
      const bool sees = row.seen.Has(key) && (!IsMasked(kForm) || !Hides(p.mask, row.mask, key));
      x[i] = sees ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
  }

  // Writes x * weight, and zeros where WriteUnseen() has not. By whole warps.
  __device__ void Store(const Params& p, const ForwardRow& row, const float (&x)[kHeld],
                        float weight) const {
    Base::Store(p.rows, row, p.probs.Row<Out>(row.index), [&](int v, float(&weighted)[E]) {
#pragma unroll
      for (int e = 0; e < E; ++e) weighted[e] = x[v * E + e] * weight;
    });
  }

 private:
  // Makes the compiler unpack again: it has no registers for what it would keep.
  __device__ static void Forget(Raw& raw) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
#pragma unroll
      for (uint32_t& word : raw.words[v]) asm volatile("" : "+r"(word));
    }
  }

  // x of a vector, before any mask.
  __device__ static void Scale(const Params& p, const uint32_t* raw, float* x) {
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = __fmul_rn(p.scale, WordElement<In>(raw, e));
  }
  // Sets to -inf what the query does not see of a vector at element `index`.
  __device__ static void Hide(const ForwardRow& row, int index, float* x) {
    if (row.seen.All<E>(index)) return;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      if (!row.seen.Has(index + e)) x[e] = -kInfinity;
    }
  }

  // The largest of E elements; NaN does not count; -inf where there is no other.
  __device__ static float MaxOf(const float* x) {
    float halves[2] = {fmaxf(x[0], -kInfinity), x[1]};
#pragma unroll
    for (int e = 2; e < E; ++e) halves[e % 2] = fmaxf(halves[e % 2], x[e]);
    return fmaxf(halves[0], halves[1]);
  }

  // x of the v-th vector, without a mask.
  __device__ void ScaledLogits(const Params& p, const ForwardRow& row, const Raw& raw, int v,
                               float* x) const {
    Scale(p, raw.words[v], x);
    Hide(row, Index(v), x);
  }

  template <class M>
  __device__ float MaskedLogits(const Params& p, const ForwardRow& row, const Raw& raw,
                                float (&x)[kHeld]) const {
    // As many loads under way as registers allow.
    constexpr int kMost = IsWhole(kForm) || E < 8 ? 20 / kWords<M, E> : 25 / (kWords<M, E> + 1);
    constexpr int kTogether = LargestDivisor(kCount, kMost);
    const M* mask = reinterpret_cast<const M*>(row.mask);
    float max = -kInfinity;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kTogether) {
      MaskVectors<M, E, IsWhole(kForm), kLanes, kTogether> masks;
      masks.Load(mask, Base::TurnsOf(p.rows, row).From(begin), Index(begin));
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        const int index = Index(begin + v);
        if (!row.seen.Some<E>(index)) continue;
        float* of_vector = x + (begin + v) * E;
        Scale(p, raw.words[begin + v], of_vector);
        masks.Apply(v, of_vector);
        Hide(row, index, of_vector);
        max = fmaxf(max, MaxOf(of_vector));
      }
    }
    return max;
  }
};

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_FORWARD_CUH_
