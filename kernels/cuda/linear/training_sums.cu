// Pass 1 of linear_cross_entropy_training: the rows' states, the exponentials of a chunk's logits
// where they are not made with the product (hopper/training.cu), and the rows' sums.
//
// Cost: reads a chunk's logits, writes their exponentials in bf16 and 12 bytes for 256 of them; what
// the sums read is noise. Limited by: HBM, where L2 does not hold the logits. Measured as a part of
// training.cu.
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/linear/training_steps.h"
#include "kernels/cuda/loss/loss_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kTrainingRows % kWarps == 0);
constexpr int kTile = kTrainingTile;
constexpr int kLaneTokens = kTile / 32;
static_assert(kLaneTokens * sizeof(Bf16) == 16);

// Fills in `count` rows; rows from `rows` on are skipped. The head has `tokens` tokens from
// `first_token` on.
__global__ void __launch_bounds__(kThreads)
    BeginKernel(const CrossEntropyRow* params, int64_t rows, int64_t count, int32_t first_token,
                int32_t tokens, RowState* to) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (r >= count) return;
  RowState row{.use = RowUse::kSkipped,
               .target = -1,
               .log2e_over_temperature = 0.0f,
               .smooth = 0,
               .stats = {-kInfinity, 0.0f},
               .total = 0.0,
               .first_nan = -1,
               .factor = 0.0f,
               .flat = 0.0f,
               .more = 0.0f,
               .hit = 0.0f};
  if (r < rows && params[r].active != 0) {
    const CrossEntropyRow& p = params[r];
    row.use = p.target < 0 ? RowUse::kIgnored : RowUse::kCounted;
    const int32_t target = p.target - first_token;
    row.target = p.target >= first_token && target < tokens ? target : -1;
    row.log2e_over_temperature = Log2EOverTemperature(0.0f, p.temperature);
    row.smooth = p.label_smoothing > 0 ? 1 : 0;
  }
  to[r] = row;
}

// Makes the exponentials of a chunk, a tile of a row by each warp. The logits are [rows, stride],
// of the rows from `first` on.
__global__ void __launch_bounds__(kThreads)
    ExponentialKernel(const float* __restrict__ logits, int64_t stride,
                      const RowState* __restrict__ rows, int64_t first, Chunk chunk) {
  const int lane = threadIdx.x % 32;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (tile >= chunk.Tiles()) return;
  const int64_t r = first + blockIdx.y;
  const RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const int begin = tile * kTile + lane * kLaneTokens;  // in the chunk
  const float* from = logits + blockIdx.y * stride + begin;
  const int valid = static_cast<int>(min(chunk.tokens - begin, int64_t{kLaneTokens}));
  float x[kLaneTokens];
  if (valid == kLaneTokens) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; i += 4) {
      const float4 four = __ldcs(reinterpret_cast<const float4*>(from + i));
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) x[i] = i < valid ? from[i] : -kInfinity;
  }
  float max = -kInfinity;
#pragma unroll
  for (float value : x) max = fmaxf(max, value);
  max = WarpMax(max);
  const Exponential exponential = TileExponential(max, row.log2e_over_temperature);
  float e[kLaneTokens];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    e[i] = exponential(x[i]);
    sum += e[i];
  }
  const float factor = FactorOfTile(max, row.log2e_over_temperature);
  uint32_t words[kLaneTokens / 2];
#pragma unroll
  for (int i = 0; i < kLaneTokens; i += 2)
    words[i / 2] = PackPair<Bf16>(e[i] * factor, e[i + 1] * factor);
  *reinterpret_cast<uint4*>(chunk.e.At(r, chunk.first + begin)) = {words[0], words[1], words[2],
                                                                   words[3]};
  const int64_t place = row.target - chunk.first - begin;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if (place == i) chunk.target_logits[r] = x[i];
  }
  float total = 0.0f;
  if (row.smooth != 0) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) total = fmaf(i < valid ? x[i] : 0.0f, kTotalUnit, total);
    total = WarpSum(total);
  }
  sum = WarpSum(sum);
  if (lane != 0) return;
  chunk.maxima[r * chunk.maxima_stride + tile] = max;
  chunk.parts[r * chunk.parts_stride + tile] = {sum, total};
}

// The first token of the chunk whose exponential is NaN, by one warp. There must be one.
__device__ __noinline__ int32_t FindNanToken(const Chunk& chunk, int64_t r, int lane) {
  const TilePart* parts = chunk.parts + r * chunk.parts_stride;
  int tile = 0;
  while (tile + 1 < chunk.Tiles() && !isnan(parts[tile].sum)) ++tile;
  const Bf16* e = chunk.e.At(r, chunk.first + tile * kTile);
  int first = kTile;
  for (int i = lane; i < kTile; i += 32) {
    if (isnan(ToFloat(e[i]))) first = min(first, i);
  }
  return static_cast<int32_t>(chunk.first) + tile * kTile + __reduce_min_sync(kFullWarp, first);
}

// Adds the chunk's tiles to the rows' sums, a row by each warp.
__global__ void __launch_bounds__(kThreads) AddKernel(RowState* rows, Chunk chunk) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const TilePart* parts = chunk.parts + r * chunk.parts_stride;
  const float* maxima = chunk.maxima + r * chunk.maxima_stride;
  const Stats more = MergeCells(chunk.Tiles(), row.log2e_over_temperature, lane, [&](int i) {
    return Stats{maxima[i], parts[i].sum};
  });
  const Stats before = row.stats;
  const Stats stats = MergeCells(2, row.log2e_over_temperature, lane,
                                 [&](int i) { return i == 0 ? before : more; });
  double total = 0.0;
  if (row.smooth != 0) {
    for (int i = lane; i < chunk.Tiles(); i += 32) total += parts[i].total;
    total = WarpSum(total);
  }
  int32_t first_nan = row.first_nan;
  if (first_nan < 0 && isnan(more.sum)) first_nan = FindNanToken(chunk, r, lane);
  __syncwarp();
  if (lane != 0) return;
  row.stats = stats;
  row.total += total;
  row.first_nan = first_nan;
}

}  // namespace

void BeginRows(Steps& steps, const CrossEntropyRow* params, int64_t rows, int64_t count,
               int32_t first_token, int32_t tokens, RowState* to) {
  steps.Launch(&BeginKernel, GridFor(count, kThreads), kThreads, params, rows, count, first_token,
               tokens, to);
}

void MakeExponentials(Steps& steps, const TensorView& logits, const RowState* rows, int64_t first,
                      const Chunk& chunk) {
  const dim3 grid(GridFor(chunk.Tiles(), kWarps).x, static_cast<unsigned>(logits.rows));
  steps.Launch(&ExponentialKernel, grid, kThreads, static_cast<const float*>(logits.data),
               logits.row_stride, rows, first, chunk);
}

void AddToRows(Steps& steps, RowState* rows, int64_t count, const Chunk& chunk) {
  steps.Launch(&AddKernel, GridFor(count, kWarps), kThreads, rows, chunk);
}

}  // namespace logitd::cuda
