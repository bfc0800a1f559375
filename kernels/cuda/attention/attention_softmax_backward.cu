// attention_softmax_backward: y and dy of a row in registers as they were loaded, one sum, one
// write.
//
// Rows are dealt out as in attention_softmax.cu: lanes up to 512 keys, a block, a cluster, two
// reads. A dy that is not finite at a y of 0 must not count; whether there is one shows in a sum
// that is NaN, so the common row is summed without looking, and only the odd one again. The sinks'
// gradient: rows leave sum y dy in scratch, 2^24 rows at a time; blocks of a head add them up in
// doubles, in an order fixed by the rows.
//
// Cost: reads y and dy where the queries see, writes all keys.
// Measured on an H200 (bench/results/h200/kernels.json), in percent of those bytes at the rate of a
// plain copy of the same run (3.93 TB/s; two reads to a write go faster than a copy):
//
//   bf16, keys        64 1024 4096 16384
//   unmasked          92  108  110   109
//   causal                 97  102   105
//   f32                        111
//   off alignment 89 (1023 keys)
//
// Limited by: HBM.
// Tried and dropped: 32 16-bit elements a thread from 512 keys on (1024 keys 67%: the compiler kept
// y and dy unpacked for their second use, and spilled); 16 for all (16384 keys 86%).
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
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

struct Row {
  uint32_t index;
  bool there;  // not beyond the launch's rows
  Seen seen;
};

__device__ inline Row RowAt(const Params& p, uint32_t index) {
  Row row{.index = index, .there = index < p.rows.count, .seen = {0, p.rows.keys}};
  if (!row.there) {
    row.index = 0;
    row.seen = {0, 0};
  } else {
    row.seen = p.rows.SeenBy(index);
  }
  return row;
}

// Sum of y dy over some of a row's keys, and the lowest of them where y is NaN, or dy is and y is
// not 0.
struct Part {
  float sum;
  int nan_key;
};

// A lane's kCount vectors of a row, the first at element `first`; those of kLanes lanes are
// neighbours. kWhole: all rows are whole vectors, each aligned.
template <class In, class Out, bool kWhole, int kLanes, int kCount>
struct LaneVectors {
  static constexpr int E = kElements<In, Out>;
  struct Held {
    Blocks<In, E, kLanes, kCount> y;
    Blocks<In, E, kLanes, kCount> dy;
  };

  int first;

  __device__ int Index(int v) const { return first + v * kLanes * E; }

  // Starts the loads of what the query sees; all else stays 0.
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
      held.y.Load(y, row.seen, first);
      held.dy.Load(dy, row.seen, first);
    }
  }

  // Writes the vectors of which the query sees nothing, while the loads are under way.
  __device__ void WriteUnseen(const Params& p, const Row& row) const {
    if (!kWhole || !p.rows.windowed || !row.there) return;
    Out* out = p.d_scores.Row<Out>(row.index);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      constexpr uint32_t kZeros[kWords<Out, E>] = {};
      if (Index(v) < p.rows.keys && !row.seen.Some<E>(Index(v)))
        StoreAligned(out + Index(v), kZeros);
    }
  }

  // Takes what was loaded, and zeros what came along with what the query sees.
  __device__ void Take(const Params& p, const Row& row, Held& held) const {
    if constexpr (!kWhole) {
      held.y.Align(p.probs.Row<const In>(row.index));
      held.dy.Align(p.d_probs.Row<const In>(row.index));
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

  // kCareful: where y is 0, dy counts as 0 whatever it is. Without, that holds for finite dy alone,
  // and the sum is NaN otherwise.
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

  // Without it the compiler keeps from Dot() on what it unpacked for it, and has no room for that.
  __device__ static void Forget(Held& held) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
#pragma unroll
      for (int w = 0; w < kWords<In, E>; ++w) {
        asm volatile("" : "+r"(held.y.words[v][w]), "+r"(held.dy.words[v][w]));
      }
    }
  }

  // The part of kLanes lanes, the same in each; and whether a dy that is not finite may stand at a
  // y that is 0.
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
    // Nor may dy - dot overflow where y is 0: from here on it may, of the largest dy.
    const bool careful = odd || !(fabsf(dot) < 0x1p103f);
    Out* out = p.d_scores.Row<Out>(row.index);
    const auto vector = [&](int v, uint32_t(&words)[kWords<Out, E>]) {
      if (!row.seen.Some<E>(Index(v))) return;
      float d[E];
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
      Pack<Out, E>(d, words);
    };
    if constexpr (kWhole) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        uint32_t words[kWords<Out, E>];
        vector(v, words);
        if (row.seen.Some<E>(Index(v))) StoreAligned(out + Index(v), words);
      }
    } else {
      StoreBlocks<Out, E, kLanes, kCount>(out, row.there, first, p.rows.keys, vector);
    }
  }
};

