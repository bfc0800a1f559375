// softmax_topk: one read of the logits leaves a sketch on chip; the few groups that matter are
// looked at again.
//
// A warp takes a cell of 1024 logits into registers, folds it into (max, sum), and leaves the
// maxima of its groups of 16 (8 for k above 128), 16 bits each, in shared memory. No barrier, no
// branch on the data: the loop is loads, maxima and exponentials. Then a floor is found that at
// least k logits reach: r lanes of each of w warps have seen one, r * w >= k; or, for larger k, the
// k-th largest group maximum. Groups that reach it are read again, about k of them, and what is not
// below the floor is ranked. Cells merge in one order whatever the grid, so all variants give the
// same bits:
//
//   warp per row      vocab <= 1024, k <= 32
//   cluster per row   up to 64 rows: its blocks meet in the first one's shared memory (sm_90)
//   block per row     many rows
//   blocks per row    else; each leaves candidates and cells in scratch, the last one merges
//   sorted            k > 1024: statistics as above, then CUB's radix sort of (row, logit)
//
// Cost: reads rows * vocab * sizeof(T) once, writes 8 k + 12 bytes a row.
// Measured, as a share of one read (bench/results/h200/kernels.json): 8192 x 50257 f32 k 10, 91%
// padded and 90% packed; 2048 x 131072 k 10, 89%; 512 x 131072 k 64, 77% f32, 63% bf16; k 1024,
// 46%; 64 rows 19 us; one row 11 us. Limited by: HBM while a row is read (a cell keeps its place in
// the lines of 128 bytes on its way to shared memory: without that, a tenth less); then by the
// chain of latencies that ends a row (floor, second look, rank, merge), about 10 us, which other
// blocks hide only in part: nearly all of the time for few rows, and the tail of a launch whose
// blocks all end together. Tried and dropped: candidates pushed to a pool inside the loop
// (divergence and a barrier a round); persistent blocks whose ring runs into the next row
// (registers; no gain); persistent blocks of streaming warps with groups of finishing warps behind
// them (both sides slower than blocks that hide each other, 8192 x 50257 11% slower); two cells at
// once in a warp (35% slower); prefetching the groups of the second look into L2 (nothing); one
// stage of 8 warps.
// Warp per row, 65536 x 1000 f32 k 10: 72 us, 725 instructions a row, issued in 67% of the cycles
// by 24 warps a multiprocessor. Tried and dropped: one stage and 32 warps of 64 registers (spills;
// slower); blocks of 8 warps, rows dealt out beforehand or in turns (77 us both); a row's keys
// ranked in 4 instructions a key instead of 3 (nothing).
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "absl/types/span.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/row_block.cuh"
#include "kernels/cuda/rows/select.cuh"

namespace logitd::cuda {
namespace {

constexpr int kWarpRowMaxK = 32;
constexpr int kMaxPooledK = 1024;

struct Params {
  const void* logits;
  int64_t row_stride;
  int32_t vocab;
  int32_t cells;   // of a row
  int32_t splits;  // blocks of a row
  const SoftmaxTopKRow* rows;
  int32_t* indices;
  float* probs;
  float* logsumexp;
  RowStatus* status;
  bool statistics_only;   // the sorted variant brings indices and probs
  int32_t list_capacity;  // candidates a block may leave: k and some slack
  // Scratch of the split variant.
  uint32_t* arrived;  // [rows], zero between launches
  Stats* cell_stats;  // [rows, cells]
  Stats* row_stats;   // [rows], for the sorted variant; else null
  Key* split_floor;   // [rows, splits], no key below it is among the row's k largest
  Key* split_keys;    // [rows, splits, list_capacity], unused places 0
};

// What is decided about a row once its statistics are known.
struct RowResult {
  Stats stats;
  Exponential exponential;
  double scale;  // log2(e) / temperature
  float weight;  // of an element at the maximum: what makes its exponential a probability

