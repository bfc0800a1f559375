// attention_softmax_backward: y and dy of a row in registers as they were loaded, one sum, one
// write.
//
// Rows are dealt out as in attention_softmax.cu: lanes up to 512 keys (768 where rows are not whole
// vectors), a block, a cluster, two reads. A dy that is not finite must not count where y is 0.
// Such a dy makes the sum NaN. So rows are summed without a look at y, and only a row whose sum is
// NaN is summed again. For the sinks' gradient (sink_gradient.cu) rows leave sum y dy in scratch.
//
// Cost: reads y and dy where the queries see, writes all keys; floor: those bytes at a plain copy's
// rate. H200, bf16: unmasked 94 to 110%, causal 98 to 105%, off alignment 88 to 104%
// (bench/results/h200/kernels.json; two reads to a write go faster than a copy). Limited by: HBM.
// Dropped: 32 16-bit elements a thread from 512 keys on (1024 keys 67%: the compiler spilled), 16
// for all rows (16384 keys 86%); rows off alignment through shared memory (4 to 14% slower).
#include <algorithm>

#include "absl/types/span.h"
#include "kernels/cuda/attention/row_threads.cuh"
#include "kernels/cuda/attention/rows.cuh"
#include "kernels/cuda/attention/sink_gradient.h"
#include "kernels/cuda/attention/vectors.cuh"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace attention {
namespace {

struct Params {
  PassRows rows;
  Matrix probs;
  Matrix d_probs;
  Matrix d_scores;
  float scale;
  float* dots;  // [rows], sum of y dy; null: not wanted
  RowStatus* status;
};

// The sum of y dy over some of a row's keys, and the lowest key where y is NaN, or where dy is NaN
// and y is not 0.
struct Part {
  float sum;
  int nan_key;
};

// kWhole: the rows of all tensors are whole vectors, each aligned.
template <class In, class Out, bool kWhole, int kLanes, int kCount, bool kOneWarp>
struct BackwardVectors
    : LaneVectors<In, Out, kWhole, AccessOf(kElements<In, Out>, kLanes), kLanes, kCount, kOneWarp> {
  using Base =
      LaneVectors<In, Out, kWhole, AccessOf(kElements<In, Out>, kLanes), kLanes, kCount, kOneWarp>;
  using Base::Base;
  using Base::E;
  using Base::Index;
  struct Held {
    typename Base::Raw y;
    typename Base::Raw dy;
  };

  // Starts the loads of what the query sees. All else stays 0.
  __device__ void Load(const Params& p, const Row& row, Held& held) const {
    const In* y = p.probs.Row<const In>(row.index);
    const In* dy = p.d_probs.Row<const In>(row.index);
    if constexpr (kWhole) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (!row.seen.Some<E>(Index(v))) continue;
        LoadAligned<true>(y + Index(v), held.y.words[v]);
        LoadAligned<true>(dy + Index(v), held.dy.words[v]);
      }
    } else {
      held.y.Load(y, row.seen, Base::first);
      held.dy.Load(dy, row.seen, Base::first);
    }
  }

  // Aligns what was loaded, and zeros the elements that the query does not see.
  __device__ void Take(const Params& p, const Row& row, Held& held) const {
    if constexpr (!kWhole) {
      const auto turns = Base::TurnsOf(p.rows, row);
      held.y.Align(p.probs.Row<const In>(row.index), turns);
      held.dy.Align(p.d_probs.Row<const In>(row.index), turns);
    }
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int index = Index(v);
      if (!row.seen.Some<E>(index) || row.seen.All<E>(index)) continue;
#pragma unroll
      for (int w = 0; w < kWords<In, E>; ++w) {
        constexpr int kPerWord = 4 / static_cast<int>(sizeof(In));
        uint32_t keep = 0;
#pragma unroll
        for (int e = 0; e < kPerWord; ++e) {
          constexpr uint32_t kElement = kPerWord == 1 ? ~0u : 0xffffu;
          if (row.seen.Has(index + w * kPerWord + e)) keep |= kElement << (e * 16);
        }
        held.y.words[v][w] &= keep;
        held.dy.words[v][w] &= keep;
      }
    }
  }

  // kCareful: where y is 0, dy counts as 0 whatever it is. Without kCareful that holds only for
  // finite dy; other dy make the sum NaN.
  template <bool kCareful>
  __device__ float Dot(const Row& row, const Held& held) const {
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!row.seen.Some<E>(Index(v))) continue;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const float y = WordElement<In>(held.y.words[v], e);
        const float dy = WordElement<In>(held.dy.words[v], e);
        sums[e % 4] = fmaf(y, kCareful && y == 0.0f ? 0.0f : dy, sums[e % 4]);
      }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  __device__ int NanKey(const Row& row, const Held& held) const {
    int key = kNoPosition;
#pragma unroll
    for (int v = kCount - 1; v >= 0; --v) {
      if (!row.seen.Some<E>(Index(v))) continue;
#pragma unroll
      for (int e = E - 1; e >= 0; --e) {
        const float y = WordElement<In>(held.y.words[v], e);
        if (isnan(y) || (y != 0.0f && isnan(WordElement<In>(held.dy.words[v], e))))
          key = Index(v) + e;
      }
    }
    return key;
  }

  // Without this the compiler keeps what it unpacked for Dot(), and has no registers for it.
  __device__ static void Forget(Held& held) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
