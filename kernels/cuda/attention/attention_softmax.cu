// attention_softmax: a row in the registers of the threads that own it, read once and written once.
//
// All loads of a row are under way before the first is waited for; meanwhile vectors that its query
// does not see are written as zeros, and cost nothing else. A warp finds its own maximum and sum,
// relative to a whole power of two, so that warps meet once: factors between them are exact, and a
// probability has the error of one rounded exponent.
//
//   lanes      keys <= 1024: 4 to 32 lanes a row
//   block      a warp for every 1024 keys, 32 elements a thread
//   long       16-bit rows of over 8192 keys without a mask: 64 elements a thread, kept as loaded,
//              and the exponentials taken twice
//   cluster    block and long, where a row needs more than one block (sm_90): its warps' sums cross
//              by shared memory
//   two reads  what does not fit: over 262144 keys (524288 where long); without clusters over 32768
//              (65536)
//
// Each has a form for rows that are whole aligned vectors, one for those with a mask, and one for
// any alignment: aligned blocks are loaded, and lanes hand each other the ends of their vectors.
//
// Cost: reads what the queries see and the mask, writes all keys. Causal at full size is 0.75 of a
// read and a write.
// Measured on an H200 (bench/results/h200/kernels.json), in percent of those bytes at the rate of a
// plain copy of the same run (3.93 TB/s):
//
//   bf16, keys        64  128  512 1024 2048 4096 8192 16384 32768 65536 131072
//   unmasked          91   94   99  101       102         104          93     86
//   causal                      91   95   86   96   97    93    88    78
//   bool mask                       103        94          87
//   f32, unmasked                             105
//   f32, causal                 93   97        98         102
//   off alignment     unmasked 85 (1023), causal 67 (4097); additive mask 73 (4096)
//
// Limited by: HBM. Up to some MB by the launch: [32,128,128] takes 3 us. From 65536 keys on by how
// few rows are under way, for a row's blocks wait for each other.
//
// Tried and dropped: exponentials relative to each warp's maximum itself (two rounded exponents,
// 5e-6); 16 elements a thread (2048 keys 92% instead of 108%, 16384 57% instead of 102%: what a
// warp does once a row decides); vectors dealt out over all warps of a row, so that each has some
// work in a causal row (4096 keys 90% instead of 100%: an idle warp is cheaper than one half busy);
// whole warps for rows of 64 to 512 keys, several rows each (128 keys 85% instead of 97%); the long
// way from 1024 keys on (2048 causal 83% instead of 89%); blocks of 256 threads above 8192 keys
// (16384 82% instead of 100%); blocks of 1024 for unmasked rows above 32768 (131072 77% instead of
// 88%); barriers with a computed name (a block claims all 16: 4096 68% instead of 105%); stores
// without a hint (backward 103% instead of 113% in one run, forward the same).
#include <algorithm>
#include <limits>
#include <type_traits>

#include "absl/types/span.h"
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

// Bytes of a mask's element.
__host__ __device__ inline int64_t MaskBytes(const AttentionMask& mask) {
  if (mask.kind == MaskKind::kBool) return 1;
  return mask.dtype == DType::kF32 ? 4 : 2;
}

// What a kernel need not look for at run time.
enum class Form {
  kWhole,        // no mask; scores and probs are whole vectors
  kWholeMasked,  // a mask, of whole vectors too
  kAny,
};

struct Params {
  PassRows rows;
  Matrix scores;
  Matrix probs;
  float scale;
  AttentionMask mask;
  const float* sinks;
  float* logsumexp;
  RowStatus* status;
};

// 2^(x log2(e) - n), n the whole number next to where x is the maximum, for any maximum, huge and
// infinite ones too: exponentials relative to it, and exact factors between different maxima.
struct ExpFrom {
  // Beyond it n has no exact neighbours; there x - max is exact where its exponential is not 0.
  static constexpr float kMostWhole = 0x1p23f;
  static constexpr float kLog2ERest = 1.925963033500e-8f;  // log2(e) - kLog2E
  static constexpr float kNothing = -1000.0f;              // an exponent of 0

  float max;
  float shift;  // -n
  bool plain;   // n is whole; else exponentials are relative to the maximum itself