  __device__ RowResult(Stats row, float temperature)
      : RowResult(row, kLog2E / temperature, Scale(temperature)) {}
  // For one who keeps what depends on the temperature alone.
  __device__ RowResult(Stats row, float c, double scale_of_row)
      : stats(row), exponential(row.max, c), scale(scale_of_row) {
    // Plain sums are relative to 2^-shift, which is not quite the maximum.
    const float at_max =
        exponential.plain ? exp2f(fmaf(row.max, exponential.c, exponential.shift)) : 1.0f;
    weight = at_max / row.sum;
  }
  __device__ static double Scale(float temperature) { return 1.4426950408889634 / temperature; }
  __device__ bool Nan() const { return isnan(stats.sum); }
  __device__ bool Empty() const { return stats.max == -kInfinity; }
  // In double up to the power of two: in the far tail a rounded exponent would cost digits.
  __device__ float Probability(float x) const {
    if (Empty()) return 0.0f;
    if (x == stats.max) return weight;
    const double power = fmax((static_cast<double>(x) - stats.max) * scale, -1000.0);
    const double whole = rint(power);
    const float scaled = exp2f(static_cast<float>(power - whole)) * weight;
    const int exponent = static_cast<int>(whole);
    // The same bits: a product with a power of two is rounded as scalbnf rounds.
    return exponent >= -126 ? scaled * __int_as_float((exponent + 127) << 23)
                            : scalbnf(scaled, exponent);
  }
};

// A row that holds NaN still owns its entries: nothing of an earlier batch may be read there.
__device__ inline void EmitNothing(const Params& p, const SoftmaxTopKRow& ask, int thread,
                                   int threads) {
  for (int i = thread; i < ask.k; i += threads) {
    p.indices[ask.first_entry + i] = -1;
    p.probs[ask.first_entry + i] = 0.0f;
  }
}

// Writes logsumexp and status, by one warp. `cell_is_nan(i)` tells whether cell i holds a NaN.
template <class T, class CellIsNan>
__device__ inline void WriteRow(const Params& p, int64_t row_index, const T* row,
                                const SoftmaxTopKRow& ask, const RowResult& result, int lane,
                                CellIsNan cell_is_nan) {
  RowStatus status{RowCode::kOk, -1};
  float logsumexp = result.exponential.LogSum(result.stats.sum, ask.temperature);
  if (isnan(result.stats.sum)) {
    int cell = 0;
    while (cell + 1 < p.cells && !cell_is_nan(cell)) ++cell;
    status = {RowCode::kNanLogit, FindNan(row, cell * kCell, p.vocab, lane)};
  } else if (result.Empty()) {
    status.code = RowCode::kEmptySupport;
    logsumexp = -kInfinity;
  }
  if (lane == 0) {
    p.logsumexp[row_index] = logsumexp;
    p.status[row_index] = status;
    if (p.row_stats != nullptr) p.row_stats[row_index] = result.stats;
  }
}

// ---- warp per row ------------------------------------------------------------------------------

constexpr int kWarpRowWarps = 24;
constexpr int kWarpRowPool = 64;
constexpr int kWarpRowStages = 2;
constexpr int kWarpRowResident = 1;  // blocks per multiprocessor
// A row whose statistics wait to be written.
struct EndedRow {
  Stats cell;
  uint32_t turn;
};
template <class T>
struct WarpRowShared {
  typename CellRing<T, kWarpRowStages>::Storage rings[kWarpRowWarps];
  Key pools[kWarpRowWarps][kWarpRowPool];
  uint4 maxima[kWarpRowWarps][4];                // of the lanes, 16 bits each
  uint16_t places[kWarpRowWarps][kWarpRowPool];  // lane << 5 | bit, of candidates
  EndedRow ended[kWarpRowWarps][32];
  uint32_t next_turn;
};

// Two logits coarsely, 16 bits each, where order stays order: f32 loses its lower half, which may
// make what differs equal.
template <class T>
using CoarsePair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ inline CoarsePair<T> CoarsePairOf(uint32_t bits) {
  return reinterpret_cast<const CoarsePair<T>&>(bits);
}

// 16 bits of a logit.
template <class T>
__device__ inline uint16_t CoarseBits(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half_as_ushort(__float2half_rn(x));  // exact, x was one
  } else {
    return static_cast<uint16_t>(__float_as_uint(x) >> 16);
  }
}

// Which of the lane's elements are coarsely >= `floor` (both halves of it the same): bit w for
// element 2 w, bit 16 + w for element 2 w + 1.
template <class T>
__device__ inline uint32_t Reached(const LaneCell<T>& x, CoarsePair<T> floor) {
  uint32_t reached = 0;
#pragma unroll
  for (int w = 0; w < kLaneElements / 2; ++w) {
    uint32_t pair;
    if constexpr (sizeof(T) == 4) {
      pair = __byte_perm(x.words[2 * w], x.words[2 * w + 1], 0x7632);
    } else {
      pair = x.words[w];
    }
    reached |= __hge2_mask(CoarsePairOf<T>(pair), floor) & (0x10001u << w);
  }
  return reached;
}

// As Reached(), of the elements themselves.
template <class T>
__device__ inline uint32_t ReachedExactly(const LaneCell<T>& x, float floor) {
  uint32_t reached = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    if (x[e] >= floor) reached |= 1u << (e / 2 + e % 2 * 16);
  }
  return reached;
}

// Place in the cell of what Reached() tells of lane `place` / 32 by bit `place` % 32.
template <class T>
__device__ inline int ReachedIndex(uint32_t place) {
  return CellIndex<T>(place >> 5, (place & 15) << 1 | (place >> 4 & 1));
}

