// Logits of up to 128 hidden states on Hopper: the weight is read once, at nearly a plain read's
// rate.
//
// The vocabulary is on wgmma's side of 64, and the rows, rounded up to 16, 32, 64, 96 or 128, on
// the other. A block is three warpgroups: one thread asks the copy engine (TMA) for stages of 64
// elements of the hidden size, and two warpgroups multiply 64 tokens each. Blocks are pairs, of
// which each loads half of the hidden states for both. Up to 16 rows pairs take tiles in turn. More
// rows: each has a range of the vocabulary, and asks for 2 or 4 steps together, 64 tokens of all of
// them before the next. A logit has product.cuh's order, so its bits.
//
// Cost: reads vocab * hidden * 2 bytes; writes rows * vocab * 4. Limited by: HBM. On an H200,
// 128256 x 4096, where a plain read takes 226 to 240 us: 1, 16, 32, 64, 128 rows 249, 249, 251,
// 270, 291 us; nvjet 243 to 272. On an H100 (bench/results/h100/few_rows.json) 32, 64, 128 rows
// 364, 373, 403. Dropped: ranges for few rows (256 us; H100 347); turns for 128 (300); 64 KB in
// flight; copies of 8 or 16 tokens; one warpgroup (265); blocks by themselves (249);
// middle_rows.cuh (1 row 295, 64 289).
#include "kernels/cuda/linear/hopper/few_rows.h"

#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/hopper/few_rows_multiply.cuh"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/linear/hopper/write_tokens.cuh"

namespace logitd::cuda::hopper {

constexpr int kUnitTokens = 64;  // of a wgmma, and of a copy

// kMostRows: rows that are multiplied, absent ones included. kAtOnce: stages that are asked for
// together; 1: pairs take tiles in turn.
template <class Element, int kMostRows, int kRingStages, int kAtOnce>
struct FewShape {
  using T = Element;
  static constexpr int kRows = kMostRows;
  static constexpr int kStages = kRingStages;
  static constexpr int kTogether = kAtOnce;
  static constexpr int kTokens = kConsumers * kUnitTokens;  // of a tile
  static constexpr int kStateBytes = kRows * kLineBytes;
  static constexpr int kBytes = kStateBytes + kTokens * kLineBytes;  // of a stage
  static constexpr int kSharedBytes = kStages * kBytes + 1024;       // stages are aligned to 1024
  static_assert(kTogether < kStages && kSharedBytes <= kMostSharedBytes);
};

struct FewParams {
  LogitsParams to;
  int32_t rows;
  int32_t vocab;
  int32_t steps;        // along the hidden size
  int32_t state_lines;  // rows of one copy of hidden states, of which each block makes one
};

// The tokens of a block, in tiles of its pair.
template <class S>
struct FewTokens {
  static constexpr int kTileUnits = kCluster * S::kTokens / kUnitTokens;
  int rank;   // of the block in its pair
  int turns;  // whole tiles that every pair takes in turn, before the range
  int begin;  // of the pair's range, in units, as `units`
  int units;
  int tiles;  // with the turns

  __device__ explicit FewTokens(const FewParams& p) : rank(blockIdx.x % kCluster) {
    const int64_t all = (p.vocab + kUnitTokens - 1) / kUnitTokens;
    turns = S::kTogether == 1 ? static_cast<int>(all / (kTileUnits * Pairs())) : 0;
    const int64_t first = int64_t{turns} * kTileUnits * Pairs();
    begin = static_cast<int>(first + (all - first) * Pair() / Pairs());
    units = static_cast<int>(first + (all - first) * (Pair() + 1) / Pairs()) - begin;
    tiles = turns + (units + kTileUnits - 1) / kTileUnits;
  }

  __device__ static int Pair() { return static_cast<int>(blockIdx.x) / kCluster; }
  __device__ static int Pairs() { return static_cast<int>(gridDim.x) / kCluster; }

