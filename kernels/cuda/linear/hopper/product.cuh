// The product of hidden states and a head's weights on Hopper, by wgmma and TMA. What becomes of a
// tile of logits, which lies in registers in fp32, is an epilogue's to say.
//
// A block is three warpgroups. Of the first, one thread asks the copy engine (TMA) for stages of
// both operands, 64 elements of the hidden size at a time, as many ahead as shared memory holds.
// The other two multiply, 64 rows by a tile of 256 tokens each, the whole tile in their registers.
// Blocks come in clusters of two. By the number of rows (RowsPlan):
//
//   many   the warpgroups of a block share 256 tokens and have rows of their own, as have the
//          blocks: 256 rows. Each block brings half of the weights' stage, to both.
//   128    the same, but blocks share the rows and have tokens of their own: 512 tokens.
//   64     warpgroups and blocks share the rows and have tokens of their own: 1024 tokens.
//
// The last two are for few rows, which the weights pass by at the rate of memory.
//
// A logit is one sum in one order, by the same instruction in all plans: its bits do not depend on
// the plan or the rows beside it.
//
// Few rows, measured at 64 x 4096 x 128256: weights that L2 lets go of first, 260 us; as any, 270
// to 310. Fetched into L2 by 256 bytes in place of 128: 2 to 5 us more, and 27 where logits are
// written, which drive them out before they are used. A stage freed when the next one is being
// multiplied, as for many rows: 25 us more at 128 rows. Blocks that bring all states themselves:
// the same at 64 rows, 10 us more at 128, and 25 at one: rows that are not there cost more than
// those that are. Many rows: groups of 4 to 16 MB of states in place of 24, and hints to L2 for
// either operand, change less than runs do among themselves.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/types.h"

namespace logitd::cuda::hopper {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2;       // warpgroups that multiply
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kGroupRows = 64;  // of a warpgroup
constexpr int kTile = 256;      // tokens of a warpgroup
constexpr int kStep = 64;       // elements of the hidden size in a stage
constexpr int kLineBytes = kStep * 2;
constexpr int kCluster = 2;
constexpr int kSums = kTile / 2;     // fp32 of a thread: 2 rows, a quarter of the tokens
constexpr int kRowSums = kSums / 2;  // of each of them

// How a cluster's rows and tokens are dealt out. kSpan: tokens that a cluster takes in a row for
// the same rows.
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
  // Lines of one copy, of what a block brings for itself alone or for both.
  static constexpr int kStateLines = kShareTokens ? kRows : kRows / kCluster;
  static constexpr int kWeightLines = kShareTokens ? kTokens / kCluster : kTile;
};
using ManyRows = RowsPlan<2, true, 4, 4>;
using Rows128 = RowsPlan<2, false, 2, 4>;
using Rows64 = RowsPlan<1, false, 4, 3>;

struct ProductParams {
  const int32_t* groups;  // null, or for every ManyRows::kClusterRows rows 0: skip them
  int32_t rows;
  int32_t vocab;
  int32_t steps;         // along the hidden size
  int32_t row_blocks;    // of a cluster's rows
  int32_t group_blocks;  // of them that stay in L2
  int32_t spans;         // of the vocabulary
};

// ---- instructions ------------------------------------------------------------------------------

// These and the kernel's body exist in code for sm_90a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void Expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the same barrier of the cluster's block `rank`. What it orders is reads by the tensor
// cores before writes by the copy engine: no fence of the cluster's memory, which costs hundreds of
// clocks.
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
// Until the phase of this parity has ended.
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

// The copies ask L2 to keep what is read again, and to let go of what is not.
template <bool kOnce>
__device__ inline uint64_t KeepPolicy() {
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
// To the same place of both blocks of the cluster, and to the barriers of both.
__device__ inline void CopyTileToAll(uint32_t to, const CUtensorMap& map, int element, int line,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1))
      : "memory");
}

// Of lines of 128 bytes, swizzled as the copy engine leaves them, 8 lines every 1024 bytes.
__device__ inline uint64_t Descriptor(uint32_t shared) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightLines = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightLines | kUnused | (shared & 0x3ffff) >> 4;
}

