// softmax_topk: one read of the logits; a threshold that only rises; survivors ranked at the end.
//
// A warp takes a cell of 1024 logits into registers, folds it into (max, sum) and offers the block what is not below its
// threshold. The first round of cells sets the threshold: the k-th largest of many group maxima bounds the k-th logit from
// below. When the pool of candidates overflows, the k-th largest of those in it is the new threshold and the cells still
// in registers are offered again. Cells merge in one order whatever the grid, so the variants below give the same bits:
//   warp per row    vocab <= 1024, k <= 32
//   block per row   many rows
//   blocks per row  few rows: each leaves its candidates and cells in scratch; the last to finish merges
//   sorted          k > 1024: statistics by the above, then CUB's radix sort of (row, logit)
//
// Cost: reads rows * vocab * sizeof(T) once, writes 8 k + 12 bytes a row. 512 x 131072 f32: 268 MB, 62 us at 4.34 TB/s.
// Limited by: HBM for many rows; for one row by the latency of launch, load, select and merge in a chain.
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>

#include "absl/types/span.h"
#include "kernels/cuda/cell.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/select.cuh"

namespace logitd::cuda {
namespace {

constexpr int kWarpRowMaxK = 32;
constexpr int kSmallK = 128;
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
  bool statistics_only;  // the sorted variant brings indices and probs
  // Scratch of the split variant.
  uint32_t* arrived;  // [rows], zero between launches
  Stats* cell_stats;  // [rows, cells]
  Stats* row_stats;   // [rows], for the sorted variant; else null
  Key* split_floor;   // [rows, splits], no key below it is among the row's k largest
  Key* split_keys;    // [rows, splits, kListCapacity], unused places 0
};

// What is decided about a row once its statistics are known.
struct RowResult {
  Stats stats;
  float inverse_sum;
  Exponential exponential;

