// The product of hidden states and a head's weights on Hopper, by wgmma and TMA. An epilogue takes
// each tile of logits from registers, in fp32, and decides what is written.
//
// A block is three warpgroups. In the first, one thread asks the copy engine (TMA) for stages of
// both operands, 64 elements of the hidden size at a time, as many ahead as shared memory holds.
// The other two multiply, 64 rows by a tile of 256 tokens each, the whole tile in their registers.
// Blocks come in clusters of two. The number of rows chooses the plan (VisitPlan):
//
//   ManyRows  The warpgroups of a block share 256 tokens; each warpgroup and each block has its own
//             rows: 256 rows. Each block loads half of the weights' stage, for both blocks.
//   Rows128   The same, but the blocks share the rows and have their own tokens: 512 tokens.
//   Rows64    Warpgroups and blocks share the rows and have their own tokens: 1024 tokens.
//
// The last two are for few rows, where reading the weights takes the time.
//
// A logit is one sum in one order, by the same instruction in all plans: its bits do not depend on
// the plan or on other rows.
//
// Few rows, measured at 64 x 4096 x 128256: weights that L2 evicts first, 260 us; with the default
// policy, 270 to 310. Tried and dropped: fetching weights into L2 by 256 bytes in place of 128 (2
// to 5 us more, and 27 more where logits are written, because the weights evict them before they
// are used); freeing a stage when the next one is being multiplied, as for many rows (25 us more at
// 128 rows); blocks that each load all states (the same at 64 rows, 10 us more at 128, 25 more at
// one: absent rows cost more than present ones). Many rows: groups of 4 to 16 MB of states in place
// of 24, and L2 hints for either operand, change less than the noise between runs.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/scratch.h"
#include "kernels/types.h"

namespace logitd::cuda::hopper {

constexpr int kGroupThreads = 128;  // threads of a warpgroup
constexpr int kConsumers = 2;       // warpgroups that multiply
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kGroupRows = 64;  // rows of a warpgroup
constexpr int kTile = 256;      // tokens of a warpgroup
constexpr int kStep = 64;       // elements of the hidden size in a stage
constexpr int kLineBytes = kStep * 2;
constexpr int kCluster = 2;
constexpr int kThreadSums = kTile / 2;     // sums of a thread: 2 rows, a quarter of the tokens
constexpr int kRowSums = kThreadSums / 2;  // sums of each of its rows

// How a cluster divides rows and tokens among its blocks and warpgroups. kSpan: tokens that a
// cluster takes one after the other for the same rows.
template <int kRowGroups, bool kSharedTokens, int kSpanTiles, int kRingStages>
struct RowsPlan {
  static constexpr bool kShareTokens = kSharedTokens;  // by the cluster's blocks; else the rows
  static constexpr bool kFewRows = !kShareTokens;
  static constexpr int kRows = kRowGroups * kGroupRows;
  static constexpr int kTokens = kConsumers / kRowGroups * kTile;
  static constexpr int kClusterRows = kShareTokens ? kCluster * kRows : kRows;
  static constexpr int kClusterTokens = kShareTokens ? kTokens : kCluster * kTokens;
  static constexpr int kSpan = kSpanTiles * kTile;
  static constexpr int kTurns = kSpan / kClusterTokens;
  static constexpr int kStages = kRingStages;
  static constexpr int kStateBytes = kRows * kLineBytes;
  static constexpr int kWeightBytes = kTokens * kLineBytes;
  static constexpr int kStageBytes = kStateBytes + kWeightBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // stages are aligned to 1024
  // Lines of one copy: what a block loads for itself, or its half of what it loads for both blocks.
  static constexpr int kStateLines = kShareTokens ? kRows : kRows / kCluster;
  static constexpr int kWeightLines = kShareTokens ? kTokens / kCluster : kTile;
};
using ManyRows = RowsPlan<2, true, 4, 4>;
using Rows128 = RowsPlan<2, false, 2, 4>;
using Rows64 = RowsPlan<1, false, 4, 3>;

// Returns visit.operator()<Plan>() with the plan for so many rows.
template <class Visit>
auto VisitPlan(int64_t rows, const Visit& visit) {
  if (rows <= Rows64::kClusterRows) return visit.template operator()<Rows64>();
  if (rows <= Rows128::kClusterRows) return visit.template operator()<Rows128>();
  return visit.template operator()<ManyRows>();
}

struct ProductParams {
  const int32_t* groups;  // null, or one for every ManyRows::kClusterRows rows; 0: skip these rows
  int32_t rows;
  int32_t vocab;
  int32_t steps;         // along the hidden size
  int32_t row_blocks;    // blocks of a cluster's rows
  int32_t group_blocks;  // row blocks whose states stay in L2 together
  int32_t spans;         // spans of the vocabulary
};

// ---- instructions ------------------------------------------------------------------------------

// Device code here, epilogues included, is called only from the kernel, whose body is only in code
// for sm_90a. It stays out of unnamed namespaces, where nvcc rejects functions that are not called.

__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void Expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the same barrier of the cluster's block `rank`. It orders reads by the tensor cores
// before writes by the copy engine, which needs no fence of the cluster's memory: a fence costs
// hundreds of clocks.
__device__ inline void ArriveAt(uint32_t barrier, int rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 there;\n\t"
      "mapa.shared::cluster.u32 there, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Waits until the phase of this parity has ended.
__device__ inline void WaitFor(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra ended;\n\t"
      "bra again;\n\t"
      "ended:\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The L2 policy of a copy: data that is read once is evicted first.
template <bool kOnce>
__device__ inline uint64_t CachePolicy() {
  uint64_t policy;
  if constexpr (kOnce) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}
__device__ inline void CopyTile(uint32_t to, const CUtensorMap& map, int element, int line,
                                uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier), "l"(policy)
      : "memory");
}
// As CopyTile, to the same place in both blocks of the cluster; arrives at the barriers of both.
__device__ inline void CopyTileToAll(uint32_t to, const CUtensorMap& map, int element, int line,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1))
      : "memory");
}

