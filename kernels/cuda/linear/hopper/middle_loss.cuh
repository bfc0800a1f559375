// The epilogue of hopper/middle_rows.cuh that sums losses.
//
// Sums a tile as LossEpilogue does, with the same bits. A row's logits lie in registers of all
// warps of the block: each lane has four, which loss_tile.cuh's order sums first. Eight lanes then
// sum what they have of eight rows, so that each gets one row; what is left are the slices of eight
// warps. These go through shared memory, and a thread for each row takes them together: first
// maxima, then sums. So all warps wait for each other three times a tile.
//
// Cost of a tile, whose multiplication takes 97 000 clocks at 152 rows of hidden 5120: about 5000.
// Limited by: the special-function unit, 2500 clocks for 256 exponentials of each row.
// Measured: losses of 300 rows take 697 us by ncu, with tensor cores 92% busy (bench/results/h100/
// middle_losses.json). Tried and dropped: see loss.cu.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_LOSS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_LOSS_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/linear/hopper/loss_parts.cuh"
#include "kernels/cuda/linear/hopper/middle_rows.cuh"
#include "kernels/cuda/rows/exponential.cuh"

namespace logitd::cuda::hopper {

template <int kRows>
class MiddleLoss {
 public:
  using Params = LossParams;
  static constexpr int kWarps = kConsumers * kGroupThreads / 32;
  static_assert(kWarps == kSlices);
  static constexpr int kChunkRows = 32;  // a warp's at a time
  static constexpr int kChunks = (kRows + kChunkRows - 1) / kChunkRows;
  static constexpr int kSharedRows = kChunks * kChunkRows;

  // What threads know of a row; that of row i is written by thread i.
  struct alignas(8) Scale {
    float log2e_over_temperature;
    float shift;  // of Exponential; kCareful where that is not plain
  };
  struct Shared {
    float max[kWarps][kSharedRows];
    float sum[kWarps][kSharedRows];
    float total[kWarps][kSharedRows];
    Scale scales[kSharedRows];
    float row_max[kSharedRows];
    int targets[kSharedRows];
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  __device__ MiddleLoss(const Params& params, int tokens, std::byte* memory)
      : p(params), vocab(tokens), shared(*reinterpret_cast<Shared*>(memory)) {}

  __device__ void Begin(const MiddleUnit& unit) {
    if (unit.row == known_row) return;
    known_row = unit.row;
    const int i = Thread();
    LossRow row{.r = unit.row + i, .target = kNoTarget};
    if (i < unit.rows) p.Read(row);
    if (i < kSharedRows) {
      shared.scales[i].log2e_over_temperature = row.log2e_over_temperature;
      shared.targets[i] = row.target;
    }
    smooth = SyncAny(row.smooth != 0);
  }

  __device__ void Take(MiddleSums<kRows>& sums, const MiddleUnit& unit, int token, int lane) const {
    const int first = unit.tile * kTile;
    MakeLogits(sums, first + token);
    TakeMaxima(sums, lane);
    Sync();
    const int own_row = Thread();
    float max = -kInfinity;
    bool hit = false;
    if (own_row < kSharedRows) {
      max = MaxOf(own_row);
      const Exponential exponential(max == -kInfinity ? 0.0f : max,
                                    shared.scales[own_row].log2e_over_temperature);
      shared.scales[own_row].shift = exponential.plain ? exponential.shift : kCareful;
      shared.row_max[own_row] = max;
      const int place = shared.targets[own_row] - first;
      hit = place >= 0 && place < kTile;
    }
    if (SyncAny(hit)) TakeTargets(sums, unit.row, first + token, lane);
    if (smooth) TakeTotals(sums, first + token, lane);
    TakeSums(sums, lane);
    Sync();
    if (own_row < unit.rows) {
      p.parts.all_tiles[int64_t{unit.row + own_row} * p.parts.row_tiles + unit.tile] =
          Merge(EmptyPart(),
                {{max, RowOf(shared.sum, own_row)}, smooth ? RowOf(shared.total, own_row) : 0.0f},
                shared.scales[own_row].log2e_over_temperature);
    }
  }