  __device__ RowResult(Stats row, float c) : stats(row), inverse_sum(1.0f / row.sum), exponential(row.max, c) {}
  __device__ bool Empty() const { return stats.max == -kInfinity; }
  __device__ float Probability(float x) const { return Empty() ? 0.0f : exponential(x) * inverse_sum; }
};

// The lowest index whose logit is NaN, by one warp. `first` is where to begin.
template <class T>
__device__ __noinline__ int FindNan(const T* row, int first, int vocab, int lane) {
  int position = vocab;
  for (int i = first + lane; i < min(first + kCell, vocab); i += 32) {
    if (isnan(ToFloat(row[i]))) position = min(position, i);
  }
  return __reduce_min_sync(kFullWarp, position);
}

// Writes logsumexp and status, by one warp. `cell_is_nan(i)` tells whether cell i holds a NaN.
template <class T, class CellIsNan>
__device__ inline void WriteRow(const Params& p, int64_t row_index, const T* row, const SoftmaxTopKRow& ask,
                                const RowResult& result, int lane, CellIsNan cell_is_nan) {
  RowStatus status{RowCode::kOk, -1};
  float logsumexp = result.exponential.LogSum(result.stats.sum, ask.temperature);
  if (isnan(result.stats.sum)) {
    int cell = 0;
    while (!cell_is_nan(cell)) ++cell;
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

// ---- warp per row ----------------------------------------------------------------------------------------------------

constexpr int kWarpRowWarps = 8;
constexpr int kWarpRowPool = 64;

// The row's largest keys one at a time: right for any row, used when equal logits flood the pool.
template <class T, class Emit>
__device__ __noinline__ void EmitByExtraction(const T* row, int vocab, int k, int lane, Emit emit) {
  Key ceiling = ~Key{0};
  for (int rank = 0; rank < k; ++rank) {
    Key best = 0;
    for (int i = lane; i < vocab; i += 32) {
      const Key key = MakeKey(ToFloat(row[i]), i);
      if (key < ceiling) best = max(best, key);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(kFullWarp, best, offset));
    if (lane == 0) emit(rank, best);
    ceiling = best;
  }
}

constexpr int kWarpRowStages = 3;
template <class T>
struct WarpRowShared {
  typename CellRing<T, kWarpRowStages>::Storage rings[kWarpRowWarps];
  Key pools[kWarpRowWarps][kWarpRowPool];
  int counts[kWarpRowWarps];
};

template <class T>
__global__ void __launch_bounds__(kWarpRowWarps * 32, 2) WarpRowKernel(const __grid_constant__ Params p, int64_t rows) {
  extern __shared__ uint4 dynamic[];
  WarpRowShared<T>& s = *reinterpret_cast<WarpRowShared<T>*>(dynamic);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  Key* pool = s.pools[warp];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarpRowWarps;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kWarpRowWarps + warp;
  const T* logits = static_cast<const T*>(p.logits);
  CellRing<T, kWarpRowStages> ring(s.rings[warp], lane);
  const auto push = [&](int64_t row) {
    // A row nobody asks for is copied too: its parameters would have to be waited for before its copy could start.
    ring.Push(logits + row * p.row_stride, row < rows ? p.vocab : 0);
  };
#pragma unroll
  for (int stage = 0; stage < kWarpRowStages; ++stage) push(begin + stage * step);
  SoftmaxTopKRow next{};
  if (begin < rows) next = p.rows[begin];

  for (int64_t row_index = begin; row_index < rows; row_index += step) {
    const SoftmaxTopKRow ask = next;
    if (row_index + step < rows) next = p.rows[row_index + step];
    const T* row = logits + row_index * p.row_stride;
    float x[kLaneElements];
    ring.Pop(row, p.vocab, x);
    if (ask.k == 0) {
      __syncwarp();
      push(row_index + kWarpRowStages * step);
      continue;
    }

    const float c = kLog2E / ask.temperature;
    float group_max[kGroups];
    const RowResult result(CellStats(x, c, group_max), c);  // merging a single cell leaves its bits alone
    WriteRow<T>(p, row_index, row, ask, result, lane, [](int) { return true; });
    const auto emit = [&](int rank, Key key) {
      p.indices[ask.first_entry + rank] = KeyIndex(key);
      p.probs[ask.first_entry + rank] = result.Probability(KeyLogit(key));
    };

    // The k-th largest of the 32 lane maxima: at least k logits are not below it.
    float sorted = fmaxf(fmaxf(group_max[0], group_max[1]), fmaxf(group_max[2], group_max[3]));
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
      for (int stride = size / 2; stride > 0; stride /= 2) {
        const float other = __shfl_xor_sync(kFullWarp, sorted, stride);
        const bool want_max = ((lane & size) == 0) == ((lane & stride) == 0);
        sorted = want_max ? fmaxf(sorted, other) : fminf(sorted, other);
      }
    }
    const float floor = __shfl_sync(kFullWarp, sorted, ask.k - 1);
    if (lane == 0) s.counts[warp] = 0;
    __syncwarp();
    for (uint32_t bits = NotBelow(x, group_max, floor); bits != 0; bits &= bits - 1) {
      const int i = CellIndex<T>(lane, __ffs(bits) - 1);
      if (i >= p.vocab) continue;
      const int at = atomicAdd(&s.counts[warp], 1);
      if (at < kWarpRowPool) pool[at] = MakeKey(ring.At(i), i);
    }
    __syncwarp();
    const int n = s.counts[warp];
    if (n > kWarpRowPool || n < ask.k) {  // n < k: the row holds NaN
      EmitByExtraction<T>(row, p.vocab, ask.k, lane, emit);
    } else {
      for (int i = lane; i < n; i += 32) {
        const Key mine = pool[i];
        int rank = 0;
        for (int j = 0; j < n; ++j) rank += pool[j] > mine;
        if (rank < ask.k) emit(rank, mine);
      }
    }
    __syncwarp();
    push(row_index + kWarpRowStages * step);
  }
}

// ---- block per row, blocks per row -----------------------------------------------------------------------------------

// A pool holds what may still be among the k largest. After an overflow at most k + slack of its keys stay.
template <int kMax>
struct PoolShape {
  static constexpr int kPool = kMax <= kSmallK ? 1024 : 4 * kMax;
  static constexpr int kListCapacity = kMax + kMax / 4;
  static_assert(2 * kListCapacity <= kPool);
};
using SmallPool = PoolShape<kSmallK>;
using LargePool = PoolShape<kMaxPooledK>;

// Warps, stages and resident blocks: about 100 KB on their way per multiprocessor, in what shared memory the pool leaves.
template <class T, class Shape, int kBlockWarps>
struct BlockShape {
  using Element = T;
  using Pool = Shape;
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr bool kLarge = Shape::kPool > 1024;
  static constexpr int kStages = kWarps < 8 ? 2 : kWide ? (kLarge ? 2 : 3) : 4;
  static constexpr int kResident = kWarps < 8 ? 5 : kWide || kLarge ? 2 : 3;
};

template <class Shape>
struct PoolShared {
  SelectScratch select;
  int count;
  int kept;
  bool overflowed;
  bool last;
  Key pool[Shape::kPool];
};

template <class Block>
struct BlockShared : PoolShared<typename Block::Pool> {
  typename CellRing<typename Block::Element, Block::kStages>::Storage rings[Block::kWarps];
};

// The pool lies first in the block's dynamic shared memory.
template <class Shape>
__device__ inline PoolShared<Shape>& Pool() {
  extern __shared__ uint4 dynamic[];
  return *reinterpret_cast<PoolShared<Shape>*>(dynamic);
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
  // Every key still to come has a higher index than any seen. So where the floor is a key of the row (it has an index), an
  // equal logit is not enough any more: rows of equal logits stay on the fast path.
  __device__ void OnlyLaterFollow() {
    if (static_cast<uint32_t>(key) != 0) logit = FromOrderedBits(static_cast<uint32_t>(key >> 32) + 1);
  }
};

__device__ inline int SlackOf(int k) { return max(k / 4, 8); }

// Pool size at which raising the floor pays.
template <class Shape>
__device__ inline int SettleAt(int k) {
  return min(Shape::kPool * 3 / 4, max(4 * k, 128));
}

// False: the pool wants settling; the key may or may not be in it.
template <class Shape>
__device__ inline bool Offer(Key key, int settle_at) {
  PoolShared<Shape>& s = Pool<Shape>();
  const int at = atomicAdd(&s.count, 1);
  if (at < Shape::kPool) s.pool[at] = key;
  return at < settle_at;
}

// Called by all threads after a barrier, when an Offer of the round wanted it: drops what is below about the k-th largest
// key of the pool, and returns that key. Had the pool overflowed, then of the round's keys (index >= first_index) none is
// kept, and s.overflowed tells that the round must be offered again, to the raised floor.
template <int kThreads, class Shape>
__device__ __noinline__ Key Settle(int k, int first_index) {
  PoolShared<Shape>& s = Pool<Shape>();
  const int n = min(s.count, Shape::kPool);
  const bool overflowed = s.count > Shape::kPool;
  const Key floor = SelectThreshold<kThreads>(s.pool, n, k, SlackOf(k), s.select);
  if (threadIdx.x == 0) s.overflowed = overflowed;
  CompactKeys<kThreads>(s.pool, n, s.count,
                        [&](Key held) { return held >= floor && !(overflowed && KeyIndex(held) >= first_index); });
  return floor;
}

// At most kListCapacity keys stay; returns how many.
template <int kThreads, class Shape>
__device__ __noinline__ int Trim(int k) {
  PoolShared<Shape>& s = Pool<Shape>();
  __syncthreads();
  const int n = s.count;
  if (n <= Shape::kListCapacity) return n;
  const Key floor = SelectThreshold<kThreads>(s.pool, n, k, SlackOf(k), s.select);
  return CompactKeys<kThreads>(s.pool, n, s.kept, [&](Key held) { return held >= floor; });
}

// The k-th largest of the round's group maxima: at least k logits are not below it. 0: no floor.
template <int kThreads, class Shape>
__device__ __noinline__ uint32_t SeedFloor(float g0, float g1, float g2, float g3, int k) {
  static_assert(sizeof(Pool<Shape>().pool) >= kThreads * kGroups * sizeof(uint32_t));
  PoolShared<Shape>& s = Pool<Shape>();
  uint32_t* seeds = reinterpret_cast<uint32_t*>(s.pool) + threadIdx.x;
  seeds[0] = g0 > -kInfinity ? OrderedBits(g0) : 0;
  seeds[kThreads] = g1 > -kInfinity ? OrderedBits(g1) : 0;
  seeds[2 * kThreads] = g2 > -kInfinity ? OrderedBits(g2) : 0;
  seeds[3 * kThreads] = g3 > -kInfinity ? OrderedBits(g3) : 0;
  __syncthreads();
  return SelectThreshold<kThreads>(reinterpret_cast<const uint32_t*>(s.pool), kThreads * kGroups, k, SlackOf(k), s.select);
}

template <int kThreads, class Shape>
__device__ __noinline__ void EmitRow(int32_t* indices, float* probs, int k, int n, Stats row_stats, float c) {
  PoolShared<Shape>& s = Pool<Shape>();
  const RowResult result(row_stats, c);
  EmitByRank<kThreads>(s.pool, n, s.pool + Shape::kListCapacity, s.select, [&](int rank, Key key) {
    if (rank >= k) return;
    indices[rank] = KeyIndex(key);
    probs[rank] = result.Probability(KeyLogit(key));
  });
}

// Brings what the blocks of a row left in scratch together: cells into `cells`, candidates into the pool.
template <int kThreads, class Shape>
__device__ __noinline__ void GatherSplits(const Params& p, int64_t row_index, int k, Floor floor, Stats* cells) {
  PoolShared<Shape>& s = Pool<Shape>();
  const float2* stats = reinterpret_cast<const float2*>(p.cell_stats + row_index * p.cells);
#pragma unroll 4
  for (int i = threadIdx.x; i < p.cells; i += kThreads) {
    const float2 pair = __ldcg(stats + i);
    cells[i] = {pair.x, pair.y};
  }
  if (p.statistics_only) return;
  const int64_t first_item = row_index * p.splits;
  Key highest = 0;
  for (int i = threadIdx.x & 31; i < p.splits; i += 32) highest = max(highest, __ldcg(&p.split_floor[first_item + i]));
  const Key* keys = p.split_keys + first_item * Shape::kListCapacity;
  const int total = p.splits * Shape::kListCapacity;
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int begin = 0; begin < total; begin += kThreads * kAtOnce) {
    Key held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = begin + i * kThreads + static_cast<int>(threadIdx.x);
      held[i] = at < total ? __ldcg(keys + at) : 0;
    }
    if (begin == 0) floor.Raise(WarpMax(highest));
    bool lost;
    do {
      // What got in stays in when the pool is settled, so it is not offered again.
      bool room = true;
      lost = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (held[i] == 0 || held[i] < floor.key) continue;
        const int at = atomicAdd(&s.count, 1);
        if (at < Shape::kPool) {
          s.pool[at] = held[i];
          held[i] = 0;
        } else {
          lost = true;
        }
        room &= at < Shape::kPool * 3 / 4;
      }
      lost = __syncthreads_or(lost);
      if (__syncthreads_or(!room)) floor.Raise(Settle<kThreads, Shape>(k, p.vocab));
    } while (lost);
  }
}

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident) BlockRowKernel(const __grid_constant__ Params p,
                                                                                    int rows) {
  using T = typename Block::Element;
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  constexpr int kWarps = Block::kWarps;
  constexpr int kStages = Block::kStages;
  constexpr int kRound = kWarps * kCell;
  extern __shared__ uint4 dynamic[];
  BlockShared<Block>& s = *reinterpret_cast<BlockShared<Block>*>(dynamic);
  Stats* own_cells = reinterpret_cast<Stats*>(&s + 1);  // [cells]
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const bool select = !p.statistics_only;

  // An item is one split of one row; a block takes every gridDim.x-th.
  struct Item {
    int row;
    int first;  // element
    int end;    // element, a cell border or beyond the vocabulary
  };
  const int items = rows * p.splits;
  const auto item_at = [&](int index) -> Item {
    if (p.splits == 1) return {index, 0, p.cells * kCell};
    const int row = index / p.splits;
    const int split = index - row * p.splits;
    return {row, p.cells * split / p.splits * kCell, p.cells * (split + 1) / p.splits * kCell};
  };
  const auto row_at = [&](int row) { return static_cast<const T*>(p.logits) + row * p.row_stride; };

  // The ring runs ahead of the row at work, across its end into the block's next item, so that loads go on while the row
  // is being finished. A row nobody asks for is copied too: its parameters come too late to know.
  CellRing<T, kStages> ring(s.rings[warp], lane);
  int ahead_index = blockIdx.x;
  const T* ahead = nullptr;
  int ahead_first = 0, ahead_end = 0;
  const auto enter_ahead = [&] {
    for (; ahead_index < items; ahead_index += gridDim.x) {
      const Item item = item_at(ahead_index);
      ahead_first = item.first + warp * kCell;
      ahead_end = item.end;
      ahead = row_at(item.row) + ahead_first;
      if (ahead_first < ahead_end) return;
    }
    ahead_first = p.vocab;  // nothing left: pushes take their turn only
  };
  const auto push = [&] {
    ring.Push(ahead, p.vocab - ahead_first);
    if (ahead_index >= items) return;
    ahead += kRound;
    ahead_first += kRound;
    if (ahead_first >= ahead_end) {
      ahead_index += gridDim.x;
      enter_ahead();
    }
  };
  enter_ahead();
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) push();
  SoftmaxTopKRow next = p.rows[item_at(blockIdx.x).row];

