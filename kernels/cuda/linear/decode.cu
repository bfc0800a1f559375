// Logits of up to 64 hidden states: the weight is read once, at the rate of memory.
//
// One block a multiprocessor. Each block takes an equal range of the vocabulary, in units of 16
// tokens, and goes through it in tiles: all of the hidden size for one tile before the next tile.
// Stages of 64 elements of the hidden size, of the tile's weights and of the hidden states, come by
// cp.async into a ring; the ring continues from tile to tile. The vocabulary is the M side of
// mma.m16n8k16 and hidden states the N side, so that one hidden state costs a sixteenth of 64 and
// not as much as 64. Lines of 128 bytes are stored with their 16-byte chunks XORed by the line's
// index, so that ldmatrix has no bank conflicts. L2 evicts weights first: it keeps hidden states,
// and logits, which the next kernel reads.
//
// A sum runs over the hidden size in steps of 16, in order, whatever the number of rows, the tile
// or the device. So a row's bits do not depend on other rows.
//
// Cost: reads vocab * hidden * 2 bytes once, and rows * hidden * 2 from L2 for every tile of every
// block (twice at 128256 x 4096: 13% more than the weights, at 64 rows); writes rows * vocab * 4.
// Floor at 128256 x 4096: 0.242 ms at 4.34 TB/s. Limited by: HBM; 128 KB in flight a
// multiprocessor. Not measured on a device that it serves.
#include "kernels/cuda/linear/decode.h"

#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/logit.cuh"
#include "kernels/cuda/rows/ring.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnit = 16;                // tokens of the vocabulary, the M of an mma
constexpr int kStep = 64;                // elements of the hidden size in a stage
constexpr int kChunks = kStep * 2 / 16;  // of 16 bytes in a line of a stage
constexpr int kLineBytes = kStep * 2;

struct Params {
  const void* weight;
  const void* hidden;
  const float* bias;
  float* logits;
  int64_t weight_stride;
  int64_t hidden_stride;
  int64_t logits_stride;
  int32_t vocab;
  int32_t size;  // elements of a hidden state
  int32_t rows;
  float scale;
  float softcap;
};

// The offset of chunk `chunk` of line `line` in a stage, in bytes. The same chunk of eight lines is
// in eight different banks.
__device__ inline uint32_t PlaceOf(int line, int chunk) {
  return static_cast<uint32_t>(line * kLineBytes + ((chunk ^ (line & 7)) << 4));
}

__device__ inline uint64_t EvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As CopyAsync16, of data that is read once.
__device__ inline void StreamAsync16(uint32_t shared, const void* global, int valid,
                                     uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(global), "r"(valid), "l"(policy)
               : "memory");
}
__device__ inline void KeepAsync16(uint32_t shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid)
               : "memory");
}

__device__ inline void LoadMatrices(uint32_t shared, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}

// sums += weights [16, 16] * states [16, 8]
template <class T>
__device__ inline void MultiplyAdd(const uint32_t (&weights)[4], uint32_t states0, uint32_t states1,
                                   float (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.%10.%10.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(states0),
        "r"(states1), "C"(Traits16Bit<T>::kPtxName));
}

// kRows: hidden states the block holds, a multiple of 8; kWarpUnits: units of a warp in a tile.
template <class T, int kRows, int kWarpUnits, int kRingStages>
struct Shape {
  using Element = T;
  static constexpr int kStates = kRows;
  static constexpr int kUnits = kWarpUnits;
  static constexpr int kTile = kWarps * kWarpUnits * kUnit;  // tokens
  static constexpr int kStages = kRingStages;
  static constexpr int kWeightBytes = kTile * kLineBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kLineBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

// A block's range of the vocabulary, and the stages it goes through: all steps of a tile, then
// those of the next.
template <class S>
struct Work {
  int begin;  // tokens
  int end;
  int steps;  // of a tile
  int turns;  // of all tiles

