// Pass 1 of linear_cross_entropy_training on Hopper: the product of hopper/product.cuh with an
// epilogue that writes the exponentials of a tile, in the head's type, and their sum.
//
// The four threads of a row take its maximum in the tile, and each the exponentials of its 64
// logits, and their factor; then they exchange pairs, so that each writes 16 bytes at a time.
//
// Cost: the product, 2 * rows * hidden * vocab operations, and a write of rows * vocab * 2 bytes.
// Limited by: the tensor cores. Measured as a part of training.cu.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/hopper/loss_tile.cuh"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/linear/training.cuh"

namespace logitd::cuda::hopper {

static_assert(kTile == kTrainingTile);

struct ExponentialParams {
  const RowState* rows;
  Chunk all;
  float* target_logits;
  float scale;

  __device__ void Read(LossRow& to) const {
    const RowState& row = rows[to.r];
    to.target = row.target;
    to.smooth = row.smooth;
    to.log2e_over_temperature = row.log2e_over_temperature;
  }
};

template <class T>
struct ExponentialEpilogue : LossRows<ExponentialParams> {
  using LossRows::LossRows;

  __device__ void Take(float (&acc)[kThreadSums], int first, int lane) {
    MakeLogits(acc, first, lane);
    TakeRow<0>(upper, acc, first, lane);
    TakeRow<1>(lower, acc, first, lane);
  }

  template <int half>
  __device__ void TakeRow(const LossRow& row, float (&acc)[kThreadSums], int first,
                          int lane) const {
    const LossPart part = SumRow<half>(acc, first, lane);
    const float factor = FactorOfTile<T>(part.stats.max, row.log2e_over_temperature);
    if (row.r >= 0 && lane % 4 == 0) {
      const int tile = first / kTile;
      p.all.maxima[row.r * p.all.maxima_stride + tile] = part.stats.max;
      p.all.parts[row.r * p.all.parts_stride + tile] = {part.stats.sum, part.total};
    }
    // A thread holds a pair of every eight tokens. Four threads exchange the pairs of four times
    // eight tokens, so that each gets all pairs of eight.
    const int quad = lane % 4;
    uint4* to = reinterpret_cast<uint4*>(p.all.e.At<T>(row.r >= 0 ? row.r : 0, first)) + quad;
#pragma unroll
    for (int i = 0; i < kRowSums; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = PackPair<T>(acc[SumOf(half, i + 2 * j)] * factor,
                               acc[SumOf(half, i + 2 * j + 1)] * factor);
      const uint4 eight = Transpose(words, quad);
      if (row.r >= 0) __stcs(to + i / 2, eight);
    }
  }

  // Word j of thread `quad` of four goes to thread j, as its word `quad`.
  __device__ static uint4 Transpose(const uint32_t (&words)[4], int quad) {
    const bool odd = quad % 2 != 0;
    const bool high = quad / 2 != 0;
    const uint32_t near0 = __shfl_xor_sync(kFullWarp, odd ? words[0] : words[1], 1);
    const uint32_t near1 = __shfl_xor_sync(kFullWarp, odd ? words[2] : words[3], 1);
    // Words of this thread and its neighbour, for thread `odd` and for thread 2 + `odd`.
    const uint2 here = odd ? uint2{near0, words[1]} : uint2{words[0], near0};
    const uint2 there = odd ? uint2{near1, words[3]} : uint2{words[2], near1};
    const uint2 given = high ? here : there;
    const uint2 kept = high ? there : here;
    const uint2 far = {__shfl_xor_sync(kFullWarp, given.x, 2),
                       __shfl_xor_sync(kFullWarp, given.y, 2)};
    return high ? uint4{far.x, far.y, kept.x, kept.y} : uint4{kept.x, kept.y, far.x, far.y};
  }
};

cudaError_t Exponentials(const TensorView& hidden, const HeadView& head, const RowState* rows,
                         const Chunk& all, const Scratch& scratch, cudaStream_t stream) {
  const ExponentialParams p = {
      .rows = rows, .all = all, .target_logits = all.target_logits, .scale = head.scale};
  return Visit16Bit(head.weight.dtype, [&]<class T>() {
    return LaunchRows<T, Rows::kMany, ExponentialEpilogue<T>>({{hidden, head.weight}}, nullptr, p,
                                                              scratch, stream);
  });
}

}  // namespace logitd::cuda::hopper