// How many of the 32 lanes' values, 16 bits each in `maxima`, are above the lane's own.
template <class T>
__device__ inline int LanesAbove(const uint4* maxima, uint16_t mine) {
  const CoarsePair<T> own = CoarsePairOf<T>(mine * 0x10001u);
  CoarsePair<T> sums[2] = {CoarsePairOf<T>(0), CoarsePairOf<T>(0)};
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    const uint4 four = maxima[v];
    sums[0] = __hadd2(sums[0], __hgt2(CoarsePairOf<T>(four.x), own));
    sums[1] = __hadd2(sums[1], __hgt2(CoarsePairOf<T>(four.y), own));
    sums[0] = __hadd2(sums[0], __hgt2(CoarsePairOf<T>(four.z), own));
    sums[1] = __hadd2(sums[1], __hgt2(CoarsePairOf<T>(four.w), own));
  }
  const CoarsePair<T> sum = __hadd2(sums[0], sums[1]);
  return static_cast<int>(ToFloat(sum.x) + ToFloat(sum.y));
}

// rank -= key > mine, by the borrow of mine - key.
__device__ inline void CountAbove(Key key, Key mine, int& rank) {
  asm("{\n\t"
      ".reg .u32 low;\n\t"
      "sub.cc.u32 low, %1, %3;\n\t"
      "subc.cc.u32 low, %2, %4;\n\t"
      "subc.u32 %0, %0, 0;\n\t"
      "}"
      : "+r"(rank)
      : "r"(static_cast<uint32_t>(mine)), "r"(static_cast<uint32_t>(mine >> 32)),
        "r"(static_cast<uint32_t>(key)), "r"(static_cast<uint32_t>(key >> 32)));
}

// A row that ends in a way few do: it holds a NaN, or equal logits flood the pool; then its largest
// keys are found one at a time. Right for any row.
template <class T>
__device__ __noinline__ void FinishOddRow(const Params& p, int64_t row_index, Stats stats,
                                          int lane) {
  const SoftmaxTopKRow ask = p.rows[row_index];
  const T* row = static_cast<const T*>(p.logits) + row_index * p.row_stride;
  const RowResult result(stats, ask.temperature);
  WriteRow<T>(p, row_index, row, ask, result, lane, [](int) { return true; });
  if (result.Nan()) return EmitNothing(p, ask, lane, 32);
  Key ceiling = ~Key{0};
  for (int rank = 0; rank < ask.k; ++rank) {
    Key best = 0;
    for (int i = lane; i < p.vocab; i += 32) {
      const Key key = MakeKey(ToFloat(row[i]), i);
      if (key < ceiling) best = max(best, key);
    }
    best = WarpMax(best);
    if (lane == 0) {
      p.indices[ask.first_entry + rank] = KeyIndex(best);
      p.probs[ask.first_entry + rank] = result.Probability(KeyLogit(best));
    }
    ceiling = best;
  }
}

