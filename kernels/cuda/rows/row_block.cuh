// A row read once by a block, or by a cluster of them, and its largest tokens: what every op on
// rows of logits is built from.
//
// RowStream reads cells and leaves statistics and a sketch: the maxima of groups of logits, 16 bits
// each. With a floor that at least k logits reach, Gather reads the few groups again that reach it,
// and leaves the candidates in the block's pool.
#ifndef LOGITD_KERNELS_CUDA_ROWS_ROW_BLOCK_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_ROW_BLOCK_CUH_

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/rows/select.cuh"

namespace logitd::cuda {

// The lowest index whose logit is NaN, by one warp. `first` is where to begin.
template <class T>
__device__ __noinline__ int FindNan(const T* row, int first, int vocab, int lane) {
  int position = vocab;
  for (int i = first + lane; i < min(first + kCell, vocab); i += 32) {
    if (isnan(ToFloat(row[i]))) position = min(position, i);
  }
  return __reduce_min_sync(kFullWarp, position);
}

// ---- blocks ------------------------------------------------------------------------------------

constexpr int kMaxItemCells = 256;  // cells a softmax_topk block sketches; longer rows are split

// What the block needs after its read of a row: the pool, for up to kMax keys, and the sketch.
// kLaneGroups: groups of a lane's part of a cell, in the sketch.
template <int kMax, int kGroupsOfLane = kMax <= 128 ? 2 : 4>
struct PoolShape {
  static constexpr int kMaxK = kMax;
  static constexpr int kPool = kMax <= 128 ? 1024 : 4096;  // candidates
  static constexpr int kHits = kPool / 2;                  // groups to look at again
  static constexpr int kLaneGroups = kGroupsOfLane;
  static constexpr int kGroupsOfCell = 32 * kLaneGroups;
  static constexpr int kElements = kLaneElements / kLaneGroups;  // of a group
  // A lane's group maxima, 16 bits each.
  using Sketch = std::conditional_t<kLaneGroups == 1, uint16_t,
                                    std::conditional_t<kLaneGroups == 2, uint32_t, uint2>>;
  struct Shared {
    SelectScratch select;
    int count;  // keys in the pool; more than kPool: it overflowed
    int kept;
    int hit_count;
    bool overflowed;
    bool last;
    float warp_floor[SelectScratch::kMaxWarps];
    uint16_t hits[kHits];  // groups of the item, kGroupsOfCell a cell
    alignas(16) Key pool[kPool];
    // Candidates of the cluster's blocks.
    static constexpr int kInbox = kPool / kMaxClusterBlocks;
    Key inbox[kMaxClusterBlocks][kInbox];
    int inbox_counts[kMaxClusterBlocks];
  };
};
using SmallPool = PoolShape<128>;
using LargePool = PoolShape<1024>;

// kInCluster: a split row's blocks are a cluster, and leave what they found in its first block's
// shared memory, not in scratch.
template <class T, class PoolShapeOfBlock, int kBlockWarps, int kRingStages, int kResidentBlocks,
          bool kInCluster = false>
struct BlockShape {
  static constexpr bool kCluster = kInCluster;
  using Element = T;
  using Pool = PoolShapeOfBlock;
  using Ring = CellRing<T, kRingStages>;
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kRingStages;
  static constexpr int kResident = kResidentBlocks;  // per multiprocessor
  struct Shared {
    union {  // the ring's memory is the pool's once the row has been read
      typename Ring::Storage rings[kWarps];
      typename Pool::Shared pool;
    };
    // Of the cluster: never the ring's, for its blocks do not end their reading together.
    float warp_bests[kCluster ? kMaxClusterBlocks * kWarps : 1];
    float row_floor;
  };
};

template <class Shape>
__device__ inline typename Shape::Shared& Pool() {
  extern __shared__ __align__(128) uint4 dynamic[];
  return *reinterpret_cast<typename Shape::Shared*>(dynamic);
}

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

__device__ inline int SlackOf(int k) { return max(k / 4, 8); }

// A logit's place in the order, coarse: what the sketch keeps of a group's maximum.
__device__ inline uint32_t Coarse(float x) { return OrderedBits(x) >> 16; }

// Called by all threads after a barrier: drops what is below about the k-th largest key of the
// pool, and returns that key. Had the pool overflowed, then of the round's keys (index >=
// first_index) none is kept, and s.overflowed tells that the round must be offered again, to the
// raised floor.
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

// Place in the item of the e-th element of a group of the sketch.
template <class T, class Shape>
__device__ inline int GroupIndex(uint32_t group, int e) {
  return group / Shape::kGroupsOfCell * kCell +
         CellIndex<T>(group / Shape::kLaneGroups % 32,
                      group % Shape::kLaneGroups * Shape::kElements + e);
}

// 16 bytes from `first`, of which only the first `valid` elements may be read.
template <class T>
__device__ inline uint4 LoadVector(const T* first, bool aligned, int valid) {
  if (aligned && valid >= kVector<T>) return *reinterpret_cast<const uint4*>(first);
  uint32_t words[4] = {};
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) {
    if (e >= valid) continue;
    if constexpr (sizeof(T) == 4) {
      words[e] = __float_as_uint(first[e]);
    } else {
      const uint32_t bits = reinterpret_cast<const uint16_t*>(first)[e];
      words[e / 2] |= bits << (e % 2 * 16);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Reads again the groups of cells [first_cell, last_cell) of the item that reach the floor, and
// offers their logits to the pool. False: more groups than Shape::kHits reach it; nothing was
// offered. Ends with a barrier passed.
template <class T, int kThreads, class Shape>
__device__ __noinline__ bool OfferGroups(const T* item, int item_begin, int item_elements,
                                         const typename Shape::Sketch* sketch, int first_cell,
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
  const int hits = s.hit_count;
  if (hits > Shape::kHits) return false;
  // A thread takes a vector of 16 bytes, so neighbouring threads share a group. All of a round's
  // loads are under way at once.
  constexpr int kVectors = Shape::kElements / kVector<T>;
  constexpr int kTogether = kThreads / kVectors;
  constexpr int kTaken = kThreads > 256 ? 8 : 16;  // elements of a thread in a round
  constexpr int kAtOnce = kTaken / kVector<T>;
  const bool aligned = (reinterpret_cast<uintptr_t>(item) & 15) == 0;
#pragma unroll 1
  for (int round = thread / kVectors; round < hits; round += kAtOnce * kTogether) {
    LaneCell<T> x;  // the first kTaken elements of it
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
      x.words[4 * j] = vector.x;
      x.words[4 * j + 1] = vector.y;
      x.words[4 * j + 2] = vector.z;
      x.words[4 * j + 3] = vector.w;
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
  return true;
}

// Fills the pool with candidates: all of the item's k largest among them. Returns the floor they
// are not below.
template <class T, int kThreads, class Shape>
__device__ __noinline__ Key Gather(const T* item, int item_begin, int item_elements,
                                   const typename Shape::Sketch* sketch, Floor floor, int k) {
  auto& s = Pool<Shape>();
  const int cells = (item_elements + kCell - 1) / kCell;
  if (threadIdx.x == 0) s.count = 0;
  if (floor.key == 0 && k <= cells * Shape::kGroupsOfCell) {
    // The k-th largest of the sketch: at least k groups, so k logits, reach it.
    const uint32_t coarse =
        SelectThreshold<kThreads>(reinterpret_cast<const uint16_t*>(sketch),
                                  cells * Shape::kGroupsOfCell, k, k / 8, s.select);
    if (coarse > Coarse(-kInfinity)) floor.Raise(static_cast<Key>(coarse) << 48);
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

// ---- reading -----------------------------------------------------------------------------------

// A warp's part in its block's read of elements [begin, end) of a row. Copies start with
// construction; the rings' memory is free after Run and a barrier.
template <class Block>
class RowStream {
 public:
  using T = typename Block::Element;
  using Pool = typename Block::Pool;

  __device__ RowStream(typename Block::Shared& shared, const T* row, int begin, int end)
      : ring_(shared.rings[threadIdx.x / 32], threadIdx.x % 32),
        lane_(threadIdx.x % 32),
        at_(begin + static_cast<int>(threadIdx.x) / 32 * kCell),
        end_(end),
        row_(row),
        ahead_(row + at_),
        left_(end - at_) {
#pragma unroll
    for (int stage = 0; stage < Block::kStages; ++stage) Push();
  }

  // Writes the statistics of the row's cells at scale c = log2(e) / temperature to `cells`, counted
  // from the row's start, and the sketch, counted from `begin`. Returns the largest logit the lane
  // has seen. kTwice: statistics at c2 to cells2 too, where it is not null.
  template <bool kTwice = false>
  __device__ float Run(float c, Stats* cells, typename Pool::Sketch* sketch, float c2 = 0.0f,
                       Stats* cells2 = nullptr) {
    float lane_best = -kInfinity;
    // A cell's lanes are merged a turn late, so that the shuffles overlap with the next cell's
    // arithmetic.
    Stats late{-kInfinity, 0.0f};
    Stats late2{-kInfinity, 0.0f};
    int late_cell = -1;
    const auto merge_late = [&] {
      const Stats stats = MergeLanes(late, c);
      if (lane_ == 0 && late_cell >= 0) cells[late_cell] = stats;
      if constexpr (kTwice) {
        if (cells2 == nullptr) return;
        const Stats stats2 = MergeLanes(late2, c2);
        if (lane_ == 0 && late_cell >= 0) cells2[late_cell] = stats2;
      }
    };
    typename Pool::Sketch* sketch_to = sketch + threadIdx.x;
#pragma unroll 1
    for (int first = at_; first < end_; first += kRound) {
      LaneCell<T> x;
      ring_.Pop(row_ + first, end_ - first, x);
      Push();
      merge_late();
      float group_max[Pool::kLaneGroups];
      float lane_max = -kInfinity;
#pragma unroll
      for (int g = 0; g < Pool::kLaneGroups; ++g) {
        group_max[g] = x.Max(g * Pool::kElements, Pool::kElements);
        lane_max = fmaxf(lane_max, group_max[g]);
      }
      late = LaneStats(x, lane_max, c);
      if constexpr (kTwice) {
        if (cells2 != nullptr) late2 = LaneStats(x, lane_max, c2);
      }
      late_cell = first / kCell;
      lane_best = fmaxf(lane_best, lane_max);
      if constexpr (Pool::kLaneGroups == 2) {
        *sketch_to = __byte_perm(OrderedBits(group_max[0]), OrderedBits(group_max[1]), 0x7632);
      } else {
        *sketch_to = {__byte_perm(OrderedBits(group_max[0]), OrderedBits(group_max[1]), 0x7632),
                      __byte_perm(OrderedBits(group_max[2]), OrderedBits(group_max[3]), 0x7632)};
      }
      sketch_to += Block::kThreads;
    }
    merge_late();
    WaitAsync<0>();
    return lane_best;
  }

  // In place of Run, cell by cell: Next, as long as there is one, and Release. In between the cell
  // lies in shared memory too, the warp's to change.
  __device__ bool Next(LaneCell<T>& x) {
    if (at_ >= end_) {
      WaitAsync<0>();
      return false;
    }
    ring_.Pop(row_ + at_, end_ - at_, x);
    return true;
  }
  __device__ int first() const { return at_; }  // element of the row
  __device__ T* InShared() { return ring_.Cell(row_ + at_); }
  __device__ void Release() {
    at_ += kRound;
    Push();
  }

  // In place of Run: nothing is asked of the row.
  __device__ void Abandon() { WaitAsync<0>(); }

 private:
  static constexpr int kRound = Block::kWarps * kCell;

  __device__ void Push() {
    if (left_ <= 0) return ring_.PushNothing();
    ring_.Push(ahead_, left_);
    ahead_ += kRound;
    left_ -= kRound;
  }

  typename Block::Ring ring_;
  const int lane_;
  int at_;
  const int end_;
  const T* row_;
  const T* ahead_;
  int left_;
};

// A logit that at least k of the block's reach, -inf where k is too large for this: r lanes of each
// of w warps have seen one, r * w >= k. `cells` are what the block has read. Called by all threads
// after a barrier; passes another, unless k is too large.
template <class Block>
__device__ inline float BlockFloor(float lane_best, int cells, int k) {
  auto& s = Pool<typename Block::Pool>();
  const int lane = threadIdx.x % 32;
  const int warps = min(Block::kWarps, cells);
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
__device__ __noinline__ float ClusterFloor(float lane_best, int block, int blocks, int k,
                                           float* bests, float& row_floor) {
  constexpr int kMaxWarps = kMaxClusterBlocks * Block::kWarps;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blocks * Block::kWarps;
  const int r = min(32, (2 * k + warps - 1) / warps);
  const int m = (k + r - 1) / r;
  const float best = __shfl_sync(kFullWarp, WarpSortDescending(lane_best, lane), r - 1);
  if (lane < blocks) *InBlock(&bests[block * Block::kWarps + warp], lane) = best;
  if (threadIdx.x == 0) row_floor = -kInfinity;
  ClusterArrive();
  ClusterWait();
  // Ranked by as many neighbouring lanes as there are threads for a value.
  constexpr int kParts = Block::kThreads / kMaxWarps;
  static_assert(kParts >= 1 && kMaxWarps % (4 * kParts) == 0);
  const int own = threadIdx.x / kParts;
  const int part = threadIdx.x % kParts;
  const float mine = own < warps ? bests[own] : -kInfinity;
  int rank = 0;
#pragma unroll 8
  for (int i = part; i < warps; i += kParts)
    rank += bests[i] > mine || (bests[i] == mine && i < own);
#pragma unroll
  for (int offset = 1; offset < kParts; offset *= 2)
    rank += __shfl_xor_sync(kFullWarp, rank, offset);
  if (part == 0 && own < warps && rank == m - 1) row_floor = mine;
  __syncthreads();
  return row_floor;
}

// Sends the k largest keys of the block's pool, and what else comes with them, to the first block
// of the cluster. Called by all threads; passes a barrier of the cluster.
template <int kThreads, class Shape>
__device__ inline void SendToFirst(int k, int block) {
  auto& s = Pool<Shape>();
  const int n = Trim<kThreads, Shape>(k, Shape::Shared::kInbox);
  Key* inbox = InBlock(s.inbox[block], 0);
  for (int i = threadIdx.x; i < n; i += kThreads) inbox[i] = s.pool[i];
  if (threadIdx.x == 0) *InBlock(&s.inbox_counts[block], 0) = n;
  ClusterArrive();
  ClusterWait();
}

// Puts what the cluster's blocks have sent to the first one into its pool.
template <int kThreads, class Shape>
__device__ inline void OpenInbox(int blocks) {
  auto& s = Pool<Shape>();
  int n = 0;
  for (int block = 0; block < blocks; ++block) {
    const int count = s.inbox_counts[block];
    for (int i = threadIdx.x; i < count; i += kThreads) s.pool[n + i] = s.inbox[block][i];
    n += count;
  }
  if (threadIdx.x == 0) s.count = n;
  __syncthreads();
}

// Dynamic shared memory of a block: rings or pool, a row's statistics, an item's sketch.
template <class Block>
int SharedBytes(int cells, int item_cells) {
  return static_cast<int>(sizeof(typename Block::Shared) + (cells + cells % 2) * sizeof(Stats) +
                          item_cells * 32 * sizeof(typename Block::Pool::Sketch));
}

// The most cells of an item that a block can hold the sketch of, for rows of `cells` cells; 0 where
// the device's shared memory does not even hold its rings.
template <class Block>
int MaxItemCells(int cells, const Scratch& scratch) {
  const int bytes = scratch.block_shared_bytes - SharedBytes<Block>(cells, 0);
  return std::clamp<int>(bytes / static_cast<int>(32 * sizeof(typename Block::Pool::Sketch)), 0,
                         kMaxItemCells);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_ROW_BLOCK_CUH_
