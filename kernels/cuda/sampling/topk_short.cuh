// softmax_topk, a warp per row, the whole row in the warp's shared memory: rows of up to 8 cells, or
// 12 of 16 bits, k <= 64.
//
// A block has as many warps as shared memory holds rows of the launch's number of cells, and a last
// cell of which the row has at most a quarter takes less time. So a row just above a cell's border
// takes little longer than one below it.
//
// A row's end has no barrier: the floor is found among the maxima of the row's groups by halving,
// then the cells that reach it are read again from shared memory. The row's memory is free before
// its answers are ranked, so the next row's copy runs meanwhile.
//
// Limited by instructions, and by latencies where f32 rows of 4 cells leave room for 12 warps a
// multiprocessor: 16384 x 4096 f32 k 50 takes 3080 instructions a row, each 6 cycles after the one
// before. Measured on an H100 (bench/results/h100/rows_and_draws.json): 79% of one read; bf16 57%;
// k 5 86%. At borders (bench/results/h100/borders.json): 16384 x 4097 bf16 k 64 125 us (147 with the warps
// of 8 cells), 65536 x 1025 k 10 113 us (134), still 1.8 times what 1024 tokens take by topk_warp.cuh.
// Tried and dropped: ranking by a sort from 32 keys on (20000 x 3001 k 50 7% slower); branches by quarters
// in the loop over whole cells (up to 10% slower).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_SHORT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_SHORT_CUH_

#include <algorithm>

#include "kernels/cuda/rows/row_block.cuh"
#include "kernels/cuda/sampling/topk_warp.cuh"

namespace logitd::cuda {

constexpr int kShortRowMaxK = 64;
constexpr int kShortRowPool = 128;

// Blocks for rows of kLeastCells to kMaxCells cells; one is resident on a multiprocessor. It has as
// many warps as shared memory holds rows of the launch.
template <class T, int kLeastCells, int kMaxCells>
struct ShortRowShape {
  using Element = T;
  using Ring = CellRing<T, kMaxCells>;
  // 256 groups of a row, or 128 where it is a cell: k <= 64 of them are well below all.
  using Pool = PoolShape<128, std::clamp(8 / kMaxCells, 1, 4)>;
  static constexpr int kCells = kMaxCells;
  static constexpr int kGroups = kMaxCells * Pool::kLaneGroups;  // of a lane
  struct Warp {
    Key pool[kShortRowPool];
    typename Pool::Sketch sketch[kMaxCells][32];
    uint16_t places[kShortRowPool];  // cell << 10 | lane << 5 | bit, of candidates
    typename Ring::Storage ring;     // only its first slots, of the row's cells, are there
  };
  struct alignas(128) Shared {
    uint32_t next_turn;
    // Then the warps' memory.
    __device__ Warp& OfWarp(int warp, int cells) {
      return *reinterpret_cast<Warp*>(reinterpret_cast<char*>(this + 1) + warp * WarpBytes(cells));
    }
  };
  __host__ __device__ static constexpr int WarpBytes(int cells) {
    return static_cast<int>(sizeof(Warp)) - (kMaxCells - cells) * Ring::kCellBytes;
  }
  static constexpr int kMostWarps = sizeof(T) == 4 ? 22 : 32;  // by registers
  // Warps of a block for rows of `cells` cells, where it may have so much shared memory.
  static constexpr int Warps(int cells, int shared_bytes) {
    return std::min(kMostWarps,
                    (shared_bytes - static_cast<int>(sizeof(Shared))) / WarpBytes(cells));
  }
  static constexpr int kMostThreads = 32 * Warps(kLeastCells, 227 * 1024);
};

// A row in shared memory, cell by cell.
template <class Shape>
struct RowInShared {
  using T = typename Shape::Element;
  const T* first;
  __device__ float operator[](int i) const {
    const char* cell = reinterpret_cast<const char*>(first) + i / kCell * Shape::Ring::kCellBytes;
    return ToFloat(reinterpret_cast<const T*>(cell)[i % kCell]);
  }
};

// ---- candidates --------------------------------------------------------------------------------

// The lane's group maxima, ordered and 16 bits each; 0 for cells that the row does not have.
template <class Shape>
__device__ inline void GroupMaxima(const typename Shape::Warp& s, int lane,
                                   uint32_t (&maxima)[Shape::kGroups]) {
  constexpr int kLaneGroups = Shape::Pool::kLaneGroups;
#pragma unroll
  for (int c = 0; c < Shape::kCells; ++c) {
    const auto* of_cell = reinterpret_cast<const uint16_t*>(&s.sketch[c][lane]);
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) maxima[c * kLaneGroups + g] = of_cell[g];
  }
}