  __device__ explicit ExpFrom(float row_max) : max(row_max) {
    // Relative to 0 where all is -inf: the exponentials are 0 either way.
    shift = max == -kInfinity ? 0.0f : -rintf(__fmul_rn(max, kLog2E));
    plain = fabsf(shift) < kMostWhole;
  }
  __device__ float Plain(float x) const { return Exp2(fmaf(x, kLog2E, shift)); }
  __device__ float Careful(float x) const {
    if (x == max) return 1.0f;
    const float d = x - max;
    if (d < kNothing) return 0.0f;
    return Exp2(fmaf(d, kLog2E, d * kLog2ERest));
  }
  __device__ float operator()(float x) const { return plain ? Plain(x) : Careful(x); }

  // What turns something relative to another maximum, <= this one, into the same relative to this.
  __device__ float Factor(const ExpFrom& other) const {
    if (other.max == -kInfinity) return 0.0f;
    if (plain) return other.plain ? Exp2(shift - other.shift) : Plain(other.max);
    const float careful = Careful(other.max);
    return other.plain ? careful * Exp2(-fmaf(other.max, kLog2E, other.shift)) : careful;
  }
  // Natural logarithm of a sum relative to this maximum.
  __device__ float Log(float sum) const {
    return plain ? (log2f(sum) - shift) * kLn2 : max + logf(sum);
  }
};

// Sum of exp(x - max) over some of a row's keys. Where the sum is NaN, the lowest key whose x is.
struct Part {
  float max;
  float sum;
  int nan_key;
};

// What a thread knows of its row. Its pointers are computed where they are used: a thread may hold
// several rows.
struct Row {
  uint32_t index;
  bool there;  // not beyond the launch's rows
  Seen seen;
  float sink;
  const std::byte* mask;  // of key 0
};

template <Form kForm>
__device__ inline Row RowAt(const Params& p, uint32_t index) {
  Row row{.index = index,
          .there = index < p.rows.count,
          .seen = {0, p.rows.keys},
          .sink = -kInfinity,
          .mask = nullptr};
  if (!row.there) row.index = 0;
  const bool masked = kForm != Form::kWhole && p.mask.kind != MaskKind::kNone;
  row.seen = p.rows.SeenBy(row.index);
  if (masked || p.sinks != nullptr) {
    const Place place = p.rows.PlaceOf(row.index);
    if (p.sinks != nullptr) row.sink = p.sinks[place.head];
    if (masked) {
      const int64_t first = place.batch * p.mask.batch_stride + place.head * p.mask.head_stride +
                            place.query * p.mask.query_stride - p.mask.origin;
      row.mask = static_cast<const std::byte*>(p.mask.data) + first * MaskBytes(p.mask);
    }
  }
  if (!row.there) row.seen = {0, 0};
  return row;
}

// Element `key` of an additive mask, or -inf where a bool mask masks.
__device__ inline float MaskAt(const Params& p, const std::byte* mask, int key) {
  if (p.mask.kind == MaskKind::kBool) return mask[key] != std::byte{0} ? -kInfinity : 0.0f;
  switch (p.mask.dtype) {
    case DType::kF32:
      return reinterpret_cast<const float*>(mask)[key];
    case DType::kF16:
      return ToFloat(reinterpret_cast<const __half*>(mask)[key]);
    default:
      return ToFloat(reinterpret_cast<const __nv_bfloat16*>(mask)[key]);
  }
}

// A lane's kCount vectors of a row, the first at element `first`; those of kLanes lanes are
// neighbours.
template <class In, class Out, Form kForm, int kLanes, int kCount>
struct LaneVectors {
  static constexpr int E = kElements<In, Out>;
  static constexpr int kHeld = kCount * E;
  using Raw = Blocks<In, E, kLanes, kCount>;

  int first;

  __device__ int Index(int v) const { return first + v * kLanes * E; }

