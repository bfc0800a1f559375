// softmax_topk, by blocks: a block per row, a cluster per row, or several blocks that leave what
// they find of a row in scratch, where the last of them merges it.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_BLOCK_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_BLOCK_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/candidates.cuh"
#include "kernels/cuda/sampling/topk_row.cuh"

namespace logitd::cuda {

// Ranks the n keys of the pool and writes the first k.
template <int kThreads, class Shape>
__device__ __forceinline__ void EmitRow(int32_t* indices, float* probs, int k, int n,
                                        const RowResult& result) {
  auto& s = Pool<Shape>();
  EmitByRank<kThreads>(s.pool, n, s.pool + Shape::kPool / 2, s.select, [&](int rank, Key key) {
    if (rank >= k) return;
    indices[rank] = KeyIndex(key);
    probs[rank] = result.Probability(KeyLogit(key));
  });
}

// ---- rows split over blocks --------------------------------------------------------------------

// Leaves the k largest keys of the block's pool in scratch, and the floor they are not below.
template <int kThreads, class Shape>
__device__ __forceinline__ void LeaveCandidates(const TopKParams& p, int k, Key floor) {
  const int n = Trim<kThreads, Shape>(k, p.list_capacity);
  Key* list = p.split_keys + static_cast<int64_t>(blockIdx.x) * p.list_capacity;
  for (int i = threadIdx.x; i < p.list_capacity; i += kThreads)
    list[i] = i < n ? Pool<Shape>().pool[i] : 0;
  if (threadIdx.x == 0) p.split_floor[blockIdx.x] = floor;
}

// Whether the block is the last of its row to get here: it sees what the others left in scratch.
template <class Shape>
__device__ __forceinline__ bool LastOfRow(const TopKParams& p, int row_index) {
  auto& s = Pool<Shape>();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // the block's writes come before its arrival
    s.last = atomicAdd(&p.arrived[row_index], 1u) == static_cast<uint32_t>(p.splits - 1);
    if (s.last) p.arrived[row_index] = 0;
    __threadfence();
  }
  __syncthreads();
  return s.last;
}

// Copies the cells that the blocks of a row left in scratch into `cells`, and returns a floor for
// the candidates they left.
template <class Block>
__device__ __forceinline__ Floor SplitsFloor(const TopKParams& p, int row_index, int k, bool select,
                                             Stats* cells) {
  const float2* stats =
      reinterpret_cast<const float2*>(p.cell_stats + static_cast<int64_t>(row_index) * p.cells);
  Key highest = 0;  // the best of the blocks' floors
  if (select) {
    for (int i = threadIdx.x % 32; i < p.splits; i += 32)
      highest =
          max(highest, __ldcg(&p.split_floor[static_cast<int64_t>(row_index) * p.splits + i]));
  }
  float thread_best = -kInfinity;
  for (int i = threadIdx.x; i < p.cells; i += Block::kThreads) {
    const float2 pair = __ldcg(stats + i);
    cells[i] = {pair.x, pair.y};
    thread_best = fmaxf(thread_best, pair.x);
  }
  Floor floor;
  floor.Raise(WarpMax(highest));
  // As in a block, by threads: each has seen a cell with its maximum.
  __syncthreads();
  floor.RaiseToLogit(BlockFloor<Block>(thread_best, p.cells / 32, k));
  return floor;
}

// Brings together what the blocks of a row left in scratch: cells in `cells`, candidates in the
// pool.
template <class Block>
__device__ __noinline__ void GatherSplits(const TopKParams& p, int row_index, int k, Stats* cells) {
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  auto& s = Pool<Shape>();
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32;
  const Key* keys = p.split_keys + static_cast<int64_t>(row_index) * p.splits * p.list_capacity;
  const int total = p.statistics_only ? 0 : p.splits * p.list_capacity;
  if (threadIdx.x == 0) s.count = 0;
  Key held[kAtOnce];
  const auto load = [&](int round) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = round + i * kThreads + static_cast<int>(threadIdx.x);
      held[i] = at < total ? __ldcg(keys + at) : 0;
    }
  };
  load(0);  // under way while the floor is found
  Floor floor = SplitsFloor<Block>(p, row_index, k, total > 0, cells);
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
    load(round);
  }
}

// ---- the kernel --------------------------------------------------------------------------------

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident)
    BlockRowKernel(const __grid_constant__ TopKParams p) {
  using T = typename Block::Element;
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  if constexpr (Block::kCluster) ClusterArriveEmpty();
  AwaitEarlierKernels();
  typename Block::Shared& shared = *reinterpret_cast<typename Block::Shared*>(dynamic);
  Stats* cells = reinterpret_cast<Stats*>(&shared + 1);  // [cells]
  typename Shape::Sketch* sketch = reinterpret_cast<typename Shape::Sketch*>(
      cells + p.cells + p.cells % 2);  // [cells of the part, 32]
  const bool select = !p.statistics_only;
  const int row_index = p.splits == 1 ? blockIdx.x : blockIdx.x / p.splits;
  const int split = blockIdx.x - row_index * p.splits;
  const Part part = Part::Of(split, p.splits, p.cells, p.vocab);
  const T* row = p.Row<T>(row_index);

  // Requested before the copies, or it arrives after all of them. Needed only once they are under
  // way.
  const SoftmaxTopKRow ask = p.args.rows[row_index];
  RowStream<Block> stream(shared, row, part.begin, part.end);
  if constexpr (Block::kCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (ask.k == 0) return stream.Abandon();

  // Divisions in double are slow: this one while the first cells are on their way.
  const float log2e_over_temperature = kLog2E / ask.temperature;
  const double exact_log2e_over_temperature = RowResult::Log2EOver(ask.temperature);
  Stats* row_cells = cells;  // where the row's cells are brought together
  if constexpr (Block::kCluster) {
    row_cells = InBlock(cells, 0);
  } else if (p.splits > 1) {
    row_cells = p.cell_stats + static_cast<int64_t>(row_index) * p.cells;
  }
  const float lane_best = stream.Run({log2e_over_temperature, row_cells}, sketch);
  __syncthreads();  // from here on the ring's memory is the pool's

  const auto gather = [&] { return GatherRow<Block>(row, part, sketch, lane_best, ask.k, shared); };
  if constexpr (Block::kCluster) {
    if (select) {
      gather();
    } else {
      ClusterArrive();
      ClusterWait();
    }
    if (split != 0) return;
  } else {
    if (select) {
      const Key floor = gather();
      if (p.splits > 1) LeaveCandidates<kThreads, Shape>(p, ask.k, floor);
    }
    if (p.splits > 1) {
      if (!LastOfRow<Shape>(p, row_index)) return;
      GatherSplits<Block>(p, row_index, ask.k, cells);
    }
  }

  const int n = select ? Trim<kThreads, Shape>(ask.k, Shape::kPool / 2) : 0;
  const RowResult result(MergeCells(cells, p.cells, log2e_over_temperature), log2e_over_temperature,
                         exact_log2e_over_temperature);
  if (threadIdx.x < 32) {
    WriteRow<T>(p, row_index, ask, result, threadIdx.x, [&](int i) { return isnan(cells[i].sum); });
  }
  if (!select) return;
  if (result.Nan()) return EmitNothing(p.args, ask, threadIdx.x, kThreads);
  EmitRow<kThreads, Shape>(p.args.indices + ask.first_entry, p.args.probs + ask.first_entry, ask.k,
                           n, result);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_BLOCK_CUH_