// The lowest logit, as OrderedBits, with these first 16 bits.
__device__ inline uint32_t LowestOf(uint32_t coarse) {
  return max(coarse << 16, OrderedBits(-kInfinity));  // below it are the bits of NaN
}

// The first 16 bits of an ordered logit that at least k of the row reach: near the k-th largest of
// the group maxima.
template <int kGroups>
__device__ inline uint32_t FloorOfGroups(const uint32_t (&maxima)[kGroups], int k) {
  uint32_t best = 0;
  uint32_t second = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    second = max(second, min(best, maxima[g]));
    best = max(best, maxima[g]);
  }
  static_assert(kShortRowMaxK <= 64);
  uint32_t low = WarpMin(k <= 32 ? best : second);  // k groups reach it
  uint32_t high = WarpMax(best);
  const int enough = k + k / 8;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    int count = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) count += maxima[g] >= middle;
    count = __reduce_add_sync(kFullWarp, count);
    if (count >= k) {
      low = middle;
      if (count <= enough) break;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The same from the largest logits that the lanes have seen: the floor is lower, and found in fewer
// instructions.
template <class T>
__device__ inline uint32_t FloorOfLanes(float lane_best, int k, uint4* maxima, int lane) {
  const uint16_t coarse = CoarseBits<T>(lane_best);
  reinterpret_cast<uint16_t*>(maxima)[lane] = coarse;
  __syncwarp();
  const bool among = LanesAbove<T>(maxima, coarse) < k;
  __syncwarp();
  return __reduce_min_sync(kFullWarp, among ? OrderedBits(lane_best) : ~0u) >> 16;
}

// For k up to this, some 20 logits reach the floor of lanes.
constexpr int kFewOfLanes = 16;

// The floor of a row that has just been read.
template <class Shape>
__device__ __forceinline__ uint32_t CoarseFloor(float lane_best, int k, typename Shape::Warp& s,
                                                int lane) {
  if (k <= kFewOfLanes)
    return FloorOfLanes<typename Shape::Element>(lane_best, k, reinterpret_cast<uint4*>(s.pool),
                                                 lane);
  uint32_t maxima[Shape::kGroups];
  GroupMaxima<Shape>(s, lane, maxima);
  return FloorOfGroups(maxima, k);
}

// The same floor for Reached(): two coarse logits that what is not below it is not below.
template <class T>
__device__ inline CoarsePair<T> CoarsePairOfFloor(uint32_t coarse) {
  const float floor = FromOrderedBits(LowestOf(coarse));
  uint16_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    bits = __half_as_ushort(__float2half_rd(floor));
  } else {
    bits = static_cast<uint16_t>(__float_as_uint(floor) >> 16);
  }
  return CoarsePairOf<T>(bits * 0x10001u);
}

// Lists the places of the row's logits that reach the floor coarsely. Returns their number; above
// kShortRowPool not all of them are listed.
template <class Shape>
__device__ __forceinline__ int ListPlacesOfRow(typename Shape::Ring& ring,
                                               const typename Shape::Element* row, int vocab,
                                               uint32_t coarse, typename Shape::Warp& s, int lane) {
  using T = typename Shape::Element;
  const CoarsePair<T> floor = CoarsePairOfFloor<T>(coarse);
  int n = 0;
#pragma unroll 1
  for (int c = 0; c * kCell < vocab; ++c) {
    bool hit = false;
    const auto* of_cell = reinterpret_cast<const uint16_t*>(&s.sketch[c][lane]);
#pragma unroll
    for (int g = 0; g < Shape::Pool::kLaneGroups; ++g) hit |= of_cell[g] >= coarse;
    if (!__any_sync(kFullWarp, hit)) continue;
    LaneCell<T> x;
    ring.Reread(row, c, vocab - c * kCell, x);
    uint32_t reached = Reached<T>(x, floor);
#pragma unroll 1
    while (true) {  // the lanes' candidates, one of each lane a round
      const uint32_t lanes = __ballot_sync(kFullWarp, reached != 0);
      if (lanes == 0) break;
      const int at = n + __popc(lanes & ((1u << lane) - 1));
      if (reached != 0 && at < kShortRowPool)
        s.places[at] =
            static_cast<uint16_t>(c << 10 | lane << 5 | (31 - __clz(reached & -reached)));
      reached &= reached - 1;
      n += __popc(lanes);
    }
    if (n > kShortRowPool) break;
  }
  __syncwarp();
  return n;
}