// The descriptor of a matrix of 128-byte lines, swizzled as the copy engine leaves them, 8 lines
// every 1024 bytes.
__device__ inline uint64_t Descriptor(uint32_t shared) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightLines = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightLines | kUnused | (shared & 0x3ffff) >> 4;
}

// acc += a [64, 16] b [16, 256]; where `add` is 0, acc = that product.
template <class T>
__device__ inline void MultiplyAsync(float (&acc)[kThreadSums], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.b32 p, %130, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.%131.%131 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1, 0, 0;\n\t"
      "}\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]),
        "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]),
        "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),
        "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]),
        "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]),
        "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]),
        "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),
        "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]),
        "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]),
        "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]), "+f"(acc[64]), "+f"(acc[65]),
        "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]),
        "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]),
        "+f"(acc[78]), "+f"(acc[79]), "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]),
        "+f"(acc[84]), "+f"(acc[85]), "+f"(acc[86]), "+f"(acc[87]), "+f"(acc[88]), "+f"(acc[89]),
        "+f"(acc[90]), "+f"(acc[91]), "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95]),
        "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]), "+f"(acc[101]),
        "+f"(acc[102]), "+f"(acc[103]), "+f"(acc[104]), "+f"(acc[105]), "+f"(acc[106]),
        "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]), "+f"(acc[111]),
        "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]), "+f"(acc[116]),
        "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]), "+f"(acc[121]),
        "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]), "+f"(acc[126]),
        "+f"(acc[127])
      : "l"(a), "l"(b), "r"(add), "C"(Traits16Bit<T>::kPtxName));
}
__device__ inline void BeginMultiplying() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void CommitMultiplying() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WaitMultiplied() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler does not move reads or writes of acc across this.
__device__ inline void Pin(float (&acc)[kThreadSums]) {
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
}

// ---- work --------------------------------------------------------------------------------------

// A cluster's item of work: a block of rows, and a span of the vocabulary.
template <class Plan>
struct Item {
  int row;
  int token;
  bool wanted;  // whether any of its rows is wanted; the same in all threads of the cluster

