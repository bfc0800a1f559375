// The product of hidden states and a head's weights on Hopper where there are more than 128 rows
// but not thousands (middle_plan.h). An epilogue takes each tile of sums from registers.
//
// As in few_rows.cu the vocabulary is on wgmma's side of 64, and the rows on the other, where they
// are paid for 8 at a time. Two warpgroups of a block multiply 128 tokens each by up to 160 rows.
// Blocks are pairs with the same tile of 256 tokens, of which each loads half for both, and their
// own rows: the weights are read once for up to 320 rows. More rows are groups, of two sizes at
// most; clusters next to each other take the groups of a tile. A logit has product.cuh's order, so
// its bits.
//
// Cost: reads vocab * hidden * 2 bytes. Limited by HBM up to about 250 rows, then by the tensor
// cores. Measured on an H100 (bench/results/h100/middle_rows.json), 151936 x 5120, logits of 200,
// 300, 520, 777 and 1000 rows: 1.07, 1.12, 1.09, 1.06, 1.04 of cuBLASLt's product, which writes
// half as much.
// Dropped: clusters of four blocks (300 rows 837 us for 720), more groups (879), groups of one
// size.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_ROWS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_ROWS_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/linear/hopper/few_rows_multiply.cuh"
#include "kernels/cuda/linear/hopper/middle_plan.h"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/rows/clusters_at_once.h"