  __device__ explicit Work(const Params& p) {
    const int64_t units = (p.vocab + kUnit - 1) / kUnit;
    begin = static_cast<int>(units * blockIdx.x / gridDim.x) * kUnit;
    end = min(static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * kUnit, p.vocab);
    steps = (p.size + kStep - 1) / kStep;
    turns = (end - begin + S::kTile - 1) / S::kTile * steps;
  }
};

// Starts the copy of stage `turn` into the ring; nothing after the last.
template <class S>
__device__ inline void CopyStage(const Params& p, const Work<S>& work, uint32_t ring, int turn,
                                 uint64_t policy) {
  using T = typename S::Element;
  // A thread copies the same chunk of every kLinesAtOnce-th line.
  constexpr int kLinesAtOnce = kThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int first_line = static_cast<int>(threadIdx.x) / kChunks;
  if (turn < work.turns) {
    const int tile = turn / work.steps;
    const int element = (turn - tile * work.steps) * kStep + chunk * (16 / 2);
    // Both operands are zero after the end of the hidden size. The address stays within the row.
    const int valid = max(0, min(16, (p.size - element) * 2));
    const int from = valid > 0 ? element : 0;
    const uint32_t stage = ring + turn % S::kStages * S::kStageBytes;
    const int token = work.begin + tile * S::kTile + first_line;
    const T* weight = static_cast<const T*>(p.weight) + token * p.weight_stride + from;
#pragma unroll
    for (int i = 0; i < S::kTile / kLinesAtOnce; ++i) {
      // Lines after the block's last token keep old data: it is in no logit.
      if (token + i * kLinesAtOnce < work.end)
        StreamAsync16(stage + PlaceOf(first_line + i * kLinesAtOnce, chunk),
                      weight + i * kLinesAtOnce * p.weight_stride, valid, policy);
    }
#pragma unroll
    for (int i = 0; i < (S::kStates + kLinesAtOnce - 1) / kLinesAtOnce; ++i) {
      const int row = first_line + i * kLinesAtOnce;
      const bool is_row = row < p.rows;  // zeros after the last
      if (row < S::kStates)
        KeepAsync16(stage + S::kWeightBytes + PlaceOf(row, chunk),
                    static_cast<const T*>(p.hidden) + (is_row ? row * p.hidden_stride + from : 0),
                    is_row ? valid : 0);
    }
  }
  CommitAsync();
}

// The sums of a thread. [..][0, 1]: token lane / 4 of the unit, rows 2 (lane % 4) and the next;
// [..][2, 3]: 8 tokens later.
template <class S>
using Sums = float[S::kUnits][S::kStates / 8][4];

// sums += the stage's weights * its states
template <class S>
__device__ inline void MultiplyStage(uint32_t stage, int warp, int lane, Sums<S>& sums) {
  // The line and chunk that the lane's address names in an ldmatrix of four matrices: weights, the
  // 16 tokens of a unit by 16 elements; states, 8 rows by 32 elements.
  const int weight_line = warp * S::kUnits * kUnit + lane % 16;
  const int weight_chunk = lane / 16;
  const int state_line = lane % 8;
  const int state_chunk = lane / 8;
#pragma unroll
  for (int half = 0; half < kStep / 32; ++half) {
    uint32_t states[S::kStates / 8][4];
#pragma unroll
    for (int g = 0; g < S::kStates / 8; ++g)
      LoadMatrices(stage + S::kWeightBytes + PlaceOf(8 * g + state_line, 4 * half + state_chunk),
                   states[g]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) {
        uint32_t weights[4];
        LoadMatrices(stage + PlaceOf(weight_line + u * kUnit, 4 * half + 2 * k + weight_chunk),
                     weights);
#pragma unroll
        for (int g = 0; g < S::kStates / 8; ++g)
          MultiplyAdd<typename S::Element>(weights, states[g][2 * k], states[g][2 * k + 1],
                                           sums[u][g]);
      }
    }
  }
}