#pragma unroll
      for (int w = 0; w < kWords<In, E>; ++w) {
        asm volatile("" : "+r"(held.y.words[v][w]), "+r"(held.dy.words[v][w]));
      }
    }
  }

  // The part of kLanes lanes, the same in each. `odd`: there may be a dy that is not finite where y
  // is 0.
  __device__ Part PartOf(const Row& row, Held& held, bool& odd) const {
    Part part{LanesSum<kLanes>(Dot<false>(row, held)), kNoPosition};
    Forget(held);
    odd = isnan(part.sum);
    if (__any_sync(kFullWarp, odd)) {
      const float careful = LanesSum<kLanes>(Dot<true>(row, held));
      Forget(held);
      const int nan_key = LanesMin<kLanes>(NanKey(row, held));
      Forget(held);
      if (odd) part = {careful, nan_key};
    }
    return part;
  }

  // Writes the gradient, and zeros where WriteUnseen() has not. By whole warps.
  __device__ void Store(const Params& p, const Row& row, const Held& held, float dot,
                        bool odd) const {
    // Where y is 0, dy - dot must not overflow either. With the largest dy it may, from here on.
    const bool careful = odd || !(fabsf(dot) < 0x1p103f);
    Base::Store(p.rows, row, p.d_scores.Row<Out>(row.index), [&](int v, float(&d)[E]) {
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const float y = WordElement<In>(held.y.words[v], e);
        // Adds 0: no -0 where y is 0.
        d[e] = fmaf(y * (WordElement<In>(held.dy.words[v], e) - dot), p.scale, 0.0f);
      }
      if (careful) {
#pragma unroll
        for (int e = 0; e < E; ++e) {
          if (WordElement<In>(held.y.words[v], e) == 0.0f) d[e] = 0.0f;
        }
      }
    });
  }
};

// Writes the row's sum and status, by one thread.
__device__ inline void WriteRow(const Params& p, uint32_t row, const Part& all) {
  if (p.dots != nullptr) p.dots[row] = all.sum;
  p.status[row] = all.nan_key == kNoPosition ? RowStatus{RowCode::kOk, -1}
                                             : RowStatus{RowCode::kNanLogit, all.nan_key};
}

// ---- rows a warp holds -------------------------------------------------------------------------