  // Starts the loads of what the query sees.
  __device__ void Load(const Params& p, const Row& row, Raw& raw) const {
    const In* scores = p.scores.Row<const In>(row.index);
    if constexpr (kForm == Form::kAny) {
      raw.Load(scores, row.seen, first);
    } else {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (row.seen.Some<E>(Index(v))) LoadAligned<true>(scores + Index(v), raw.words[v]);
      }
    }
  }

  // Writes the vectors of which the query sees nothing, while the loads are under way.
  __device__ void WriteUnseen(const Params& p, const Row& row) const {
    if (kForm == Form::kAny || !p.rows.windowed || !row.there) return;
    Out* probs = p.probs.Row<Out>(row.index);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      constexpr uint32_t kZeros[kWords<Out, E>] = {};
      if (Index(v) < p.rows.keys && !row.seen.Some<E>(Index(v)))
        StoreAligned(probs + Index(v), kZeros);
    }
  }

  // x of the vectors of which the query sees some; -inf where it does not count. Returns the
  // largest.
  __device__ float Logits(const Params& p, const Row& row, Raw& raw, float (&x)[kHeld]) const {
    if constexpr (kForm == Form::kAny) raw.Align(p.scores.Row<const In>(row.index));
    if constexpr (kForm != Form::kWhole) {
      if (p.mask.kind == MaskKind::kBool) return Masked<uint8_t>(p, row, raw, x);
      if (p.mask.kind == MaskKind::kAdditive) {
        switch (p.mask.dtype) {
          case DType::kF32:
            return Masked<float>(p, row, raw, x);
          case DType::kF16:
            return Masked<__half>(p, row, raw, x);
          default:
            return Masked<__nv_bfloat16>(p, row, raw, x);
        }
      }
    }
    float max = -kInfinity;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!row.seen.Some<E>(Index(v))) continue;
      Scale(p, raw.words[v], x + v * E);
      Hide(row, Index(v), x + v * E);
      max = fmaxf(max, MaxOf(x + v * E));
    }
    return max;
  }

  // Turns x into exponentials relative to `from` and returns their sum.
  __device__ float Exponentials(const ExpFrom& from, const Row& row, float (&x)[kHeld]) const {
    float sums[4] = {};
    const auto over = [&](auto exponential) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (!row.seen.Some<E>(Index(v))) continue;
#pragma unroll
        for (int e = 0; e < E; ++e) {
          x[v * E + e] = exponential(x[v * E + e]);
          sums[e % 4] += x[v * E + e];
        }
      }
    };
    if (from.plain) {
      over([&](float value) { return from.Plain(value); });
    } else {
      over([&](float value) { return from.Careful(value); });
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // The same two for rows without a mask, that keep nothing but what was loaded: less to hold, and
  // the exponentials twice.
  __device__ float MaxLogit(const Params& p, const Row& row, Raw& raw) const {
    static_assert(sizeof(In) == 2);
    using Pair = std::conditional_t<std::is_same_v<In, __half>, __half2, __nv_bfloat162>;
    if constexpr (kForm == Form::kAny) raw.Align(p.scores.Row<const In>(row.index));
    // Two at once, of the scores themselves, negated where the scale is negative.
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
        Scale(p, raw.words[v], x);
        Hide(row, Index(v), x);
        max = fmaxf(max, MaxOf(x));
      }
    }
    const float of_pair = fmaxf(ToFloat(pair.x), ToFloat(pair.y));
    return fmaxf(max, __fmul_rn(fabsf(p.scale), of_pair));
  }
  __device__ float SumOfExponentials(const Params& p, const ExpFrom& from, const Row& row,
                                     Raw& raw) const {
    Forget(raw);
    float sums[4] = {};
    const auto over = [&](auto exponential) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (!row.seen.Some<E>(Index(v))) continue;
        float x[E];
        Scale(p, raw.words[v], x);
        Hide(row, Index(v), x);
#pragma unroll
        for (int e = 0; e < E; ++e) sums[e % 4] += exponential(x[e]);
      }
    };
    if (from.plain) {
      over([&](float value) { return from.Plain(value); });
    } else {
      over([&](float value) { return from.Careful(value); });
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  __device__ int NanKey(const Params& p, const Row& row, Raw& raw) const {
    Forget(raw);
    int key = kNoPosition;
#pragma unroll
    for (int v = kCount - 1; v >= 0; --v) {
      if (!row.seen.Some<E>(Index(v))) continue;
      float x[E];
      Scale(p, raw.words[v], x);
      Hide(row, Index(v), x);
#pragma unroll
      for (int e = E - 1; e >= 0; --e) {
        if (isnan(x[e])) key = Index(v) + e;
      }
    }
    return key;
  }
  // `nan`: the row holds one.
  __device__ void StoreExponentials(const Params& p, const ExpFrom& from, const Row& row, Raw& raw,
                                    float weight, bool nan) const {
    Forget(raw);
    StoreEach(p, row, [&](int v, float(&x)[E]) {
      Scale(p, raw.words[v], x);
      Hide(row, Index(v), x);
      if (nan) {
#pragma unroll
        for (int e = 0; e < E; ++e) {
          x[e] = row.seen.Has(Index(v) + e) ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        }
      } else if (from.plain) {
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] = from.Plain(x[e]) * weight;
      } else {
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] = from.Careful(x[e]) * weight;
      }
    });
  }

  // The lowest key whose exponential is NaN.
  __device__ int NanKey(const Row& row, const float (&x)[kHeld]) const {
    int key = kNoPosition;
#pragma unroll
    for (int i = kHeld - 1; i >= 0; --i) {
      if (row.seen.Some<E>(Index(i / E)) && isnan(x[i])) key = Index(i / E) + i % E;
    }
    return key;
  }

  // What a row with NaN gets: NaN for every key the query sees.
  __device__ void Spoil(const Params& p, const Row& row, float (&x)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int key = Index(i / E) + i % E;
      const bool sees =
          row.seen.Has(key) && (kForm == Form::kWhole || p.mask.kind == MaskKind::kNone ||
                                MaskAt(p, row.mask, key) != -kInfinity);
      x[i] = sees ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
  }

  // Writes x * weight, and zeros where WriteUnseen() has not. By whole warps.
  __device__ void Store(const Params& p, const Row& row, const float (&x)[kHeld],
                        float weight) const {
    StoreEach(p, row, [&](int v, float(&weighted)[E]) {
#pragma unroll
      for (int e = 0; e < E; ++e) weighted[e] = x[v * E + e] * weight;
    });
  }

 private:
  // Writes what probs(v, p) gives for vectors of which the query sees some.
  template <class Probs>
  __device__ void StoreEach(const Params& p, const Row& row, Probs probs) const {
    Out* out = p.probs.Row<Out>(row.index);
    const auto vector = [&](int v, uint32_t(&words)[kWords<Out, E>]) {
      if (!row.seen.Some<E>(Index(v))) return;
      float of_vector[E];
      probs(v, of_vector);
      Pack<Out, E>(of_vector, words);
    };
    if constexpr (kForm == Form::kAny) {
      StoreBlocks<Out, E, kLanes, kCount>(out, row.there, first, p.rows.keys, vector);
    } else {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        uint32_t words[kWords<Out, E>];
        vector(v, words);
        if (row.seen.Some<E>(Index(v))) StoreAligned(out + Index(v), words);
      }
    }
  }

  // Makes the compiler unpack again, rather than keep what it has no room for.
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
  // Takes out of a vector at element `index` what came along unseen.
  __device__ static void Hide(const Row& row, int index, float* x) {
    if (row.seen.All<E>(index)) return;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      if (!row.seen.Has(index + e)) x[e] = -kInfinity;
    }
  }

  // The largest of E elements, NaN apart; -inf where there is no other.
  __device__ static float MaxOf(const float* x) {
    float halves[2] = {fmaxf(x[0], -kInfinity), x[1]};
#pragma unroll
    for (int e = 2; e < E; ++e) halves[e % 2] = fmaxf(halves[e % 2], x[e]);
    return fmaxf(halves[0], halves[1]);
  }

  template <class M>
  __device__ float Masked(const Params& p, const Row& row, const Raw& raw,
                          float (&x)[kHeld]) const {
    constexpr int kMaskWords = kWords<M, E>;
    // As many loads under way as registers allow.
    constexpr int kTogether = std::clamp(16 / kMaskWords, 1, kCount);
    static_assert(kCount % kTogether == 0);
    const M* mask = reinterpret_cast<const M*>(row.mask);
    float max = -kInfinity;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kTogether) {
      Blocks<M, E, kLanes, kTogether> masks;
      if constexpr (kForm == Form::kWholeMasked) {
#pragma unroll
        for (int v = 0; v < kTogether; ++v) {
          const int index = Index(begin + v);
          if (row.seen.Some<E>(index)) LoadAligned<false>(mask + index, masks.words[v]);
        }
      } else {
        masks.Load(mask, row.seen, Index(begin));
        masks.Align(mask);
      }
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        if (!row.seen.Some<E>(Index(begin + v))) continue;
        Scale(p, raw.words[begin + v], x + (begin + v) * E);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          float& logit = x[(begin + v) * E + e];
          if constexpr (std::is_same_v<M, uint8_t>) {
            if ((masks.words[v][e / 4] & 0xffu << (e % 4 * 8)) != 0) logit = -kInfinity;
          } else {
            const float added = WordElement<M>(masks.words[v], e);
            logit = added == -kInfinity ? -kInfinity : __fadd_rn(logit, added);
          }
        }
        Hide(row, Index(begin + v), x + (begin + v) * E);
        max = fmaxf(max, MaxOf(x + (begin + v) * E));
      }
    }
    return max;
  }
};

