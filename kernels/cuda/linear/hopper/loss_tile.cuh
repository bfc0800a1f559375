// What an epilogue of hopper/product.cuh takes of a row's logits in a tile for its loss.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_

#include <cstdint>

#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda::hopper {

// The sums of a row's part of the vocabulary: a tile, or tiles.
struct LossPart {
  Stats stats;
  float total;  // times kTotalUnit; where the row is smooth
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What is known of one of a thread's two rows.
struct LossRow {
  int r;               // -1: there is no such row
  int target = -1;     // -1: none
  int smooth = 0;      // whether the sum of its logits is wanted
  float power = 1.0f;  // Log2EOverTemperature()
};

// Makes the sums of the tile at `first` logits; those from `vocab` on are -inf.
__device__ inline void MakeLogits(float (&acc)[kSums], float scale, int first, int vocab,
                                  int lane) {
#pragma unroll
  for (float& x : acc) x *= scale;
  if (first + kTile <= vocab) return;
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) {
    if (first + TokenOf(lane, i) >= vocab) acc[SumOf(0, i)] = acc[SumOf(1, i)] = -kInfinity;
  }
}

// Takes row `half` of these logits: the target's goes to target_logits, all make room for their
// exponentials, relative to their maximum. By all four threads of the row, which get the same.
template <int half>
__device__ inline LossPart TakeRow(const LossRow& row, float (&acc)[kSums], int first, int vocab,
                                   int lane, float* target_logits) {
  const int place = row.target - first;
  if (__any_sync(kFullWarp, place >= 0 && place < kTile)) {
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) {
      if (TokenOf(lane, i) == place) target_logits[row.r] = acc[SumOf(half, i)];
    }
  }
  float total = 0.0f;
  if (__any_sync(kFullWarp, row.smooth != 0)) {
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) {
      const bool is_token = first + TokenOf(lane, i) < vocab;
      total = fmaf(is_token ? acc[SumOf(half, i)] : 0.0f, kTotalUnit, total);
    }
    total = QuadSum(total);
  }
  const float max = QuadMax<half>(acc);
  // Where all is -inf the sum is 0 whatever it is relative to.
  const Exponential exponential(max == -kInfinity ? 0.0f : max, row.power);
  float sums[4] = {};
  const auto take = [&](auto exponential_of) {
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) {
      float& x = acc[SumOf(half, i)];
      x = exponential_of(x);
      sums[i % 4] += x;
    }
  };
  if (__all_sync(kFullWarp, exponential.plain)) {
    take([&](float x) { return exponential.Plain(x); });
  } else {
    take([&](float x) { return exponential(x); });
  }
  return {{max, QuadSum((sums[0] + sums[1]) + (sums[2] + sums[3]))}, total};
}
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_
