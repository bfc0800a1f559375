// linear_cross_entropy on Hopper: the product by wgmma, its epilogue the sums of the losses. No
// logit leaves the chip.
//
// A block has 128 rows and goes along the vocabulary in tiles of 256 tokens, 64 elements of the
// hidden size at a time: one warp asks the copy engine (TMA) for stages of both operands, 4 ahead;
// two warpgroups multiply, 64 rows each, the whole tile in their registers. Blocks come in clusters
// of two, of neighbouring rows and the same tokens: each brings half of the weights' stage, to
// both. When a tile is done, a thread takes the maximum and the sum of exponentials of its 64
// logits of each of its two rows, in fp32, and merges them with those before. After a cell of 1024
// tokens the four threads of a row meet, and the cell's sums go to scratch: 12 bytes for 1024
// logits. A last kernel, a block a row, merges the cells in their order and writes the losses.
//
// Cells are of the vocabulary alone and each is summed in one order, so a row's bits are its own,
// whatever the rows beside it and the grid. Work is dealt out by cells, for groups of rows that
// stay in L2, so that the weights come from HBM once a group.
//
// For 16-bit heads without bias and softcap (HopperLossServes), and rows that ask for neither rank,
// entropy nor tops; linear.cu sends rows that ask for more to the other kernels. The logits of
// extras are products of their own, a warp each; an extra that is the target has the logit of the
// loss, so that both have the same bits.
//
// Cost: the product, 2 * rows * hidden * vocab operations; epilogues about 2500 clocks of 65536 a
// tile at hidden 4096. Memory beside inputs and outputs: rows * vocab / 1024 * 12 bytes, of at most
// 16384 rows at a time. Limited by: the tensor cores, at the clock their power allows. Not yet
// measured.
#include "kernels/cuda/linear_loss_hopper.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/cell.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/loss_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2;       // warpgroups that multiply
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kBlockRows = 64 * kConsumers;
constexpr int kTile = 256;  // tokens
constexpr int kStep = 64;   // elements of the hidden size in a stage
constexpr int kStages = 4;
constexpr int kCluster = 2;
constexpr int kStateBytes = kBlockRows * kStep * 2;
constexpr int kWeightBytes = kTile * kStep * 2;
constexpr int kStageBytes = kStateBytes + kWeightBytes;
constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // stages are aligned to 1024
constexpr int kRowsAtOnce = 16384;
static_assert(kCluster * kBlockRows == kLossGroupRows);

// A cell's sums of a row.
struct CellPart {
  Stats stats;
  float total;  // times kTotalUnit
};

struct Params {
  const CrossEntropyRow* asks;  // [rows]
  CellPart* parts;              // [rows, cells]
  float* target_logits;         // [rows]
  const int32_t* groups;        // [pairs], 0: skipped; null: none is
  int32_t rows;
  int32_t vocab;
  int32_t cells;
  int32_t steps;        // of a tile, along the hidden size
  int32_t pairs;        // of blocks of rows
  int32_t group_pairs;  // that stay in L2
  float scale;
};

// ---- instructions ------------------------------------------------------------------------------

// These and the kernel's body exist in code for sm_90a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kTilesOfCell = kCell / kTile;
constexpr int kSums = kTile / 2;  // fp32 of a thread: 2 rows, a quarter of the tokens

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
__device__ inline void CopyTile(uint32_t to, const CUtensorMap& map, int element, int line,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier)
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

// A cluster's turn: a pair of blocks of rows, and a cell.
struct Item {
  int pair;
  int cell;

  __device__ Item(const Params& p, int64_t index) {
    const int64_t group_items = static_cast<int64_t>(p.group_pairs) * p.cells;
    const int group = static_cast<int>(index / group_items);
    const int rest = static_cast<int>(index - group * group_items);
    const int pairs = min(p.group_pairs, p.pairs - group * p.group_pairs);
    cell = rest / pairs;
    pair = group * p.group_pairs + rest % pairs;
  }
  // Whether the pair has rows to take. The same in all threads of the cluster.
  __device__ bool IsWanted(const Params& p) const {
    return p.groups == nullptr || p.groups[pair] != 0;
  }
  __device__ int Tiles(const Params& p) const {
    return min(kTilesOfCell, (p.vocab - cell * kCell + kTile - 1) / kTile);
  }
};