  struct Range {
    int first;
    int last;  // not in it
  };
  // The block's part of a tile. Tiles of the range differ by a unit at most; the last may end after
  // the vocabulary's.
  __device__ Range Tile(int tile) const {
    int from = (tile * Pairs() + Pair()) * kTileUnits;
    int count = kTileUnits;
    if (tile >= turns) {
      const int parts = tiles - turns;
      const int part = tile - turns;
      from = begin + units * part / parts;
      count = begin + units * (part + 1) / parts - from;
    }
    return {(from + count * rank / kCluster) * kUnitTokens,
            (from + count * (rank + 1) / kCluster) * kUnitTokens};
  }
};

// A ring of stages in shared memory, each of a step: hidden states, then weights.
template <class S>
struct FewRing {
  uint32_t stages;
  uint32_t full;   // a barrier a stage: it has been filled
  uint32_t empty;  // a barrier a stage: all warps of the cluster have read it
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t At(int of) const { return stages + of * S::kBytes; }
  __device__ static int After(int of) { return of + 1 == S::kStages ? 0 : of + 1; }
  __device__ void Advance() {
    stage = After(stage);
    if (stage == 0) parity ^= 1;
  }
};

// Fills stages, by one thread.
template <class S>
__device__ inline void LoadFew(const CUtensorMap& states, const CUtensorMap& weights,
                               const FewParams& p, const FewTokens<S>& tokens, FewRing<S> ring) {
  const uint64_t once = CachePolicy</*kOnce=*/true>();
  const int first_row = tokens.rank * p.state_lines;
#pragma unroll 1
  for (int tile = 0; tile < tokens.tiles; ++tile) {
    const auto range = tokens.Tile(tile);
    const int bytes = (range.last - range.first + kCluster * p.state_lines) * kLineBytes;
#pragma unroll 1
    for (int step = 0; step < p.steps; step += S::kTogether) {
      const int together = min(S::kTogether, p.steps - step);
      const int first_stage = ring.stage;
#pragma unroll 1
      for (int i = 0; i < together; ++i) {
        WaitFor(ring.empty + 8 * ring.stage, ring.parity ^ 1);
        const uint32_t full = ring.full + 8 * ring.stage;
        Expect(full, bytes);
        const uint32_t to = ring.At(ring.stage) + first_row * kLineBytes;
        CopyTileToAll(to, states, (step + i) * kStep, first_row, full);
        ring.Advance();
      }
      // All steps of a few tokens, then those of the next tokens.
#pragma unroll 1
      for (int token = range.first; token < range.last; token += kUnitTokens) {
        int stage = first_stage;
#pragma unroll 1
        for (int i = 0; i < together; ++i) {
          CopyTile(ring.At(stage) + S::kStateBytes + (token - range.first) * kLineBytes, weights,
                   (step + i) * kStep, token, ring.full + 8 * stage, once);
          stage = FewRing<S>::After(stage);
        }
      }
    }
  }
}

// The sums of a thread: token lane / 4 of its warp's 16 and the one 8 after it, by rows 8 j +
// lane % 4 * 2 and the next, at [4 j + 2 * (second token) + (next row)].
template <class S>
using FewSums = float[S::kRows / 2];

// The compiler does not move reads or writes of sums across this.
template <class S>
__device__ inline void PinFew(FewSums<S>& sums) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// Multiplies a tile.
template <class S>
__device__ inline void MultiplyFew(FewSums<S>& sums, int steps, int group, int lane,
                                   FewRing<S>& ring) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitFor(ring.full + 8 * ring.stage, ring.parity);
    const uint32_t at = ring.At(ring.stage);
    const uint64_t a = Descriptor(at + S::kStateBytes + group * kUnitTokens * kLineBytes);
    const uint64_t b = Descriptor(at);
    PinFew<S>(sums);
    BeginMultiplying();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      MultiplyTokens<typename S::T, S::kRows>(sums, a + 2 * k, b + 2 * k, step > 0 || k > 0);
    CommitMultiplying();
    PinFew<S>(sums);
    WaitMultiplied<0>();
    if (lane < kCluster) ArriveAt(ring.empty + 8 * ring.stage, lane);
    ring.Advance();
  }
  PinFew<S>(sums);
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    FewRowsKernel(const __grid_constant__ CUtensorMap states,
                  const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ FewParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * S::kStages];
  LetNextKernelBegin();
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  FewRing<S> ring{
      .stages = (static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) + 1023) / 1024 * 1024,
      .full = full,
      .empty = full + S::kStages * 8};
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
  const FewTokens<S> tokens(p);
  if (group == 0) {
    if (threadIdx.x == 0) LoadFew(states, weights, p, tokens, ring);
  } else {
    const int first = (group - 1) * kUnitTokens +
                      static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
    FewSums<S> sums;
#pragma unroll 1
    for (int tile = 0; tile < tokens.tiles; ++tile) {
      MultiplyFew<S>(sums, p.steps, group - 1, lane, ring);
      const auto range = tokens.Tile(tile);
      WriteTokens<S::kRows>(p.to, sums, 0, p.rows, range.first + first, min(range.last, p.vocab),
                            lane);
    }
  }
  // No block ends while another of its cluster may still write to its memory.
  ClusterArrive();
  ClusterWait();