template <class T>
__global__ void __launch_bounds__(kWarpRowWarps * 32, kWarpRowResident)
    WarpRowKernel(const __grid_constant__ Params p, int64_t rows) {
  extern __shared__ __align__(128) uint4 dynamic[];
  WarpRowShared<T>& s = *reinterpret_cast<WarpRowShared<T>*>(dynamic);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  Key* pool = s.pools[warp];
  uint16_t* places = s.places[warp];
  // A block's rows are those of its own turns; a warp takes the next turn when it can, for warps
  // do not run equally fast.
  const auto row_of = [](uint32_t turn) {
    return blockIdx.x + static_cast<int64_t>(turn) * gridDim.x;
  };
  const T* logits = static_cast<const T*>(p.logits);
  CellRing<T, kWarpRowStages> ring(s.rings[warp], lane);
  const auto push = [&](int64_t row) {
    // A row nobody asks for is copied too: its parameters would have to be waited for before its
    // copy could start.
    if (row < rows) {
      ring.PushShort(logits + row * p.row_stride, p.vocab);
    } else {
      ring.PushNothing();
    }
  };
  static_assert(kWarpRowStages == 2);
  uint32_t turn = warp;
  uint32_t following = kWarpRowWarps + warp;
  push(row_of(turn));
  push(row_of(following));
  if (threadIdx.x == 0) s.next_turn = kWarpRowWarps * kWarpRowStages;
  __syncthreads();
  int next_k = 0;
  float next_temperature = 0.0f;
  const auto prefetch = [&](int64_t row) {
    if (row >= rows) return;
    next_k = p.rows[row].k;
    next_temperature = p.rows[row].temperature;
  };
  prefetch(row_of(turn));
  float temperature = 0.0f;  // of c and scale
  float c = 0.0f;
  double scale = 0.0;
  // Statistics of rows that ended wait here: 32 logarithms cost as much as one.
  EndedRow* ended = s.ended[warp];
  constexpr Stats kNothing{0.0f, -1.0f};  // the row's entries were written, or nobody asks
  int count = 0;
  const auto write_ended = [&] {
    __syncwarp();
    const Stats cell = lane < count ? ended[lane].cell : kNothing;
    if (cell.sum < 0.0f) return;
    const int64_t row_index = row_of(ended[lane].turn);
    const float row_temperature = p.rows[row_index].temperature;
    const RowResult result(cell, row_temperature);
    p.logsumexp[row_index] =
        result.Empty() ? -kInfinity : result.exponential.LogSum(cell.sum, row_temperature);
    p.status[row_index] = {result.Empty() ? RowCode::kEmptySupport : RowCode::kOk, -1};
    if (p.row_stats != nullptr) p.row_stats[row_index] = cell;
  };

  const auto advance = [&] {  // the current row's slot of the ring is free
    turn = following;
    if (lane == 0) following = atomicAdd(&s.next_turn, 1u);
    following = __shfl_sync(kFullWarp, following, 0);
    push(row_of(following));
  };
#pragma unroll 1
  while (true) {
    const int64_t row_index = row_of(turn);
    if (row_index >= rows) break;
    const int k = next_k;
    const float asked_temperature = next_temperature;
    prefetch(row_of(following));
    const T* row = logits + row_index * p.row_stride;
    LaneCell<T> x;
    ring.PopShort(row, p.vocab, x);
    if (count == 32) {
      write_ended();
      count = 0;
      __syncwarp();
    }
    ++count;
    if (k == 0) {
      if (lane == 0) ended[count - 1] = {kNothing, turn};
      advance();
      continue;
    }
    if (asked_temperature != temperature) {
      temperature = asked_temperature;
      c = kLog2E / temperature;
      scale = RowResult::Scale(temperature);
    }

    // At least k logits are not below the k-th largest of the 32 lane maxima, nor below anything
    // that equals it coarsely.
    const float lane_max = x.Max(0, kLaneElements);
    const uint16_t coarse = CoarseBits<T>(lane_max);
    reinterpret_cast<uint16_t*>(s.maxima[warp])[lane] = coarse;
    __syncwarp();
    const bool among = LanesAbove<T>(s.maxima[warp], coarse) < k;
    const uint32_t floor = __reduce_min_sync(kFullWarp, among ? OrderedBits(lane_max) : ~0u);
    uint32_t reached =
        Reached<T>(x, CoarsePairOf<T>(CoarseBits<T>(FromOrderedBits(floor)) * 0x10001u));
    int n = 0;
    bool exact = sizeof(T) == 2;
#pragma unroll 1
    while (true) {  // the lanes' candidates, one of each lane a round
      const uint32_t lanes = __ballot_sync(kFullWarp, reached != 0);
      if (lanes == 0) {
        if (exact || n <= kWarpRowPool) break;
        // Logits far from zero for their spread: coarsely all alike.
        exact = true;
        n = 0;
        reached =
            ReachedExactly<T>(x, __shfl_sync(kFullWarp, WarpSortDescending(lane_max, lane), k - 1));
        continue;
      }
      const int at = n + __popc(lanes & ((1u << lane) - 1));
      if (reached != 0 && at < kWarpRowPool)
        places[at] = static_cast<uint16_t>(lane << 5 | (31 - __clz(reached & -reached)));
      reached &= reached - 1;
      n += __popc(lanes);
    }
    __syncwarp();
    // Merging a single cell would leave its bits alone.
    const Stats cell = MergeLanes(LaneStats(x, lane_max, c), c);
    // A place beyond the row has the lowest key of all, and is never among the k.
    const auto key_at = [&](int at) {
      const int i = ReachedIndex<T>(places[at]);
      return at < n && i < p.vocab ? MakeKey(ring.At(row, i), i) : 0;
    };
    const bool odd = isnan(cell.sum) || n > kWarpRowPool;
    if (lane == 0) ended[count - 1] = {odd ? kNothing : cell, turn};
    if (odd) {
      advance();
      FinishOddRow<T>(p, row_index, cell, lane);
      continue;
    }
    Key mine = lane < n ? key_at(lane) : 0;
    pool[lane] = mine;
    if (n > 32) pool[lane + 32] = key_at(lane + 32);
    __syncwarp();
    advance();
    const int64_t first_entry = p.rows[row_index].first_entry;
    const RowResult result(cell, c, scale);
#pragma unroll 1
    for (int base = 0;; base += 32) {
      const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(pool);
      int rank = 0;
#pragma unroll 1
      for (int j = 0; j < n; j += 4) {  // zeros follow the n-th
        const ulonglong2 first = *pairs++;
        const ulonglong2 second = *pairs++;
        CountAbove(first.x, mine, rank);
        CountAbove(first.y, mine, rank);
        CountAbove(second.x, mine, rank);
        CountAbove(second.y, mine, rank);
      }
      rank = -rank;
      if (base + lane < n && rank < k) {
        p.indices[first_entry + rank] = KeyIndex(mine);
        p.probs[first_entry + rank] = result.Probability(KeyLogit(mine));
      }
      if (base + 32 >= n) break;
      mine = pool[lane + 32];
    }
  }
  write_ended();
}

template <int kThreads, class Shape>
__device__ __noinline__ void EmitRow(int32_t* indices, float* probs, int k, int n, Stats row_stats,
                                     float temperature) {
  auto& s = Pool<Shape>();
  const RowResult result(row_stats, temperature);
  EmitByRank<kThreads>(s.pool, n, s.pool + Shape::kPool / 2, s.select, [&](int rank, Key key) {
    if (rank >= k) return;
    indices[rank] = KeyIndex(key);
    probs[rank] = result.Probability(KeyLogit(key));
  });
}