// ---- epilogue ----------------------------------------------------------------------------------

__device__ inline Stats Merge(Stats a, Stats b, float c) {
  const float max = fmaxf(a.max, b.max);
  const Exponential exponential(max, c);
  return {max, fmaf(a.sum, exponential.Factor(a.max), __fmul_rn(b.sum, exponential.Factor(b.max)))};
}

// The thread's logits of row `half` of its two: place in the tile of the i-th.
__device__ constexpr int SumOf(int half, int i) { return i / 2 * 4 + half * 2 + i % 2; }
__device__ constexpr int TokenOf(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
constexpr int kRowSums = kSums / 2;

// Statistics of them, relative to their own maximum.
template <int half>
__device__ inline Stats StatsOf(const float (&acc)[kSums], float c) {
  float max = acc[SumOf(half, 0)];
#pragma unroll
  for (int i = 1; i < kRowSums; ++i) max = fmaxf(max, acc[SumOf(half, i)]);
  max = fmaxf(max, -kInfinity);
  const Exponential exponential(max == -kInfinity ? 0.0f : max, c);
  float sums[4] = {};
  if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) sums[i % 4] += exponential.Plain(acc[SumOf(half, i)]);
  } else {
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) sums[i % 4] += exponential(acc[SumOf(half, i)]);
  }
  return {max, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// One of a thread's two rows, through a cell.
struct RowCell {
  int64_t r;
  bool here;   // the row exists
  int target;  // -1: none
  bool smooth;
  float c;
  Stats stats;
  float total;

  __device__ RowCell(const Params& p, int64_t row)
      : r(row),
        here(row < p.rows),
        target(-1),
        smooth(false),
        c(kLog2E),
        stats{-kInfinity, 0.0f},
        total(0.0f) {
    if (!here || p.asks[r].active == 0) return;
    target = p.asks[r].target;
    smooth = p.asks[r].label_smoothing > 0;
    c = PowerOf(Cap::Rate(0.0f, p.asks[r].temperature));
  }

  // Takes the thread's logits of a tile at `first`; those from `vocab` on are -inf.
  template <int half>
  __device__ void Take(const Params& p, const float (&acc)[kSums], int first, int lane) {
    const int place = target - first;
    if (__any_sync(kFullWarp, place >= 0 && place < kTile)) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        if (TokenOf(lane, i) == place) p.target_logits[r] = acc[SumOf(half, i)];
      }
    }
    if (__any_sync(kFullWarp, smooth)) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        const bool is_token = first + TokenOf(lane, i) < p.vocab;
        total = fmaf(is_token ? acc[SumOf(half, i)] : 0.0f, kTotalUnit, total);
      }
    }
    stats = Merge(stats, StatsOf<half>(acc, c), c);
  }

  // The row's four threads leave the cell's sums.
  __device__ void Leave(const Params& p, int cell, int lane) {
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      const Stats other = {__shfl_xor_sync(kFullWarp, stats.max, offset),
                           __shfl_xor_sync(kFullWarp, stats.sum, offset)};
      stats = Merge(stats, other, c);
      total += __shfl_xor_sync(kFullWarp, total, offset);
    }
    if (lane % 4 == 0 && here) p.parts[r * p.cells + cell] = {stats, total};
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// ---- kernels -----------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap states,
                  const __grid_constant__ CUtensorMap weights, const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  const uint32_t ring =
      (static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) + 1023) / 1024 * 1024;
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  const uint32_t empty = full + kStages * 8;
  const int rank = blockIdx.x % kCluster;
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(full + 8 * stage, 1);
      // A warp of either block says once that it has read the stage.
      InitBarrier(empty + 8 * stage, kCluster * kConsumers * (kGroupThreads / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  ClusterArrive();
  ClusterWait();

  const int64_t items = static_cast<int64_t>(p.pairs) * p.cells;
  const int64_t first_item = blockIdx.x / kCluster;
  const int64_t item_step = gridDim.x / kCluster;
  int stage = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int64_t index = first_item; index < items; index += item_step) {
        const Item item(p, index);
        if (!item.IsWanted(p)) continue;
        const int row = (item.pair * kCluster + rank) * kBlockRows;
        const int tiles = item.Tiles(p);
        for (int tile = 0; tile < tiles; ++tile) {
          const int token = item.cell * kCell + tile * kTile + rank * (kTile / kCluster);
          for (int step = 0; step < p.steps; ++step) {
            WaitFor(empty + 8 * stage, parity ^ 1);
            const uint32_t to = ring + stage * kStageBytes;
            Expect(full + 8 * stage, kStageBytes);
            CopyTile(to, states, step * kStep, row, full + 8 * stage);
            CopyTileToAll(to + kStateBytes + rank * (kWeightBytes / kCluster), weights,
                          step * kStep, token, full + 8 * stage);
            advance();
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float acc[kSums];
    const int consumer = group - 1;
    const int row_in_pair =
        rank * kBlockRows + consumer * 64 + threadIdx.x % kGroupThreads / 32 * 16 + lane / 4;
    const auto release = [&](int of) {
      if (lane < kCluster) ArriveAt(empty + 8 * of, lane);
    };
    for (int64_t index = first_item; index < items; index += item_step) {
      const Item item(p, index);
      if (!item.IsWanted(p)) continue;
      const int64_t row = static_cast<int64_t>(item.pair) * kCluster * kBlockRows + row_in_pair;
      RowCell upper(p, row);
      RowCell lower(p, row + 8);
      const int tiles = item.Tiles(p);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < p.steps; ++step) {
          WaitFor(full + 8 * stage, parity);
          const uint32_t from = ring + stage * kStageBytes;
          const uint64_t a = Descriptor(from + consumer * 64 * kStep * 2);
          const uint64_t b = Descriptor(from + kStateBytes);
          Pin(acc);
          BeginMultiplying();
#pragma unroll
          for (int k = 0; k < kStep / 16; ++k)
            MultiplyAsync<T>(acc, a + 2 * k, b + 2 * k, step > 0 || k > 0);
          CommitMultiplying();
          Pin(acc);
          if (step > 0) {
            WaitMultiplied<1>();
            release(before);
          }
          before = stage;
          advance();
        }
        WaitMultiplied<0>();
        Pin(acc);
        release(before);
        const int first = item.cell * kCell + tile * kTile;
#pragma unroll
        for (float& x : acc) x *= p.scale;
        if (first + kTile > p.vocab) {
#pragma unroll
          for (int i = 0; i < kRowSums; ++i) {
            if (first + TokenOf(lane, i) >= p.vocab)
              acc[SumOf(0, i)] = acc[SumOf(1, i)] = -kInfinity;
          }
        }
        upper.Take<0>(p, acc, first, lane);
        lower.Take<1>(p, acc, first, lane);
      }
      upper.Leave(p, item.cell, lane);
      lower.Leave(p, item.cell, lane);
    }
  }
  // Neither block ends while the other may still write to its memory.
  ClusterArrive();
  ClusterWait();
#endif
}