// What turns exponentials relative to all.max into probabilities.
__device__ inline float WeightOf(const Part& all) {
  if (isnan(all.sum)) return 1.0f;  // of what Spoil() left
  return all.sum > 0.0f ? __frcp_rn(all.sum) : 0.0f;
}

// Writes what belongs to the row as a whole; by one thread.
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

// ---- rows a warp holds -------------------------------------------------------------------------

constexpr int kLanesThreads = 128;
constexpr int kLanesResident = 8;  // blocks per multiprocessor

// kLanes lanes to a row, kRows rows to a lane.
template <class In, class Out, Form kForm, int kLanes, int kCount, int kRows>
__global__ void __launch_bounds__(kLanesThreads, kLanesResident)
    LanesKernel(const __grid_constant__ Params p) {
  constexpr int kGroups = 32 / kLanes;
  using Vectors = LaneVectors<In, Out, kForm, kLanes, kCount>;
  const int lane = threadIdx.x % 32;
  const uint32_t warp = blockIdx.x * (kLanesThreads / 32) + threadIdx.x / 32;
  const uint32_t first_row = warp * kGroups * kRows + lane / kLanes;
  const Vectors vectors{lane % kLanes * Vectors::E};
  Row rows[kRows];
  typename Vectors::Raw raw[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = RowAt<kForm>(p, first_row + r * kGroups);
    vectors.Load(p, rows[r], raw[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) vectors.WriteUnseen(p, rows[r]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Row& row = rows[r];
    float x[Vectors::kHeld];
    const float max = vectors.Logits(p, row, raw[r], x);
    Part all{.max = fmaxf(LanesMax<kLanes>(max), row.sink)};
    const ExpFrom from(all.max);
    all.sum = LanesSum<kLanes>(vectors.Exponentials(from, row, x));
    if (__any_sync(kFullWarp, isnan(all.sum))) {
      all.nan_key = LanesMin<kLanes>(vectors.NanKey(row, x));
      if (isnan(all.sum)) vectors.Spoil(p, row, x);
    }
    if (p.sinks != nullptr) all.sum += from(row.sink);
    vectors.Store(p, row, x, WeightOf(all));
    if (row.there && lane % kLanes == 0) WriteRow(p, first_row + r * kGroups, from, all);
  }
}

// ---- rows of blocks ----------------------------------------------------------------------------

// The row's statistics from its active warps', sink included, in an order that depends on which
// they are alone. By a whole warp, the same in every lane.
template <bool kCluster>
__device__ inline Part MergeParts(const Part* parts, const ActiveWarps& active, float sink) {
  const int lane = threadIdx.x % 32;
  Part all{.max = sink, .sum = 0.0f, .nan_key = kNoPosition};
  const auto each = [&](auto use) {
    if constexpr (kCluster) {
#pragma unroll 1
      for (int i = active.begin + lane; i < active.end; i += 32) use(parts[i]);
    } else {
      if (active.begin + lane < active.end) use(parts[active.begin + lane]);
    }
  };
  each([&](const Part& part) { all.max = fmaxf(all.max, part.max); });
  all.max = LanesMax<32>(all.max);
  const ExpFrom from(all.max);
  each([&](const Part& part) {
    all.sum += part.sum * from.Factor(ExpFrom(part.max));
    all.nan_key = min(all.nan_key, part.nan_key);
  });
  all.sum = LanesSum<32>(all.sum) + from(sink);
  if (isnan(all.sum)) all.nan_key = LanesMin<32>(all.nan_key);
  return all;
}

constexpr int kBlockHeld = 32;     // elements of a thread
constexpr int kTwoReadsHeld = 16;  // at a time

// A block to a row, or a cluster, all of the row in registers.
template <class In, class Out, Form kForm, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1) BlockKernel(const __grid_constant__ Params p) {
  using Vectors = LaneVectors<In, Out, kForm, 32, kBlockHeld / kElements<In, Out>>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxClusterBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt<kForm>(p, me.Row());
  const Vectors vectors{me.warp * 32 * Vectors::kHeld + lane * Vectors::E};
  const ActiveWarps active(row.seen, 32 * Vectors::kHeld);
  const bool is_active = active.Has(me.warp);
  typename Vectors::Raw raw = {};
  float x[Vectors::kHeld];
  Part part{.max = -kInfinity, .sum = 0.0f, .nan_key = kNoPosition};
  if (is_active) vectors.Load(p, row, raw);
  vectors.WriteUnseen(p, row);
  if (is_active) {
    part.max = LanesMax<32>(vectors.Logits(p, row, raw, x));
    const ExpFrom from(part.max);
    part.sum = LanesSum<32>(vectors.Exponentials(from, row, x));
    if (isnan(part.sum)) part.nan_key = LanesMin<32>(vectors.NanKey(row, x));
  } else if (!kCluster) {
    // The block needs no more of this warp. In a cluster it must stay, for others write to the
    // shared memory of its block.
    vectors.Store(p, row, x, 0.0f);
    return;
  }
  me.Share(part, is_active, parts);
  if (is_active) {
    const Part all = MergeParts<kCluster>(parts, active, row.sink);
    const ExpFrom from_all(all.max);
    float weight = WeightOf(all);
    if (isnan(all.sum)) {
      vectors.Spoil(p, row, x);
    } else {
      weight *= from_all.Factor(ExpFrom(part.max));
    }
    if (me.warp == active.begin && lane == 0) WriteRow(p, me.Row(), from_all, all);
    vectors.Store(p, row, x, weight);
  } else {
    vectors.Store(p, row, x, 0.0f);
  }
}

constexpr int kLongHeld = 64;
constexpr int64_t kLongKeys = 8192;  // beyond them a row is long

// As BlockKernel, for long rows of 16 bits without a mask: a thread holds twice as many elements,
// as they were loaded.
template <class In, class Out, Form kForm, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1) LongKernel(const __grid_constant__ Params p) {
  using Vectors = LaneVectors<In, Out, kForm, 32, kLongHeld / kElements<In, Out>>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxClusterBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt<kForm>(p, me.Row());
  const Vectors vectors{me.warp * 32 * Vectors::kHeld + lane * Vectors::E};
  const ActiveWarps active(row.seen, 32 * Vectors::kHeld);
  const bool is_active = active.Has(me.warp);
  typename Vectors::Raw raw = {};
  Part part{.max = -kInfinity, .sum = 0.0f, .nan_key = kNoPosition};
  if (is_active) vectors.Load(p, row, raw);
  vectors.WriteUnseen(p, row);
  if (is_active) {
    part.max = LanesMax<32>(vectors.MaxLogit(p, row, raw));
    part.sum = LanesSum<32>(vectors.SumOfExponentials(p, ExpFrom(part.max), row, raw));
    if (isnan(part.sum)) part.nan_key = LanesMin<32>(vectors.NanKey(p, row, raw));
  } else if (!kCluster) {
    vectors.StoreExponentials(p, ExpFrom(0.0f), row, raw, 0.0f, false);
    return;
  }
  me.Share(part, is_active, parts);
  Part all{.max = 0.0f, .sum = 0.0f, .nan_key = kNoPosition};
  if (is_active) {
    all = MergeParts<kCluster>(parts, active, row.sink);
    if (me.warp == active.begin && lane == 0) WriteRow(p, me.Row(), ExpFrom(all.max), all);
  }
  vectors.StoreExponentials(p, ExpFrom(all.max), row, raw, WeightOf(all), isnan(all.sum));
}