 private:
  static constexpr int kThreadsAtOnce = kConsumers * kGroupThreads;
  static constexpr int kChunkValues = 8;        // rows of a thread in a chunk
  static constexpr int kNoTarget = -(1 << 30);  // also less a token
  static constexpr float kCareful = -kInfinity;
  static_assert(kSharedRows <= kThreadsAtOnce);

  __device__ static int Thread() { return static_cast<int>(threadIdx.x) - kGroupThreads; }
  __device__ static int Warp() { return Thread() / 32; }
  // All warps that multiply have come here.
  __device__ static void Sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreadsAtOnce) : "memory");
  }
  // The same, and whether it is true for any thread.
  __device__ static bool SyncAny(bool mine) {
    int any;
    asm volatile(
        "{\n\t"
        ".reg .pred p, q;\n\t"
        "setp.ne.s32 p, %1, 0;\n\t"
        "bar.red.or.pred q, 1, %2, p;\n\t"
        "selp.s32 %0, 1, 0, q;\n\t"
        "}\n"
        : "=r"(any)
        : "r"(static_cast<int>(mine)), "n"(kThreadsAtOnce)
        : "memory");
    return any != 0;
  }

  // The k-th row of a thread in a chunk.
  __device__ static constexpr int RowAt(int chunk, int k, int lane) {
    return chunk * kChunkRows + k / 2 * 8 + lane % 4 * 2 + k % 2;
  }
  static constexpr bool HasRow(int chunk, int k) { return chunk * kChunkRows + k / 2 * 8 < kRows; }
  // Its logits are sums[unit][SumAt()] and the one 2 after it.
  static constexpr int SumAt(int chunk, int k) { return (chunk * 4 + k / 2) * 4 + k % 2; }

  // Combines value k of each over the eight lanes that have the same rows; lane 4 k + .. gets it.
  template <class Combine>
  __device__ static float OverLanes(const float (&values)[kChunkValues], int lane,
                                    const Combine& combine) {
    float left[kChunkValues];
#pragma unroll
    for (int k = 0; k < kChunkValues; ++k) left[k] = values[k];
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      const bool odd = (lane >> (2 + bit)) % 2 != 0;
#pragma unroll
      for (int k = 0; k < kChunkValues >> (bit + 1); ++k) {
        const float kept = odd ? left[2 * k + 1] : left[2 * k];
        const float given = odd ? left[2 * k] : left[2 * k + 1];
        left[k] = combine(kept, __shfl_xor_sync(kFullWarp, given, 4 << bit));
      }
    }
    return left[0];
  }
  __device__ static float SumOverLanes(const float (&values)[kChunkValues], int lane) {
    return OverLanes(values, lane, [](float a, float b) { return a + b; });
  }
  __device__ static float RowOf(const float (&sums)[kWarps][kSharedRows], int row) {
    float slices[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) slices[slice] = sums[slice][row];
    return SumSlices(slices);
  }
  __device__ float MaxOf(int row) const {
    float max = shared.max[0][row];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) max = fmaxf(max, shared.max[warp][row]);
    return max;
  }

  // token: the thread's first.
  __device__ void MakeLogits(MiddleSums<kRows>& sums, int token) const {
#pragma unroll
    for (int unit = 0; unit < kGroupUnits; ++unit) {
#pragma unroll
      for (float& x : sums[unit]) x = __fmul_rn(x, p.scale);
    }
    if (token / kTile * kTile + kTile <= vocab) return;
#pragma unroll
    for (int unit = 0; unit < kGroupUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        if (token + unit * kUnitTokens + i / 2 % 2 * 8 >= vocab) sums[unit][i] = -kInfinity;
      }
    }
  }

  __device__ void TakeMaxima(const MiddleSums<kRows>& sums, int lane) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float values[kChunkValues];