  __device__ Item(const ProductParams& p, int64_t index) {
    const int64_t group_items = static_cast<int64_t>(p.group_blocks) * p.spans;
    const int group = static_cast<int>(index / group_items);
    const int rest = static_cast<int>(index - group * group_items);
    const int blocks = min(p.group_blocks, p.row_blocks - group * p.group_blocks);
    token = rest / blocks * Plan::kSpan;
    row = (group * p.group_blocks + rest % blocks) * Plan::kClusterRows;
    wanted = p.groups == nullptr || p.groups[row / ManyRows::kClusterRows] != 0;
  }
  __device__ int Turns(const ProductParams& p) const {
    return min(Plan::kTurns, (p.vocab - token + Plan::kClusterTokens - 1) / Plan::kClusterTokens);
  }
};

// The i-th logit of the thread's row `half`: its place in acc, and its token in the tile.
__device__ constexpr int SumOf(int half, int i) { return i / 2 * 4 + half * 2 + i % 2; }
__device__ constexpr int TokenOf(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

// The sum over the four threads of a row, the same in each.
__device__ inline float QuadSum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}
// The largest of the four threads' logits, NaN left out; -inf where all are NaN.
template <int half>
__device__ inline float QuadMax(const float (&acc)[kThreadSums]) {
  float max = -kInfinity;
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) max = fmaxf(max, acc[SumOf(half, i)]);
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
  return fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
}