// Writes what belongs to the row as a whole; by one thread.
__device__ inline void WriteRow(const Params& p, uint32_t row, const Part& all) {
  if (p.dots != nullptr) p.dots[row] = all.sum;
  p.status[row] = all.nan_key == kNoPosition ? RowStatus{RowCode::kOk, -1}
                                             : RowStatus{RowCode::kNanLogit, all.nan_key};
}

// ---- rows a warp holds -------------------------------------------------------------------------

constexpr int kLanesThreads = 128;
constexpr int kLanesResident = 8;  // blocks per multiprocessor

// kLanes lanes to a row, kRows rows to a lane.
template <class In, class Out, bool kWhole, int kLanes, int kCount, int kRows>
__global__ void __launch_bounds__(kLanesThreads, kLanesResident)
    LanesKernel(const __grid_constant__ Params p) {
  constexpr int kGroups = 32 / kLanes;
  using Vectors = LaneVectors<In, Out, kWhole, kLanes, kCount>;
  const int lane = threadIdx.x % 32;
  const uint32_t warp = blockIdx.x * (kLanesThreads / 32) + threadIdx.x / 32;
  const uint32_t first_row = warp * kGroups * kRows + lane / kLanes;
  const Vectors vectors{lane % kLanes * Vectors::E};
  Row rows[kRows];
  typename Vectors::Held held[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = RowAt(p, first_row + r * kGroups);
    vectors.Load(p, rows[r], held[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) vectors.WriteUnseen(p, rows[r]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    vectors.Take(p, rows[r], held[r]);
    bool odd;
    const Part all = vectors.PartOf(rows[r], held[r], odd);
    vectors.Store(p, rows[r], held[r], all.sum, odd);
    if (rows[r].there && lane % kLanes == 0) WriteRow(p, first_row + r * kGroups, all);
  }
}

// ---- rows of blocks ----------------------------------------------------------------------------

// The row's part from its active warps', added in an order that depends on which they are alone. By
// a whole warp, the same in every lane.
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

// A block to a row, or a cluster, all of the row in registers. kHeld: elements of a thread.
template <class In, class Out, bool kWhole, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1) BlockKernel(const __grid_constant__ Params p) {
  using Vectors = LaneVectors<In, Out, kWhole, 32, kHeld / kElements<In, Out>>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxClusterBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt(p, me.Row());
  const Vectors vectors{me.warp * 32 * kHeld + lane * Vectors::E};
  const ActiveWarps active(row.seen, 32 * kHeld);
  const bool is_active = active.Has(me.warp);
  typename Vectors::Held held = {};
  Part part{.sum = 0.0f, .nan_key = kNoPosition};
  bool odd = false;
  if (is_active) vectors.Load(p, row, held);
  vectors.WriteUnseen(p, row);
  if (is_active) {
    vectors.Take(p, row, held);
    part = vectors.PartOf(row, held, odd);
  } else if (!kCluster) {
    // The block needs no more of this warp. In a cluster it must stay, for others write to the
    // shared memory of its block.
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

// A block or a cluster to a row that they read twice.
template <class In, class Out, bool kWhole, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    TwoReadsKernel(const __grid_constant__ Params p) {
  using Vectors = LaneVectors<In, Out, kWhole, 32, kHeld / kElements<In, Out>>;
  __shared__ Part parts[kMaxRowWarps * (kCluster ? kMaxClusterBlocks : 1)];
  if constexpr (kCluster) ClusterArrive();
  const RowThread<kCluster> me;
  const int lane = threadIdx.x % 32;
  const Row row = RowAt(p, me.Row());
  const int round = me.warps * 32 * kHeld;
  const int first = me.warp * 32 * kHeld + lane * Vectors::E;
  Part part{.sum = 0.0f, .nan_key = kNoPosition};
  bool odd = false;
#pragma unroll 1
  for (int begin = row.seen.begin / round * round; begin < row.seen.end; begin += round) {
    const Vectors vectors{begin + first};
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
    const Vectors vectors{begin + first};
    typename Vectors::Held held = {};
    vectors.Load(p, row, held);
    vectors.WriteUnseen(p, row);
    vectors.Take(p, row, held);
    vectors.Store(p, row, held, all.sum, odd);
  }
}

// ---- the sinks' gradient -----------------------------------------------------------------------

// Rows of a pass that dots fit scratch for, whatever the device: d_sinks is summed pass by pass.
constexpr int64_t kSinkPassRows = int64_t{1} << 24;
constexpr int kSinkThreads = 256;
// Blocks of a head, where heads alone would not fill the device.
constexpr int kSinkSplits = 32;
constexpr int64_t kSplitHeads = 1024;
constexpr int64_t kHeadsAtOnce = int64_t{1} << 20;

struct SinkParams {
  int64_t heads;
  int64_t queries;
  int64_t begin;  // first row of the pass in the tensor, and where it ends
  int64_t end;
  int64_t first_head;  // of those summed by the launch
  int64_t head_count;
  const float* dots;       // [end - begin]
  const float* logsumexp;  // [end - begin]
  const float* sinks;
  double* sums;  // [head_count, splits]
  int splits;

  // Rows of the head before row `row` of the tensor.
  __device__ int64_t RowsBefore(int64_t head, int64_t row) const {
    const int64_t of_batch = heads * queries;
    return row / of_batch * queries +
           min(max(row % of_batch - head * queries, int64_t{0}), queries);
  }
};

// sums = the heads' parts of - d_sinks over the pass, each summed in an order fixed by the rows.
__global__ void __launch_bounds__(kSinkThreads)
    SinkTermsKernel(const __grid_constant__ SinkParams p) {
  __shared__ double warp_sums[kSinkThreads / 32];
  for (int64_t item = blockIdx.x; item < p.head_count * p.splits; item += gridDim.x) {
    const int64_t head = p.first_head + item / p.splits;
    const float sink = p.sinks[head];
    const int64_t last = p.RowsBefore(head, p.end);
    double sum = 0;
    for (int64_t i = p.RowsBefore(head, p.begin) + item % p.splits * kSinkThreads + threadIdx.x;
         i < last; i += p.splits * kSinkThreads) {
      const int64_t row = (i / p.queries * p.heads + head) * p.queries + i % p.queries - p.begin;
      const double share =
          sink == -kInfinity ? 0.0 : exp(static_cast<double>(sink) - p.logsumexp[row]);
      sum += share * p.dots[row];
    }
    sum = LanesReduce<32>(sum, [](double a, double b) { return a + b; });
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double all = 0;
      for (double warp_sum : warp_sums) all += warp_sum;
      p.sums[item] = all;
    }
    __syncthreads();
  }
}

// d_sinks -= the head's sums, in order; from 0 in the first pass.
__global__ void AddSinkTermsKernel(const double* sums, int64_t heads, int splits, bool first,
                                   double* d_sinks) {
  for (int64_t head = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; head < heads;
       head += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    double sum = 0;
    for (int s = 0; s < splits; ++s) sum += sums[head * splits + s];
    d_sinks[head] = (first ? 0.0 : d_sinks[head]) - sum;
  }
}

cudaError_t AddSinkTerms(const AttentionSoftmaxBackwardArgs& args, int64_t begin, int64_t count,
                         const float* dots, double* sums, cudaStream_t stream) {
  const int64_t heads = args.shape.heads;
  for (int64_t head = 0; head < heads; head += kHeadsAtOnce) {
    const SinkParams p{.heads = heads,
                       .queries = args.shape.queries,
                       .begin = args.shape.first_row + begin,
                       .end = args.shape.first_row + begin + count,
                       .first_head = head,
                       .head_count = std::min(kHeadsAtOnce, heads - head),
                       .dots = dots,
                       .logsumexp = args.logsumexp + begin,
                       .sinks = args.sinks,
                       .sums = sums,
                       .splits = heads > kSplitHeads ? 1 : kSinkSplits};
    SinkTermsKernel<<<static_cast<unsigned>(p.head_count * p.splits), kSinkThreads, 0, stream>>>(p);
    const unsigned blocks = static_cast<unsigned>((p.head_count + kSinkThreads - 1) / kSinkThreads);
    AddSinkTermsKernel<<<blocks, kSinkThreads, 0, stream>>>(sums, p.head_count, p.splits,
                                                            begin == 0, args.d_sinks + head);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// ---- variants ----------------------------------------------------------------------------------

// Elements a lane holds, of all its rows.
template <class In, class Out, bool kWhole>
constexpr int kLaneHeld = kWhole && sizeof(In) == 2 ? 32 : 16;

// kHeld: elements of one row that a lane holds.
template <class In, class Out, bool kWhole, int kLanes, int kHeld>
cudaError_t LaunchLanes(const Params& p, cudaStream_t stream) {
  constexpr int kRows = std::max(1, kLaneHeld<In, Out, kWhole> / kHeld);
  constexpr unsigned kBlockRows = kLanesThreads / kLanes * kRows;
  LanesKernel<In, Out, kWhole, kLanes, kHeld / kElements<In, Out>, kRows>
      <<<(p.rows.count + kBlockRows - 1) / kBlockRows, kLanesThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

struct Variant {
  int64_t max_keys;
  cudaError_t (*launch)(const Params&, cudaStream_t);
};

template <class In, class Out, bool kWhole>
constexpr Variant kLanesVariants[] = {
    {64, &LaunchLanes<In, Out, kWhole, 4, 16>},
    {128, &LaunchLanes<In, Out, kWhole, 8, 16>},
    {256, &LaunchLanes<In, Out, kWhole, 16, 16>},
    {512, &LaunchLanes<In, Out, kWhole, 32, 16>},
};

constexpr int64_t kLongKeys = 2048;  // beyond: a thread holds twice as many 16-bit elements

// `kHeld`: elements of a thread.
template <class In, class Out, bool kWhole, int kHeld>
cudaError_t LaunchBlockRows(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  const BlockPlan plan = PlanBlocks(p.rows.keys, kHeld, scratch.clusters, kMaxRowThreads / 2);
  const bool cluster = plan.blocks > 1;
  constexpr int kHeldOfTwo = 16;  // where rows are read twice
  const auto kernel = plan.two_reads
                          ? (cluster ? &TwoReadsKernel<In, Out, kWhole, kHeldOfTwo, true>
                                     : &TwoReadsKernel<In, Out, kWhole, kHeldOfTwo, false>)
                          : (cluster ? &BlockKernel<In, Out, kWhole, kHeld, true>
                                     : &BlockKernel<In, Out, kWhole, kHeld, false>);
  return LaunchBlocks(kernel, plan, p, stream);
}

template <class In, class Out, bool kWhole>
cudaError_t LaunchRows(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  for (const Variant& variant : kLanesVariants<In, Out, kWhole>) {
    if (p.rows.keys <= variant.max_keys) return variant.launch(p, stream);
  }
  if constexpr (sizeof(In) == 2) {
    if (p.rows.keys > kLongKeys) return LaunchBlockRows<In, Out, kWhole, 32>(p, scratch, stream);
  }
  return LaunchBlockRows<In, Out, kWhole, 16>(p, scratch, stream);
}

template <class In, class Out>
cudaError_t Run(const AttentionSoftmaxBackwardArgs& args, const Scratch& scratch,
                cudaStream_t stream) {
  constexpr int E = kElements<In, Out>;
  const int64_t keys = args.shape.keys;
  const Params p{.probs = MatrixOf<In, E>(args.probs.data, args.probs.row_stride, keys),
                 .d_probs = MatrixOf<In, E>(args.d_probs.data, args.d_probs.row_stride, keys),
                 .d_scores = MatrixOf<Out, E>(args.d_scores.data, args.d_scores.row_stride, keys),
                 .scale = args.scale,
                 .status = args.status};
  const bool whole = p.probs.whole && p.d_probs.whole && p.d_scores.whole;
  const auto launch = whole ? &LaunchRows<In, Out, true> : &LaunchRows<In, Out, false>;
  const bool sinks = args.sinks != nullptr;
  Carver carver(scratch);
  float* dots = sinks ? carver.Take<float>(std::min(args.shape.rows, kSinkPassRows)) : nullptr;
  double* sums = sinks ? carver.Take<double>(std::max(kSplitHeads * kSinkSplits,
                                                      std::min(args.shape.heads, kHeadsAtOnce)))
                       : nullptr;
  const int64_t most = sinks ? kSinkPassRows : PassRows::kMost;
  for (int64_t begin = 0; begin < args.shape.rows; begin += most) {
    const int64_t count = std::min(most, args.shape.rows - begin);
    Params pass = p;
    pass.rows = PassRows(args.shape, args.window, begin, count);
    pass.probs.Skip(begin);
    pass.d_probs.Skip(begin);
    pass.d_scores.Skip(begin);
    pass.dots = dots;
    pass.status += begin;
    cudaError_t error = launch(pass, scratch, stream);
    if (error == cudaSuccess && sinks) {
      error = AddSinkTerms(args, begin, count, dots, sums, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

struct TypeRow {
  DType probs;
  DType d_scores;
  cudaError_t (*run)(const AttentionSoftmaxBackwardArgs&, const Scratch&, cudaStream_t);
};

constexpr TypeRow kTypes[] = {
    {DType::kF32, DType::kF32, &Run<float, float>},
    {DType::kF32, DType::kF16, &Run<float, __half>},
    {DType::kF32, DType::kBF16, &Run<float, __nv_bfloat16>},
    {DType::kF16, DType::kF16, &Run<__half, __half>},
    {DType::kBF16, DType::kBF16, &Run<__nv_bfloat16, __nv_bfloat16>},
};

}  // namespace

cudaError_t AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args,
                                     const Scratch& scratch, cudaStream_t stream) {
  const TypeRow* type = kTypes;
  while (type->probs != args.probs.dtype || type->d_scores != args.d_scores.dtype) ++type;
  return type->run(args, scratch, stream);
}

}  // namespace logitd::cuda
