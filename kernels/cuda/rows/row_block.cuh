// A row read once by a block, or by a cluster of blocks: what every op on rows of logits is built
// from.
//
// RowStream reads cells and leaves their statistics and a sketch: the maxima of groups of
// consecutive logits, 16 bits each. candidates.cuh finds the row's largest tokens by the sketch.
#ifndef LOGITD_KERNELS_CUDA_ROWS_ROW_BLOCK_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_ROW_BLOCK_CUH_

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/rows/ring.cuh"
#include "kernels/cuda/rows/select.cuh"

namespace logitd::cuda {

// ---- shapes ------------------------------------------------------------------------------------

// What the block needs after its read of a row: the pool, for up to kMax keys, and the sketch.
// kGroupsOfLane: groups of a lane's part of a cell, in the sketch.
template <int kMax, int kGroupsOfLane = kMax <= 128 ? 2 : 4, int kKeys = kMax <= 128 ? 1024 : 4096>
struct PoolShape {
  static constexpr int kMaxK = kMax;
  static constexpr int kPool = kKeys;      // candidates
  static constexpr int kHits = kPool / 2;  // groups to look at again
  static constexpr int kLaneGroups = kGroupsOfLane;
  static constexpr int kGroupsOfCell = 32 * kLaneGroups;
  static constexpr int kMostCells = 65536 / kGroupsOfCell;       // of a block: a hit has 16 bits
  static constexpr int kElements = kLaneElements / kLaneGroups;  // of a group
  // A lane's group maxima, 16 bits each.
  using Sketch = std::conditional_t<kLaneGroups == 1, uint16_t,
                                    std::conditional_t<kLaneGroups == 2, uint32_t, uint2>>;
  struct Shared {
    SelectScratch select;
    int count;  // keys offered to the pool; more than kPool: it overflowed
    int kept;
    int hit_count;
    bool overflowed;
    bool last;
    float warp_floor[SelectScratch::kMaxWarps];
    uint16_t hits[kHits];  // groups of the item, kGroupsOfCell a cell
    alignas(16) Key pool[kPool];
  };
};
using SmallPool = PoolShape<128>;
using LargePool = PoolShape<1024>;
using LargeClusterPool = PoolShape<1024, 2, 8192>;  // room for what 8 blocks find

// kInCluster: a row's blocks may be a cluster; they leave what they found in the shared memory of
// its first block.
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
    // The cluster's floor. Not in the ring's memory: the blocks do not end their reading together.
    alignas(16) uint32_t warp_bests[kCluster ? kMaxClusterBlocks * kWarps : 1];
    float row_floor;
    // Groups that a warp looks at again, and how many keys the block's warps have offered.
    static constexpr int kHitsOfWarp = 64;
    uint16_t hits[kCluster ? kWarps : 1][kCluster ? kHitsOfWarp : 1];
    int offered;
    bool crowded;
    // Candidates of the cluster's blocks. Here, so that other blocks do not have room for them.
    static constexpr int kInbox = std::max(Pool::kPool / kMaxClusterBlocks, Pool::kMaxK);
    alignas(16) Key inbox[kCluster ? kMaxClusterBlocks : 1][kCluster ? kInbox : 1];
    int inbox_counts[kCluster ? kMaxClusterBlocks : 1];
  };
};

template <class Shape>
__device__ inline typename Shape::Shared& Pool() {
  extern __shared__ __align__(128) uint4 dynamic[];
  return *reinterpret_cast<typename Shape::Shared*>(dynamic);
}

// A block that reads a row and selects nothing: it needs no memory for a pool.
template <class T, int kBlockWarps, int kRingStages, int kResidentBlocks, bool kInCluster = false>
struct StreamShape
    : BlockShape<T, SmallPool, kBlockWarps, kRingStages, kResidentBlocks, kInCluster> {
  struct Shared {
    typename CellRing<T, kRingStages>::Storage rings[kBlockWarps];
  };
};

// The part of a row that a block reads: all of it, or its share where the row is split over blocks.
struct Part {
  int block;
  int blocks;
  int begin;  // a cell's border
  int end;
  int row_elements;

  __device__ static Part Of(int block, int blocks, int row_cells, int vocab) {
    const auto border = [=](int n) { return SmallQuotient(row_cells * n, blocks) * kCell; };
    return {block, blocks, border(block), min(border(block + 1), vocab), vocab};
  }
  __device__ int elements() const { return end - begin; }
  __device__ int cells() const { return CellsOf(elements()); }
};

// ---- reading -----------------------------------------------------------------------------------

// A lane's part of the sketch of a cell: the maxima of its groups.
template <class Shape>
__device__ __forceinline__ typename Shape::Sketch PackSketch(
    const float (&group_max)[Shape::kLaneGroups]) {
  const auto pair = [&](int g) {
    return __byte_perm(OrderedBits(group_max[g]), OrderedBits(group_max[g + 1]), 0x7632);
  };
  if constexpr (Shape::kLaneGroups == 1) {
    return static_cast<uint16_t>(OrderedBits(group_max[0]) >> 16);
  } else if constexpr (Shape::kLaneGroups == 2) {
    return pair(0);
  } else {
    return {pair(0), pair(2)};
  }
}

