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
  const int rank = SmallQuotient(k + warps - 1, warps);
  if (rank > 16) return -kInfinity;
  const float sorted = WarpSortDescending(lane_best, lane);
  if (lane == rank - 1) s.warp_floor[threadIdx.x / 32] = sorted;
  __syncthreads();
  const float lowest = lane < warps ? s.warp_floor[lane] : kInfinity;
  return -WarpMax(-lowest);
}

// The r-th best of the lanes' logits, as OrderedBits.
__device__ inline uint32_t LaneOfRank(float lane_best, int r, int lane) {
  constexpr int kFew = 4;
  if (r > kFew)
    return OrderedBits(__shfl_sync(kFullWarp, WarpSortDescending(lane_best, lane), r - 1));
  uint32_t left = OrderedBits(lane_best);
#pragma unroll 1
  for (; r > 1; --r) {
    const unsigned best = __ballot_sync(kFullWarp, left == WarpMax(left));
    if (lane == __ffs(best) - 1) left = 0;
  }
  return WarpMax(left);
}

// A logit that at least k of the row reach: of the r-th best lanes of all the cluster's warps, the
// m-th best, r * m >= k, with its last bits zero. `bests` and `row_floor` are Shared::warp_bests
// and row_floor of the block's own memory: other blocks write there while it may still read its
// part of the row. Called by all threads; passes a barrier of the cluster.
template <class Block>
__device__ __noinline__ float ClusterFloor(float lane_best, const Part& part, int k,
                                           uint32_t* bests, float& row_floor) {
  constexpr uint32_t kMaxWarps = kMaxClusterBlocks * Block::kWarps;
  const int lane = threadIdx.x % 32;
  const int warps = part.blocks * Block::kWarps;
  const int busy = max(1, min(warps, part.row_elements / kCell));  // with a whole cell or more
  // The middle of many warps' bests is a better floor than their lowest. Of few warps it is not.
  const int r = min(32, SmallQuotient((k <= 2 * busy ? 2 * k : k) + busy - 1, busy));
  const uint32_t of_row = part.block * Block::kWarps + threadIdx.x / 32;
  static_assert((kMaxWarps & (kMaxWarps - 1)) == 0);
  // With the warp's number in its last bits, so that no two are equal.
  const uint32_t best = (LaneOfRank(lane_best, r, lane) & ~(kMaxWarps - 1)) | of_row;
  if (lane < part.blocks) *InBlock(&bests[of_row], lane) = best;
  if (threadIdx.x == 0) row_floor = -kInfinity;
  ClusterArrive();
  ClusterWait();
  // Ranked by as many neighbouring lanes as there are threads for a value, four values a load.
  constexpr int kParts = Block::kThreads / kMaxWarps;
  static_assert(kParts >= 1 && Block::kWarps % 4 == 0);
  const int own = threadIdx.x / kParts;
  const uint32_t mine = own < warps ? bests[own] : 0;
  const uint4* fours = reinterpret_cast<const uint4*>(bests);
  int rank = 0;
#pragma unroll 4
  for (int i = threadIdx.x % kParts; i < warps / 4; i += kParts) {
    const uint4 four = fours[i];
    rank += (four.x > mine) + (four.y > mine) + (four.z > mine) + (four.w > mine);
  }
#pragma unroll
  for (int offset = 1; offset < kParts; offset *= 2)
    rank += __shfl_xor_sync(kFullWarp, rank, offset);
  // Below -inf are the bits of NaN.
  if (own < warps && rank * r < k && (rank + 1) * r >= k)
    row_floor = fmaxf(FromOrderedBits(mine & ~(kMaxWarps - 1)), -kInfinity);
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

// Offers the warp's logits that reach a floor of the row to the first block of the cluster. They
// are few in a warp, so no thread waits for another warp. Where they are not, sets
// `shared.crowded`.
template <class Block, class Shared>
__device__ __forceinline__ void SendOwn(const typename Block::Element* item, const Part& part,
                                        const typename Block::Pool::Sketch* sketch, Floor floor,
                                        Shared& shared) {
  using T = typename Block::Element;
  using Shape = typename Block::Pool;
  static_assert(Shape::kElements <= 32);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t below = (1u << lane) - 1;
  const uint32_t edge = OrderedBits(floor.logit) >> 16;
  uint16_t* const hits = shared.hits[warp];
  int count = 0;
#pragma unroll 1
  for (int cell = warp; cell < part.cells(); cell += Block::kWarps) {
    const typename Shape::Sketch of_lane = sketch[cell * 32 + lane];
#pragma unroll
    for (int g = 0; g < Shape::kLaneGroups; ++g) {
      const bool hit = reinterpret_cast<const uint16_t*>(&of_lane)[g] >= edge;
      const uint32_t lanes = __ballot_sync(kFullWarp, hit);
      const int at = count + __popc(lanes & below);
      if (hit && at < Shared::kHitsOfWarp) {
        hits[at] =
            static_cast<uint16_t>(Shape::kGroupsOfCell * cell + Shape::kLaneGroups * lane + g);
      }
      count += __popc(lanes);
    }
  }
  __syncwarp();
  Key* const inbox = InBlock(shared.inbox[part.block], 0);
  bool crowded = count > Shared::kHitsOfWarp;
  constexpr int kTogether = 32 / Shape::kElements;  // groups, a lane reads an element
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int first = 0; first < count && !crowded; first += kAtOnce * kTogether) {
    float x[kAtOnce];
    int index[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = first + j * kTogether + lane / Shape::kElements;
      index[j] =
          at < count ? GroupIndex<T, Shape>(hits[at], lane % Shape::kElements) : part.elements();
      x[j] = index[j] < part.elements() ? ToFloat(item[index[j]]) : -kInfinity;
    }
    uint32_t reached[kAtOnce];
    int all = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      reached[j] = __ballot_sync(kFullWarp, index[j] < part.elements() && x[j] >= floor.logit);
      all += __popc(reached[j]);
    }
    if (all == 0) continue;
    int at = lane == 0 ? atomicAdd(&shared.offered, all) : 0;
    at = __shfl_sync(kFullWarp, at, 0);
    crowded = at + all > Shared::kInbox;
#pragma unroll
    for (int j = 0; j < kAtOnce && !crowded; ++j) {
      if ((reached[j] >> lane & 1) != 0)
        inbox[at + __popc(reached[j] & below)] = MakeKey(x[j], part.begin + index[j]);
      at += __popc(reached[j]);
    }
  }
  if (crowded && lane == 0) shared.crowded = true;
}