namespace logitd::cuda::hopper {

static_assert(kMiddleBlocks == kCluster);
constexpr int kUnitTokens = 64;                                // of a wgmma
constexpr int kGroupUnits = kTile / kConsumers / kUnitTokens;  // of a warpgroup
// A thread's registers, as in product.cuh; here more of them hold sums.
constexpr int kMiddleLoadRegisters = 40;
constexpr int kMiddleMultiplyRegisters = 232;
static_assert(kMiddleLoadRegisters + kConsumers * kMiddleMultiplyRegisters <=
              (1 + kConsumers) * 168);

// kMostRows: rows that a block multiplies, absent ones included. TileEpilogue<kMostRows> has
// Params, kSharedBytes, and functions that all threads that multiply call: Begin(unit), then
// Take(sums, unit, the thread's first token in a tile, lane).
template <class Element, int kMostRows, template <int> class TileEpilogue>
struct MiddleShape {
  using T = Element;
  using Epilogue = TileEpilogue<kMostRows>;
  static constexpr int kRows = kMostRows;
  static constexpr int kStateBytes = kRows * kLineBytes;
  static constexpr int kBytes = kStateBytes + kTile * kLineBytes;  // of a stage
  static constexpr int kRest = 1024 + Epilogue::kSharedBytes;      // stages are aligned to 1024
  static constexpr int kStages = std::min(5, (kMostSharedBytes - kRest) / kBytes);
  static constexpr int kSharedBytes = kStages * kBytes + kRest;
  static_assert(kStages >= 4);
};

// The sums of a thread, by unit: token lane / 4 of its warp's 16 and the one 8 after it, by rows
// 8 j + lane % 4 * 2 and the next, at [4 j + 2 * (second token) + (next row)].
template <int kRows>
using MiddleSums = float[kGroupUnits][kRows / 2];

struct MiddleParams {
  int32_t rows;
  int32_t vocab;
  int32_t steps;  // along the hidden size
  MiddlePlan plan;
};

// What a block does at a time: a tile by its rows of a group.
struct MiddleUnit {
  int tile;
  int row;     // the first
  int rows;    // that there are; none: 0 or less
  bool small;  // as MiddlePlan::IsSmall
};

// Calls take(unit) for all that this block's cluster takes. The first tiles come last: L2 still has
// their logits when the next kernel begins to read. Where the number of clusters is a multiple of
// that of groups, a cluster would always take the same group, and groups differ in size; so the
// first of a tile's groups becomes another as tiles go on.
template <class Take>
__device__ inline void ForEachMiddleUnit(const MiddleParams& p, const Take& take) {
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int groups = p.plan.groups;
  const int tiles = (p.vocab + kTile - 1) / kTile;
#pragma unroll 1
  for (int unit = static_cast<int>(blockIdx.x) / kCluster; unit < tiles * groups;
       unit += clusters) {
    const int tile = unit / groups;
    const int group = (unit % groups + tile * groups / tiles) % groups;
    const int block_rows = p.plan.BlockRows(group);
    const int row = p.plan.FirstRow(group) + rank * block_rows;
    take(MiddleUnit{.tile = tiles - 1 - tile,
                    .row = row,
                    .rows = min(block_rows, p.rows - row),
                    .small = p.plan.IsSmall(group)});
  }
}

// A ring of stages in shared memory, each of a step: hidden states, then weights.
template <class S>
struct MiddleRing {
  uint32_t stages;
  uint32_t full;   // a barrier a stage: it has been filled
  uint32_t empty;  // a barrier a stage: all warps of the cluster have read it
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t At() const { return stages + stage * S::kBytes; }
  __device__ void Advance() {
    if (++stage == S::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fills stages, by one thread.
template <class S>
__device__ inline void LoadMiddle(const CUtensorMap& states, const CUtensorMap& weights,
                                  const MiddleParams& p, MiddleRing<S> ring) {
  const uint64_t again = CachePolicy</*kOnce=*/false>();
  const uint64_t weight_policy = p.plan.groups > 1 ? again : CachePolicy</*kOnce=*/true>();
  constexpr int kLines = kTile / kCluster;  // of weights, from this block for both
  const int line = static_cast<int>(blockIdx.x) % kCluster * kLines;
  const int bytes = (kTile + p.plan.block_rows) * kLineBytes;
  ForEachMiddleUnit(p, [&](const MiddleUnit& unit) {
#pragma unroll 1
    for (int element = 0; element < p.steps * kStep; element += kStep) {
      WaitFor(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      const uint32_t full = ring.full + 8 * ring.stage;
      Expect(full, bytes);
      CopyTile(ring.At(), states, element, unit.row, full, again);
      CopyTileToAll(ring.At() + S::kStateBytes + line * kLineBytes, weights, element,
                    unit.tile * kTile + line, full, weight_policy);
      ring.Advance();
    }
  });
}

// The compiler does not move reads or writes of sums across this.
template <int kRows>
__device__ inline void PinMiddle(MiddleSums<kRows>& sums) {
#pragma unroll
  for (auto& unit : sums) {
#pragma unroll
    for (float& sum : unit) asm volatile("" : "+f"(sum)::"memory");
  }
}

// Multiplies a tile by the first kRows rows of the stages.
template <class S, int kRows>
__device__ inline void MultiplyMiddle(MiddleSums<S::kRows>& sums, const MiddleParams& p, int group,
                                      int lane, MiddleRing<S>& ring) {
  constexpr uint64_t kUnit = kUnitTokens * kLineBytes >> 4;  // as in a descriptor
  const auto release = [&](int stage) {
    if (lane < kCluster) ArriveAt(ring.empty + 8 * stage, lane);
  };
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    WaitFor(ring.full + 8 * ring.stage, ring.parity);
    const uint64_t b = Descriptor(ring.At());
    const uint64_t a = Descriptor(ring.At() + S::kStateBytes) + group * kGroupUnits * kUnit;
    PinMiddle<S::kRows>(sums);
    BeginMultiplying();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int unit = 0; unit < kGroupUnits; ++unit) {
        MultiplyTokens<typename S::T, kRows>(reinterpret_cast<float(&)[kRows / 2]>(sums[unit]),
                                             a + unit * kUnit + 2 * k, b + 2 * k,
                                             step > 0 || k > 0);
      }
    }
    CommitMultiplying();
    PinMiddle<S::kRows>(sums);
    if (step > 0) {
      WaitMultiplied<1>();
      release(previous);
    }
    previous = ring.stage;
    ring.Advance();
  }
  WaitMultiplied<0>();
  release(previous);
  PinMiddle<S::kRows>(sums);
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    MiddleRowsKernel(const __grid_constant__ CUtensorMap states,
                     const __grid_constant__ CUtensorMap weights,
                     const __grid_constant__ MiddleParams p,
                     const __grid_constant__ typename S::Epilogue::Params epilogue_params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * S::kStages];
  LetNextKernelBegin();
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
  MiddleRing<S> ring{
      .stages = (begin + 1023) / 1024 * 1024, .full = full, .empty = full + S::kStages * 8};
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      InitBarrier(ring.full + 8 * stage, 1);
      // Once for each warp that multiplies, of all blocks.
      InitBarrier(ring.empty + 8 * stage, kCluster * kConsumers * (kGroupThreads / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  ClusterArrive();
  ClusterWait();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMiddleLoadRegisters));
    if (threadIdx.x == 0) LoadMiddle(states, weights, p, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMiddleMultiplyRegisters));
    std::byte* rest =
        reinterpret_cast<std::byte*>(dynamic) + (ring.stages - begin) + S::kStages * S::kBytes;
    // The thread's first token in a tile.
    const int token = (group - 1) * kGroupUnits * kUnitTokens +
                      static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
    typename S::Epilogue epilogue(epilogue_params, p.vocab, rest);
    ForEachMiddleUnit(p, [&](const MiddleUnit& unit) {
      epilogue.Begin(unit);
      // What an epilogue leaves in registers must not reach the next tile, or the compiler makes
      // multiplications wait for each other.
      MiddleSums<S::kRows> sums = {};
      if constexpr (S::kRows > kLeastMiddleBlockRows) {
        if (unit.small) {
          MultiplyMiddle<S, S::kRows - kMiddleRowUnit>(sums, p, group - 1, lane, ring);
        } else {
          MultiplyMiddle<S, S::kRows>(sums, p, group - 1, lane, ring);
        }
      } else {
        MultiplyMiddle<S, S::kRows>(sums, p, group - 1, lane, ring);
      }
      epilogue.Take(sums, unit, token, lane);
    });
  }
  // No block ends while another of its cluster may still write to its memory.
  ClusterArrive();
  ClusterWait();
#endif
}