// kLanes lanes hold a row, and each lane a part of kRows rows.
template <class In, class Out, bool kWhole, int kLanes, int kCount, int kRows>
__global__ void __launch_bounds__(kLanesThreads, kLanesResident)
    LanesKernel(const __grid_constant__ Params p) {
  constexpr int kGroups = 32 / kLanes;
  using Vectors = BackwardVectors<In, Out, kWhole, kLanes, kCount, true>;
  const int lane = threadIdx.x % 32;
  const uint32_t warp = blockIdx.x * (kLanesThreads / 32) + WarpInBlock();
  const uint32_t first_row = warp * kGroups * kRows + lane / kLanes;
  const Vectors vectors(0);
  Row rows[kRows];
  typename Vectors::Held held[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = RowAt(p.rows, first_row + r * kGroups);
    vectors.Load(p, rows[r], held[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    vectors.WriteUnseen(p.rows, rows[r], p.d_scores.Row<Out>(rows[r].index));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    vectors.Take(p, rows[r], held[r]);
    bool odd;
    const Part all = vectors.PartOf(rows[r], held[r], odd);
    vectors.Store(p, rows[r], held[r], all.sum, odd);
    if (rows[r].in_pass && lane % kLanes == 0) WriteRow(p, first_row + r * kGroups, all);
  }
}

// ---- rows of blocks ----------------------------------------------------------------------------

// The row's part from its active warps' parts. Their order depends only on which warps are active.
// By a whole warp, the same in every lane.
template <bool kCluster>
__device__ inline Part MergeParts(const Part* parts, const ActiveWarps& active) {
  Part all{.sum = 0.0f, .nan_key = kNoPosition};
#pragma unroll 1
  for (int i = active.begin + threadIdx.x % 32; i < active.end; i += 32) {
    all.sum += parts[i].sum;
    all.nan_key = min(all.nan_key, parts[i].nan_key);
    if constexpr (!kCluster) break;
  }
  return {LanesSum<32>(all.sum), LanesMin<32>(all.nan_key)};
}

// A block or a cluster holds a row in registers. kHeld: elements of a thread.
template <class In, class Out, bool kWhole, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1) BlockKernel(const __grid_constant__ Params p) {
  using Vectors = BackwardVectors<In, Out, kWhole, 32, kHeld / kElements<In, Out>, false>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxRowBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt(p.rows, me.Row());
  const Vectors vectors(me.warp * 32 * kHeld);
  const ActiveWarps active(row.seen, 32 * kHeld);
  const bool is_active = active.Has(me.warp);
  typename Vectors::Held held = {};
  Part part{.sum = 0.0f, .nan_key = kNoPosition};
  bool odd = false;
  if (is_active) vectors.Load(p, row, held);
  vectors.WriteUnseen(p.rows, row, p.d_scores.Row<Out>(row.index));
  if (is_active) {
    vectors.Take(p, row, held);
    part = vectors.PartOf(row, held, odd);
  } else if (!kCluster) {
    // The block does not need this warp any more. In a cluster the warp must stay, because other
    // blocks write to the shared memory of its block.
    vectors.Store(p, row, held, 0.0f, false);
    return;
  }
  me.Share(part, is_active, parts);
  Part all{.sum = 0.0f, .nan_key = kNoPosition};
  if (is_active) {
    all = MergeParts<kCluster>(parts, active);
    if (me.warp == active.begin && lane == 0) WriteRow(p, me.Row(), all);
  }
  vectors.Store(p, row, held, all.sum, odd);
}

// A block or a cluster reads a row twice. kHeld: elements of a thread at a time.
template <class In, class Out, bool kWhole, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    TwoReadsKernel(const __grid_constant__ Params p) {
  using Vectors = BackwardVectors<In, Out, kWhole, 32, kHeld / kElements<In, Out>, false>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxRowBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt(p.rows, me.Row());
  const int round = me.warps * 32 * kHeld;
  const int first = me.warp * 32 * kHeld;
  Part part{.sum = 0.0f, .nan_key = kNoPosition};
  bool odd = false;
#pragma unroll 1
  for (int begin = row.seen.begin / round * round; begin < row.seen.end; begin += round) {
    const Vectors vectors(begin + first);
    typename Vectors::Held held = {};
    vectors.Load(p, row, held);
    vectors.Take(p, row, held);
    float sum = vectors.template Dot<false>(row, held);
    if (isnan(sum)) {
      odd = true;
      sum = vectors.template Dot<true>(row, held);
      part.nan_key = min(part.nan_key, vectors.NanKey(row, held));
    }
    part.sum += sum;
  }
  part = {LanesSum<32>(part.sum), LanesMin<32>(part.nan_key)};
  me.Share(part, true, parts);
  const Part all = MergeParts<kCluster>(parts, ActiveWarps({0, me.warps}, 1));
  if (me.warp == 0 && lane == 0) WriteRow(p, me.Row(), all);
#pragma unroll 1
  for (int begin = 0; begin < p.rows.keys; begin += round) {
    const Vectors vectors(begin + first);
    typename Vectors::Held held = {};
    vectors.Load(p, row, held);
    vectors.WriteUnseen(p.rows, row, p.d_scores.Row<Out>(row.index));
    vectors.Take(p, row, held);
    vectors.Store(p, row, held, all.sum, odd);
  }
}

// ---- variants ----------------------------------------------------------------------------------

// Elements that a lane holds of all its rows.
template <class In, class Out, bool kWhole>
constexpr int kLaneHeld = kWhole && sizeof(In) == 2 ? 32 : 16;

// kHeld: elements of one row that a lane holds.
template <class In, class Out, bool kWhole, int kLanes, int kHeld>
cudaError_t Launch(const Params& p, cudaStream_t stream) {
  constexpr int kRows = std::max(1, kLaneHeld<In, Out, kWhole> / kHeld);
  return LaunchLanes<kLanes, kRows>(
      &LanesKernel<In, Out, kWhole, kLanes, kHeld / kElements<In, Out>, kRows>, p, stream);
}

struct Variant {
  int64_t max_keys;
  cudaError_t (*launch)(const Params&, cudaStream_t);
};

template <class In, class Out, bool kWhole>
constexpr Variant kLanesVariants[] = {
    {64, &Launch<In, Out, kWhole, 4, 16>},
    {128, &Launch<In, Out, kWhole, 8, 16>},
    {256, &Launch<In, Out, kWhole, 16, 16>},
    {512, &Launch<In, Out, kWhole, 32, 16>},
};

// Of rows that are not whole vectors: lengths just past those where a warp holds half as many rows.
template <class In, class Out>
constexpr Variant kRaggedVariants[] = {
    {64, &Launch<In, Out, false, 4, 16>},   {96, &Launch<In, Out, false, 4, 24>},
    {128, &Launch<In, Out, false, 8, 16>},  {192, &Launch<In, Out, false, 8, 24>},
    {256, &Launch<In, Out, false, 16, 16>}, {384, &Launch<In, Out, false, 16, 24>},
    {512, &Launch<In, Out, false, 32, 16>}, {768, &Launch<In, Out, false, 32, 24>},
};

template <class In, class Out, bool kWhole>
absl::Span<const Variant> VariantsFor(int64_t keys) {
  if constexpr (!kWhole && kElements<In, Out> == 8) {
    if (keys % 8 != 0) return kRaggedVariants<In, Out>;
  }
  return kLanesVariants<In, Out, kWhole>;
}

constexpr int64_t kLongKeys = 2048;  // with more keys a thread holds twice as many 16-bit elements

// `kHeld`: elements of a thread.
template <class In, class Out, bool kWhole, int kHeld>
cudaError_t LaunchBlockRows(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  constexpr double kEnough = .65;  // two loads a vector: see PlanHeld()
  const BlockPlan plan = PlanHeldRows(&BlockKernel<In, Out, kWhole, kHeld, true>,
                                      CeilDiv(p.rows.keys, 32 * kHeld), false, kEnough, scratch);
  if (plan.rate > 0) {
    return LaunchBlocks(plan.blocks > 1 ? &BlockKernel<In, Out, kWhole, kHeld, true>
                                        : &BlockKernel<In, Out, kWhole, kHeld, false>,
                        plan, p, stream);
  }
  constexpr int kHeldOfTwo =
      16;  // at a time, where rows are read twice: their bits depend on the plan
  const bool cluster = scratch.clusters;
  return LaunchBlocks(cluster ? &TwoReadsKernel<In, Out, kWhole, kHeldOfTwo, true>
                              : &TwoReadsKernel<In, Out, kWhole, kHeldOfTwo, false>,
                      {.threads = kMaxRowThreads / 2, .blocks = cluster ? kMaxClusterBlocks : 1}, p,
                      stream);
}

template <class In, class Out, bool kWhole>
cudaError_t LaunchRows(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  for (const Variant& variant : VariantsFor<In, Out, kWhole>(p.rows.keys)) {
    if (p.rows.keys <= variant.max_keys) return variant.launch(p, stream);
  }
  if constexpr (sizeof(In) == 2) {
    if (p.rows.keys > kLongKeys) return LaunchBlockRows<In, Out, kWhole, 32>(p, scratch, stream);
  }
  return LaunchBlockRows<In, Out, kWhole, 16>(p, scratch, stream);
}

using RowsLauncher = cudaError_t (*)(const Params&, const Scratch&, cudaStream_t);

// d_scores have the probs' type or, of f32 probs, any. `whole`: so are the rows of all tensors.
RowsLauncher LauncherFor(DType probs, DType d_scores, bool whole) {
  return VisitDType(d_scores, [&]<class Out>() {
    const auto launcher = [&]<class In>() -> RowsLauncher {
      return whole ? &LaunchRows<In, Out, true> : &LaunchRows<In, Out, false>;
    };
    return probs == d_scores ? launcher.template operator()<Out>()
                             : launcher.template operator()<float>();
  });
}

}  // namespace
}  // namespace attention