// A ring of stages in shared memory: a stage's states, then its weights.
template <class Plan>
struct Ring {
  uint32_t stages;  // addresses in shared memory
  uint32_t full;    // a barrier a stage: it has been filled
  uint32_t empty;   // a barrier a stage: all warps of the cluster have read it
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t At() const { return stages + stage * Plan::kStageBytes; }
  __device__ void Advance() {
    if (++stage == Plan::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The part of a cluster's items that one of its blocks takes.
template <class Plan>
struct BlockPart {
  int rank;  // of the block in the cluster
  int row;   // its first row, in the item
  int token;

  __device__ explicit BlockPart(int of_rank)
      : rank(of_rank),
        row(Plan::kShareTokens ? of_rank * Plan::kRows : 0),
        token(Plan::kShareTokens ? 0 : of_rank * Plan::kTokens) {}
};

// Calls take(item) for all items of this block's cluster.
template <class Plan, class Take>
__device__ inline void ForEachItem(const ProductParams& p, const Take& take) {
  const int64_t items = static_cast<int64_t>(p.row_blocks) * p.spans;
  for (int64_t index = blockIdx.x / kCluster; index < items; index += gridDim.x / kCluster) {
    const Item<Plan> item(p, index);
    if (item.wanted) take(item);
  }
}

// Fills stages, by one thread.
template <class Plan>
__device__ inline void LoadStages(const CUtensorMap& states, const CUtensorMap& weights,
                                  const ProductParams& p, const BlockPart<Plan>& part,
                                  Ring<Plan> ring) {
  const uint64_t keep = CachePolicy</*kOnce=*/false>();
  const uint64_t once = CachePolicy</*kOnce=*/true>();
  ForEachItem<Plan>(p, [&](const Item<Plan>& item) {
    const int row = item.row + part.row;
    const int turns = item.Turns(p);
    for (int turn = 0; turn < turns; ++turn) {
      const int token = item.token + turn * Plan::kClusterTokens + part.token;
      for (int step = 0; step < p.steps; ++step) {
        WaitFor(ring.empty + 8 * ring.stage, ring.parity ^ 1);
        const uint32_t to = ring.At();
        const uint32_t to_weights = to + Plan::kStateBytes;
        const uint32_t barrier = ring.full + 8 * ring.stage;
        const int element = step * kStep;
        Expect(barrier, Plan::kStageBytes);
        if constexpr (Plan::kShareTokens) {
          CopyTile(to, states, element, row, barrier, keep);
          constexpr int kLines = Plan::kWeightLines;
          CopyTileToAll(to_weights + part.rank * kLines * kLineBytes, weights, element,
                        token + part.rank * kLines, barrier);
        } else {
          constexpr int kLines = Plan::kStateLines;
          CopyTileToAll(to + part.rank * kLines * kLineBytes, states, element,
                        row + part.rank * kLines, barrier);
#pragma unroll
          for (int line = 0; line < Plan::kTokens; line += kTile)
            CopyTile(to_weights + line * kLineBytes, weights, element, token + line, barrier, once);
        }
        ring.Advance();
      }
    }
  });
}

// Multiplies a tile: acc becomes the sums over the hidden size.
template <class T, class Plan>
__device__ inline void MultiplyTile(float (&acc)[kThreadSums], int steps, int group_row,
                                    int group_token, int lane, Ring<Plan>& ring) {
  const auto release = [&](int stage) {
    if (lane < kCluster) ArriveAt(ring.empty + 8 * stage, lane);
  };
  int before = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitFor(ring.full + 8 * ring.stage, ring.parity);
    const uint32_t from = ring.At();
    const uint64_t a = Descriptor(from + group_row * kLineBytes);
    const uint64_t b = Descriptor(from + Plan::kStateBytes + group_token * kLineBytes);
    Pin(acc);
    BeginMultiplying();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      MultiplyAsync<T>(acc, a + 2 * k, b + 2 * k, step > 0 || k > 0);
    CommitMultiplying();
    Pin(acc);
    if constexpr (Plan::kFewRows) {
      // Multiplying takes less time than loading a stage from memory: free the stage at once.
      WaitMultiplied<0>();
      release(ring.stage);
    } else if (step > 0) {
      WaitMultiplied<1>();
      release(before);
    }
    before = ring.stage;
    ring.Advance();
  }
  if constexpr (!Plan::kFewRows) {
    WaitMultiplied<0>();
    release(before);
  }
  Pin(acc);
}

// Multiplies the stages that LoadStages fills, by warpgroup `consumer` of those that multiply.
template <class T, class Plan, class Epilogue>
__device__ inline void MultiplyStages(const ProductParams& p,
                                      const typename Epilogue::Params& epilogue_params,
                                      const BlockPart<Plan>& part, int consumer, int lane,
                                      Ring<Plan> ring) {
  float acc[kThreadSums];
  const int group_row = Plan::kRows > kGroupRows ? consumer * kGroupRows : 0;
  const int group_token = Plan::kTokens > kTile ? consumer * kTile : 0;
  const int thread_row =
      part.row + group_row + static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
  ForEachItem<Plan>(p, [&](const Item<Plan>& item) {
    Epilogue epilogue(epilogue_params, p, static_cast<int64_t>(item.row) + thread_row);
    const int turns = item.Turns(p);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      MultiplyTile<T>(acc, p.steps, group_row, group_token, lane, ring);
      const int first = item.token + turn * Plan::kClusterTokens + part.token + group_token;
      if (first < p.vocab) epilogue.Take(acc, first, lane);
    }
    if constexpr (requires { epilogue.Leave(lane); }) epilogue.Leave(lane);
  });
}

// ---- kernel ------------------------------------------------------------------------------------

// Every thread that multiplies makes an Epilogue for each item, from its Params, p and the first of
// the thread's two rows, which are 8 apart. Take(acc, first token, lane) gets the sums of a tile
// and may change them; it is not called for tiles after the vocabulary. Leave(lane), where there is
// one, ends the item.
template <class T, class Plan, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap states,
                  const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ ProductParams p,
                  const __grid_constant__ typename Epilogue::Params epilogue_params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * Plan::kStages];
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  const Ring<Plan> ring{
      .stages = (static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) + 1023) / 1024 * 1024,
      .full = full,
      .empty = full + Plan::kStages * 8};
  const BlockPart<Plan> part(blockIdx.x % kCluster);
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Plan::kStages; ++stage) {
      InitBarrier(ring.full + 8 * stage, 1);
      // Each warp that multiplies, of both blocks, arrives once when it has read the stage.
      InitBarrier(ring.empty + 8 * stage, kCluster * kConsumers * (kGroupThreads / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  ClusterArrive();
  ClusterWait();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) LoadStages(states, weights, p, part, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    MultiplyStages<T, Plan, Epilogue>(p, epilogue_params, part, group - 1, lane, ring);
  }
  // Neither block ends while the other may still write to its memory.
  ClusterArrive();
  ClusterWait();
#endif
}

// ---- launch ------------------------------------------------------------------------------------

// The driver's encoder of tensor maps; null where there is none. The runtime looks it up, so that
// nothing here links the driver.
inline decltype(&cuTensorMapEncodeTiled) Encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      function = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

inline CUtensorMapDataType MapTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
  __builtin_unreachable();
}