// Where groups of consecutive elements are: kLanes neighbouring lanes hold a vector each of a
// group, and their parts of the sketch, together, are the maxima of vectors 0, 1, 2, ... over these
// lanes.
template <class Shape, class T>
struct GroupPlace {
  static constexpr int kVectors = kLaneElements / kVector<T>;  // of a lane
  static constexpr int kLanes = Shape::kElements / kVector<T>;
  static_assert(kVectors == kLanes * Shape::kLaneGroups);
};

// The largest of each of a lane's vectors of a cell.
template <class Shape, class T>
class VectorMaxima {
 public:
  __device__ explicit VectorMaxima(const LaneCell<T>& x) {
#pragma unroll
    for (int v = 0; v < Place::kVectors; ++v) largest_[v] = Largest(x, v);
  }

  // The lane's largest logit.
  __device__ float OfLane() const {
    Largest of_lane = largest_[0];
#pragma unroll
    for (int v = 1; v < Place::kVectors; ++v) of_lane.Merge(largest_[v]);
    return of_lane.ToFloat();
  }

  // The lane's part of the sketch. A group is consecutive elements, which a second look reads from
  // one place.
  __device__ typename Shape::Sketch Sketch() {
    // Neighbours swap halves of what they have, until each has its groups.
    const int lane = threadIdx.x % 32;
    int left = Place::kVectors;
#pragma unroll
    for (int distance = Place::kLanes / 2; distance > 0; distance /= 2) {
      left /= 2;
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int v = 0; v < left; ++v) {
        const Largest sent = upper ? largest_[v] : largest_[v + left];
        if (upper) largest_[v] = largest_[v + left];
        largest_[v].Merge(sent.Swapped(distance));
      }
    }
    float group_max[Shape::kLaneGroups];
#pragma unroll
    for (int g = 0; g < Shape::kLaneGroups; ++g) group_max[g] = largest_[g].ToFloat();
    return PackSketch<Shape>(group_max);
  }

 private:
  using Place = GroupPlace<Shape, T>;
  using Largest = LargestOf<T>;
  Largest largest_[Place::kVectors];
};

// The lane's part of the sketch of a cell, and its largest logit.
template <class Shape, class T>
__device__ __forceinline__ typename Shape::Sketch SketchOf(const LaneCell<T>& x, float& lane_max) {
  VectorMaxima<Shape, T> maxima(x);
  lane_max = maxima.OfLane();
  return maxima.Sketch();
}

// The same of groups of the lane's own elements: no lane waits for another. For rows that stay in
// shared memory.
template <class Shape, class T>
__device__ __forceinline__ typename Shape::Sketch SketchOfLane(const LaneCell<T>& x,
                                                               float& lane_max) {
  float group_max[Shape::kLaneGroups];
  lane_max = -kInfinity;
#pragma unroll
  for (int g = 0; g < Shape::kLaneGroups; ++g) {
    group_max[g] = x.Max(g * Shape::kElements, Shape::kElements);
    lane_max = fmaxf(lane_max, group_max[g]);
  }
  return PackSketch<Shape>(group_max);
}

// Where the statistics of a row's cells at one temperature go, counted from the row's start.
struct CellStats {
  float log2e_over_temperature;
  Stats* cells;
};

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

  // Writes the cells' statistics and the sketch, counted from `begin`. Returns the largest logit
  // the lane has seen. kTwice: also the statistics of `second`, where its cells are not null, and
  // no sketch where `sketch` is null.
  template <bool kTwice = false>
  __device__ float Run(CellStats to, typename Pool::Sketch* sketch, CellStats second = {}) {
    float lane_best = -kInfinity;
    // A cell's lanes are merged a turn late, so that the shuffles overlap with the next cell's
    // arithmetic.
    Stats late{-kInfinity, 0.0f};
    Stats late_second{-kInfinity, 0.0f};
    int late_cell = -1;
    const auto merge_late = [&] {
      const Stats stats = MergeLanes(late, to.log2e_over_temperature);
      if (lane_ == 0 && late_cell >= 0) to.cells[late_cell] = stats;
      if constexpr (kTwice) {
        if (second.cells == nullptr) return;
        const Stats stats_second = MergeLanes(late_second, second.log2e_over_temperature);
        if (lane_ == 0 && late_cell >= 0) second.cells[late_cell] = stats_second;
      }
    };
    typename Pool::Sketch* sketch_to = sketch + threadIdx.x;
#pragma unroll 1
    for (int first = at_; first < end_; first += kRound) {
      LaneCell<T> x;
      ring_.Pop(row_ + first, end_ - first, x);
      Push();
      merge_late();
      VectorMaxima<Pool, T> maxima(x);
      const float lane_max = maxima.OfLane();
      if (!kTwice || sketch != nullptr) *sketch_to = maxima.Sketch();
      sketch_to += Block::kThreads;
      late = LaneStats(x, lane_max, to.log2e_over_temperature);
      if constexpr (kTwice) {
        if (second.cells != nullptr)
          late_second = LaneStats(x, lane_max, second.log2e_over_temperature);
      }
      late_cell = first / kCell;
      lane_best = fmaxf(lane_best, lane_max);
    }
    merge_late();
    WaitAsync<0>();
    return lane_best;
  }

  // Instead of Run, cell by cell: Next, as long as there is one, and Release. In between the cell
  // is in shared memory too, and the warp may change it there.
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

  // Instead of Run: the row is not needed.
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

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_ROW_BLOCK_CUH_