// A block or a cluster to a row that they read twice.
template <class In, class Out, Form kForm, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    TwoReadsKernel(const __grid_constant__ Params p) {
  using Vectors = LaneVectors<In, Out, kForm, 32, kTwoReadsHeld / kElements<In, Out>>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxClusterBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt<kForm>(p, me.Row());
  const int round = me.warps * 32 * Vectors::kHeld;
  const int first = me.warp * 32 * Vectors::kHeld + lane * Vectors::E;
  Part part{.max = -kInfinity, .sum = 0.0f, .nan_key = kNoPosition};
#pragma unroll 1
  for (int begin = row.seen.begin / round * round; begin < row.seen.end; begin += round) {
    const Vectors vectors{begin + first};
    typename Vectors::Raw raw = {};
    vectors.Load(p, row, raw);
    float x[Vectors::kHeld];
    const ExpFrom before(part.max);
    part.max = fmaxf(part.max, vectors.Logits(p, row, raw, x));
    const ExpFrom from(part.max);
    const float sum = vectors.Exponentials(from, row, x);
    if (isnan(sum)) part.nan_key = min(part.nan_key, vectors.NanKey(row, x));
    part.sum = part.sum * from.Factor(before) + sum;
  }
  const ExpFrom mine(part.max);
  part.max = LanesMax<32>(part.max);
  part.sum = LanesSum<32>(part.sum * ExpFrom(part.max).Factor(mine));
  if (isnan(part.sum)) part.nan_key = LanesMin<32>(part.nan_key);
  me.Share(part, true, parts);
  const Part all = MergeParts<kCluster>(parts, ActiveWarps({0, me.warps}, 1), row.sink);
  const ExpFrom from(all.max);
  if (me.warp == 0 && lane == 0) WriteRow(p, me.Row(), from, all);
#pragma unroll 1
  for (int begin = 0; begin < p.rows.keys; begin += round) {
    const Vectors vectors{begin + first};
    float x[Vectors::kHeld];
    typename Vectors::Raw raw = {};
    vectors.Load(p, row, raw);
    vectors.WriteUnseen(p, row);
    if (isnan(all.sum)) {
      vectors.Spoil(p, row, x);
    } else {
      vectors.Logits(p, row, raw, x);
      vectors.Exponentials(from, row, x);
    }
    vectors.Store(p, row, x, WeightOf(all));
  }
}