// Brings what the blocks of a row left in scratch together: cells into `cells`, candidates into the
// pool.
template <int kThreads, class Shape>
__device__ __noinline__ void GatherSplits(const Params& p, int row_index, int k, Stats* cells) {
  auto& s = Pool<Shape>();
  constexpr int kWarps = kThreads / 32;
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_item = static_cast<int64_t>(row_index) * p.splits;
  const Key* keys = p.split_keys + first_item * p.list_capacity;
  const int total = p.statistics_only ? 0 : p.splits * p.list_capacity;
  const float2* stats =
      reinterpret_cast<const float2*>(p.cell_stats + static_cast<int64_t>(row_index) * p.cells);
  if (threadIdx.x == 0) s.count = 0;
  Key held[kAtOnce];  // on their way while the floor is found
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    held[i] = at < total ? __ldcg(keys + at) : 0;
  }
  Key highest = 0;  // the best of the blocks' floors
  if (total > 0) {
    for (int i = lane; i < p.splits; i += 32)
      highest = max(highest, __ldcg(&p.split_floor[first_item + i]));
  }
  float thread_best = -kInfinity;
  for (int i = threadIdx.x; i < p.cells; i += kThreads) {
    const float2 pair = __ldcg(stats + i);
    cells[i] = {pair.x, pair.y};
    thread_best = fmaxf(thread_best, pair.x);
  }
  Floor floor;
  floor.Raise(WarpMax(highest));
  // As in a block: r threads of each of w warps have a cell with a maximum that reaches the floor,
  // r * w >= k.
  const int active_warps = min(kWarps, (p.cells + 31) / 32);
  const int floor_rank = (k + active_warps - 1) / active_warps;
  if (floor_rank <= 16) {
    const float sorted = WarpSortDescending(thread_best, lane);
    if (lane == floor_rank - 1) s.warp_floor[warp] = sorted;
  }
  __syncthreads();
  if (floor_rank <= 16) {
    const float lowest = lane < active_warps ? s.warp_floor[lane] : kInfinity;
    floor.RaiseToLogit(-WarpMax(-lowest));
  }