// Puts what the cluster's blocks have sent to the first one into its pool.
template <int kThreads, class Shape, class Shared>
__device__ inline void OpenInbox(int blocks, const Shared& shared) {
  auto& s = Pool<Shape>();
  constexpr int kOfBlock = kThreads / kMaxClusterBlocks;  // threads that take what a block has sent
  const int from = static_cast<int>(threadIdx.x) / kOfBlock;
  const int lane = threadIdx.x % 32;
  const int of_lane = lane < blocks ? shared.inbox_counts[lane] : 0;
  const int through = WarpPrefix(of_lane, lane);
  const int count = __shfl_sync(kFullWarp, of_lane, from);
  Key* const to = s.pool + __shfl_sync(kFullWarp, through, from) - count;
#pragma unroll 1
  for (int i = threadIdx.x % kOfBlock; i < count; i += kOfBlock) to[i] = shared.inbox[from][i];
  if (threadIdx.x == 31) s.count = through;
  __syncthreads();
}

// Fills the block's pool with candidates for the k largest tokens of its part of the row; in a
// cluster of several blocks, the first block's pool with those of the whole row. `lane_best` is
// what RowStream::Run returned; `shared` is what the row was read with. Called by all threads after
// a barrier; in such a cluster it passes barriers of the cluster. Calls meanwhile() once all
// statistics are there: in such a cluster before it waits for the other blocks' candidates.
template <class Block, class Shared, class Meanwhile>
__device__ __forceinline__ void GatherRow(const typename Block::Element* row, const Part& part,
                                          const typename Block::Pool::Sketch* sketch,
                                          float lane_best, int k, Shared& shared,
                                          Meanwhile meanwhile) {
  using T = typename Block::Element;
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  const T* const item = row + part.begin;
  Floor floor;
  if (!Block::kCluster || part.blocks == 1) {
    floor.RaiseToLogit(BlockFloor<Block>(lane_best, part.elements() / kCell, k));
    Gather<T, kThreads, Shape>(item, part.begin, part.elements(), sketch, floor, k);
    return meanwhile();
  }
  if (threadIdx.x == 0) {
    shared.offered = 0;
    shared.crowded = false;
  }
  floor.RaiseToLogit(ClusterFloor<Block>(lane_best, part, k, shared.warp_bests, shared.row_floor));
  SendOwn<Block>(item, part, sketch, floor, shared);
  __syncthreads();
  int offered = shared.offered;
  if (shared.crowded) {
    Gather<T, kThreads, Shape>(item, part.begin, part.elements(), sketch, floor, k);
    offered = Trim<kThreads, Shape>(k, Shared::kInbox);
    Key* const inbox = InBlock(shared.inbox[part.block], 0);
    for (int i = threadIdx.x; i < offered; i += kThreads) inbox[i] = Pool<Shape>().pool[i];
  }
  if (threadIdx.x == 0) *InBlock(&shared.inbox_counts[part.block], 0) = offered;
  ClusterArrive();
  meanwhile();
  ClusterWait();
  if (part.block == 0) OpenInbox<kThreads, Shape>(part.blocks, shared);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CANDIDATES_CUH_