// ---- variants ----------------------------------------------------------------------------------

using Launch = cudaError_t (*)(const Params&, cudaStream_t);

// Elements a lane holds, of all its rows.
template <class In, class Out, Form kForm>
constexpr int kLaneHeld = kForm == Form::kWhole&& kElements<In, Out> == 8 ? 32 : 16;

// kHeld: elements of one row that a lane holds.
template <class In, class Out, Form kForm, int kLanes, int kHeld>
cudaError_t LaunchLanes(const Params& p, cudaStream_t stream) {
  constexpr int kRows = std::max(1, kLaneHeld<In, Out, kForm> / kHeld);
  constexpr unsigned kBlockRows = kLanesThreads / kLanes * kRows;
  LanesKernel<In, Out, kForm, kLanes, kHeld / kElements<In, Out>, kRows>
      <<<(p.rows.count + kBlockRows - 1) / kBlockRows, kLanesThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

struct Variant {
  int64_t max_keys;
  Launch launch;
};

template <class In, class Out, Form kForm>
constexpr Variant kLanesVariants[] = {
    {64, &LaunchLanes<In, Out, kForm, 4, 16>},    {128, &LaunchLanes<In, Out, kForm, 4, 32>},
    {256, &LaunchLanes<In, Out, kForm, 8, 32>},   {512, &LaunchLanes<In, Out, kForm, 16, 32>},
    {1024, &LaunchLanes<In, Out, kForm, 32, 32>},
};

template <class In, class Out, Form kForm>
cudaError_t LaunchRows(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  for (const Variant& variant : kLanesVariants<In, Out, kForm>) {
    if (p.rows.keys <= variant.max_keys) return variant.launch(p, stream);
  }
  // Where part of a row is all there is to do, or a mask is waited for, blocks that are fewer and
  // larger did better.
  const bool masked = p.mask.kind != MaskKind::kNone;
  const int spread = masked || p.rows.windowed ? kMaxRowThreads : kMaxRowThreads / 2;
  if constexpr (kElements<In, Out> == 8 && kForm != Form::kWholeMasked) {
    const BlockPlan plan = PlanBlocks(p.rows.keys, kLongHeld, scratch.clusters, spread);
    if (p.rows.keys > kLongKeys && !masked && !plan.two_reads) {
      return LaunchBlocks(
          plan.blocks > 1 ? &LongKernel<In, Out, kForm, true> : &LongKernel<In, Out, kForm, false>,
          plan, p, stream);
    }
  }
  const BlockPlan plan = PlanBlocks(p.rows.keys, kBlockHeld, scratch.clusters, spread);
  const bool cluster = plan.blocks > 1;
  const auto kernel =
      plan.two_reads
          ? (cluster ? &TwoReadsKernel<In, Out, kForm, true>
                     : &TwoReadsKernel<In, Out, kForm, false>)
          : (cluster ? &BlockKernel<In, Out, kForm, true> : &BlockKernel<In, Out, kForm, false>);
  return LaunchBlocks(kernel, plan, p, stream);
}

// Whether rows of the mask are whole vectors of `elements`, each aligned.
bool MaskIsWhole(const AttentionMask& mask, int64_t keys, int elements) {
  const int64_t bytes = std::min<int64_t>(16, elements * MaskBytes(mask));
  const int64_t strides[] = {mask.batch_stride, mask.head_stride, mask.query_stride, mask.origin};
  return reinterpret_cast<uintptr_t>(mask.data) % bytes == 0 && keys % elements == 0 &&
         std::all_of(std::begin(strides), std::end(strides),
                     [&](int64_t stride) { return stride * MaskBytes(mask) % bytes == 0; });
}

template <class In, class Out>
cudaError_t Run(const AttentionSoftmaxArgs& args, const Scratch& scratch, cudaStream_t stream) {
  constexpr int E = kElements<In, Out>;
  Params p{.scores = MatrixOf<In, E>(args.scores.data, args.scores.row_stride, args.shape.keys),
           .probs = MatrixOf<Out, E>(args.probs.data, args.probs.row_stride, args.shape.keys),
           .scale = args.scale,
           .mask = args.mask,
           .sinks = args.sinks,
           .logsumexp = args.logsumexp,
           .status = args.status};
  const bool whole = p.scores.whole && p.probs.whole;
  const auto launch = !whole                              ? &LaunchRows<In, Out, Form::kAny>
                      : args.mask.kind == MaskKind::kNone ? &LaunchRows<In, Out, Form::kWhole>
                      : MaskIsWhole(args.mask, args.shape.keys, E)
                          ? &LaunchRows<In, Out, Form::kWholeMasked>
                          : &LaunchRows<In, Out, Form::kAny>;
  for (int64_t begin = 0; begin < args.shape.rows; begin += PassRows::kMost) {
    Params pass = p;
    pass.rows = PassRows(args.shape, args.window, begin,
                         std::min(PassRows::kMost, args.shape.rows - begin));
    pass.scores.Skip(begin);
    pass.probs.Skip(begin);
    if (pass.logsumexp != nullptr) pass.logsumexp += begin;
    pass.status += begin;
    const cudaError_t error = launch(pass, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

struct TypeRow {
  DType scores;
  DType probs;
  cudaError_t (*run)(const AttentionSoftmaxArgs&, const Scratch&, cudaStream_t);
};

constexpr TypeRow kTypes[] = {
    {DType::kF32, DType::kF32, &Run<float, float>},
    {DType::kF16, DType::kF16, &Run<__half, __half>},
    {DType::kF16, DType::kF32, &Run<__half, float>},
    {DType::kBF16, DType::kBF16, &Run<__nv_bfloat16, __nv_bfloat16>},
    {DType::kBF16, DType::kF32, &Run<__nv_bfloat16, float>},
};

}  // namespace

cudaError_t AttentionSoftmax(const AttentionSoftmaxArgs& args, const Scratch& scratch,
                             cudaStream_t stream) {
  const TypeRow* type = kTypes;
  while (type->scores != args.scores.dtype || type->probs != args.probs.dtype) ++type;
  return type->run(args, scratch, stream);
}

}  // namespace logitd::cuda
