// attention_softmax of rows of more than 1536 keys: a block or a cluster holds a row, or reads it
// twice. attention_softmax.cu has the cost, the limits and the measurements.
#include "kernels/cuda/attention/forward.cuh"

namespace logitd::cuda::attention {
namespace {

// Whether the sum is NaN, where it is the same in all lanes: the warp goes one way.
__device__ inline bool NanOfWarp(const Part& part) {
  return __any_sync(kFullWarp, isnan(part.sum));
}

// The row's sums from its active warps' parts, sink included. Their order depends only on which
// warps are active. By a whole warp, the same in every lane.
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
  if (NanOfWarp(all)) all.nan_key = LanesMin<32>(all.nan_key);
  return all;
}

constexpr int kBlockHeld = 32;     // elements of a thread
constexpr int kTwoReadsHeld = 16;  // at a time

// A block or a cluster holds a row in registers.
template <class In, class Out, Form kForm, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1) BlockKernel(const __grid_constant__ Params p) {
  using Vectors = ForwardVectors<In, Out, kForm, 32, kBlockHeld / kElements<In, Out>, false>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxRowBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const ForwardRow row = ForwardRowAt<kForm>(p, p.order(me.Row()));
  const Vectors vectors(me.warp * 32 * Vectors::kHeld);
  const ActiveWarps active(row.seen, 32 * Vectors::kHeld);
  const bool is_active = active.Has(me.warp);
  typename Vectors::Raw raw = {};
  float x[Vectors::kHeld];
  Part part{.max = -kInfinity, .sum = 0.0f, .nan_key = kNoPosition};
  if (is_active) vectors.Load(p, row, raw);
  vectors.WriteUnseen(p.rows, row, p.probs.Row<Out>(row.index));
  if (is_active) {
    part.max = LanesMax<32>(vectors.Logits(p, row, raw, x));
    const ExpFrom from = ExpFrom::OfWarp(part.max);
    part.sum = LanesSum<32>(vectors.Exponentials(from, row, x));
    if (NanOfWarp(part)) part.nan_key = LanesMin<32>(vectors.NanKey(row, x));
  } else if (!kCluster) {
    // The block does not need this warp any more. In a cluster the warp must stay, because other
    // blocks write to the shared memory of its block.
    vectors.Store(p, row, x, 0.0f);
    return;
  }
  me.Share(part, is_active, parts);
  if (is_active) {
    const Part all = MergeParts<kCluster>(parts, active, row.sink);
    const ExpFrom from_all(all.max);
    float weight = WeightOf(all);
    if (NanOfWarp(all)) {
      vectors.SetNan(p, row, x);
    } else {
      weight *= from_all.Factor(ExpFrom(part.max));
    }
    if (me.warp == active.begin && lane == 0) WriteRow(p, row.index, from_all, all);
    vectors.Store(p, row, x, weight);
  } else {
    vectors.Store(p, row, x, 0.0f);
  }
}

constexpr int kLongHeld = 64;
constexpr int64_t kLongKeys = 8192;  // rows with more keys are long

// Rows that are not whole vectors are long only with more keys, except in a window that ends on their
// left: BlockKernel loads and stores them by words, for which threads of LongKernel have no registers.
constexpr int64_t kLongRaggedKeys = 16384;

bool IsLong(const PassRows& rows, int elements) {
  const bool ragged = rows.keys % elements != 0 && rows.left < 0;
  return rows.keys > (ragged ? kLongRaggedKeys : kLongKeys);
}

