// Pass 1 of linear_cross_entropy_training on Hopper: the product of product_hopper.cuh, its
// epilogue the exponentials of a tile, in bf16, and their sum.
//
// The four threads of a row take its maximum in the tile, and each the exponentials of its 64
// logits; then they exchange pairs, so that each writes 16 bytes at a time.
//
// Cost: the product, 2 * rows * hidden * vocab operations, and a write of rows * vocab * 2 bytes.
// Limited by: the tensor cores. Not yet measured.
#include "kernels/cuda/linear_training_hopper.h"

#include "kernels/cuda/loss_row.cuh"
#include "kernels/cuda/product_hopper.cuh"

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
  using Sums = float[hopper::kSums];

  // One of the thread's two rows.
  struct Row {
    int64_t r;
    bool here;   // the row exists
    int target;  // -1: none
    bool smooth;
    float power;

    __device__ Row(const Params& p, int64_t row, int rows)
        : r(row), here(row < rows), target(-1), smooth(false), power(0.0f) {
      if (!here) return;
      target = p.rows[r].target;
      smooth = p.rows[r].smooth != 0;
      power = p.rows[r].power;
    }
  };

  const Params& p;
  const int vocab;
  Row upper;
  Row lower;

  __device__ ExponentialEpilogue(const Params& params, const hopper::ProductParams& product,
                                 int64_t row, int /*lane*/)
      : p(params),
        vocab(product.vocab),
        upper(params, row, product.rows),
        lower(params, row + 8, product.rows) {}

  __device__ void Take(Sums& acc, int first, int lane) {
#pragma unroll
    for (float& x : acc) x *= p.scale;
    if (first + hopper::kTile > vocab) {
#pragma unroll
      for (int i = 0; i < hopper::kRowSums; ++i) {
        if (first + hopper::TokenOf(lane, i) >= vocab)
          acc[hopper::SumOf(0, i)] = acc[hopper::SumOf(1, i)] = -kInfinity;
      }
    }
    TakeRow<0>(upper, acc, first, lane);
    TakeRow<1>(lower, acc, first, lane);
  }

  __device__ void Leave(int /*lane*/) {}

  template <int half>
  __device__ void TakeRow(const Row& row, Sums& acc, int first, int lane) const {
    using hopper::kRowSums, hopper::SumOf, hopper::TokenOf;
    const int place = row.target - first;
    if (__any_sync(kFullWarp, place >= 0 && place < hopper::kTile)) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        if (TokenOf(lane, i) == place) p.all.target_logits[row.r] = acc[SumOf(half, i)];
      }
    }
    float total = 0.0f;
    if (__any_sync(kFullWarp, row.smooth)) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        const bool is_token = first + TokenOf(lane, i) < vocab;
        total = fmaf(is_token ? acc[SumOf(half, i)] : 0.0f, kTotalUnit, total);
      }
      total = hopper::QuadSum(total);
    }
    const float max = hopper::QuadMax<half>(acc);
    const Exponential exponential = TileExponential(max, row.power);
    float sums[4] = {};
    if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        float& x = acc[SumOf(half, i)];
        x = exponential.Plain(x);
        sums[i % 4] += x;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        float& x = acc[SumOf(half, i)];
        x = exponential(x);
        sums[i % 4] += x;
      }
    }
    const float sum = hopper::QuadSum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (row.here && lane % 4 == 0) {
      const int tile = first / hopper::kTile;
      p.all.maxima[row.r * p.all.maxima_stride + tile] = max;
      p.all.parts[row.r * p.all.parts_stride + tile] = {sum, total};
    }
    // A thread has a pair of every eight tokens; of four times eight it is to have one eight.
    const int quad = lane % 4;
    uint4* to = reinterpret_cast<uint4*>(p.all.e.At(row.here ? row.r : 0, first)) + quad;
#pragma unroll
    for (int i = 0; i < kRowSums; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = PackPair<Bf16>(acc[SumOf(half, i + 2 * j)], acc[SumOf(half, i + 2 * j + 1)]);
      const uint4 eight = Transpose(words, quad);
      if (row.here) __stcs(to + i / 2, eight);
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