#pragma unroll
      for (int k = 0; k < kChunkValues; ++k) {
        values[k] = -kInfinity;
        if (!HasRow(chunk, k)) continue;
        const int at = SumAt(chunk, k);
        values[k] = fmaxf(fmaxf(sums[0][at], sums[0][at + 2]), fmaxf(sums[1][at], sums[1][at + 2]));
      }
      const float max = OverLanes(values, lane, [](float a, float b) { return fmaxf(a, b); });
      shared.max[Warp()][RowAt(chunk, lane / 4, lane)] = fmaxf(max, -kInfinity);
    }
  }

  // The logits of the rows' targets. One that is not in the vocabulary is -inf.
  __device__ void TakeTargets(const MiddleSums<kRows>& sums, int row, int token, int lane) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int k = 0; k < kChunkValues; ++k) {
        if (!HasRow(chunk, k)) continue;
        const int in_block = RowAt(chunk, k, lane);
        const int place = shared.targets[in_block] - token;
        if ((place & ~(kUnitTokens | 8)) != 0) continue;  // 0, 8, 64 and 72 are this thread's
        const int at = SumAt(chunk, k);
        const float near = place % kUnitTokens == 0 ? sums[0][at] : sums[0][at + 2];
        const float far = place % kUnitTokens == 0 ? sums[1][at] : sums[1][at + 2];
        p.target_logits[row + in_block] = place < kUnitTokens ? near : far;
      }
    }
  }

  __device__ void TakeTotals(const MiddleSums<kRows>& sums, int token, int lane) const {
    const auto term = [&](float x, int unit, int second) {
      const bool is_token = token + unit * kUnitTokens + second * 8 < vocab;
      return __fmul_rn(is_token ? x : 0.0f, kTotalUnit);
    };
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float values[kChunkValues];
#pragma unroll
      for (int k = 0; k < kChunkValues; ++k) {
        values[k] = 0.0f;
        if (!HasRow(chunk, k)) continue;
        const int at = SumAt(chunk, k);
        values[k] = (term(sums[0][at], 0, 0) + term(sums[1][at], 1, 0)) +
                    (term(sums[0][at + 2], 0, 1) + term(sums[1][at + 2], 1, 1));
      }
      shared.total[Warp()][RowAt(chunk, lane / 4, lane)] = SumOverLanes(values, lane);
    }
  }

  __device__ void TakeSums(MiddleSums<kRows>& sums, int lane) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Scale scales[kChunkValues];
      bool plain = true;
#pragma unroll
      for (int k = 0; k < kChunkValues; ++k) {
        if (!HasRow(chunk, k)) continue;
        scales[k] = shared.scales[RowAt(chunk, k, lane)];
        plain = plain && scales[k].shift != kCareful;
      }
      if (!__all_sync(kFullWarp, plain)) MakeExponents(sums, scales, chunk, lane);
      float values[kChunkValues];
#pragma unroll
      for (int k = 0; k < kChunkValues; ++k) {
        values[k] = 0.0f;
        if (!HasRow(chunk, k)) continue;
        const int at = SumAt(chunk, k);
        const auto term = [&](float x) {
          return Exp2(fmaf(x, scales[k].log2e_over_temperature, scales[k].shift));
        };
        values[k] = (term(sums[0][at]) + term(sums[1][at])) +
                    (term(sums[0][at + 2]) + term(sums[1][at + 2]));
      }
      shared.sum[Warp()][RowAt(chunk, lane / 4, lane)] = SumOverLanes(values, lane);
    }
  }

  // Where a row's exponentials are not plain, its logits become the exponents of
  // Exponential::Careful(), with a scale of 1.
  __device__ void MakeExponents(MiddleSums<kRows>& sums, Scale (&scales)[kChunkValues], int chunk,
                                int lane) const {
#pragma unroll
    for (int k = 0; k < kChunkValues; ++k) {
      if (!HasRow(chunk, k) || scales[k].shift != kCareful) continue;
      const float max = shared.row_max[RowAt(chunk, k, lane)];
#pragma unroll
      for (int unit = 0; unit < kGroupUnits; ++unit) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          float& x = sums[unit][SumAt(chunk, k) + 2 * second];
          x = x == max ? 0.0f : (x - max) * scales[k].log2e_over_temperature;
        }
      }
      scales[k] = {1.0f, 0.0f};
    }
  }

  const Params& p;
  const int vocab;
  Shared& shared;
  int known_row = -1;   // the first of the rows that `shared` knows
  bool smooth = false;  // whether one of them is
};

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_LOSS_CUH_
