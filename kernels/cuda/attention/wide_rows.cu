// attention_softmax of rows of more than 1536 keys: a block or a cluster holds a row, or reads it
// twice. attention_softmax.cu has the cost, the limits and the measurements.
#include "kernels/cuda/attention/forward.cuh"
#include "kernels/cuda/attention/reads.h"

namespace logitd::cuda::attention {
namespace {

thread_local Reads forced_reads = Reads::kChosen;

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

constexpr int kBlockHeld = 32;  // elements of a thread

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

// Rows that are not whole vectors are long only with more keys, except in a window that ends on
// their left: BlockKernel loads and stores them by words, for which threads of LongKernel have no
// registers.
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

constexpr int kTwiceThreads = 512;

// A block or a cluster reads a row twice, a warp every so many-th of the parts that warps of
// BlockKernel or LongKernel hold. A row's bits are those of these kernels.
template <class In, class Out, Form kForm, bool kLong>
__global__ void __launch_bounds__(kTwiceThreads, kLong ? 2 : 1)
    TwoReadsKernel(const __grid_constant__ Params p) {
  constexpr int kHeld = kLong ? kLongHeld : kBlockHeld;
  constexpr int kPart = 32 * kHeld;
  using Vectors = ForwardVectors<In, Out, kForm, 32, kHeld / kElements<In, Out>, false>;
  __shared__ Part parts[CeilDiv(kMaxKeys, kPart)];
  const RowThread<true> me;
  const bool cluster = me.blocks > 1;
  const auto meet = [&] {
    if (!cluster) return __syncthreads();
    ClusterArrive();
    ClusterWait();
  };
  if (cluster) meet();  // all blocks have begun: their memory is there
  const int lane = threadIdx.x % 32;
  const ForwardRow row = ForwardRowAt<kForm>(p, p.order(me.Row()));
  const ActiveWarps active(row.seen, kPart);
  const int count = static_cast<int>(CeilDiv(p.rows.keys, kPart));
  typename Vectors::Raw raw = {};
  float x[kLong ? 1 : kHeld];
  // Loads what vectors.Load() loads, but keeps it in L2.
  const auto load_kept = [&](const Vectors& vectors) {
    if constexpr (IsWhole(kForm)) {
#pragma unroll
      for (int v = 0; v < kHeld / Vectors::E; ++v) {
        const int index = vectors.Index(v);
        if (row.seen.Some<Vectors::E>(index))
          LoadAligned<false>(p.scores.Row<const In>(row.index) + index, raw.words[v]);
      }
    } else {
      vectors.Load(p, row, raw);
    }
  };
#pragma unroll 1
  for (int i = me.warp; i < count; i += me.warps) {
    const Vectors vectors(i * kPart);
    if (active.Has(i)) load_kept(vectors);
    vectors.WriteUnseen(p.rows, row, p.probs.Row<Out>(row.index));
    if (!active.Has(i)) continue;
    Part part{.nan_key = kNoPosition};
    if constexpr (kLong) {
      part.max = LanesMax<32>(vectors.MaxLogit(p, row, raw));
      part.sum = LanesSum<32>(vectors.SumOfExponentials(p, ExpFrom::OfWarp(part.max), row, raw));
      if (NanOfWarp(part)) part.nan_key = LanesMin<32>(vectors.NanKey(p, row, raw));
    } else {
      part.max = LanesMax<32>(vectors.Logits(p, row, raw, x));
      part.sum = LanesSum<32>(vectors.Exponentials(ExpFrom::OfWarp(part.max), row, x));
      if (NanOfWarp(part)) part.nan_key = LanesMin<32>(vectors.NanKey(row, x));
    }
    if (lane < me.blocks) *(cluster ? InBlock(parts + i, lane) : parts + i) = part;
  }
  meet();
  const Part all = MergeParts<true>(parts, active, row.sink);
  const ExpFrom from_all = ExpFrom::OfWarp(all.max);
  const bool nan = NanOfWarp(all);
  if (me.warp == 0 && lane == 0) WriteRow(p, row.index, from_all, all);
#pragma unroll 1
  for (int i = me.warp; i < count; i += me.warps) {
    const Vectors vectors(i * kPart);
    const bool is_active = active.Has(i);
    if (is_active) vectors.Load(p, row, raw);
    if constexpr (kLong) {
      if (is_active) vectors.Align(p, row, raw);
      vectors.StoreExponentials(p, from_all, row, raw, WeightOf(all), nan);
    } else {
      float weight = WeightOf(all);
      if (is_active && nan) vectors.SetNan(p, row, x);
      if (is_active && !nan) {
        const ExpFrom from = ExpFrom::OfWarp(parts[i].max);
        vectors.Logits(p, row, raw, x);
        vectors.Exponentials(from, row, x);
        weight *= from_all.Factor(from);
      }
      vectors.Store(p, row, x, weight);
    }
  }
}

// The rate up to which held rows are slower than two reads, as PlanHeld() counts it; measured on an
// H200 (attention_plans.json).
constexpr double TwiceRate(Form form, int held, bool partly) {
  if (held < kLongHeld) return .48;
  return partly ? .88 : IsWhole(form) ? .76 : .68;
}

// A row's threads where it is read twice. Rows under way must stay in L2 until they are read again:
// with more blocks each, fewer are. Where twice as many would stay, blocks are half as large.
BlockPlan PlanTwice(const Params& p, bool fits, const Scratch& scratch) {
  constexpr int64_t kKeptBytes = int64_t{42} << 20;  // of an H200's 50 MB
  const int64_t under_way = int64_t{2} * scratch.multiprocessors;
  const int64_t bytes = under_way * p.scores.row_bytes;
  BlockPlan plan{.threads = kTwiceThreads, .blocks = 1};
  const auto few = [&] { return !fits && p.rows.count * plan.blocks < 4 * under_way; };
  while (scratch.clusters && plan.blocks < kMaxClusterBlocks &&
         (few() || bytes > kKeptBytes * plan.blocks))
    plan.blocks *= 2;
  if (2 * bytes <= kKeptBytes) plan.threads /= 2;
  return plan;
}

// Launches `held` or, in clusters, `clustered`; or `twice`, where the row's parts do not fit or two
// reads are faster. part: elements of a part. `partly` and twice_rate: see PlanHeld(), TwiceRate().
cudaError_t LaunchParts(void (*held)(Params), void (*clustered)(Params), void (*twice)(Params),
                        int part, bool partly, double twice_rate, const Params& p,
                        const Scratch& scratch, cudaStream_t stream) {
  constexpr double kEnough = .9;  // see PlanHeld()
  const BlockPlan plan =
      PlanHeldRows(clustered, CeilDiv(p.rows.keys, part), partly, kEnough, scratch);
  const bool fits = plan.rate > 0;
  const BlockPlan two = PlanTwice(p, fits, scratch);
  // Two reads need many blocks for each multiprocessor.
  const bool many = int64_t{p.rows.count} * two.blocks >= 16 * scratch.multiprocessors;
  const bool twice_forced = forced_reads == Reads::kTwice;
  const bool once = forced_reads == Reads::kOnce || plan.rate >= twice_rate || !many;
  if (fits && once && !twice_forced)
    return LaunchBlocks(plan.blocks > 1 ? clustered : held, plan, p, stream);
  return LaunchBlocks(twice, two, p, stream);
}

}  // namespace

void ForceReads(Reads reads) { forced_reads = reads; }

cudaError_t LaunchWideRows(const KernelTypes& types, const Params& p, const Scratch& scratch,
                           cudaStream_t stream) {
  return VisitTypes(types, [&]<class In, class Out, Form kForm>() {
    const bool partly = IsMasked(kForm) || p.rows.windowed;
    if constexpr (kElements<In, Out> == 8 && !IsMasked(kForm)) {
      if (IsLong(p.rows, kElements<In, Out>)) {
        return LaunchParts(&LongKernel<In, Out, kForm, false>, &LongKernel<In, Out, kForm, true>,
                           &TwoReadsKernel<In, Out, kForm, true>, 32 * kLongHeld, partly,
                           TwiceRate(kForm, kLongHeld, partly), p, scratch, stream);
      }
    }
    return LaunchParts(&BlockKernel<In, Out, kForm, false>, &BlockKernel<In, Out, kForm, true>,
                       &TwoReadsKernel<In, Out, kForm, false>, 32 * kBlockHeld, partly,
                       TwiceRate(kForm, kBlockHeld, partly), p, scratch, stream);
  });
}

}  // namespace logitd::cuda::attention