// acc (+)= a [64, 16] b [16, 256]; `add` 0: in place of what acc holds.
template <class T>
__device__ inline void MultiplyAsync(float (&acc)[kSums], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
        "%111, "
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
          "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]),
          "+f"(acc[101]), "+f"(acc[102]), "+f"(acc[103]), "+f"(acc[104]), "+f"(acc[105]),
          "+f"(acc[106]), "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]),
          "+f"(acc[111]), "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]),
          "+f"(acc[116]), "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]),
          "+f"(acc[121]), "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]),
          "+f"(acc[126]), "+f"(acc[127])
        : "l"(a), "l"(b), "r"(add));
  } else {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
        "%111, "
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
          "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]),
          "+f"(acc[101]), "+f"(acc[102]), "+f"(acc[103]), "+f"(acc[104]), "+f"(acc[105]),
          "+f"(acc[106]), "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]),
          "+f"(acc[111]), "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]),
          "+f"(acc[116]), "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]),
          "+f"(acc[121]), "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]),
          "+f"(acc[126]), "+f"(acc[127])
        : "l"(a), "l"(b), "r"(add));
  }
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
// The compiler must not move what touches acc across this.
__device__ inline void Pin(float (&acc)[kSums]) {
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
}

// ---- work --------------------------------------------------------------------------------------