#pragma unroll 1
  for (int round = 0; round < total;) {
    bool lost;
    do {
      // What got in stays in when the pool is settled, so it is not offered again.
      uint32_t reached = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (held[i] != 0 && held[i] >= floor.key) reached |= 1u << i;
      }
      int at = WarpReserve(&s.count, __popc(reached), lane);
      lost = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if ((reached >> i & 1) == 0) continue;
        if (at < Shape::kPool) {
          s.pool[at] = held[i];
          held[i] = 0;
        } else {
          lost = true;
        }
        ++at;
      }
      lost = __syncthreads_or(lost);
      if (s.count > Shape::kPool / 2) {
        __syncthreads();
        floor.Raise(Settle<kThreads, Shape>(k, p.vocab));
      }
      if (lost || round + kThreads * kAtOnce < total) __syncthreads();
    } while (lost);
    round += kThreads * kAtOnce;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = round + i * kThreads + static_cast<int>(threadIdx.x);
      held[i] = at < total ? __ldcg(keys + at) : 0;
    }
  }
}

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident)
    BlockRowKernel(const __grid_constant__ Params p) {
  using T = typename Block::Element;
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  if constexpr (Block::kCluster) ClusterArrive();
  typename Block::Shared& shared = *reinterpret_cast<typename Block::Shared*>(dynamic);
  Stats* cells = reinterpret_cast<Stats*>(&shared + 1);  // [cells]
  typename Shape::Sketch* sketch = reinterpret_cast<typename Shape::Sketch*>(
      cells + p.cells + p.cells % 2);  // [cells of the item, 32]
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const bool select = !p.statistics_only;
  const int row_index = p.splits == 1 ? blockIdx.x : blockIdx.x / p.splits;
  const int split = blockIdx.x - row_index * p.splits;
  const int begin = p.cells * split / p.splits * kCell;
  const int end = min(p.cells * (split + 1) / p.splits * kCell, p.vocab);
  const T* row = static_cast<const T*>(p.logits) + row_index * p.row_stride;

  // Asked for first, or its answer would come behind all the copies; needed only once they are
  // under way.
  const SoftmaxTopKRow ask = p.rows[row_index];
  RowStream<Block> stream(shared, row, begin, end);
  if constexpr (Block::kCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (ask.k == 0) return stream.Abandon();
  const float c = kLog2E / ask.temperature;
  Stats* row_cells = cells;  // where the row's cells are brought together
  if constexpr (Block::kCluster) {
    row_cells = InBlock(cells, 0);
  } else if (p.splits > 1) {
    row_cells = p.cell_stats + static_cast<int64_t>(row_index) * p.cells;
  }
  const float lane_best = stream.Run(c, row_cells, sketch);
  __syncthreads();  // from here on the ring's memory is the pool's
  typename Shape::Shared& s = shared.pool;

  if constexpr (Block::kCluster) {
    if (select) {
      Floor floor;
      floor.RaiseToLogit(ClusterFloor<Block>(lane_best, split, p.splits, ask.k, shared.warp_bests,
                                             shared.row_floor));
      Gather<T, kThreads, Shape>(row + begin, begin, end - begin, sketch, floor, ask.k);
      SendToFirst<kThreads, Shape>(ask.k, split);
    } else {
      ClusterArrive();
      ClusterWait();
    }
    if (split != 0) return;
    if (select) OpenInbox<kThreads, Shape>(p.splits);
  } else {
    if (select) {
      Floor floor;
      floor.RaiseToLogit(BlockFloor<Block>(lane_best, (end - begin + kCell - 1) / kCell, ask.k));
      const Key reached =
          Gather<T, kThreads, Shape>(row + begin, begin, end - begin, sketch, floor, ask.k);
      if (p.splits > 1) {
        const int n = Trim<kThreads, Shape>(ask.k, p.list_capacity);
        Key* list = p.split_keys + static_cast<int64_t>(blockIdx.x) * p.list_capacity;
        for (int i = threadIdx.x; i < p.list_capacity; i += kThreads)
          list[i] = i < n ? s.pool[i] : 0;
        if (threadIdx.x == 0) p.split_floor[blockIdx.x] = reached;
      }
    }
    if (p.splits > 1) {
      // The last block of the row to get here takes it from what all have left in scratch.
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();  // the block's writes come before its arrival
        s.last = atomicAdd(&p.arrived[row_index], 1u) == static_cast<uint32_t>(p.splits - 1);
        if (s.last) p.arrived[row_index] = 0;
        __threadfence();
      }
      __syncthreads();
      if (!s.last) return;
      GatherSplits<kThreads, Shape>(p, row_index, ask.k, cells);
    }
  }

  const int n = select ? Trim<kThreads, Shape>(ask.k, Shape::kPool / 2) : 0;
  const RowResult result(MergeCells(p.cells, c, lane, [&](int i) { return cells[i]; }),
                         ask.temperature);
  if (warp == 0)
    WriteRow<T>(p, row_index, row, ask, result, lane, [&](int i) { return isnan(cells[i].sum); });
  if (!select) return;
  if (result.Nan()) return EmitNothing(p, ask, threadIdx.x, kThreads);
  EmitRow<kThreads, Shape>(p.indices + ask.first_entry, p.probs + ask.first_entry, ask.k, n,
                           result.stats, ask.temperature);
}

// ---- sorted ------------------------------------------------------------------------------------

using SortKey = uint64_t;  // row << 32 | complement of the logit's ordered bits: ascending is most
                           // probable first

template <class T>
__global__ void SortKeysKernel(Params p, int64_t first_row, int64_t elements, SortKey* keys,
                               int32_t* values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements;
       i += step) {
    const int64_t row = i / p.vocab;
    const int32_t column = static_cast<int32_t>(i % p.vocab);
    const T* logits = static_cast<const T*>(p.logits) + (first_row + row) * p.row_stride;
    keys[i] = static_cast<SortKey>(row) << 32 |
              static_cast<uint32_t>(~OrderedBits(ToFloat(logits[column])));
    values[i] = column;
  }
}

__global__ void EmitSortedKernel(Params p, int64_t first_row, const SortKey* keys,
                                 const int32_t* values) {
  const int64_t row = blockIdx.y;
  const SoftmaxTopKRow ask = p.rows[first_row + row];
  if (ask.k == 0) return;
  const RowResult result(p.row_stats[first_row + row], ask.temperature);
  if (result.Nan())
    return EmitNothing(p, ask, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  for (int rank = blockIdx.x * blockDim.x + threadIdx.x; rank < ask.k;
       rank += gridDim.x * blockDim.x) {
    const int64_t at = row * p.vocab + rank;
    p.indices[ask.first_entry + rank] = values[at];
    p.probs[ask.first_entry + rank] =
        result.Probability(FromOrderedBits(~static_cast<uint32_t>(keys[at])));
  }
}

// ---- launch ------------------------------------------------------------------------------------

template <class T>
cudaError_t LaunchWarpRow(const Params& p, int64_t rows, const Scratch& scratch,
                          cudaStream_t stream) {
  constexpr int kShared = sizeof(WarpRowShared<T>);
  const cudaError_t error =
      cudaFuncSetAttribute(&WarpRowKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(rows, kWarpRowResident * scratch.multiprocessors);
  WarpRowKernel<T><<<static_cast<unsigned>(blocks), kWarpRowWarps * 32, kShared, stream>>>(p, rows);
  return cudaGetLastError();
}

template <class Block>
cudaError_t LaunchBlockRow(const Params& p, int64_t rows, const Scratch& scratch,
                           cudaStream_t stream) {
  // The most any launch may ask for: the attribute belongs to the kernel, and other streams launch
  // it at the same time.
  const cudaError_t error =
      cudaFuncSetAttribute(&BlockRowKernel<Block>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           scratch.block_shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows * p.splits));
  config.blockDim = dim3(Block::kThreads);
  config.dynamicSmemBytes = SharedBytes<Block>(p.cells, (p.cells + p.splits - 1) / p.splits);
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(p.splits), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = Block::kCluster ? 1 : 0;
  return cudaLaunchKernelEx(&config, &BlockRowKernel<Block>, p);
}

template <class T>
cudaError_t LaunchSortKeys(const Params& p, int64_t first_row, int64_t elements, SortKey* keys,
                           int32_t* values, int multiprocessors, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>((elements + 255) / 256, multiprocessors * 16));
  SortKeysKernel<T><<<blocks, 256, 0, stream>>>(p, first_row, elements, keys, values);
  return cudaGetLastError();
}

using Launch = cudaError_t (*)(const Params&, int64_t rows, const Scratch&, cudaStream_t);

constexpr int32_t kAnyRows = std::numeric_limits<int32_t>::max();
constexpr int32_t kFewRows = 64;

// By number of rows, row length, k and the device's shared memory: the first variant whose limits
// hold is taken.
struct Variant {
  int32_t max_vocab;
  int64_t max_rows;
  int32_t max_k;
  int32_t warps;     // of a block
  int32_t resident;  // blocks per multiprocessor; 0: rows are never split over blocks
  Launch launch;
  int (*max_item_cells)(int cells, const Scratch&);
  bool cluster = false;  // a row's blocks are a cluster
};

template <class Block>
constexpr Variant BlockRowVariant(int32_t max_rows = kAnyRows) {
  return {static_cast<int32_t>(kMaxVocab),
          max_rows,
          Block::Pool::kMaxK,
          Block::kWarps,
          Block::kResident,
          &LaunchBlockRow<Block>,
          &MaxItemCells<Block>,
          Block::kCluster};
}

// Warps, stages and resident blocks are what measured best on an H200.
template <class T>
constexpr bool kWide = sizeof(T) == 4;
template <class T>
using UsualBlock = BlockShape<T, SmallPool, 4, 2, kWide<T> ? 4 : 6>;
template <class T>
using FewRowsBlock = BlockShape<T, SmallPool, 16, 2, 1, true>;
template <class T>
using LargeKBlock = BlockShape<T, LargePool, 8, 2, 2>;
template <class T>
using SmallMemoryBlock = BlockShape<T, LargePool, 4, 2, 1>;
template <class T>
constexpr Variant kVariants[] = {
    {kCell, kAnyRows, kWarpRowMaxK, kWarpRowWarps, 0, &LaunchWarpRow<T>,
     [](int, const Scratch& scratch) {
       return scratch.block_shared_bytes < static_cast<int>(sizeof(WarpRowShared<T>)) ? 0 : 1;
     }},
    BlockRowVariant<FewRowsBlock<T>>(kFewRows),
    BlockRowVariant<UsualBlock<T>>(),
    BlockRowVariant<LargeKBlock<T>>(),
    BlockRowVariant<SmallMemoryBlock<T>>(),
};

struct TypeRow {
  DType dtype;
  absl::Span<const Variant> variants;
  cudaError_t (*sort_keys)(const Params&, int64_t, int64_t, SortKey*, int32_t*, int, cudaStream_t);
};

constexpr TypeRow kTypes[] = {
    {DType::kF32, kVariants<float>, &LaunchSortKeys<float>},
    {DType::kF16, kVariants<__half>, &LaunchSortKeys<__half>},
    {DType::kBF16, kVariants<__nv_bfloat16>, &LaunchSortKeys<__nv_bfloat16>},
};

// Blocks a row is split over: one where the rows alone fill the device, else as many as are
// resident at once.
int32_t SplitsOf(int64_t rows, int32_t cells, const Variant& variant, const Scratch& scratch) {
  if (variant.resident == 0) return 1;
  const int32_t largest = variant.max_item_cells(cells, scratch);
  const int32_t least = (cells + largest - 1) / largest;
  const int32_t worth = (cells + variant.warps - 1) / variant.warps;  // a cell for every warp
  const int32_t most =
      std::max(least, variant.cluster ? std::min(worth, kMaxClusterBlocks) : worth);
  const int64_t wanted = static_cast<int64_t>(variant.resident) * scratch.multiprocessors / rows;
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, least, most));
}