// The logit of one token, but for the order of its sum, by one warp.
template <class T>
__device__ inline float Dot(const T* state, const T* weight, int size, int lane) {
  float sum = 0.0f;
  for (int i = lane; i < size; i += 32) sum = fmaf(ToFloat(weight[i]), ToFloat(state[i]), sum);
  return WarpSum(sum);
}

// The lowest token of the cell at `first` whose logit is NaN, by one warp; `first` where sums in
// this order make none.
template <class T>
__device__ __noinline__ int FindNanLogit(const T* state, const T* weights, int64_t weights_stride,
                                         int size, int first, int vocab, int lane) {
  for (int token = first; token < min(first + kCell, vocab); ++token) {
    if (isnan(Dot(state, weights + token * weights_stride, size, lane))) return token;
  }
  return first;
}

constexpr int kFinishThreads = 128;

// Merges a row's cells and writes what it is asked beside extras, by one warp.
template <class T>
__device__ inline Outcome ConcludeRow(const CrossEntropyArgs& args, int64_t r,
                                      const CellPart* parts, int cells, float target_logit,
                                      const T* state, const T* weights, int64_t weights_stride,
                                      int size, int lane) {
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const float c = PowerOf(Cap::Rate(0.0f, args.rows[r].temperature));
  const Stats stats = MergeCells(cells, c, lane, [&](int i) { return parts[i].stats; });
  double total = 0.0;
  for (int i = lane; i < cells; i += 32) total += parts[i].total;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
  int nan = vocab;
  if (isnan(stats.sum)) {
    int cell = 0;
    while (cell + 1 < cells && !isnan(parts[cell].stats.sum)) ++cell;
    nan = FindNanLogit(state, weights, weights_stride, size, cell * kCell, vocab, lane);
  }
  return Conclude(args, r, {stats, 0.0f, total, 0}, target_logit, nan, lane);
}