// Fills the pool with the keys of the listed places, and zeros up to 32, 64 or 128.
template <class Shape>
__device__ __forceinline__ void KeysOfPlaces(RowInShared<Shape> row, int vocab, int n,
                                             typename Shape::Warp& s, int lane) {
  const int end = n <= 64 ? n : kShortRowPool;
#pragma unroll 1
  for (int at = lane; at - lane < end; at += 32) {
    Key key = 0;
    if (at < n) {
      const uint32_t place = s.places[at];
      const int i = static_cast<int>(place >> 10) * kCell +
                    ReachedIndex<typename Shape::Element>(place & 1023);
      if (i < vocab) key = MakeKey(row[i], i);
    }
    s.pool[at] = key;
  }
}

// Where too many logits reach the floor coarsely: fills the pool with the k largest keys, or some
// more. At least k logits of the row are not below `low`, in OrderedBits. Returns their number.
template <class Shape>
__device__ __noinline__ int FillByHalving(RowInShared<Shape> row, int vocab, int k, uint32_t low,
                                          uint32_t high, typename Shape::Warp& s, int lane) {
  const auto count = [&](auto take) {
    int n = 0;
#pragma unroll 4
    for (int i = lane; i < vocab; i += 32) n += take(row[i]);
    return __reduce_add_sync(kFullWarp, n);
  };
  bool few = false;
#pragma unroll 1
  while (low < high && !few) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const float edge = FromOrderedBits(middle);
    const int n = count([=](float x) { return x >= edge; });
    if (n >= k) {
      low = middle;
      few = n <= kShortRowPool;
    } else {
      high = middle - 1;
    }
  }
  // Of logits equal to the floor, the first.
  const float floor = FromOrderedBits(low);
  int equals = few ? vocab : k - count([=](float x) { return x > floor; });
  int n = 0;
#pragma unroll 1
  for (int base = 0; base < vocab; base += 32) {
    const int i = base + lane;
    const float x = i < vocab ? row[i] : 0.0f;
    const uint32_t equal = __ballot_sync(kFullWarp, i < vocab && x == floor);
    const uint32_t below = (1u << lane) - 1;
    const bool take = i < vocab && (x > floor || (x == floor && __popc(equal & below) < equals));
    const uint32_t taken = __ballot_sync(kFullWarp, take);
    if (take) s.pool[n + __popc(taken & below)] = MakeKey(x, i);
    n += __popc(taken);
    equals = max(0, equals - __popc(equal));
  }
  for (int at = n + lane; at < kShortRowPool; at += 32) s.pool[at] = 0;
  __syncwarp();
  return n;
}

// ---- answers -----------------------------------------------------------------------------------

// Sorts 32 * kKeys keys over the warp, descending; place i is keys[i / 32] of lane i % 32.
template <int kKeys>
__device__ __forceinline__ void SortOverWarp(Key (&keys)[kKeys], int lane) {
#pragma unroll
  for (int size = 2; size <= 32 * kKeys; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride >= 32; stride /= 2) {
#pragma unroll
      for (int r = 0; r < kKeys; ++r) {
        if (((32 * r) & stride) != 0) continue;
        Key& low = keys[r];
        Key& high = keys[r + stride / 32];
        const Key larger = max(low, high);
        const Key smaller = min(low, high);
        const bool descends = ((32 * r) & size) == 0;
        low = descends ? larger : smaller;
        high = descends ? smaller : larger;
      }
    }
#pragma unroll
    for (int stride = min(size / 2, 16); stride > 0; stride /= 2) {
#pragma unroll
      for (int r = 0; r < kKeys; ++r) {
        const Key other = __shfl_xor_sync(kFullWarp, keys[r], stride);
        const bool takes_larger = (((32 * r + lane) & size) == 0) == ((lane & stride) == 0);
        keys[r] = takes_larger == (other > keys[r]) ? other : keys[r];
      }
    }
  }
}

