// The largest tokens of a row that a block, or a cluster, has just read.
//
// With a floor that at least k logits reach, Gather reads the few groups of the sketch that reach
// it again, and leaves their tokens in the block's pool: the candidates, all of the k largest among
// them.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CANDIDATES_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_CANDIDATES_CUH_

#include "kernels/cuda/rows/row_block.cuh"

namespace logitd::cuda {

// ---- floors ------------------------------------------------------------------------------------

// No key below `key` can be among the k largest. A logit below `logit` gives such a key.
struct Floor {
  Key key = 0;
  float logit = -kInfinity;

  __device__ void Raise(Key to) {
    if (to <= key) return;
    key = to;
    logit = KeyLogit(to);
  }
  __device__ void RaiseToLogit(float to) {
    if (to > logit) Raise(static_cast<Key>(OrderedBits(to)) << 32);
  }
  // Every key still to come has a higher index than any seen. So where the floor is a key of the
  // row (it has an index), an equal logit is not enough any more: rows of equal logits are not
  // looked at again.
  __device__ void OnlyLaterFollow() {
    if (static_cast<uint32_t>(key) != 0)
      logit = FromOrderedBits(static_cast<uint32_t>(key >> 32) + 1);
  }
};

// A logit that at least k of the block's reach, -inf where k is too large for this: r lanes of each
// of w warps have seen one, r * w >= k. The block's first `whole` warps have read a whole cell or
// more: a warp with fewer logits would lower the floor. Called by all threads after a barrier;
// passes another, unless k is too large.
template <class Block>
__device__ inline float BlockFloor(float lane_best, int whole, int k) {
  auto& s = Pool<typename Block::Pool>();
  const int lane = threadIdx.x % 32;
  const int warps = max(1, min(Block::kWarps, whole));
  const int rank = (k + warps - 1) / warps;
  if (rank > 16) return -kInfinity;
  const float sorted = WarpSortDescending(lane_best, lane);
  if (lane == rank - 1) s.warp_floor[threadIdx.x / 32] = sorted;
  __syncthreads();
  const float lowest = lane < warps ? s.warp_floor[lane] : kInfinity;
  return -WarpMax(-lowest);
}

// A logit that at least k of the row reach: of the r-th best lanes of all the cluster's warps, the
// m-th best, r * m >= k. `bests` and `row_floor` are Shared::warp_bests and row_floor of the
// block's own memory: other blocks write there while it may still read its part of the row. Called
// by all threads; passes a barrier of the cluster.
template <class Block>
__device__ __noinline__ float ClusterFloor(float lane_best, const Part& part, int k, float* bests,
                                           float& row_floor) {
  constexpr int kMaxWarps = kMaxClusterBlocks * Block::kWarps;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = part.blocks * Block::kWarps;
  const int busy = max(1, min(warps, part.row_elements / kCell));  // with a whole cell or more
  // The middle of many warps' bests is a better floor than their lowest. Of few warps it is not.
  const int of_all = (k + busy - 1) / busy;
  const int r = min(32, of_all <= 2 ? (2 * k + busy - 1) / busy : of_all);
  const int m = (k + r - 1) / r;
  const float best = __shfl_sync(kFullWarp, WarpSortDescending(lane_best, lane), r - 1);
  if (lane < part.blocks) *InBlock(&bests[part.block * Block::kWarps + warp], lane) = best;
  if (threadIdx.x == 0) row_floor = -kInfinity;
  ClusterArrive();
  ClusterWait();
  // Ranked by as many neighbouring lanes as there are threads for a value.
  constexpr int kParts = Block::kThreads / kMaxWarps;
  static_assert(kParts >= 1 && kMaxWarps % (4 * kParts) == 0);
  const int own = threadIdx.x / kParts;
  const int of_value = threadIdx.x % kParts;
  const float mine = own < warps ? bests[own] : -kInfinity;
  int rank = 0;
#pragma unroll 8
  for (int i = of_value; i < warps; i += kParts)
    rank += bests[i] > mine || (bests[i] == mine && i < own);
#pragma unroll
  for (int offset = 1; offset < kParts; offset *= 2)
    rank += __shfl_xor_sync(kFullWarp, rank, offset);
  if (of_value == 0 && own < warps && rank == m - 1) row_floor = mine;
  __syncthreads();
  return row_floor;
}

// ---- the pool ----------------------------------------------------------------------------------

__device__ inline int SlackOf(int k) { return max(k / 4, 8); }

// Called by all threads after a barrier: drops what is below about the k-th largest key of the
// pool, and returns that key. If the pool overflowed, no key of the last round (index >=
// first_index) is kept, and s.overflowed says that the round must be offered again, with the raised
// floor.
template <int kThreads, class Shape>
__device__ __noinline__ Key Settle(int k, int first_index) {
  auto& s = Pool<Shape>();
  const int n = min(s.count, Shape::kPool);
  const bool overflowed = s.count > Shape::kPool;
  const Key floor = SelectThreshold<kThreads>(s.pool, n, k, SlackOf(k), s.select);
  if (threadIdx.x == 0) s.overflowed = overflowed;
  CompactKeys<kThreads>(s.pool, n, s.count, [&](Key held) {
    return held >= floor && !(overflowed && KeyIndex(held) >= first_index);
  });
  return floor;
}

// Drops keys of the pool until at most `capacity` stay, all of the k largest among them. Returns
// how many.
template <int kThreads, class Shape>
__device__ __noinline__ int Trim(int k, int capacity) {
  auto& s = Pool<Shape>();
  const int n = s.count;
  if (n <= capacity) return n;
  const Key floor =
      SelectThreshold<kThreads>(s.pool, n, k, min(SlackOf(k), capacity - k), s.select);
  return CompactKeys<kThreads>(s.pool, n, s.kept, [&](Key held) { return held >= floor; });
}

// ---- the second look ---------------------------------------------------------------------------

// Place in the item of the e-th element of a group of the sketch.
template <class T, class Shape>
__device__ inline int GroupIndex(uint32_t group, int e) {
  constexpr int kVectors = GroupPlace<Shape, T>::kVectors;
  const int in_cell = group % Shape::kGroupsOfCell;
  return group / Shape::kGroupsOfCell * kCell + in_cell % kVectors * 32 * kVector<T> +
         in_cell / kVectors * Shape::kElements + e;
}

// Lists the groups of cells [first_cell, last_cell) of the item that reach the floor in s.hits, up
// to Shape::kHits of them, and counts all in s.hit_count. Ends with a barrier passed.
template <int kThreads, class Shape>
__device__ __forceinline__ void ListHits(const typename Shape::Sketch* sketch, int first_cell,
                                         int last_cell, Floor floor) {
  auto& s = Pool<Shape>();
  const int thread = threadIdx.x;
  if (thread == 0) s.hit_count = 0;
  __syncthreads();
  // A floor of NaN (nothing can follow +inf) is above all.
  const uint32_t edge = floor.logit == floor.logit ? OrderedBits(floor.logit) & 0xffff0000u : ~0u;
  constexpr int kWordsOfCell = Shape::kGroupsOfCell / 2;  // two groups a word
  constexpr int kWordsAtOnce = 16;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(sketch);
  const int last_word = last_cell * kWordsOfCell;
#pragma unroll 1
  for (int round = first_cell * kWordsOfCell + thread; round < last_word;
       round += kWordsAtOnce * kThreads) {
    uint32_t reached = 0;  // bit 2 * j: the lower half of word j
#pragma unroll
    for (int j = 0; j < kWordsAtOnce; ++j) {
      const int i = round + j * kThreads;
      const uint32_t maxima = i < last_word ? words[i] : 0;
      if (maxima << 16 >= edge) reached |= 1u << (2 * j);
      if (maxima >= edge) reached |= 2u << (2 * j);
    }
    if (reached == 0) continue;
    int at = atomicAdd(&s.hit_count, __popc(reached));
#pragma unroll 1
    for (; reached != 0; reached &= reached - 1) {
      const int bit = __ffs(reached) - 1;
      const int hit = 2 * (round + bit / 2 * kThreads) + bit % 2;
      if (at < Shape::kHits) s.hits[at] = static_cast<uint16_t>(hit);
      ++at;
    }
  }
  __syncthreads();
}

// Reads the listed groups again and offers their logits that reach the floor to the pool. Ends with
// a barrier passed.
template <class T, int kThreads, class Shape>
__device__ __forceinline__ void OfferHits(const T* item, int item_begin, int item_elements,
                                          int hits, Floor floor) {
  auto& s = Pool<Shape>();
  const int thread = threadIdx.x;
  // A thread takes a vector of 16 bytes, so neighbouring threads share a group. All of a round's
  // loads are under way at once.
  constexpr int kVectors = Shape::kElements / kVector<T>;
  constexpr int kTogether = kThreads / kVectors;
  constexpr int kTaken = kThreads > 256 ? 8 : 16;  // elements of a thread in a round
  constexpr int kAtOnce = kTaken / kVector<T>;
  const bool aligned = (reinterpret_cast<uintptr_t>(item) & 15) == 0;
#pragma unroll 1
  for (int round = thread / kVectors; round < hits; round += kAtOnce * kTogether) {
    LaneCell<T> x;  // only its first kTaken elements
    int index[kAtOnce];
    uint32_t reached = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = round + j * kTogether;
      uint4 vector = {};
      index[j] = 0;
      if (at < hits) {
        const uint32_t hit = s.hits[at];
        index[j] = GroupIndex<T, Shape>(hit, thread % kVectors * kVector<T>);
        const int valid = item_elements - index[j];
        vector = LoadVector(item + index[j], aligned, valid);
        reached |= ((1u << max(0, min(valid, kVector<T>))) - 1) << (j * kVector<T>);
      }
      x.SetVector(j, vector);
    }
#pragma unroll
    for (int e = 0; e < kTaken; ++e) {
      if (!(x[e] >= floor.logit)) reached &= ~(1u << e);
    }
    const auto key = [&](int e) {
      return MakeKey(x[e], item_begin + index[e / kVector<T>] + e % kVector<T>);
    };
    if (static_cast<uint32_t>(floor.key) != 0) {  // equal logits are told apart by index
#pragma unroll
      for (int e = 0; e < kTaken; ++e) {
        if (key(e) < floor.key) reached &= ~(1u << e);
      }
    }
    if (reached == 0) continue;
    int at = atomicAdd(&s.count, __popc(reached));
#pragma unroll
    for (int e = 0; e < kTaken; ++e) {
      if ((reached >> e & 1) == 0) continue;
      if (at < Shape::kPool) s.pool[at] = key(e);
      ++at;
    }
  }
  __syncthreads();
}