// A block a row: its first warp the losses, all of them the extras.
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    FinishKernel(const __grid_constant__ CrossEntropyArgs args, const CellPart* parts,
                 const float* target_logits, int cells, const T* states, int64_t states_stride,
                 const T* weights, int64_t weights_stride, int size, float scale) {
  constexpr int kWarps = kFinishThreads / 32;
  __shared__ Outcome told;  // what the first warp tells the others
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t r = blockIdx.x;
  if (args.rows[r].active == 0) return;
  const CrossEntropyRow& ask = args.rows[r];
  const float target_logit = ask.target < 0 ? 0.0f : target_logits[r];
  if (warp == 0) {
    const Outcome outcome =
        ConcludeRow(args, r, parts + r * cells, cells, target_logit, states + r * states_stride,
                    weights, weights_stride, size, lane);
    if (lane == 0) told = outcome;
  }
  if (ask.extra_count == 0) return;
  __syncthreads();
  for (int i = warp; i < ask.extra_count; i += kWarps) {
    const int64_t token = args.extra_ids[ask.first_extra + i];
    const float x = token == ask.target ? target_logit
                                        : scale * Dot(states + r * states_stride,
                                                      weights + token * weights_stride, size, lane);
    if (lane == 0)
      args.answers.extra_logprobs[ask.first_extra_entry + i] = static_cast<float>(told.Logprob(x));
  }
}

// ---- launch ------------------------------------------------------------------------------------

