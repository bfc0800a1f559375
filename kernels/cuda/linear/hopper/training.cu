// Pass 1 of linear_cross_entropy_training on Hopper: the product of hopper/product.cuh, its
// epilogue the exponentials of a tile, in bf16, and their sum.
//
// The four threads of a row take its maximum in the tile, and each the exponentials of its 64
// logits; then they exchange pairs, so that each writes 16 bytes at a time.
//
// Cost: the product, 2 * rows * hidden * vocab operations, and a write of rows * vocab * 2 bytes.
// Limited by: the tensor cores. Measured
// within training.cu.
#include "kernels/cuda/linear/hopper/training.h"

#include "kernels/cuda/linear/hopper/loss_tile.cuh"
#include "kernels/cuda/linear/hopper/product.cuh"

namespace logitd::cuda {
namespace {

static_assert(hopper::kTile == kTrainingTile);

struct ExponentialParams {
  const RowState* rows;
  Chunk all;
  float scale;
};

struct ExponentialEpilogue {
  using Params = ExponentialParams;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Params& p;
  const int vocab;
  const hopper::LossRow upper;
  const hopper::LossRow lower;

  __device__ ExponentialEpilogue(const Params& params, const hopper::ProductParams& product,
                                 int64_t row, int /*lane*/)
      : p(params),
        vocab(product.vocab),
        upper(RowOf(params, row, product.rows)),
        lower(RowOf(params, row + 8, product.rows)) {}

  __device__ static hopper::LossRow RowOf(const Params& p, int64_t r, int rows) {
    hopper::LossRow row{.r = r < rows ? static_cast<int>(r) : -1};
    if (r >= rows) return row;
    row.target = p.rows[r].target;
    row.smooth = p.rows[r].smooth;
    row.power = p.rows[r].power;
    return row;
  }

  __device__ void Take(float (&acc)[hopper::kSums], int first, int lane) {
    hopper::MakeLogits(acc, p.scale, first, vocab, lane);
    TakeRow<0>(upper, acc, first, lane);
    TakeRow<1>(lower, acc, first, lane);
  }

  __device__ void Leave(int /*lane*/) {}

  template <int half>
  __device__ void TakeRow(const hopper::LossRow& row, float (&acc)[hopper::kSums], int first,
                          int lane) const {
    using hopper::kRowSums, hopper::SumOf;
    const hopper::LossPart part =
        hopper::TakeRow<half>(row, acc, first, vocab, lane, p.all.target_logits);
    if (row.r >= 0 && lane % 4 == 0) {
      const int tile = first / hopper::kTile;
      p.all.maxima[row.r * p.all.maxima_stride + tile] = part.stats.max;
      p.all.parts[row.r * p.all.parts_stride + tile] = {part.stats.sum, part.total};
    }
    // A thread has a pair of every eight tokens; of four times eight it is to have one eight.
    const int quad = lane % 4;
    uint4* to = reinterpret_cast<uint4*>(p.all.e.At(row.r >= 0 ? row.r : 0, first)) + quad;
#pragma unroll
    for (int i = 0; i < kRowSums; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = PackPair<Bf16>(acc[SumOf(half, i + 2 * j)], acc[SumOf(half, i + 2 * j + 1)]);
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
#endif
};

}  // namespace

bool HopperExponentialsServes(const HeadView& head, const Scratch& scratch) {
  return head.weight.dtype == DType::kBF16 && head.bias == nullptr && head.softcap == 0 &&
         hopper::CanRun<&hopper::ProductKernel<Bf16, hopper::ManyRows, ExponentialEpilogue>>(
             scratch);
}

cudaError_t HopperExponentials(const TensorView& hidden, const HeadView& head, const RowState* rows,
                               const Chunk& all, const Scratch& scratch, cudaStream_t stream) {
  return hopper::LaunchProduct<Bf16, hopper::ManyRows, ExponentialEpilogue>(
      hidden, head.weight, nullptr, {.rows = rows, .all = all, .scale = head.scale}, scratch,
      stream);
}

}  // namespace logitd::cuda