// Reads again the groups of cells [first_cell, last_cell) of the item that reach the floor, and
// offers their logits to the pool. False: more groups than Shape::kHits reach it; nothing was
// offered. Ends with a barrier passed.
template <class T, int kThreads, class Shape>
__device__ __noinline__ bool OfferGroups(const T* item, int item_begin, int item_elements,
                                         const typename Shape::Sketch* sketch, int first_cell,
                                         int last_cell, Floor floor) {
  ListHits<kThreads, Shape>(sketch, first_cell, last_cell, floor);
  const int hits = Pool<Shape>().hit_count;
  if (hits > Shape::kHits) return false;
  OfferHits<T, kThreads, Shape>(item, item_begin, item_elements, hits, floor);
  return true;
}

// Fills the pool with candidates: all of the item's k largest among them. Returns the floor they
// are not below.
template <class T, int kThreads, class Shape>
__device__ __noinline__ Key Gather(const T* item, int item_begin, int item_elements,
                                   const typename Shape::Sketch* sketch, Floor floor, int k) {
  auto& s = Pool<Shape>();
  const int cells = CellsOf(item_elements);
  if (threadIdx.x == 0) s.count = 0;
  if (floor.key == 0 && k <= cells * Shape::kGroupsOfCell) {
    // The k-th largest of the sketch: at least k groups, so k logits, reach it.
    const uint32_t coarse =
        SelectThreshold<kThreads>(reinterpret_cast<const uint16_t*>(sketch),
                                  cells * Shape::kGroupsOfCell, k, k / 8, s.select);
    if (coarse > OrderedBits(-kInfinity) >> 16) floor.Raise(static_cast<Key>(coarse) << 48);
  }
  if (OfferGroups<T, kThreads, Shape>(item, item_begin, item_elements, sketch, 0, cells, floor) &&
      s.count <= Shape::kPool) {
    return floor.key;
  }
  // Many equal logits, or few groups for a large k: cells in order, and only what is later and
  // higher goes on.
  __syncthreads();
  if (threadIdx.x == 0) s.count = 0;
  constexpr int kStep = Shape::kHits / Shape::kGroupsOfCell;
#pragma unroll 1
  for (int cell = 0; cell < cells; cell += kStep) {
    bool again = true;
    while (again) {
      OfferGroups<T, kThreads, Shape>(item, item_begin, item_elements, sketch, cell,
                                      min(cell + kStep, cells), floor);
      again = false;
      if (s.count > Shape::kPool / 2) {
        __syncthreads();
        floor.Raise(Settle<kThreads, Shape>(k, item_begin + cell * kCell));
        again = s.overflowed;
      }
    }
    floor.OnlyLaterFollow();
  }
  __syncthreads();
  return floor.key;
}

