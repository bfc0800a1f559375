// What the epilogues of hopper/product.cuh that sum losses share: a thread's two rows, and the sums
// of a row's logits in a tile.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_

#include <cstdint>

#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda::hopper {

// A row's sums over a part of the vocabulary: a tile, or several.
struct LossPart {
  Stats stats;
  float total;  // the sum of the logits, times kTotalUnit; only where the row is smooth
};

// What an epilogue knows of a row.
struct LossRow {
  int r;            // -1: there is no such row
  int target = -1;  // -1: none
  int smooth = 0;   // whether the sum of its logits is wanted
  float log2e_over_temperature = 1.0f;
};

// The part of an epilogue that holds a thread's two rows. RowParams has Read(row), which fills in
// what is known of row.r, and `scale` and `target_logits`.
template <class RowParams>
struct LossRows {
  using Params = RowParams;
  const Params& p;
  const int vocab;
  const LossRow upper;
  const LossRow lower;

  __device__ LossRows(const Params& params, const ProductParams& product, const SumsPlace& place)
      : p(params),
        vocab(product.vocab),
        upper(RowOf(params, place.row, product.rows)),
        lower(RowOf(params, place.row + 8, product.rows)) {}

  __device__ static LossRow RowOf(const Params& p, int64_t r, int rows) {
    LossRow row{.r = r < rows ? static_cast<int>(r) : -1};
    if (r < rows) p.Read(row);
    return row;
  }

  // Turns the sums of the tile at `first` into logits; those from `vocab` on are -inf.
  __device__ void MakeLogits(float (&acc)[kThreadSums], int first, int lane) const {
#pragma unroll
    for (float& x : acc) x *= p.scale;
    if (first + kTile <= vocab) return;
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) {
      if (first + TokenOf(lane, i) >= vocab) acc[SumOf(0, i)] = acc[SumOf(1, i)] = -kInfinity;
    }
  }

  // Sums row `half` of these logits. The target's logit goes to target_logits; every logit is
  // replaced by its exponential, relative to their maximum. By all four threads of the row, which
  // get the same sums.
  template <int half>
  __device__ LossPart SumRow(float (&acc)[kThreadSums], int first, int lane) const {
    const LossRow& row = half == 0 ? upper : lower;
    const int place = row.target - first;
    if (__any_sync(kFullWarp, place >= 0 && place < kTile)) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        if (TokenOf(lane, i) == place) p.target_logits[row.r] = acc[SumOf(half, i)];
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
    // Where all logits are -inf the sum is 0, whatever it is relative to.
    const Exponential exponential(max == -kInfinity ? 0.0f : max, row.log2e_over_temperature);
    float sums[4] = {};
    const auto sum = [&](auto exponential_of) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        float& x = acc[SumOf(half, i)];
        x = exponential_of(x);
        sums[i % 4] += x;
      }
    };
    if (__all_sync(kFullWarp, exponential.plain)) {
      sum([&](float x) { return exponential.Plain(x); });
    } else {
      sum([&](float x) { return exponential(x); });
    }
    return {{max, QuadSum((sums[0] + sums[1]) + (sums[2] + sums[3]))}, total};
  }
};

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_
