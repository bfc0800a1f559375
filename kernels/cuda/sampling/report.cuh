// sample, the report: status, rank, and log-probabilities of the token, the top tokens and the
// asked ids.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_REPORT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_REPORT_CUH_

#include "kernels/cuda/sampling/moments.cuh"
#include "kernels/cuda/sampling/nucleus.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// Refuses a row: one that holds a NaN, or else one of which nothing can be drawn. Called by all
// threads of a block.
template <class T, bool kMayAskMore>
__device__ __noinline__ void RefuseRow(const SampleArgs& args, int64_t r, const SampleRow& ask,
                                       const T* sent, const Stats* raw_cells, bool has_nan) {
  DrawShared& s = Finish().draw;
  const int vocab = static_cast<int>(args.logits.cols);
  if (!has_nan) {
    Refuse(args, r, ask, {RowCode::kEmptySupport, -1}, threadIdx.x, blockDim.x);
    if constexpr (kMayAskMore) {
      const Stats raw = MergeCells(raw_cells, CellsOf(vocab), kLog2E);
      if (!ask.want_entropy || raw.max == -kInfinity) return;
      const float of_sent = EntropyOf(Logits<T, Serves::kPlain>(sent, vocab), RawSupport(raw));
      if (threadIdx.x == 0) args.raw_entropies[r] = of_sent;
    }
    return;
  }
  if (threadIdx.x < 32) {
    const int cells = CellsOf(vocab);
    int cell = 0;
    while (cell + 1 < cells && !isnan(raw_cells[cell].sum)) ++cell;
    const int found = FindNan(sent, cell * kCell, vocab, threadIdx.x);
    if (threadIdx.x == 0) s.found = found;
  }
  __syncthreads();
  if (threadIdx.x == 0) args.logsumexp[r] = __int_as_float(0x7fffffff);
  Refuse(args, r, ask, {RowCode::kNanLogit, s.found}, threadIdx.x, blockDim.x);
}

// ---- rank --------------------------------------------------------------------------------------

// The thread's count of tokens in the part that are no later in the order than `token` with logit
// x. Only groups that reach it are looked at, by the part's sketch of these logits.
template <int kThreads, class Shape, class Element>
__device__ __forceinline__ int CountByCells(const Element* row, const Part& part,
                                            const typename Shape::Sketch* sketch, float x,
                                            int token) {
  using Place = GroupPlace<Shape, Element>;
  const auto* maxima = reinterpret_cast<const uint16_t*>(sketch);
  const int lane = threadIdx.x % 32;
  const uint32_t edge = OrderedBits(x) >> 16;
  int count = 0;
#pragma unroll 1
  for (int cell = threadIdx.x / 32; cell < part.cells(); cell += kThreads / 32) {
    const auto* of_lane =  // of the groups that the lane has vectors of
        maxima + cell * Shape::kGroupsOfCell + lane / Place::kLanes * Place::kVectors;
    uint32_t wanted = 0;
#pragma unroll
    for (int v = 0; v < Place::kVectors; ++v) {
      if (of_lane[v] >= edge) wanted |= 1u << v;
    }
    const int first = part.begin + cell * kCell;
    LaneCell<Element> others;
    ReadCell(row, first, part.end, wanted, others);
    uint32_t ties = 0;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      count += others[e] > x;
      if (others[e] == x) ties |= 1u << e;
    }
#pragma unroll 1
    for (; ties != 0; ties &= ties - 1)
      count += first + CellIndex<Element>(lane, __ffs(ties) - 1) <= token;
  }
  return count;
}

// How many tokens of the part are no later in the order than `token` with logit x: one by one where
// few groups of the part's sketch of these logits reach it. Called by all threads.
template <int kThreads, class Shape, class Element>
__device__ __noinline__ int CountFrom(const Element* row, Part part,
                                      const typename Shape::Sketch* sketch, float x, int token) {
  AreInShared(sketch);
  auto& pool = Pool<Shape>();
  __syncthreads();
  if (threadIdx.x == 0) pool.count = 0;
  Floor floor;
  floor.Raise(MakeKey(x, token));
  if (OfferGroups<Element, kThreads, Shape>(row + part.begin, part.begin, part.elements(), sketch,
                                            0, part.cells(), floor)) {
    return pool.count;
  }
  const int count = CountByCells<kThreads, Shape>(row, part, sketch, x, token);
  return static_cast<int>(BlockSum(count, Finish().draw));
}

