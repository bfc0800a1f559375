#include "kernels/cuda/linear/hopper/few_rows.h"

#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/hopper/few_rows_multiply.cuh"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/linear/logit.cuh"

namespace logitd::cuda::hopper {

constexpr int kUnitTokens = 64;  // of a wgmma, and of a copy
// A thread's registers, as in product.cuh; here more of them hold sums.
constexpr int kFewLoadRegisters = 40;
constexpr int kFewMultiplyRegisters = 232;
static_assert(kFewLoadRegisters + kConsumers * kFewMultiplyRegisters <= (1 + kConsumers) * 168);

// kMostRows: rows that are multiplied, absent ones included. kUnits: of a warpgroup. kAtOnce:
// stages that are asked for together. kClusterBlocks: blocks that share hidden states. kLate: a
// stage is free when the next one is being multiplied, not as soon as it has been.
template <class Element, int kMostRows, int kUnits, int kRingStages, int kAtOnce,
          int kClusterBlocks, bool kLate>
struct FewShape {
  using T = Element;
  static constexpr int kRows = kMostRows;
  static constexpr int kParts = kRows > 256 ? 2 : 1;  // a wgmma takes up to 256
  static constexpr int kGroupUnits = kUnits;
  static constexpr int kStages = kRingStages;
  static constexpr int kTogether = kAtOnce;
  static constexpr int kBlocks = kClusterBlocks;
  static constexpr bool kFreedLate = kLate;
  static constexpr int kTokens = kConsumers * kUnits * kUnitTokens;  // of a tile
  static constexpr int kStateBytes = kRows * kLineBytes;
  static constexpr int kBytes = kStateBytes + kTokens * kLineBytes;  // of a stage
  static constexpr int kSharedBytes = kStages * kBytes + 1024;       // stages are aligned to 1024
  static_assert(kTogether < kStages && kSharedBytes <= kMostSharedBytes);
  static_assert(kBlocks == 1 || kBlocks == kCluster);
};

struct FewParams {
  LogitsParams to;
  int32_t rows;
  int32_t vocab;
  int32_t steps;        // along the hidden size
  int32_t state_lines;  // rows of one copy of hidden states, of which each block makes one
#ifdef FEW_TEST
  int32_t store;
#endif
};

// The tokens of a block.
template <class S>
struct FewTokens {
  int rank;   // of the block in its cluster
  int begin;  // of the cluster, in units, as `units`
  int units;
  int tiles;

  __device__ explicit FewTokens(const FewParams& p) : rank(blockIdx.x % S::kBlocks) {
    const int64_t all = (p.vocab + kUnitTokens - 1) / kUnitTokens;
    const int cluster = blockIdx.x / S::kBlocks;
    const int clusters = gridDim.x / S::kBlocks;
    begin = static_cast<int>(all * cluster / clusters);
    units = static_cast<int>(all * (cluster + 1) / clusters) - begin;
    constexpr int kTileUnits = S::kBlocks * S::kTokens / kUnitTokens;
    tiles = (units + kTileUnits - 1) / kTileUnits;
  }

  struct Range {
    int first;
    int last;  // not in it
  };
  // The block's part of a tile. Tiles differ by a unit at most; the last may lie after the
  // vocabulary's end.
  __device__ Range Tile(int tile) const {
    const int from = units * tile / tiles;
    const int count = units * (tile + 1) / tiles - from;
    return {(begin + from + count * rank / S::kBlocks) * kUnitTokens,
            (begin + from + count * (rank + 1) / S::kBlocks) * kUnitTokens};
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
  const uint64_t again = CachePolicy</*kOnce=*/false>();
  const int first_row = tokens.rank * p.state_lines;
#pragma unroll 1
  for (int tile = 0; tile < tokens.tiles; ++tile) {
    const auto range = tokens.Tile(tile);
    const int bytes = (range.last - range.first + S::kBlocks * p.state_lines) * kLineBytes;
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
        if constexpr (S::kBlocks > 1) {
          CopyTileToAll(to, states, (step + i) * kStep, first_row, full);
        } else {
          CopyTile(to, states, (step + i) * kStep, first_row, full, again);
        }
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

// The sums of a thread, of each unit and part [..][..]: token lane / 4 of its warp's 16 and the one
// 8 after it, by rows 8 j + lane % 4 * 2 of the part and the next, at [4 j + 2 * (second token) +
// (next row)].
template <class S>
using FewSums = float[S::kGroupUnits][S::kParts][S::kRows / S::kParts / 2];

// The compiler does not move reads or writes of sums across this.
template <class S>
__device__ inline void PinFew(FewSums<S>& sums) {
#pragma unroll
  for (auto& unit : sums) {
#pragma unroll
    for (auto& part : unit) {
#pragma unroll
      for (float& sum : part) asm volatile("" : "+f"(sum)::"memory");
    }
  }
}

// Multiplies a tile.
template <class S>
__device__ inline void MultiplyFew(FewSums<S>& sums, int steps, int group, int lane,
                                   FewRing<S>& ring) {
  constexpr int kPartRows = S::kRows / S::kParts;
  constexpr uint64_t kUnit = kUnitTokens * kLineBytes >> 4;  // as in a descriptor
  constexpr uint64_t kPart = kPartRows * kLineBytes >> 4;
  const auto release = [&](int stage) {
    if (lane < S::kBlocks) ArriveAt(ring.empty + 8 * stage, lane);
  };
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitFor(ring.full + 8 * ring.stage, ring.parity);
    const uint64_t b = Descriptor(ring.At(ring.stage));
    const uint64_t a = Descriptor(ring.At(ring.stage) + S::kStateBytes) + group * S::kGroupUnits * kUnit;
    PinFew<S>(sums);
    BeginMultiplying();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int u = 0; u < S::kGroupUnits; ++u) {
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          MultiplyTokens<typename S::T, kPartRows>(sums[u][part], a + u * kUnit + 2 * k,
                                                   b + part * kPart + 2 * k, step > 0 || k > 0);
        }
      }
    }
    CommitMultiplying();
    PinFew<S>(sums);
    if constexpr (!S::kFreedLate) {
      WaitMultiplied<0>();
      release(ring.stage);
    } else if (step > 0) {
      WaitMultiplied<1>();
      release(previous);
    }
    previous = ring.stage;
    ring.Advance();
  }
  if constexpr (S::kFreedLate) {
    WaitMultiplied<0>();
    release(previous);
  }
  PinFew<S>(sums);
}