cudaError_t AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args,
                                     const Scratch& scratch, cudaStream_t stream) {
  using namespace attention;
  const int64_t keys = args.shape.keys;
  const int elements = ElementsOf(args.probs.dtype, args.d_scores.dtype);
  const Params p{.probs = MatrixOf(args.probs, keys, elements),
                 .d_probs = MatrixOf(args.d_probs, keys, elements),
                 .d_scores = MatrixOf(args.d_scores, keys, elements),
                 .scale = args.scale,
                 .status = args.status};
  const auto launch = LauncherFor(args.probs.dtype, args.d_scores.dtype,
                                  p.probs.whole && p.d_probs.whole && p.d_scores.whole);
  const bool sinks = args.sinks != nullptr;
  Scratch left = scratch;
  const SinkScratch sink_scratch = sinks ? TakeSinkScratch(args.shape, left) : SinkScratch{};
  const int64_t most = sinks ? kSinkPassRows : PassRows::kMost;
  for (int64_t begin = 0; begin < args.shape.rows; begin += most) {
    const int64_t count = std::min(most, args.shape.rows - begin);
    Params pass = p;
    pass.rows = PassRows(args.shape, args.window, begin, count);
    pass.probs.Skip(begin);
    pass.d_probs.Skip(begin);
    pass.d_scores.Skip(begin);
    pass.dots = sink_scratch.dots;
    pass.status += begin;
    cudaError_t error = launch(pass, scratch, stream);
    if (error == cudaSuccess && sinks)
      error = AddSinkTerms(args, begin, count, sink_scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda
