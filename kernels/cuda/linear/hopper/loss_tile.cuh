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

// ---- the order of a sum -------------------------------------------------------------------------
//
// A row's sum over a tile is a tree, so that it has the same bits however threads share the tile's
// tokens. The bits of a token's number in the tile are summed over in the order 6, 3, 0, 1, 2, 7,
// 4, 5: first the two tokens that are 64 apart, then those that are 8 apart, and so on. In hopper/
// product.cuh a thread has all tokens with the same bits 1 and 2, in hopper/middle_rows.cuh those
// with the same bits 0, 1, 2, 4, 5 and 7.

// What is left to sum when that is done for the bits 6, 3, 0, 1 and 2.
constexpr int kSlices = 8;  // number: bits 4 and 5 of a token, then bit 7

// From the sums of all slices, the sum of the tile.
__device__ inline float SumSlices(const float (&slices)[kSlices]) {
  float pairs[kSlices / 2];
#pragma unroll
  for (int i = 0; i < kSlices / 2; ++i) pairs[i] = slices[i] + slices[i + kSlices / 2];
  return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
}

// A thread of hopper/product.cuh: sums over the bits 6, 3 and 0. term(i) is that of its i-th token.
template <class Term>
__device__ inline void SumToSlices(float (&slices)[kSlices], const Term& term) {
  static_assert(kTile == 256 && kRowSums == 64);
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int first = slice / 4 * 32 + slice % 4 * 4;
    float near[2][2];  // by bits 3 and 0
#pragma unroll
    for (int i = 0; i < 4; ++i) near[i / 2][i % 2] = term(first + i);
#pragma unroll
    for (int i = 0; i < 4; ++i) near[i / 2][i % 2] += term(first + 16 + i);
    slices[slice] = (near[0][0] + near[1][0]) + (near[0][1] + near[1][1]);
  }
}
// The other bits, by the four threads of a row, which get the same. At first a thread keeps the
// slices whose bits are those of its number.
__device__ inline float SumQuadSlices(const float (&slices)[kSlices], int lane) {
  const bool odd = lane % 2 != 0;
  const bool high = lane / 2 % 2 != 0;
  float half[kSlices / 2];
#pragma unroll
  for (int i = 0; i < kSlices / 2; ++i) {
    const float kept = odd ? slices[2 * i + 1] : slices[2 * i];
    const float given = odd ? slices[2 * i] : slices[2 * i + 1];
    half[i] = kept + __shfl_xor_sync(kFullWarp, given, 1);
  }
  float quarter[kSlices / 4];
#pragma unroll
  for (int i = 0; i < kSlices / 4; ++i) {
    const float kept = high ? half[2 * i + 1] : half[2 * i];
    const float given = high ? half[2 * i] : half[2 * i + 1];
    quarter[i] = kept + __shfl_xor_sync(kFullWarp, given, 2);
  }
  return QuadSum(quarter[0] + quarter[1]);
}

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
    for (float& x : acc) x = __fmul_rn(x, p.scale);
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
      float slices[kSlices];
      SumToSlices(slices, [&](int i) {
        const bool is_token = first + TokenOf(lane, i) < vocab;
        return __fmul_rn(is_token ? acc[SumOf(half, i)] : 0.0f, kTotalUnit);
      });
      total = SumQuadSlices(slices, lane);
    }
    const float max = QuadMax<half>(acc);
    // Where all logits are -inf the sum is 0, whatever it is relative to.
    const Exponential exponential(max == -kInfinity ? 0.0f : max, row.log2e_over_temperature);
    float slices[kSlices];
    const auto sum_of = [&](auto exponential_of) {
      SumToSlices(slices, [&](int i) {
        float& x = acc[SumOf(half, i)];
        return x = exponential_of(x);
      });
    };
    if (__all_sync(kFullWarp, exponential.plain)) {
      sum_of([&](float x) { return exponential.Plain(x); });
    } else {
      sum_of([&](float x) { return exponential(x); });
    }
    return {{max, SumQuadSlices(slices, lane)}, total};
  }
};

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_LOSS_TILE_CUH_