// The driver's encoder of tensor maps; null where there is none. By the runtime, so that nothing
// here links the driver.
decltype(&cuTensorMapEncodeTiled) Encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// A map of boxes of `lines` rows by kStep elements; what lies outside the matrix reads as 0.
bool MakeMap(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t stride, int lines,
             CUtensorMap& map) {
  static const auto encode = Encoder();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kStep, static_cast<cuuint32_t>(lines)};
  const cuuint32_t element_strides[2] = {1, 1};
  return encode(&map,
                dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2, const_cast<void*>(data), dims, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether the code that was loaded has the kernel's body: only then has it barriers.
bool HasBody() {
  cudaFuncAttributes loaded;
  if (cudaFuncGetAttributes(&loaded, ProductKernel<__nv_bfloat16>) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return loaded.sharedSizeBytes > 0;
}

template <class T>
cudaError_t Launch(const LinearCrossEntropyArgs& args, const int32_t* groups,
                   const Scratch& scratch, cudaStream_t stream) {
  const HeadView& head = args.head;
  const int64_t vocab = head.vocab();
  const int64_t cells = (vocab + kCell - 1) / kCell;
  // As many rows at once as scratch holds the parts of; whole pairs of blocks.
  constexpr int64_t kPairRows = kLossGroupRows;
  const int64_t row_bytes = cells * static_cast<int64_t>(sizeof(CellPart)) + 4;
  const int64_t room = static_cast<int64_t>(scratch.bytes - Scratch::kCounterBytes) - 4096;
  const int64_t pass =
      std::clamp<int64_t>(room / row_bytes / kPairRows * kPairRows, kPairRows, kRowsAtOnce);
  Carver carver(scratch);
  CellPart* parts = carver.Take<CellPart>(static_cast<size_t>(std::min(pass, args.hidden.rows)) *
                                          static_cast<size_t>(cells));
  float* target_logits = carver.Take<float>(std::min(pass, args.hidden.rows));
  if (target_logits == nullptr) return cudaErrorMemoryAllocation;
  CUtensorMap weights;
  if (!MakeMap(head.weight.data, head.weight.dtype, vocab, head.hidden(), head.weight.row_stride,
               kTile / kCluster, weights)) {
    return cudaErrorNotSupported;
  }
  cudaError_t error = cudaFuncSetAttribute(
      &ProductKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  for (int64_t first = 0; first < args.hidden.rows; first += pass) {
    const int64_t rows = std::min(pass, args.hidden.rows - first);
    const T* hidden = static_cast<const T*>(args.hidden.data) + first * args.hidden.row_stride;
    CUtensorMap states;
    if (!MakeMap(hidden, head.weight.dtype, rows, head.hidden(), args.hidden.row_stride, kBlockRows,
                 states)) {
      return cudaErrorNotSupported;
    }
    CrossEntropyArgs part = args.cross_entropy;
    part.logits.cols = vocab;
    part.rows += first;
    part.answers.loss += first;
    part.answers.logsumexp += first;
    part.answers.target_logprob += first;
    part.answers.status += first;
    if (part.answers.rank != nullptr) part.answers.rank += first;
    if (part.answers.entropy != nullptr) part.answers.entropy += first;
    const int64_t pairs = (rows + kPairRows - 1) / kPairRows;
    constexpr int64_t kGroupBytes = int64_t{24} << 20;  // of hidden states, to stay in L2
    const Params p{.asks = part.rows,
                   .parts = parts,
                   .target_logits = target_logits,
                   .groups = groups == nullptr ? nullptr : groups + first / kPairRows,
                   .rows = static_cast<int32_t>(rows),
                   .vocab = static_cast<int32_t>(vocab),
                   .cells = static_cast<int32_t>(cells),
                   .steps = static_cast<int32_t>((head.hidden() + kStep - 1) / kStep),
                   .pairs = static_cast<int32_t>(pairs),
                   .group_pairs = static_cast<int32_t>(std::clamp<int64_t>(
                       kGroupBytes / (kPairRows * head.hidden() * 2), 1, pairs)),
                   .scale = head.scale};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(
        kCluster * std::min<int64_t>(scratch.multiprocessors / kCluster, pairs * cells)));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, &ProductKernel<T>, states, weights, p);
    if (error != cudaSuccess) return error;
    FinishKernel<T><<<static_cast<unsigned>(rows), kFinishThreads, 0, stream>>>(
        part, parts, target_logits, static_cast<int>(cells), hidden, args.hidden.row_stride,
        static_cast<const T*>(head.weight.data), head.weight.row_stride,
        static_cast<int>(head.hidden()), head.scale);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

bool HopperLossServes(const HeadView& head, const Scratch& scratch) {
  if (head.weight.dtype == DType::kF32 || head.bias != nullptr || head.softcap > 0 ||
      !scratch.clusters || scratch.block_shared_bytes < kSharedBytes) {
    return false;
  }
  static const bool has_body = HasBody();
  return has_body;
}

cudaError_t HopperLoss(const LinearCrossEntropyArgs& args, const int32_t* groups,
                       const Scratch& scratch, cudaStream_t stream) {
  return args.head.weight.dtype == DType::kF16
             ? Launch<__half>(args, groups, scratch, stream)
             : Launch<__nv_bfloat16>(args, groups, scratch, stream);
}

}  // namespace logitd::cuda
