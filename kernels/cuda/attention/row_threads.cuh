// The threads that hold a row: sums over them, and how rows are dealt out to them.
//
// A warp holds neighbouring vectors, dealt out to the row's lanes in turns. How many warps a row
// has depends on its length, its types and whether it has a mask or a window. So which element a
// thread adds in which order depends only on the element's index, and a row's bits are the same at
// any alignment and stride.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_ROW_THREADS_CUH_
#define LOGITD_KERNELS_CUDA_ATTENTION_ROW_THREADS_CUH_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/attention/rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/rows/clusters_at_once.h"
#include "kernels/cuda/rows/reductions.cuh"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda::attention {

constexpr int kNoPosition = std::numeric_limits<int>::max();

// A value that is the same in all lanes, taken from the first: so the compiler knows it, and
// neither prepares shuffles for lanes that go different ways nor keeps what follows from it in
// every lane.
__device__ inline int OfWarp(int value) { return __shfl_sync(kFullWarp, value, 0); }

// The thread's warp in its block.
__device__ inline int WarpInBlock() { return OfWarp(static_cast<int>(threadIdx.x / 32)); }

// ---- several rows in a warp --------------------------------------------------------------------

constexpr int kLanesThreads = 128;
constexpr int kLanesResident = 8;  // blocks per multiprocessor

// Every lane gets the same bits: the butterfly combines the same pairs everywhere.
template <int kLanes, class Op>
__device__ inline auto LanesReduce(auto v, Op op) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    v = op(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}
template <int kLanes>
__device__ inline float LanesMax(float v) {
  return LanesReduce<kLanes>(v, [](float a, float b) { return fmaxf(a, b); });
}
template <int kLanes>
__device__ inline float LanesSum(float v) {
  return LanesReduce<kLanes>(v, [](float a, float b) { return a + b; });
}
template <int kLanes>
__device__ inline int LanesMin(int v) {
  return LanesReduce<kLanes>(v, [](int a, int b) { return min(a, b); });
}

// The warps of a row that hold a key its query sees; warp 0 where it sees nothing.
struct ActiveWarps {
  int begin;
  int end;

  // `held`: elements that a warp holds.
  __device__ ActiveWarps(const Seen& seen, int held)
      : begin(seen.begin / held), end(max((seen.end + held - 1) / held, begin + 1)) {}
  __device__ bool Has(int warp) const { return warp >= begin && warp < end; }
};

// Launches `kernel`, in which kLanes lanes hold a row, and each lane a part of kRows rows.
template <int kLanes, int kRows, class Params>
cudaError_t LaunchLanes(void (*kernel)(Params), const Params& p, cudaStream_t stream) {
  return LaunchKernel(
      kernel,
      {.grid = GridFor(p.rows.count, kLanesThreads / kLanes * kRows), .threads = kLanesThreads},
      stream, p);
}

// ---- rows of blocks ----------------------------------------------------------------------------

constexpr int kMaxRowThreads = 1024;  // of a block
constexpr int kMaxRowWarps = kMaxRowThreads / 32;
constexpr int kMaxRowBlocks = 16;  // of a cluster, where the device has room for so many

// The threads of a row that is longer than a warp holds: each warp holds a part of it.
struct BlockPlan {
  int threads;      // of a block
  int blocks;       // of a row: a cluster
  double rate = 0;  // as a share of a plain copy's; 0: no such threads hold the row
};

// Rates of plans depend on these; measured on an H200 (attention_plans.json).
struct BlockRates {
  static constexpr double kMeet[] = {1, .86, .80, .74, .55};  // by log2 of a cluster's blocks
  static constexpr double kAlone = .70;  // a block that fills its multiprocessor, where all is seen
  static constexpr double kClear = 1.2;  // a plan of more blocks must be so much faster
  static constexpr int kResident = 32;   // warps of a multiprocessor: registers limit them
};