// Writes the first k keys of a pool of more than 64 by sorting all of it: fewer instructions than
// EmitPool, which compares each key with all. For fewer keys the sort's latencies are longer.
__device__ __forceinline__ void EmitSorted(const Key* pool, int k, const RowResult& result,
                                           int32_t* indices, float* probs, int lane) {
  constexpr int kKeys = kShortRowPool / 32;
  Key keys[kKeys];
#pragma unroll
  for (int r = 0; r < kKeys; ++r) keys[r] = pool[32 * r + lane];
  SortOverWarp(keys, lane);
#pragma unroll
  for (int r = 0; r < kKeys; ++r) {
    const int rank = 32 * r + lane;
    if (rank >= k) continue;
    indices[rank] = KeyIndex(keys[r]);
    probs[rank] = result.Probability(KeyLogit(keys[r]));
  }
}

// ---- a warp's rows -----------------------------------------------------------------------------

// The warp's rows, one after the other: the copy of the next one, and its parameters, are under way
// while the present one's answers are ranked.
template <class Shape>
class ShortRows {
 public:
  using T = typename Shape::Element;

  __device__ ShortRows(const TopKParams& p, typename Shape::Shared& s, int warp, int lane)
      : p_(p), s_(s), lane_(lane), ring_(s.OfWarp(warp, p.cells).ring, lane), turn_(warp) {
    if (threadIdx.x == 0) s.next_turn = blockDim.x / 32;
    Start();
    __syncthreads();
  }

  __device__ int64_t row() const { return RowOfTurn(turn_); }
  __device__ bool Done() const { return row() >= p_.args.logits.rows; }
  __device__ const SoftmaxTopKRow& ask() const { return ask_; }
  __device__ const T* logits() const { return p_.Row<T>(row()); }
  __device__ typename Shape::Ring& ring() { return ring_; }
  __device__ RowInShared<Shape> in_shared() { return {ring_.Row(logits())}; }

  // Loads the row's next cell, which begins at `first`.
  __device__ void Next(int first, LaneCell<T>& x) {
    ring_.PopQuarters(logits() + first, p_.vocab - first, x);
    ring_.PushNothing();
  }
  // The same where only the cell's first quarter is in the row.
  __device__ void NextQuarter(int first, LaneCell<T>& x) {
    ring_.PopQuarter(logits() + first, p_.vocab - first, x);
    ring_.PushNothing();
  }
  // Ends the row: its shared memory is free.
  __device__ void Advance() {
    __syncwarp();
    if (lane_ == 0) turn_ = atomicAdd(&s_.next_turn, 1u);
    turn_ = __shfl_sync(kFullWarp, turn_, 0);
    Start();
  }

 private:
  __device__ void Start() {
    ring_.Restart();
    if (Done()) return;
    const T* first = logits();
#pragma unroll
    for (int c = 0; c < Shape::kCells; ++c) {
      if (c * kCell < p_.vocab) {
        ring_.Push(first + c * kCell, p_.vocab - c * kCell);
      } else {
        ring_.PushNothing();
      }
    }
    ask_ = p_.args.rows[row()];
  }

  const TopKParams& p_;
  typename Shape::Shared& s_;
  const int lane_;
  typename Shape::Ring ring_;
  uint32_t turn_;
  SoftmaxTopKRow ask_;
};

// What a lane knows of a row that the warp has read.
struct ReadRow {
  Stats cell;       // of the cell with the lane's number
  float lane_best;  // the largest logit the lane has seen
  float row_max;    // the row's
};