// ---- the row's candidates ----------------------------------------------------------------------

// Sends the k largest keys of the block's pool, and what else comes with them, to the first block
// of the cluster, into the inbox of its `shared`. Called by all threads; passes two barriers of the
// cluster.
template <int kThreads, class Shape, class Stream>
__device__ inline void SendToFirst(int k, int block, Stream& shared) {
  auto& s = Pool<Shape>();
  const int n = Trim<kThreads, Shape>(k, Stream::kInbox);
  Key* inbox = InBlock(shared.inbox[block], 0);
  for (int i = threadIdx.x; i < n; i += kThreads) inbox[i] = s.pool[i];
  if (threadIdx.x == 0) *InBlock(&shared.inbox_counts[block], 0) = n;
  ClusterArrive();
  ClusterWait();
}

// Puts what the cluster's blocks have sent to the first one into its pool.
template <int kThreads, class Shape, class Stream>
__device__ inline void OpenInbox(int blocks, const Stream& shared) {
  auto& s = Pool<Shape>();
  int n = 0;
  for (int block = 0; block < blocks; ++block) {
    const int count = shared.inbox_counts[block];
    for (int i = threadIdx.x; i < count; i += kThreads) s.pool[n + i] = shared.inbox[block][i];
    n += count;
  }
  if (threadIdx.x == 0) s.count = n;
  __syncthreads();
}