#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_at(index);
    const SoftmaxTopKRow ask = next;
    if (index + gridDim.x < items) next = p.rows[item_at(index + gridDim.x).row];
    const T* row = row_at(item.row);
    const float c = kLog2E / ask.temperature;
    const int settle_at = SettleAt<Shape>(ask.k);
    Floor floor;
    __syncthreads();  // the row before is finished
    if (threadIdx.x == 0) s.count = 0;

#pragma unroll 1
    for (int begin = item.first; begin < item.end; begin += kRound) {
      const int first = begin + warp * kCell;
      const bool mine = first < item.end;
      float x[kLaneElements];
      float group_max[kGroups];
      if (mine) {
        ring.Pop(row + first, p.vocab - first, x);
        const Stats stats = CellStats(x, c, group_max);
        if (lane == 0) {
          Stats* cells = p.splits == 1 ? own_cells : p.cell_stats + static_cast<int64_t>(item.row) * p.cells;
          cells[first / kCell] = stats;
        }
      } else {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) group_max[g] = -kInfinity;
      }
      if (select && ask.k > 0) {
        // The registers are read before anything is called, so that nothing has to keep them: the rare second look, after
        // the floor was set or raised, is at shared memory.
        const bool seed = begin == item.first && ask.k <= kThreads * kGroups / 4;
        uint32_t bits = mine && !seed ? NotBelow(x, group_max, floor.logit) : 0;
        if (seed) {
          const uint32_t seeded =
              SeedFloor<kThreads, Shape>(group_max[0], group_max[1], group_max[2], group_max[3], ask.k);
          if (seeded != 0) floor.Raise(static_cast<Key>(seeded) << 32);
          if (mine) bits = ring.NotBelow(floor.logit);
        }
        while (true) {
          bool room = true;
#pragma unroll 1
          for (; bits != 0; bits &= bits - 1) {
            const int i = CellIndex<T>(lane, __ffs(bits) - 1);
            const Key key = MakeKey(ring.At(i), first + i);
            if (first + i < p.vocab && key >= floor.key) room &= Offer<Shape>(key, settle_at);
          }
          if (!__syncthreads_or(!room)) break;
          floor.Raise(Settle<kThreads, Shape>(ask.k, begin));
          if (!s.overflowed) break;
          if (mine) bits = ring.NotBelow(floor.logit);
        }
        floor.OnlyLaterFollow();
      }
      if (mine) {
        __syncwarp();
        push();
      }
    }
    if (ask.k == 0) continue;

    if (p.splits > 1) {
      // Leave what this block knows to the last block of the row, which takes it from there.
      if (select) {
        const int n = Trim<kThreads, Shape>(ask.k);
        Key* list = p.split_keys + static_cast<int64_t>(index) * Shape::kListCapacity;
        for (int i = threadIdx.x; i < Shape::kListCapacity; i += kThreads) list[i] = i < n ? s.pool[i] : 0;
        if (threadIdx.x == 0) p.split_floor[index] = floor.key;
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        s.last = atomicAdd(&p.arrived[item.row], 1u) == static_cast<uint32_t>(p.splits - 1);
        if (s.last) p.arrived[item.row] = 0;
        s.count = 0;
      }
      __syncthreads();
      if (!s.last) continue;
      __threadfence();
      GatherSplits<kThreads, Shape>(p, item.row, ask.k, floor, own_cells);
    }

    const int n = select ? Trim<kThreads, Shape>(ask.k) : 0;
    __syncthreads();
    const RowResult result(MergeCells(p.cells, c, lane, [&](int i) { return own_cells[i]; }), c);
    if (warp == 0) {
      WriteRow<T>(p, item.row, row, ask, result, lane, [&](int i) { return isnan(own_cells[i].sum); });
    }
    if (select) {
      EmitRow<kThreads, Shape>(p.indices + ask.first_entry, p.probs + ask.first_entry, ask.k, n, result.stats, c);
    }
  }
}