// A map of boxes of `lines` rows by kStep elements; elements outside the matrix read as 0. once: L2
// fetches only what is asked for; else the next step's elements too.
inline bool MakeMap(const TensorView& matrix, int lines, bool once, CUtensorMap& map) {
  const auto encode = Encoder();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(matrix.cols),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.row_stride) * SizeOf(matrix.dtype)};
  const cuuint32_t box[2] = {kStep, static_cast<cuuint32_t>(lines)};
  const cuuint32_t element_strides[2] = {1, 1};
  return encode(&map, MapTypeOf(matrix.dtype), 2, const_cast<void*>(matrix.data), dims, strides,
                box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether the device has the memory, the driver makes tensor maps, and the loaded code is that for
// sm_90a: only there does the kernel have a body, and with it barriers in shared memory.
template <auto* kKernel>
bool CanRun(const Scratch& scratch) {
  static_assert(ManyRows::kSharedBytes <= Rows64::kSharedBytes &&
                Rows128::kSharedBytes <= Rows64::kSharedBytes);
  if (!scratch.clusters || scratch.block_shared_bytes < Rows64::kSharedBytes ||
      Encoder() == nullptr) {
    return false;
  }
  // Asked once for each device, because devices may have loaded different code.
  enum Answer : int { kNotAsked, kNoBody, kHasBody };
  constexpr int kDevices = 64;
  static std::array<std::atomic<int>, kDevices> answers = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) {
    cudaGetLastError();
    return false;
  }
  std::atomic<int>& answer = answers[static_cast<size_t>(device)];
  if (answer.load(std::memory_order_relaxed) == kNotAsked) {
    cudaFuncAttributes loaded;
    const bool has_body =
        cudaFuncGetAttributes(&loaded, kKernel) == cudaSuccess && loaded.sharedSizeBytes > 0;
    cudaGetLastError();
    answer.store(has_body ? kHasBody : kNoBody, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kHasBody;
}

// Multiplies `hidden` [rows, size], after the head's norm, by `weight` [vocab, size]: 16-bit, of
// one dtype, 16-byte aligned rows. groups: as in ProductParams.
template <class T, class Plan, class Epilogue>
cudaError_t LaunchProduct(const TensorView& hidden, const TensorView& weight, const int32_t* groups,
                          const typename Epilogue::Params& epilogue, const Scratch& scratch,
                          cudaStream_t stream) {
  CUtensorMap states, weights;
  if (!MakeMap(hidden, Plan::kStateLines, /*once=*/false, states) ||
      !MakeMap(weight, Plan::kWeightLines, /*once=*/Plan::kFewRows, weights)) {
    return cudaErrorNotSupported;
  }
  constexpr int64_t kGroupBytes = int64_t{24} << 20;  // hidden states that stay in L2
  const int64_t row_blocks = CeilDiv(hidden.rows, Plan::kClusterRows);
  const int64_t spans = CeilDiv(weight.rows, Plan::kSpan);
  const int64_t group_blocks =
      std::clamp<int64_t>(kGroupBytes / (Plan::kClusterRows * hidden.cols * 2), 1, row_blocks);
  const ProductParams p{.groups = groups,
                        .rows = static_cast<int32_t>(hidden.rows),
                        .vocab = static_cast<int32_t>(weight.rows),
                        .steps = static_cast<int32_t>(CeilDiv(hidden.cols, kStep)),
                        .row_blocks = static_cast<int32_t>(row_blocks),
                        .group_blocks = static_cast<int32_t>(group_blocks),
                        .spans = static_cast<int32_t>(spans)};
  const int64_t clusters =
      std::min<int64_t>(scratch.multiprocessors / kCluster, row_blocks * spans);
  return LaunchKernel(&ProductKernel<T, Plan, Epilogue>,
                      {.grid = GridFor(kCluster * clusters),
                       .threads = kThreads,
                       .cluster = kCluster,
                       .shared_bytes = Plan::kSharedBytes},
                      stream, states, weights, p, epilogue);
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_