// In a cluster, once its blocks know the ranked token: adds what the block counts in its part of
// the row.
template <class Count>
__device__ inline void AddToRank(DrawShared& s, Count count_in_part) {
  const int count = count_in_part(s.ranked_logit, s.ranked_token);
  if (threadIdx.x == 0) atomicAdd(InBlock(&s.rank, 0), count);
  ClusterArrive();
}

// In a cluster, what the blocks after the first one do once that has drawn.
template <class Count>
__device__ inline void HelpToRank(DrawShared& s, Count count_in_part) {
  if (s.ranked_token >= 0) AddToRank(s, count_in_part);
}

// The rank of `token` with logit x, or 0 where it is not wanted. `listed`: how many tokens of the
// order that is asked for are in s.sorted. Called by all threads of the first block.
template <bool kInCluster, int kThreads, class Count>
__device__ __forceinline__ int FindRank(bool wanted, float x, int token, int listed, int blocks,
                                        DrawShared& s, Count count_in_part) {
  const Key key = MakeKey(x, token);
  const bool is_listed = wanted && listed > 0 && key >= s.sorted[listed - 1];
  int rank = 0;
  if (is_listed) {
    for (int i = threadIdx.x; i < listed; i += kThreads) rank += s.sorted[i] >= key;
    rank = static_cast<int>(BlockSum(rank, s));
  }
  const bool look = wanted && !is_listed;  // in the row itself
  if constexpr (kInCluster) {
    if (look) {
      if (threadIdx.x < blocks) {
        *InBlock(&s.ranked_logit, threadIdx.x) = x;
        *InBlock(&s.ranked_token, threadIdx.x) = token;
      }
      if (threadIdx.x == 0) s.rank = 0;
    }
    ClusterArrive();
    if (look) {
      ClusterWait();
      AddToRank(s, count_in_part);
      ClusterWait();
      rank = s.rank;
    }
  } else if (look) {
    rank = count_in_part(x, token);
  }
  return rank;
}

// ---- log-probabilities -------------------------------------------------------------------------

// Writes the top tokens, of which the first is at `keys`.
__device__ __forceinline__ void ReportTops(const SampleArgs& args, const SampleRow& ask, int count,
                                           const Support& support, const Key* keys) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int id = KeyIndex(keys[i]);
    args.top_ids[ask.first_top_entry + i] = id;
    args.top_logprobs[ask.first_top_entry + i] = support.Logprob(KeyLogit(keys[i]), id);
  }
}

// Writes the top tokens where the row wants more than are listed: further reads of the row find the
// last of them, and then all. `row` has the logits of the report, `support` their maximum. Called
// by all threads.
template <int kThreads, class Row>
__device__ __noinline__ void ReportManyTops(const SampleArgs& args, const SampleRow& ask, Row row,
                                            Support support) {
  static_assert(kMaxTopLogprobs <= SmallPool::kPool);
  DrawShared& s = Finish().draw;
  auto& pool = Finish().pool;
  __syncthreads();
  const Key last = LastOfPrefix<kThreads>(
      row, MakeKey(-kInfinity, row.vocab - 1), MakeKey(support.max, 0),
      static_cast<uint64_t>(ask.top_logprobs), Measure{Weigher(support.max, ask), /*counts=*/true});
  __syncthreads();
  if (threadIdx.x == 0) pool.count = 0;
  __syncthreads();
  row.EachKey([&](Key key, float) {
    if (key >= last) pool.pool[atomicAdd(&pool.count, 1)] = key;
  });
  __syncthreads();
  SortKeys<kThreads>(pool.pool, pool.count, s.spare, ask.top_logprobs, s.sorted_pool);
  ReportTops(args, ask, ask.top_logprobs, support, s.sorted_pool);
}

// Writes the top tokens, where they are listed, and the asked ids, of logits whose first tokens are
// in s.sorted.
template <class Row>
__device__ inline void ReportLists(const SampleArgs& args, const SampleRow& ask, const Row& row,
                                   const Support& support, const DrawShared& s) {
  ReportTops(args, ask, ListedTops(ask), support, s.sorted);
  for (int i = threadIdx.x; i < ask.extra_count; i += blockDim.x) {
    const int id = args.extra_ids[ask.first_extra + i];
    args.extra_logprobs[ask.first_extra_entry + i] = support.Logprob(row[id], id);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_REPORT_CUH_