// ---- sorted ----------------------------------------------------------------------------------------------------------

using SortKey = uint64_t;  // row << 32 | complement of the logit's ordered bits: ascending is most probable first

template <class T>
__global__ void SortKeysKernel(Params p, int64_t first_row, int64_t elements, SortKey* keys, int32_t* values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
    const int64_t row = i / p.vocab;
    const int32_t column = static_cast<int32_t>(i % p.vocab);
    const T* logits = static_cast<const T*>(p.logits) + (first_row + row) * p.row_stride;
    keys[i] = static_cast<SortKey>(row) << 32 | static_cast<uint32_t>(~OrderedBits(ToFloat(logits[column])));
    values[i] = column;
  }
}

__global__ void EmitSortedKernel(Params p, int64_t first_row, const SortKey* keys, const int32_t* values) {
  const int64_t row = blockIdx.y;
  const SoftmaxTopKRow ask = p.rows[first_row + row];
  if (ask.k == 0) return;
  const RowResult result(p.row_stats[first_row + row], kLog2E / ask.temperature);
  for (int rank = blockIdx.x * blockDim.x + threadIdx.x; rank < ask.k; rank += gridDim.x * blockDim.x) {
    const int64_t at = row * p.vocab + rank;
    p.indices[ask.first_entry + rank] = values[at];
    p.probs[ask.first_entry + rank] = result.Probability(FromOrderedBits(~static_cast<uint32_t>(keys[at])));
  }
}