// As BlockKernel, for long 16-bit rows without a mask: a thread holds twice as many elements, as
// they were loaded.
template <class In, class Out, Form kForm, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1) LongKernel(const __grid_constant__ Params p) {
  using Vectors = ForwardVectors<In, Out, kForm, 32, kLongHeld / kElements<In, Out>, false>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxRowBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const ForwardRow row = ForwardRowAt<kForm>(p, me.Row());
  const Vectors vectors(me.warp * 32 * Vectors::kHeld);
  const ActiveWarps active(row.seen, 32 * Vectors::kHeld);
  const bool is_active = active.Has(me.warp);
  typename Vectors::Raw raw = {};
  Part part{.max = -kInfinity, .sum = 0.0f, .nan_key = kNoPosition};
  if (is_active) vectors.Load(p, row, raw);
  vectors.WriteUnseen(p.rows, row, p.probs.Row<Out>(row.index));
  if (is_active) {
    part.max = LanesMax<32>(vectors.MaxLogit(p, row, raw));
    part.sum = LanesSum<32>(vectors.SumOfExponentials(p, ExpFrom::OfWarp(part.max), row, raw));
    if (NanOfWarp(part)) part.nan_key = LanesMin<32>(vectors.NanKey(p, row, raw));
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
  vectors.StoreExponentials(p, ExpFrom::OfWarp(all.max), row, raw, WeightOf(all), NanOfWarp(all));
}

// A block or a cluster reads a row twice.
template <class In, class Out, Form kForm, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    TwoReadsKernel(const __grid_constant__ Params p) {
  using Vectors = ForwardVectors<In, Out, kForm, 32, kTwoReadsHeld / kElements<In, Out>, false>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxRowBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const ForwardRow row = ForwardRowAt<kForm>(p, p.order(me.Row()));
  const int round = me.warps * 32 * Vectors::kHeld;
  const int first = me.warp * 32 * Vectors::kHeld;
  Part part{.max = -kInfinity, .sum = 0.0f, .nan_key = kNoPosition};
#pragma unroll 1
  for (int begin = row.seen.begin / round * round; begin < row.seen.end; begin += round) {
    const Vectors vectors(begin + first);
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
  if (NanOfWarp(part)) part.nan_key = LanesMin<32>(part.nan_key);
  me.Share(part, true, parts);
  const Part all = MergeParts<kCluster>(parts, ActiveWarps({0, me.warps}, 1), row.sink);
  const ExpFrom from = ExpFrom::OfWarp(all.max);
  const bool nan = NanOfWarp(all);
  if (me.warp == 0 && lane == 0) WriteRow(p, row.index, from, all);
#pragma unroll 1
  for (int begin = 0; begin < p.rows.keys; begin += round) {
    const Vectors vectors(begin + first);
    float x[Vectors::kHeld];
    typename Vectors::Raw raw = {};
    vectors.Load(p, row, raw);
    vectors.WriteUnseen(p.rows, row, p.probs.Row<Out>(row.index));
    if (nan) {
      vectors.SetNan(p, row, x);
    } else {
      vectors.Logits(p, row, raw, x);
      vectors.Exponentials(from, row, x);
    }
    vectors.Store(p, row, x, WeightOf(all));
  }
}

}  // namespace

cudaError_t LaunchWideRows(const KernelTypes& types, const Params& p, const Scratch& scratch,
                           cudaStream_t stream) {
  return VisitTypes(types, [&]<class In, class Out, Form kForm>() {
    // Fewer and larger blocks did better where only a part of a row is seen, or where blocks wait
    // for a mask.
    const int spread = IsMasked(kForm) || p.rows.windowed ? kMaxRowThreads : kMaxRowThreads / 2;
    if constexpr (kElements<In, Out> == 8 && !IsMasked(kForm)) {
      const BlockPlan plan =
          PlanHeldRows(&LongKernel<In, Out, kForm, true>, p.rows.keys, kLongHeld, spread, scratch);
      if (IsLong(p.rows, kElements<In, Out>) && !plan.two_reads) {
        return LaunchBlocks(plan.blocks > 1 ? &LongKernel<In, Out, kForm, true>
                                            : &LongKernel<In, Out, kForm, false>,
                            plan, p, stream);
      }
    }
    const BlockPlan plan =
        PlanHeldRows(&BlockKernel<In, Out, kForm, true>, p.rows.keys, kBlockHeld, spread, scratch);
    const bool cluster = plan.blocks > 1;
    const auto kernel =
        plan.two_reads
            ? (cluster ? &TwoReadsKernel<In, Out, kForm, true>
                       : &TwoReadsKernel<In, Out, kForm, false>)
            : (cluster ? &BlockKernel<In, Out, kForm, true> : &BlockKernel<In, Out, kForm, false>);
    return LaunchBlocks(kernel, plan, p, stream);
  });
}

}  // namespace logitd::cuda::attention