// ---- launch ------------------------------------------------------------------------------------

template <class S>
cudaError_t LaunchMiddle(const TensorView& hidden, const TensorView& weight,
                         const typename S::Epilogue::Params& epilogue, const MiddlePlan& plan,
                         const Scratch& scratch, cudaStream_t stream) {
  CUtensorMap states, weights;
  if (!MakeMap(hidden, plan.block_rows, /*once=*/false, states) ||
      !MakeMap(weight, kTile / kCluster, /*once=*/false, weights)) {
    return cudaErrorNotSupported;
  }
  const MiddleParams p{.rows = static_cast<int32_t>(hidden.rows),
                       .vocab = static_cast<int32_t>(weight.rows),
                       .steps = static_cast<int32_t>(CeilDiv(hidden.cols, kStep)),
                       .plan = plan};
  LaunchShape shape{.threads = kThreads, .cluster = kCluster, .shared_bytes = S::kSharedBytes};
  int clusters = 0;
  const cudaError_t error = ClustersAtOnce(reinterpret_cast<const void*>(&MiddleRowsKernel<S>),
                                           shape, scratch, &clusters);
  if (error != cudaSuccess) return error;
  shape.grid =
      GridFor(kCluster * std::min<int64_t>(clusters, CeilDiv(weight.rows, kTile) * plan.groups));
  return LaunchKernel(&MiddleRowsKernel<S>, shape, stream, states, weights, p, epilogue);
}

template <class T, template <int> class Epilogue, class Params, int... kRows>
cudaError_t LaunchMiddleOf(const TensorView& hidden, const TensorView& weight,
                           const Params& epilogue, const MiddlePlan& plan, const Scratch& scratch,
                           cudaStream_t stream, std::integer_sequence<int, kRows...>) {
  // The first that has room.
  cudaError_t error = cudaErrorInvalidValue;
  ((plan.block_rows <= kRows && (error = LaunchMiddle<MiddleShape<T, kRows, Epilogue>>(
                                     hidden, weight, epilogue, plan, scratch, stream),
                                 true)) ||
   ...);
  return error;
}
// As LaunchProduct, for any number of rows, without groups that are skipped.
template <class T, template <int> class Epilogue, class Params>
cudaError_t LaunchMiddleRows(const TensorView& hidden, const TensorView& weight,
                             const Params& epilogue, const Scratch& scratch, cudaStream_t stream) {
  using Rows = std::integer_sequence<int, kLeastMiddleBlockRows, 96, 104, 112, 120, 128, 136, 144,
                                     152, kMostMiddleBlockRows>;
  return LaunchMiddleOf<T, Epilogue>(hidden, weight, epilogue, MiddlePlanOf(hidden.rows), scratch,
                                     stream, Rows());
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_ROWS_CUH_