// Writes the logits of the tile at `first`, up to token `end`.
template <class S>
__device__ inline void WriteLogits(const Params& p, int first, int end, int warp, int lane,
                                   const Sums<S>& sums) {
#pragma unroll
  for (int u = 0; u < S::kUnits; ++u) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int token = first + (warp * S::kUnits + u) * kUnit + upper * 8 + lane / 4;
      if (token >= end) continue;
      const float bias = p.bias == nullptr ? 0.0f : p.bias[token];
#pragma unroll
      for (int g = 0; g < S::kStates / 8; ++g) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 8 * g + lane % 4 * 2 + i;
          if (row >= p.rows) continue;
          p.logits[row * p.logits_stride + token] =
              LogitOf(sums[u][g][2 * upper + i], p.scale, bias, p.softcap);
        }
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) DecodeKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint4 dynamic[];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Work<S> work(p);
  const uint64_t policy = EvictFirst();
#pragma unroll
  for (int stage = 0; stage + 1 < S::kStages; ++stage) CopyStage(p, work, ring, stage, policy);
  Sums<S> sums;
  int step = 0;
  int tile_begin = work.begin;
#pragma unroll 1
  for (int turn = 0; turn < work.turns; ++turn) {
    WaitAsync<S::kStages - 2>();
    __syncthreads();  // all threads see the stage, and none still reads the one before
    CopyStage(p, work, ring, turn + S::kStages - 1, policy);
    if (step == 0) {
#pragma unroll
      for (auto& unit : sums) {
#pragma unroll
        for (auto& group : unit) {
#pragma unroll
          for (float& sum : group) sum = 0.0f;
        }
      }
    }
    MultiplyStage<S>(ring + turn % S::kStages * S::kStageBytes, warp, lane, sums);
    if (++step < work.steps) continue;
    step = 0;
    WriteLogits<S>(p, tile_begin, work.end, warp, lane, sums);
    tile_begin += S::kTile;
  }
  WaitAsync<0>();
}

// ---- launch ------------------------------------------------------------------------------------

template <class S>
cudaError_t Launch(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(CeilDiv(p.vocab, kUnit), scratch.multiprocessors);
  return LaunchKernel(
      &DecodeKernel<S>,
      {.grid = GridFor(blocks), .threads = kThreads, .shared_bytes = S::kSharedBytes}, stream, p);
}

// The device's shared memory decides the shape: as much in flight as it holds.
template <class T, int kRows>
cudaError_t LaunchRows(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  using Large = Shape<T, kRows, 4, 3>;
  using Medium = Shape<T, kRows, 4, 2>;
  using Small = Shape<T, kRows, 2, 2>;
  if (Large::kSharedBytes <= scratch.block_shared_bytes) return Launch<Large>(p, scratch, stream);
  if (Medium::kSharedBytes <= scratch.block_shared_bytes) return Launch<Medium>(p, scratch, stream);
  return Launch<Small>(p, scratch, stream);
}

}  // namespace

cudaError_t DecodeLogits(const TensorView& hidden, const HeadView& head, float* logits,
                         int64_t logits_stride, const Scratch& scratch, cudaStream_t stream) {
  const Params p{.weight = head.weight.data,
                 .hidden = hidden.data,
                 .bias = head.bias,
                 .logits = logits,
                 .weight_stride = head.weight.row_stride,
                 .hidden_stride = hidden.row_stride,
                 .logits_stride = logits_stride,
                 .vocab = static_cast<int32_t>(head.vocab()),
                 .size = static_cast<int32_t>(head.hidden()),
                 .rows = static_cast<int32_t>(hidden.rows),
                 .scale = head.scale,
                 .softcap = head.softcap};
  return Visit16Bit(head.weight.dtype, [&]<class T>() {
    if (p.rows <= 8) return LaunchRows<T, 8>(p, scratch, stream);
    if (p.rows <= 16) return LaunchRows<T, 16>(p, scratch, stream);
    if (p.rows <= 32) return LaunchRows<T, 32>(p, scratch, stream);
    return LaunchRows<T, kDecodeRows>(p, scratch, stream);
  });
}

}  // namespace logitd::cuda