// Reads the row: leaves its sketch.
template <class Shape>
__device__ __forceinline__ ReadRow ReadShortRow(ShortRows<Shape>& rows, int vocab,
                                                float log2e_over_temperature,
                                                typename Shape::Warp& s, int lane) {
  using T = typename Shape::Element;
  ReadRow row{{-kInfinity, 0.0f}, -kInfinity, -kInfinity};
  // A cell's lanes are merged a turn late, as in RowStream::Run.
  Stats late{-kInfinity, 0.0f};
  const auto merge_late = [&](int c) {
    const Stats stats = MergeLanes(late, log2e_over_temperature);
    if (lane == c) row.cell = stats;
    row.row_max = fmaxf(row.row_max, stats.max);
  };
  int c = 0;
#pragma unroll 1
  for (; vocab - c * kCell > kQuarter; ++c) {
    LaneCell<T> x;
    rows.Next(c * kCell, x);
    if (c > 0) merge_late(c - 1);
    float lane_max;
    s.sketch[c][lane] = SketchOfLane<typename Shape::Pool>(x, lane_max);
    late = LaneStats(x, lane_max, log2e_over_temperature);
    row.lane_best = fmaxf(row.lane_best, lane_max);
  }
  if (c * kCell < vocab) {  // a cell of which there is little
    LaneCell<T> x;
    rows.NextQuarter(c * kCell, x);
    if (c > 0) merge_late(c - 1);
    float group_max[Shape::Pool::kLaneGroups];
    for (float& max : group_max) max = -kInfinity;
    group_max[0] = x.Max(0, kSumElements);
    s.sketch[c][lane] = PackSketch<typename Shape::Pool>(group_max);
    late = LaneStatsOfQuarter(x, group_max[0], log2e_over_temperature);
    row.lane_best = fmaxf(row.lane_best, group_max[0]);
    ++c;
  }
  merge_late(c - 1);
  return row;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads, 1)
    ShortRowKernel(const __grid_constant__ TopKParams p) {
  using T = typename Shape::Element;
  extern __shared__ __align__(128) uint4 dynamic[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  typename Shape::Warp& s = shared.OfWarp(warp, p.cells);
  for (int c = p.cells; c < Shape::kCells; ++c) s.sketch[c][lane] = {};
  ShortRows<Shape> rows(p, shared, warp, lane);
  float temperature = 0.0f;  // what the next two are of
  float log2e_over_temperature = 0.0f;
  double exact_log2e_over_temperature = 0.0;
#pragma unroll 1
  while (!rows.Done()) {
    const SoftmaxTopKRow ask = rows.ask();
    if (ask.k == 0) {
      WaitAsync<0>();
      rows.Advance();
      continue;
    }
    if (ask.temperature != temperature) {
      temperature = ask.temperature;
      log2e_over_temperature = kLog2E / temperature;
      exact_log2e_over_temperature = RowResult::Log2EOver(temperature);
    }
    const ReadRow row = ReadShortRow<Shape>(rows, p.vocab, log2e_over_temperature, s, lane);
    const RowResult result(
        MergeCells(p.cells, log2e_over_temperature, lane, [=](int) { return row.cell; }),
        log2e_over_temperature, exact_log2e_over_temperature);
    WriteRow<T>(p, rows.row(), ask, result, lane,
                [=](int c) { return __shfl_sync(kFullWarp, isnan(row.cell.sum), c); });
    if (p.statistics_only || result.Nan()) {
      if (!p.statistics_only) EmitNothing(p.args, ask, lane, 32);
      rows.Advance();
      continue;
    }

    const uint32_t floor = CoarseFloor<Shape>(row.lane_best, ask.k, s, lane);
    int n = ListPlacesOfRow<Shape>(rows.ring(), rows.logits(), p.vocab, floor, s, lane);
    if (n <= kShortRowPool) {
      KeysOfPlaces<Shape>(rows.in_shared(), p.vocab, n, s, lane);
    } else {
      n = FillByHalving<Shape>(rows.in_shared(), p.vocab, ask.k, LowestOf(floor),
                               OrderedBits(row.row_max), s, lane);
    }
    rows.Advance();
    int32_t* const indices = p.args.indices + ask.first_entry;
    float* const probs = p.args.probs + ask.first_entry;
    if (n <= 64) {
      EmitPool(s.pool, s.pool[lane], n, ask.k, result, indices, probs, lane);
    } else {
      EmitSorted(s.pool, ask.k, result, indices, probs, lane);
    }
  }
  WaitAsync<0>();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_SHORT_CUH_