cudaError_t RunVariant(Params p, int64_t rows, int32_t k, const TypeRow& type, Carver carver,
                       const Scratch& scratch, cudaStream_t stream) {
  const Variant* variant = type.variants.data();
  while (variant->max_vocab < p.vocab || variant->max_rows < rows || variant->max_k < k ||
         variant->max_item_cells(p.cells, scratch) == 0 ||
         (variant->cluster && !scratch.clusters)) {
    ++variant;
  }
  p.splits = SplitsOf(rows, p.cells, *variant, scratch);
  if (p.splits == 1 || variant->cluster) return variant->launch(p, rows, scratch, stream);
  // Split rows leave candidates in scratch: as many rows a launch as it has room and counters for.
  p.list_capacity = k + std::max(k / 2, 64);
  const int64_t row_bytes = p.cells * static_cast<int64_t>(sizeof(Stats)) +
                            p.splits * (p.list_capacity + 1) * static_cast<int64_t>(sizeof(Key));
  const int64_t pass = std::min<int64_t>({rows, Scratch::kCounterBytes / sizeof(uint32_t),
                                          static_cast<int64_t>(scratch.bytes) / 2 / row_bytes});
  const size_t slots = static_cast<size_t>(pass) * p.splits;
  p.arrived = reinterpret_cast<uint32_t*>(scratch.data);
  p.cell_stats = carver.Take<Stats>(static_cast<size_t>(pass) * p.cells);
  p.split_floor = carver.Take<Key>(slots);
  p.split_keys = carver.Take<Key>(slots * p.list_capacity);
  for (int64_t first = 0; first < rows; first += pass) {
    Params part = p;
    part.logits = static_cast<const std::byte*>(p.logits) +
                  first * p.row_stride * static_cast<int64_t>(SizeOf(type.dtype));
    part.rows += first;
    part.logsumexp += first;
    part.status += first;
    if (p.row_stats != nullptr) part.row_stats += first;
    const cudaError_t error = variant->launch(part, std::min(pass, rows - first), scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t RunSorted(Params p, int64_t rows, const TypeRow& type, Carver carver,
                      const Scratch& scratch, cudaStream_t stream) {
  // Rows per pass: as many as scratch holds, in keys and values twice and what CUB asks beside.
  constexpr int64_t kMaxPass = 4096;
  const int64_t bytes_per_row = int64_t{2} * p.vocab * (sizeof(SortKey) + sizeof(int32_t));
  const int64_t budget = static_cast<int64_t>(scratch.bytes) * 3 / 4;
  const int64_t pass = std::clamp<int64_t>(budget / bytes_per_row, 1, std::min(rows, kMaxPass));
  p.row_stats = carver.Take<Stats>(rows);
  p.statistics_only = true;
  cudaError_t error = RunVariant(p, rows, 1, type, carver, scratch, stream);
  if (error != cudaSuccess) return error;
  cub::DoubleBuffer<SortKey> keys(carver.Take<SortKey>(pass * p.vocab),
                                  carver.Take<SortKey>(pass * p.vocab));
  cub::DoubleBuffer<int32_t> values(carver.Take<int32_t>(pass * p.vocab),
                                    carver.Take<int32_t>(pass * p.vocab));
  int row_bits = 0;
  while ((int64_t{1} << row_bits) < pass) ++row_bits;
  size_t temp_bytes = 0;
  error =
      cub::DeviceRadixSort::SortPairs(nullptr, temp_bytes, keys, values,
                                      static_cast<int>(pass * p.vocab), 0, 32 + row_bits, stream);
  if (error != cudaSuccess) return error;
  std::byte* temp = carver.Take<std::byte>(temp_bytes);
  if (temp == nullptr) return cudaErrorMemoryAllocation;
  for (int64_t first = 0; first < rows; first += pass) {
    const int64_t count = std::min(pass, rows - first);
    const int64_t elements = count * p.vocab;
    error = type.sort_keys(p, first, elements, keys.Current(), values.Current(),
                           scratch.multiprocessors, stream);
    if (error != cudaSuccess) return error;
    error = cub::DeviceRadixSort::SortPairs(temp, temp_bytes, keys, values,
                                            static_cast<int>(elements), 0, 32 + row_bits, stream);
    if (error != cudaSuccess) return error;
    const dim3 grid(std::min((p.vocab + 255) / 256, 64), static_cast<unsigned>(count));
    EmitSortedKernel<<<grid, 256, 0, stream>>>(p, first, keys.Current(), values.Current());
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t SoftmaxTopK(const SoftmaxTopKArgs& args, const Scratch& scratch, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  const TypeRow* type = kTypes;
  while (type->dtype != args.logits.dtype) ++type;
  Params p{};
  p.logits = args.logits.data;
  p.row_stride = args.logits.row_stride;
  p.vocab = static_cast<int32_t>(args.logits.cols);
  p.cells = (p.vocab + kCell - 1) / kCell;
  p.splits = 1;
  p.rows = args.rows;
  p.indices = args.indices;
  p.probs = args.probs;
  p.logsumexp = args.logsumexp;
  p.status = args.status;
  const Carver carver(scratch);
  if (args.max_k <= kMaxPooledK) {
    return RunVariant(p, args.logits.rows, args.max_k, *type, carver, scratch, stream);
  }
  return RunSorted(p, args.logits.rows, *type, carver, scratch, stream);
}

}  // namespace logitd::cuda