// The fastest plan for rows of `parts` parts. most_blocks: of a row. `partly`: of a row only some
// keys are seen, or blocks wait for a mask. `enough`: the share of a multiprocessor's warps that
// keeps its memory busy. A row's bits do not depend on its number of blocks.
inline BlockPlan PlanHeld(int64_t parts, int most_blocks, bool partly, double enough) {
  BlockPlan best{};
  for (int blocks = 1, log = 0; blocks <= most_blocks; blocks *= 2, ++log) {
    const auto warps = static_cast<int>(CeilDiv(parts, blocks));
    if (warps > kMaxRowWarps) continue;
    const int resident = BlockRates::kResident / warps;
    const double busy =
        static_cast<double>(resident * parts) / (BlockRates::kResident * blocks * enough);
    const double rate = BlockRates::kMeet[log] * std::min(1.0, busy) *
                        (resident == 1 && !partly ? BlockRates::kAlone : 1.0);
    if (rate > best.rate * BlockRates::kClear)
      best = {.threads = 32 * warps, .blocks = blocks, .rate = rate};
  }
  return best;
}

template <class Params>
cudaError_t AllowLargestClusters(void (*kernel)(Params)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Whether the device runs `kernel` in clusters of kMaxRowBlocks of its largest blocks. Some devices
// have no part with so many multiprocessors.
template <class Params>
bool LargestClustersFit(void (*kernel)(Params), const Scratch& scratch) {
  int clusters = 0;
  const LaunchShape shape{.threads = kMaxRowThreads, .cluster = kMaxRowBlocks};
  if (AllowLargestClusters(kernel) != cudaSuccess ||
      ClustersAtOnce(reinterpret_cast<const void*>(kernel), shape, scratch, &clusters) !=
          cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return clusters > 0;
}

// The fastest plan for rows that `kernel` holds where they have a cluster.
template <class Params>
BlockPlan PlanHeldRows(void (*kernel)(Params), int64_t parts, bool partly, double enough,
                       const Scratch& scratch) {
  int most_blocks = scratch.clusters ? kMaxClusterBlocks : 1;
  if (scratch.clusters && 2 * parts > kMaxClusterBlocks * kMaxRowWarps &&
      LargestClustersFit(kernel, scratch))
    most_blocks = kMaxRowBlocks;
  return PlanHeld(parts, most_blocks, partly, enough);
}

// Launches `kernel` with a cluster of plan.blocks blocks for each row.
template <class Params>
cudaError_t LaunchBlocks(void (*kernel)(Params), const BlockPlan& plan, const Params& p,
                         cudaStream_t stream) {
  if (plan.blocks > kMaxClusterBlocks) {
    const cudaError_t error = AllowLargestClusters(kernel);
    if (error != cudaSuccess) return error;
  }
  return LaunchKernel(kernel,
                      {.grid = dim3(p.rows.count * static_cast<unsigned>(plan.blocks)),
                       .threads = plan.threads,
                       .cluster = plan.blocks},
                      stream, p);
}

// A thread's place among those of its row's blocks.
template <bool kCluster>
struct RowThread {
  int blocks;
  int warps;  // of the row
  int warp;   // neighbours are in different blocks: a part of a row is work for all of them

  __device__ RowThread() {
    blocks = 1;
    int block = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
    }
#endif
    if constexpr (kCluster) {
      blocks = OfWarp(blocks);
      block = OfWarp(BlockOfCluster());
    }
    warps = blocks * static_cast<int>(blockDim.x / 32);
    warp = WarpInBlock() * blocks + block;
  }
  __device__ uint32_t Row() const { return blockIdx.x / blocks; }

  // Writes the items of the warps whose `given` is true to `items` of every block of the row, by
  // warp, and waits for all of them. It does not wait for warps that have ended.
  template <class Item>
  __device__ void Share(const Item& item, bool given, Item* items) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kCluster) {
      ClusterWait();  // all blocks have begun: their memory is there
      if (given && lane < blocks) *InBlock(items + warp, lane) = item;
      ClusterArrive();
      ClusterWait();
    } else {
      if (given && lane == 0) items[warp] = item;
      __syncthreads();
    }
  }
};

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_ROW_THREADS_CUH_