// Fills the block's pool with candidates for the k largest tokens of its part of the row; in a
// cluster, the first block's pool with those of the whole row. Returns the floor that the block's
// candidates are not below. `lane_best` is what RowStream::Run returned; `stream` is the Shared
// that the row was read with. Called by all threads after a barrier; in a cluster it passes a
// barrier of the cluster.
template <class Block, class Stream>
__device__ __forceinline__ Key GatherRow(const typename Block::Element* row, const Part& part,
                                         const typename Block::Pool::Sketch* sketch,
                                         float lane_best, int k, Stream& stream) {
  using Shape = typename Block::Pool;
  Floor floor;
  if constexpr (Block::kCluster) {
    floor.RaiseToLogit(
        ClusterFloor<Block>(lane_best, part, k, stream.warp_bests, stream.row_floor));
  } else {
    floor.RaiseToLogit(BlockFloor<Block>(lane_best, part.elements() / kCell, k));
  }
  const Key reached = Gather<typename Block::Element, Block::kThreads, Shape>(
      row + part.begin, part.begin, part.elements(), sketch, floor, k);
  if constexpr (Block::kCluster) {
    SendToFirst<Block::kThreads, Shape>(k, part.block, stream);
    if (part.block == 0) OpenInbox<Block::kThreads, Shape>(part.blocks, stream);
  }
  return reached;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CANDIDATES_CUH_