// A cluster's item of work: a block of rows, and a span of the vocabulary.
template <class Plan>
struct Item {
  int row;
  int token;
  bool wanted;  // whether there are rows to take; the same in all threads of the cluster

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

// The thread's logits of row `half` of its two: place in the tile of the i-th.
__device__ constexpr int SumOf(int half, int i) { return i / 2 * 4 + half * 2 + i % 2; }
__device__ constexpr int TokenOf(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

// Over the four threads of a row, the same in each.
__device__ inline float QuadSum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}
// The largest of their logits that is a number; -inf where none is.
template <int half>
__device__ inline float QuadMax(const float (&acc)[kSums]) {
  float max = -kInfinity;
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) max = fmaxf(max, acc[SumOf(half, i)]);
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
  return fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// ---- kernel ------------------------------------------------------------------------------------

// Epilogue is made once for an item, by every thread that multiplies, of (its Params, p, the first
// of the thread's two rows, which are 8 apart, lane). Take(acc, first token, lane) gets the tile's
// sums, and may change them; it is not called for tiles behind the vocabulary. Leave(lane) ends the
// item.
template <class T, class Plan, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap states,
                  const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ ProductParams p,
                  const __grid_constant__ typename Epilogue::Params epilogue_params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * Plan::kStages];
  const uint32_t ring =
      (static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) + 1023) / 1024 * 1024;
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  const uint32_t empty = full + Plan::kStages * 8;
  const int rank = blockIdx.x % kCluster;
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Plan::kStages; ++stage) {
      InitBarrier(full + 8 * stage, 1);
      // A warp of either block says once that it has read the stage.
      InitBarrier(empty + 8 * stage, kCluster * kConsumers * (kGroupThreads / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  ClusterArrive();
  ClusterWait();

  const int64_t items = static_cast<int64_t>(p.row_blocks) * p.spans;
  const int64_t first_item = blockIdx.x / kCluster;
  const int64_t item_step = gridDim.x / kCluster;
  const int own_row = Plan::kShareTokens ? rank * Plan::kRows : 0;
  const int own_token = Plan::kShareTokens ? 0 : rank * Plan::kTokens;
  int stage = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++stage == Plan::kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      const uint64_t keep = KeepPolicy<false>();
      const uint64_t once = KeepPolicy<true>();
      for (int64_t index = first_item; index < items; index += item_step) {
        const Item<Plan> item(p, index);
        if (!item.wanted) continue;
        const int row = item.row + own_row;
        const int turns = item.Turns(p);
        for (int turn = 0; turn < turns; ++turn) {
          const int token = item.token + turn * Plan::kClusterTokens + own_token;
          for (int step = 0; step < p.steps; ++step) {
            WaitFor(empty + 8 * stage, parity ^ 1);
            const uint32_t to = ring + stage * Plan::kStageBytes;
            const uint32_t to_weights = to + Plan::kStateBytes;
            const uint32_t barrier = full + 8 * stage;
            const int element = step * kStep;
            Expect(barrier, Plan::kStageBytes);
            if constexpr (Plan::kShareTokens) {
              CopyTile(to, states, element, row, barrier, keep);
              constexpr int kLines = Plan::kWeightLines;
              CopyTileToAll(to_weights + rank * kLines * kLineBytes, weights, element,
                            token + rank * kLines, barrier);
            } else {
              constexpr int kLines = Plan::kStateLines;
              CopyTileToAll(to + rank * kLines * kLineBytes, states, element, row + rank * kLines,
                            barrier);
#pragma unroll
              for (int line = 0; line < Plan::kTokens; line += kTile)
                CopyTile(to_weights + line * kLineBytes, weights, element, token + line, barrier,
                         once);
            }
            advance();
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float acc[kSums];
    const int consumer = group - 1;
    const int group_row = Plan::kRows > kGroupRows ? consumer * kGroupRows : 0;
    const int group_token = Plan::kTokens > kTile ? consumer * kTile : 0;
    const int thread_row =
        own_row + group_row + static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
    const auto release = [&](int of) {
      if (lane < kCluster) ArriveAt(empty + 8 * of, lane);
    };
    for (int64_t index = first_item; index < items; index += item_step) {
      const Item<Plan> item(p, index);
      if (!item.wanted) continue;
      Epilogue epilogue(epilogue_params, p, static_cast<int64_t>(item.row) + thread_row, lane);
      const int turns = item.Turns(p);
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < p.steps; ++step) {
          WaitFor(full + 8 * stage, parity);
          const uint32_t from = ring + stage * Plan::kStageBytes;
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
            // Multiplying is short beside a stage's way from memory: free the stage at once.
            WaitMultiplied<0>();
            release(stage);
          } else if (step > 0) {
            WaitMultiplied<1>();
            release(before);
          }
          before = stage;
          advance();
        }
        if constexpr (!Plan::kFewRows) {
          WaitMultiplied<0>();
          release(before);
        }
        Pin(acc);
        const int first = item.token + turn * Plan::kClusterTokens + own_token + group_token;
        if (first < p.vocab) epilogue.Take(acc, first, lane);
      }
      epilogue.Leave(lane);
    }
  }
  // Neither block ends while the other may still write to its memory.
  ClusterArrive();
  ClusterWait();
#endif
}

// ---- launch ------------------------------------------------------------------------------------

// The driver's encoder of tensor maps; null where there is none. By the runtime, so that nothing
// here links the driver.
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

// A map of boxes of `lines` rows by kStep elements; what lies outside the matrix reads as 0. once:
// L2 gets no more than is asked for; else the next step's elements too.
inline bool MakeMap(const TensorView& matrix, int lines, bool once, CUtensorMap& map) {
  const auto encode = Encoder();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(matrix.cols),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.row_stride) * 2};
  const cuuint32_t box[2] = {kStep, static_cast<cuuint32_t>(lines)};
  const cuuint32_t element_strides[2] = {1, 1};
  return encode(&map,
                matrix.dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2, const_cast<void*>(matrix.data), dims, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether the device has the memory, the driver makes tensor maps, and the loaded code has the
// kernel's body: only then has it barriers.
template <auto* kKernel>
bool CanRun(const Scratch& scratch) {
  static_assert(ManyRows::kSharedBytes <= Rows64::kSharedBytes &&
                Rows128::kSharedBytes <= Rows64::kSharedBytes);
  if (!scratch.clusters || scratch.block_shared_bytes < Rows64::kSharedBytes ||
      Encoder() == nullptr) {
    return false;
  }
  static const bool has_body = [] {
    cudaFuncAttributes loaded;
    if (cudaFuncGetAttributes(&loaded, kKernel) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    return loaded.sharedSizeBytes > 0;
  }();
  return has_body;
}

// Multiplies `hidden` [rows, size], whose norm has been taken, by `weight` [vocab, size]: 16-bit,
// of one dtype, 16-byte aligned rows. groups: as ProductParams's.
template <class T, class Plan, class Epilogue>
cudaError_t LaunchProduct(const TensorView& hidden, const TensorView& weight, const int32_t* groups,
                          const typename Epilogue::Params& epilogue, const Scratch& scratch,
                          cudaStream_t stream) {
  CUtensorMap states, weights;
  if (!MakeMap(hidden, Plan::kStateLines, /*once=*/false, states) ||
      !MakeMap(weight, Plan::kWeightLines, /*once=*/Plan::kFewRows, weights)) {
    return cudaErrorNotSupported;
  }
  const auto kernel = &ProductKernel<T, Plan, Epilogue>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t row_blocks = (hidden.rows + Plan::kClusterRows - 1) / Plan::kClusterRows;
  const int64_t spans = (weight.rows + Plan::kSpan - 1) / Plan::kSpan;
  constexpr int64_t kGroupBytes = int64_t{24} << 20;  // of hidden states, to stay in L2
  const ProductParams p{.groups = groups,
                        .rows = static_cast<int32_t>(hidden.rows),
                        .vocab = static_cast<int32_t>(weight.rows),
                        .steps = static_cast<int32_t>((hidden.cols + kStep - 1) / kStep),
                        .row_blocks = static_cast<int32_t>(row_blocks),
                        .group_blocks = static_cast<int32_t>(std::clamp<int64_t>(
                            kGroupBytes / (Plan::kClusterRows * hidden.cols * 2), 1, row_blocks)),
                        .spans = static_cast<int32_t>(spans)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(
      kCluster * std::min<int64_t>(scratch.multiprocessors / kCluster, row_blocks * spans)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Plan::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kernel, states, weights, p, epilogue);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_