// ---- launch ----------------------------------------------------------------------------------------------------------

// Hands out pieces of scratch, each aligned for any use here.
class Carver {
 public:
  Carver(std::byte* data, size_t bytes) : at_(data), left_(bytes) {}
  template <class U>
  U* Take(size_t count) {
    const size_t bytes = (count * sizeof(U) + 255) / 256 * 256;
    if (bytes > left_) return nullptr;
    U* piece = reinterpret_cast<U*>(at_);
    at_ += bytes;
    left_ -= bytes;
    return piece;
  }

 private:
  std::byte* at_;
  size_t left_;
};

template <class T>
cudaError_t LaunchWarpRow(const Params& p, int64_t rows, int multiprocessors, cudaStream_t stream) {
  constexpr int kShared = sizeof(WarpRowShared<T>);
  const cudaError_t error =
      cudaFuncSetAttribute(&WarpRowKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>((rows + kWarpRowWarps - 1) / kWarpRowWarps, 2 * multiprocessors);
  WarpRowKernel<T><<<static_cast<unsigned>(blocks), kWarpRowWarps * 32, kShared, stream>>>(p, rows);
  return cudaGetLastError();
}

template <class Block>
cudaError_t LaunchBlockRow(const Params& p, int64_t rows, int multiprocessors, cudaStream_t stream) {
  const int shared = static_cast<int>(sizeof(BlockShared<Block>) + p.cells * sizeof(Stats));
  const cudaError_t error =
      cudaFuncSetAttribute(&BlockRowKernel<Block>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(rows * p.splits, Block::kResident * multiprocessors);
  BlockRowKernel<Block><<<static_cast<unsigned>(blocks), Block::kThreads, shared, stream>>>(p, static_cast<int>(rows));
  return cudaGetLastError();
}

template <class T>
cudaError_t LaunchSortKeys(const Params& p, int64_t first_row, int64_t elements, SortKey* keys, int32_t* values,
                           cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>((elements + 255) / 256, 132 * 16));
  SortKeysKernel<T><<<blocks, 256, 0, stream>>>(p, first_row, elements, keys, values);
  return cudaGetLastError();
}

using Launch = cudaError_t (*)(const Params&, int64_t rows, int multiprocessors, cudaStream_t);

// By row length and k: the first variant whose limits hold is taken.
struct Variant {
  int32_t max_vocab;
  int32_t max_k;
  int32_t warps;     // of a block
  int32_t resident;  // blocks per multiprocessor; 0: rows are never split over blocks
  int32_t list_capacity;
  Launch launch;
};

template <class T, class Shape, int kWarps>
constexpr Variant BlockRowVariant(int32_t max_vocab, int32_t max_k) {
  using Block = BlockShape<T, Shape, kWarps>;
  return {max_vocab, max_k, kWarps, Block::kResident, Shape::kListCapacity, &LaunchBlockRow<Block>};
}

template <class T>
constexpr Variant kVariants[] = {
    {kCell, kWarpRowMaxK, kWarpRowWarps, 0, 0, &LaunchWarpRow<T>},
    BlockRowVariant<T, SmallPool, 4>(4 * kCell, kSmallK),
    BlockRowVariant<T, SmallPool, 8>(static_cast<int32_t>(kMaxVocab), kSmallK),
    BlockRowVariant<T, LargePool, 8>(static_cast<int32_t>(kMaxVocab), kMaxPooledK),
};

struct TypeRow {
  DType dtype;
  absl::Span<const Variant> variants;
  cudaError_t (*sort_keys)(const Params&, int64_t, int64_t, SortKey*, int32_t*, cudaStream_t);
};

constexpr TypeRow kTypes[] = {
    {DType::kF32, kVariants<float>, &LaunchSortKeys<float>},
    {DType::kF16, kVariants<__half>, &LaunchSortKeys<__half>},
    {DType::kBF16, kVariants<__nv_bfloat16>, &LaunchSortKeys<__nv_bfloat16>},
};

// Blocks a row is split over. Blocks stay and take items in turn, so what counts is how full the last turn is; a split
// costs a merge, so the fewest that come within a twentieth of the best.
int32_t SplitsOf(int64_t rows, int32_t cells, const Variant& variant, int multiprocessors) {
  if (variant.resident == 0) return 1;
  const int64_t blocks = static_cast<int64_t>(variant.resident) * multiprocessors;
  const int32_t most = static_cast<int32_t>(
      std::min<int64_t>((cells + variant.warps - 1) / variant.warps, 2 * blocks / rows + 1));
  int32_t best = 1;
  double best_share = 0;
  for (int32_t splits = 1; splits <= most; ++splits) {
    const int64_t items = rows * splits;
    const double share = static_cast<double>(items) / static_cast<double>((items + blocks - 1) / blocks * blocks);
    if (share > best_share + 0.05) {
      best = splits;
      best_share = share;
    }
  }
  return best;
}

cudaError_t RunVariant(Params p, int64_t rows, int32_t k, const TypeRow& type, Carver carver, const Scratch& scratch,
                       cudaStream_t stream) {
  const Variant* variant = type.variants.data();
  while (variant->max_vocab < p.vocab || variant->max_k < k) ++variant;
  p.splits = SplitsOf(rows, p.cells, *variant, scratch.multiprocessors);
  if (p.splits > 1) {
    const size_t slots = static_cast<size_t>(rows) * p.splits;
    p.arrived = reinterpret_cast<uint32_t*>(scratch.data);
    p.cell_stats = carver.Take<Stats>(static_cast<size_t>(rows) * p.cells);
    p.split_floor = carver.Take<Key>(slots);
    p.split_keys = carver.Take<Key>(slots * variant->list_capacity);
    if (p.split_keys == nullptr || rows * sizeof(uint32_t) > Scratch::kCounterBytes) p.splits = 1;
  }
  return variant->launch(p, rows, scratch.multiprocessors, stream);
}

cudaError_t RunSorted(Params p, int64_t rows, const TypeRow& type, Carver carver, const Scratch& scratch,
                      cudaStream_t stream) {
  // Rows per pass: as many as scratch holds, in keys and values twice and what CUB asks beside.
  constexpr int64_t kMaxPass = 4096;
  const int64_t bytes_per_row = int64_t{2} * p.vocab * (sizeof(SortKey) + sizeof(int32_t));
  const int64_t budget = static_cast<int64_t>(scratch.bytes) * 3 / 4;
  const int64_t pass = std::clamp<int64_t>(budget / bytes_per_row, 1, std::min(rows, kMaxPass));
  p.row_stats = carver.Take<Stats>(rows);
  p.statistics_only = true;
  cudaError_t error = RunVariant(p, rows, 1, type, carver, scratch, stream);
  if (error != cudaSuccess) return error;
  cub::DoubleBuffer<SortKey> keys(carver.Take<SortKey>(pass * p.vocab), carver.Take<SortKey>(pass * p.vocab));
  cub::DoubleBuffer<int32_t> values(carver.Take<int32_t>(pass * p.vocab), carver.Take<int32_t>(pass * p.vocab));
  int row_bits = 0;
  while ((int64_t{1} << row_bits) < pass) ++row_bits;
  size_t temp_bytes = 0;
  error = cub::DeviceRadixSort::SortPairs(nullptr, temp_bytes, keys, values, static_cast<int>(pass * p.vocab), 0,
                                          32 + row_bits, stream);
  if (error != cudaSuccess) return error;
  std::byte* temp = carver.Take<std::byte>(temp_bytes);
  if (temp == nullptr) return cudaErrorMemoryAllocation;
  for (int64_t first = 0; first < rows; first += pass) {
    const int64_t count = std::min(pass, rows - first);
    const int64_t elements = count * p.vocab;
    error = type.sort_keys(p, first, elements, keys.Current(), values.Current(), stream);
    if (error != cudaSuccess) return error;
    error = cub::DeviceRadixSort::SortPairs(temp, temp_bytes, keys, values, static_cast<int>(elements), 0,
                                            32 + row_bits, stream);
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
  const Carver carver(scratch.data + Scratch::kCounterBytes, scratch.bytes - Scratch::kCounterBytes);
  if (args.max_k <= kMaxPooledK) {
    return RunVariant(p, args.logits.rows, args.max_k, *type, carver, scratch, stream);
  }
  return RunSorted(p, args.logits.rows, *type, carver, scratch, stream);
}

}  // namespace logitd::cuda
