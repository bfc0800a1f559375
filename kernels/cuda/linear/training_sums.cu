// The rows of linear_cross_entropy_training before pass 1, and their sums after it.
//
// Cost: reads 12 bytes for each row and 256 tokens; noise beside the products.
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/counted_rows.cuh"
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/linear/training_steps.h"
#include "kernels/cuda/loss/loss_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kTrainingRows % kWarps == 0);
constexpr int kTile = kTrainingTile;

__device__ inline RowState StateOf(const CrossEntropyRow* params, int64_t r, int32_t first_token,
                                   int32_t tokens) {
  RowState row{.use = RowUse::kSkipped,
               .at = static_cast<int32_t>(r),
               .target = -1,
               .log2e_over_temperature = 0.0f,
               .smooth = 0,
               .stats = {-kInfinity, 0.0f},
               .total = 0.0,
               .first_nan = -1,
               .factor = 0.0f,
               .flat = 0.0f,
               .more = 0.0f,
               .hit = 0.0f,
               .exponent = kGradientExponent};
  if (params == nullptr || params[r].active == 0) return row;
  const CrossEntropyRow& p = params[r];
  row.use = p.target < 0 ? RowUse::kIgnored : RowUse::kCounted;
  const int32_t target = p.target - first_token;
  row.target = p.target >= first_token && target < tokens ? target : -1;
  row.log2e_over_temperature = Log2EOverTemperature(0.0f, p.temperature);
  row.smooth = p.label_smoothing > 0 ? 1 : 0;
  return row;
}

// By one block.
__global__ void __launch_bounds__(kOrderThreads)
    BeginKernel(const CrossEntropyRow* params, int64_t rows, bool counted_only, int64_t count,
                int32_t first_token, int32_t tokens, RowState* to) {
  const auto take = [&](int64_t r) {
    return !counted_only || (params[r].active != 0 && params[r].target >= 0);
  };
  const int64_t taken = ForEachTaken(rows, take, [&](int64_t r, int64_t place) {
    if (place < count) to[place] = StateOf(params, r, first_token, tokens);
  });
  for (int64_t i = taken + threadIdx.x; i < count; i += kOrderThreads)
    to[i] = StateOf(nullptr, 0, first_token, tokens);
}

// The first token of the chunk whose exponential is NaN, by one warp. There must be one.
template <class T>
__device__ __noinline__ int32_t FindNanToken(const Chunk& chunk, int64_t r, int lane) {
  const TilePart* parts = chunk.parts + r * chunk.parts_stride;
  int tile = 0;
  while (tile + 1 < chunk.Tiles() && !isnan(parts[tile].sum)) ++tile;
  const T* e = chunk.e.At<T>(r, chunk.first + tile * kTile);
  int first = kTile;
  for (int i = lane; i < kTile; i += 32) {
    if (isnan(ToFloat(e[i]))) first = min(first, i);
  }
  return static_cast<int32_t>(chunk.first) + tile * kTile + __reduce_min_sync(kFullWarp, first);
}

// Adds up the tiles of the rows, a row by each warp.
template <class T>
__global__ void __launch_bounds__(kThreads) AddKernel(RowState* rows, Chunk all) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const Stats stats = SumTiles(row, all.Tiles(), lane, [&](int i) { return all.SumsOf(r, i); });
  const int32_t first_nan = isnan(stats.sum) ? FindNanToken<T>(all, r, lane) : -1;
  if (lane == 0) row.first_nan = first_nan;
}

}  // namespace

void BeginRows(Steps& steps, const CrossEntropyRow* params, int64_t rows, bool counted_only,
               int64_t count, int32_t first_token, int32_t tokens, RowState* to) {
  steps.Launch(&BeginKernel, 1, kOrderThreads, params, rows, counted_only, count, first_token,
               tokens, to);
}

void AddToRows(Steps& steps, DType dtype, RowState* rows, int64_t count, const Chunk& all) {
  Visit16Bit(dtype, [&]<class T>() {
    steps.Launch(&AddKernel<T>, GridFor(count, kWarps), kThreads, rows, all);
  });
}

}  // namespace logitd::cuda