#endif
}

// ---- launch ------------------------------------------------------------------------------------

namespace {

template <class S>
cudaError_t LaunchFew(const TensorView& hidden, const TensorView& weight, const LogitsParams& to,
                      const Scratch& scratch, cudaStream_t stream) {
  const auto rows = static_cast<int32_t>(hidden.rows);
  const auto state_lines = static_cast<int32_t>(RoundUp(CeilDiv(rows, kCluster), 8));
  CUtensorMap states, weights;
  if (!MakeMap(hidden, state_lines, /*once=*/false, states) ||
      !MakeMap(weight, kUnitTokens, /*once=*/false, weights)) {
    return cudaErrorNotSupported;
  }
  const FewParams p{
      .to = to,
      .rows = rows,
      .vocab = static_cast<int32_t>(weight.rows),
      .steps = static_cast<int32_t>(CeilDiv(hidden.cols, kStep)),
      .state_lines = state_lines,
  };
  const int64_t clusters =
      std::min<int64_t>(scratch.multiprocessors / kCluster, CeilDiv(weight.rows, kUnitTokens));
  return LaunchKernel(&FewRowsKernel<S>,
                      {.grid = GridFor(kCluster * clusters),
                       .threads = kThreads,
                       .cluster = kCluster,
                       .shared_bytes = S::kSharedBytes},
                      stream, states, weights, p);
}

struct FewVariant {
  int64_t most_rows;
  cudaError_t (*launch)(const TensorView& hidden, const TensorView& weight, const LogitsParams& to,
                        const Scratch& scratch, cudaStream_t stream);
};
template <class T>
constexpr FewVariant kFewVariants[] = {
    {16, &LaunchFew<FewShape<T, 16, 12, 1>>},       {32, &LaunchFew<FewShape<T, 32, 11, 4>>},
    {64, &LaunchFew<FewShape<T, 64, 9, 2>>},        {96, &LaunchFew<FewShape<T, 96, 8, 2>>},
    {kFewRows, &LaunchFew<FewShape<T, 128, 7, 2>>},
};

}  // namespace

cudaError_t FewRowsLogits(const TensorView& hidden, const TensorView& weight, const LogitsParams& p,
                          const Scratch& scratch, cudaStream_t stream) {
  return Visit16Bit(weight.dtype, [&]<class T>() {
    const FewVariant* variant = kFewVariants<T>;
    while (variant->most_rows < hidden.rows) ++variant;
    return variant->launch(hidden, weight, p, scratch, stream);
  });
}

}  // namespace logitd::cuda::hopper