// Writes the logits of a unit from the sums of a thread, whose first token is `token`.
template <class S>
__device__ inline void WriteFew(const FewParams& p,
                                const float (&sums)[S::kParts][S::kRows / S::kParts / 2],
                                int token, int last, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half, token += 8) {
    if (token >= last) return;
    const float bias = p.to.bias == nullptr ? 0.0f : p.to.bias[token];
#pragma unroll
    for (int j = 0; j < S::kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * j + lane % 4 * 2 + i;
        if (row >= p.rows) break;
        constexpr int kPartGroups = S::kRows / S::kParts / 8;
        const float sum = sums[j / kPartGroups][4 * (j % kPartGroups) + 2 * half + i];
#ifdef FEW_TEST
        if (p.store == 1) {
          uint64_t policy;
          asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
          asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(p.to.logits + row * p.to.stride + token), "f"(LogitOf(sum, p.to.scale, bias, p.to.softcap)), "l"(policy) : "memory");
          continue;
        }
        if (p.store == 2) continue;
#endif
        p.to.logits[row * p.to.stride + token] =
            LogitOf(sum, p.to.scale, bias, p.to.softcap);
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    FewRowsKernel(const __grid_constant__ CUtensorMap states,
                  const __grid_constant__ CUtensorMap weights, const __grid_constant__ FewParams p) {
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
      InitBarrier(ring.empty + 8 * stage, S::kBlocks * kConsumers * (kGroupThreads / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  ClusterArrive();
  ClusterWait();
  const FewTokens<S> tokens(p);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFewLoadRegisters));
    if (threadIdx.x == 0) LoadFew(states, weights, p, tokens, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kFewMultiplyRegisters));
    const int first = (group - 1) * S::kGroupUnits * kUnitTokens +
                      static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
    FewSums<S> sums;
#pragma unroll 1
    for (int tile = 0; tile < tokens.tiles; ++tile) {
      MultiplyFew<S>(sums, p.steps, group - 1, lane, ring);
      const auto range = tokens.Tile(tile);
#pragma unroll
      for (int u = 0; u < S::kGroupUnits; ++u)
        WriteFew<S>(p, sums[u], range.first + first + u * kUnitTokens, min(range.last, p.vocab), lane);
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
  // Only rows that there are, where a block loads all: absent ones take time too.
  const auto state_lines = static_cast<int32_t>(
      S::kBlocks == 1 ? rows : RoundUp(CeilDiv(rows, S::kBlocks), 8));
  CUtensorMap states, weights;
  if (!MakeMap(hidden, state_lines, /*once=*/false, states) ||
      !MakeMap(weight, kUnitTokens, /*once=*/false, weights)) {
    return cudaErrorNotSupported;
  }
  const FewParams p{.to = to,
                    .rows = rows,
                    .vocab = static_cast<int32_t>(weight.rows),
                    .steps = static_cast<int32_t>(CeilDiv(hidden.cols, kStep)),
                    .state_lines = state_lines,
#ifdef FEW_TEST
                    .store = g_store,
#endif
  };
  const int64_t clusters = std::min<int64_t>(scratch.multiprocessors / S::kBlocks,
                                             CeilDiv(weight.rows, kUnitTokens));
  return LaunchKernel(&FewRowsKernel<S>,
                      {.grid = GridFor(S::kBlocks * clusters),
                       .threads = kThreads,
                       .cluster = S::kBlocks,
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
    {8, &LaunchFew<FewShape<T, 8, 1, 12, 4, 1, false>>},
    {16, &LaunchFew<FewShape<T, 16, 1, 12, 4, 2, false>>},
    {32, &LaunchFew<FewShape<T, 32, 1, 11, 4, 2, false>>},
    {64, &LaunchFew<FewShape<T, 64, 1, 9, 4, 2, false>>},
    {96, &LaunchFew<FewShape<T, 96, 1, 7, 3, 2, false>>},
    {128, &LaunchFew<FewShape<T, 128, 1, 7, 3, 2, true>>},
    {160, &LaunchFew<FewShape<T, 160, 1, 6, 1, 2, true>>},
    {208, &LaunchFew<FewShape<T, 208, 1, 5, 1, 2, true>>},
    {256, &LaunchFew<FewShape<T, 256, 1, 4, 1, 2, true>>},
    {kFewRows, &LaunchFew<FewShape<T, 320, 1, 4, 1, 2, true>>},
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
