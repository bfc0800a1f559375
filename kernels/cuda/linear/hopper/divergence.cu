// linear_divergence on Hopper without rows of logits in memory: both products in one kernel
// (product.cuh), a tile of the first head, then the same tile of the second. The first tile waits
// in registers and shared memory; six sums of both are left for every row and tile, and a block for
// each row merges them. Few rows go through memory, with the same bits.
//
// A row whose tile has an infinity, a NaN or a number beyond f32, or logits beyond 2^24
// temperatures, adds up that tile's tokens in double precision, one by one.
//
// Cost: both products. Memory: rows * vocab / 256 * 96 bytes, of which a third is written. Limited
// by: the tensor cores at the clock that the power limit allows; few rows by HBM. Measured (bench/
// results/h200/divergence.json), over two bare products, 128256 x 4096: 4096 rows 0.97 (f16 1.02,
// hidden 2048 1.04), 8192 1.05, 1024 1.01, 300 1.20, 256 1.07, 64 0.94, 1 row 1.03. Another card
// (divergence_738c3b18.json): 4096 rows 1.03, f16 1.02, hidden 2048 1.07.
// Dropped: the first tile in L2 (1.06: HBM reads 20.8 GB for 11.4), L2 hints for weights or states
// (3% slower), sets of 12 MB (3%), 224 registers to multiply (1%).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/hopper/middle_plan.h"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/loss/pair_sums.cuh"
#include "kernels/cuda/rows/reductions.cuh"
#include "kernels/divergence_sums.h"

namespace logitd::cuda::hopper {

// x is the first head's and y the reference's, as in kernels/divergence_sums.h.

// ---- what tiles leave --------------------------------------------------------------------------

// The sums of a row's tile. Exponents are relative to a shift, the tile's maximum times the factor,
// rounded: one multiply-add makes an exponent, and the merge knows the shift.
struct alignas(16) PairTile {
  float x_max, y_max;
  float x_sum, y_sum;  // x_sum NaN: the tile is a CarefulTile, and only the maxima are meant
  float x_moment, y_moment;
  float x_apart, y_apart;
};
struct CarefulTile {
  DivergenceSums sums;  // a and b are of the tile
  int32_t nan;          // the lowest token that is NaN, or kNoToken
};
constexpr int32_t kNoToken = std::numeric_limits<int32_t>::max();
constexpr float kMostShift = 0x1p24f;  // a larger one may be far from the maximum

constexpr int kKeepThreads = kConsumers * kGroupThreads;
constexpr int kRowVectors = kRowSums / 4;  // of a thread and row
constexpr int kHeldVectors = 12;  // of the upper row, in registers; others in shared memory
constexpr int kSharedVectors = 2 * kRowVectors - kHeldVectors;

struct PairParams {
  const DivergenceRow* rows;
  float4* aside;         // [blocks, 2, kRowVectors, kKeepThreads]: x and y of rows that need care
  PairTile* tiles;       // [rows, row_tiles]
  CarefulTile* careful;  // [rows, row_tiles]
  float* x_targets;      // [rows]: the logits of targets
  float* y_targets;
  float x_scale, y_scale;  // of the heads
  int32_t row_tiles;
};

// ---- the sums of a row's tile ------------------------------------------------------------------

struct TwoTokens {
  float x[2], y[2];
};

// A row, as its four threads see it. Each has 64 of the tile's 256 tokens: those of TokenOf().
struct PairRow {
  int r;  // -1: there is no such row
  int target = kIgnoredTarget;
  float x_factor = 1.0f, y_factor = 1.0f;
  float x_max = 0.0f, y_max = 0.0f;  // of the tile

  __device__ PairRow(const PairParams& p, int64_t row, int64_t rows)
      : r(row < rows ? static_cast<int>(row) : -1) {
    if (r < 0) return;
    const DivergenceRow& ask = p.rows[r];
    if (ask.active == 0) return;
    target = ask.target;
    x_factor = DivergenceScale(ask.temperature);
    y_factor = DivergenceScale(ask.reference_temperature);
  }
  __device__ float XShift() const { return __fmul_rn(x_max, x_factor); }
  __device__ float YShift() const { return __fmul_rn(y_max, y_factor); }

  // A logit for tokens after the vocabulary: its exponent is about -256, and its power 0.
  __device__ static float Fill(float shift, float factor) { return (shift - 256.0f) / factor; }

  // Leaves the sums of the tile at `first`, by whole warps. pairs(i) is two of the thread's tokens,
  // the i-th and the next. Where a row of the warp needs care, set_aside() is called, then
  // again(i), which is x and y of the i-th token.
  template <int kUnroll, class Pairs, class SetAside, class Again>
  __device__ void Sum(const PairParams& p, int first, int vocab, int lane, const Pairs& pairs,
                      const SetAside& set_aside, const Again& again) const {
    const float x_shift = XShift(), y_shift = YShift();
    PairSums sums;
#pragma unroll kUnroll
    for (int i = 0; i < kRowSums; i += 2) {
      const TwoTokens two = pairs(i);
      sums.Add(fmaf(two.x[0], x_factor, -x_shift), fmaf(two.y[0], y_factor, -y_shift));
      sums.Add(fmaf(two.x[1], x_factor, -x_shift), fmaf(two.y[1], y_factor, -y_shift));
    }
    PairTile tile = {.x_max = x_max,
                     .y_max = y_max,
                     .x_sum = QuadSum(sums.x_sum),
                     .y_sum = QuadSum(sums.y_sum),
                     .x_moment = QuadSum(sums.x_moment),
                     .y_moment = QuadSum(sums.y_moment),
                     .x_apart = QuadSum(sums.x_apart),
                     .y_apart = QuadSum(sums.y_apart)};
    const float all = tile.x_moment + tile.y_moment + tile.x_apart + tile.y_apart;
    const bool plain =
        fabsf(all) < kInfinity && fabsf(x_shift) < kMostShift && fabsf(y_shift) < kMostShift;
    if (!__all_sync(kFullWarp, plain)) {
      set_aside();
      SumWithCare(p, r >= 0 && !plain, first, vocab, lane, again);
      if (!plain) tile.x_sum = std::numeric_limits<float>::quiet_NaN();
    }
    if (r >= 0 && lane % 4 == 0) p.tiles[int64_t{r} * p.row_tiles + first / kTile] = tile;
  }

  template <class Again>
  __device__ void SumWithCare(const PairParams& p, bool careful, int first, int vocab, int lane,
                              const Again& again) const {
    const DivergenceRow ask = p.rows[max(r, 0)];
    DivergenceSums sums;
    int nan = kNoToken;
#pragma unroll 1
    for (int i = 0; careful && i < kRowSums; ++i) {
      const int token = first + TokenOf(lane, i);
      if (token >= vocab) break;
      const auto [x, y] = again(i);
      if (isnan(x) || isnan(y)) {
        nan = min(nan, token);
        continue;
      }
      const double a = BelowMax(x, x_max, ask.temperature);
      const double b = BelowMax(y, y_max, ask.reference_temperature);
      AddToken(sums, a, b, exp(a), exp(b));
    }
    const auto sum_over_quad = [](double& sum) {
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
    };
    sum_over_quad(sums.x_sum);
    sum_over_quad(sums.y_sum);
    sum_over_quad(sums.x_moment);
    sum_over_quad(sums.y_moment);
    sum_over_quad(sums.x_apart);
    sum_over_quad(sums.y_apart);
    sums.found |= __shfl_xor_sync(kFullWarp, sums.found, 1);
    sums.found |= __shfl_xor_sync(kFullWarp, sums.found, 2);
    nan = min(nan, __shfl_xor_sync(kFullWarp, nan, 1));
    nan = min(nan, __shfl_xor_sync(kFullWarp, nan, 2));
    if (careful && lane % 4 == 0) p.careful[int64_t{r} * p.row_tiles + first / kTile] = {sums, nan};
  }
};

// ---- epilogue ----------------------------------------------------------------------------------

struct PairEpilogue {
  using Params = PairParams;
  static constexpr int kSharedBytes =
      kSharedVectors * kKeepThreads * static_cast<int>(sizeof(float4));
  const Params& p;
  const int vocab;
  float4* const shared;  // this thread's: the upper row's, then the lower row's
  PairRow upper, lower;
  float held[4 * kHeldVectors];

  __device__ PairEpilogue(const Params& params, const ProductParams& product,
                          const SumsPlace& place)
      : p(params),
        vocab(product.vocab),
        shared(reinterpret_cast<float4*>(place.shared) + Thread()),
        upper(params, place.row, product.rows),
        lower(params, place.row + 8, product.rows) {}

  __device__ static int Thread() { return static_cast<int>(threadIdx.x) - kGroupThreads; }
  // The lower row is absent where the upper one is.
  __device__ bool HasRows() const { return __any_sync(kFullWarp, upper.r >= 0); }

  __device__ void Keep(float (&acc)[kThreadSums], int first, int lane) {
    if (!HasRows()) return;
    MakeLogits(acc, p.x_scale);
    TakeTargets(acc, p.x_targets, first, lane);
    upper.x_max = TakeMax<0>(acc, upper.x_factor, first, lane);
    lower.x_max = TakeMax<1>(acc, lower.x_factor, first, lane);
#pragma unroll
    for (int i = 0; i < 4 * kHeldVectors; ++i) held[i] = acc[SumOf(0, i)];
#pragma unroll
    for (int i = kHeldVectors; i < 2 * kRowVectors; ++i) {
      const int half = i / kRowVectors, at = i % kRowVectors * 4;
      shared[(i - kHeldVectors) * kKeepThreads] = {acc[SumOf(half, at)], acc[SumOf(half, at + 1)],
                                                   acc[SumOf(half, at + 2)],
                                                   acc[SumOf(half, at + 3)]};
    }
  }

  __device__ void Take(float (&acc)[kThreadSums], int first, int lane) {
    if (!HasRows()) return;
    MakeLogits(acc, p.y_scale);
    TakeTargets(acc, p.y_targets, first, lane);
    upper.y_max = TakeMax<0>(acc, upper.y_factor, first, lane);
    lower.y_max = TakeMax<1>(acc, lower.y_factor, first, lane);
    SumRow<0>(upper, acc, first, lane);
    SumRow<1>(lower, acc, first, lane);
  }

 private:
  template <int half>
  __device__ void SumRow(const PairRow& row, const float (&acc)[kThreadSums], int first,
                         int lane) const {
    const auto x = [&](int i) {
      const int vector = half * kRowVectors + i / 4;
      if (vector < kHeldVectors) return held[i];
      const float4& four = shared[(vector - kHeldVectors) * kKeepThreads];
      return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
    };
    const auto y = [&](int i) { return acc[SumOf(half, i)]; };
    float4* const aside =
        p.aside + int64_t{blockIdx.x} * (2 * kRowVectors * kKeepThreads) + Thread();
    const auto set_aside = [&] {
#pragma unroll
      for (int i = 0; i < kRowVectors; ++i) {
        aside[i * kKeepThreads] = {x(4 * i), x(4 * i + 1), x(4 * i + 2), x(4 * i + 3)};
        aside[(i + kRowVectors) * kKeepThreads] = {y(4 * i), y(4 * i + 1), y(4 * i + 2),
                                                   y(4 * i + 3)};
      }
    };
    const auto pairs = [&](int i) { return TwoTokens{{x(i), x(i + 1)}, {y(i), y(i + 1)}}; };
    const auto again = [&](int i) {
      const float* at = reinterpret_cast<const float*>(aside + i / 4 * kKeepThreads) + i % 4;
      return float2{at[0], at[4 * kRowVectors * kKeepThreads]};
    };
    row.Sum<kRowSums / 2>(p, first, vocab, lane, pairs, set_aside, again);
  }

  __device__ static void MakeLogits(float (&acc)[kThreadSums], float scale) {
    if (scale == 1) return;
#pragma unroll
    for (float& x : acc) x = __fmul_rn(x, scale);
  }

  __device__ void TakeTargets(const float (&acc)[kThreadSums], float* targets, int first,
                              int lane) const {
    const int places[2] = {upper.target - first, lower.target - first};
    const auto is_here = [](int place) { return place >= 0 && place < kTile; };
    if (!__any_sync(kFullWarp, is_here(places[0]) || is_here(places[1]))) return;
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) {
      if (TokenOf(lane, i) == places[0]) targets[upper.r] = acc[SumOf(0, i)];
      if (TokenOf(lane, i) == places[1]) targets[lower.r] = acc[SumOf(1, i)];
    }
  }

  // The row's largest logit of the tile at `first`. Fills in tokens from `vocab` on.
  template <int half>
  __device__ float TakeMax(float (&acc)[kThreadSums], float factor, int first, int lane) const {
    const auto fill = [&](float value) {
      if (first + kTile <= vocab) return;
#pragma unroll
      for (int i = 0; i < kRowSums; ++i) {
        if (first + TokenOf(lane, i) >= vocab) acc[SumOf(half, i)] = value;
      }
    };
    fill(-kInfinity);
    const float max = QuadMax<half>(acc);
    fill(PairRow::Fill(__fmul_rn(max, factor), factor));
    return max;
  }
};

// ---- from logits in memory ---------------------------------------------------------------------

struct PairMemory {
  const float* x;  // [rows, stride]
  const float* y;
  int64_t stride;
  int64_t rows;
  int32_t vocab;
};
constexpr int kTilesThreads = 128;

// Leaves what PairEpilogue does, with its bits; four threads for each row and tile read it twice,
// for maxima and for sums.
__global__ void __launch_bounds__(kTilesThreads)
    PairTilesKernel(const __grid_constant__ PairParams p, const __grid_constant__ PairMemory from) {
  constexpr int kUnroll = 8;
  const int lane = threadIdx.x % 32;
  const int64_t quad = (int64_t{blockIdx.x} * kTilesThreads + threadIdx.x) / 4;
  PairRow row(p, quad / p.row_tiles, from.rows);
  const int first = static_cast<int>(quad % p.row_tiles) * kTile;
  const int tokens = row.r < 0 ? 0 : min(kTile, from.vocab - first);  // of the tile
  const float* const x = from.x + max(row.r, 0) * from.stride + first;
  const float* const y = from.y + max(row.r, 0) * from.stride + first;
  const auto read = [&](int i, float x_fill, float y_fill) {
    const int at = TokenOf(lane, i);
    if (at + 2 <= tokens) {
      const float2 of_x = *reinterpret_cast<const float2*>(x + at);
      const float2 of_y = *reinterpret_cast<const float2*>(y + at);
      return TwoTokens{{of_x.x, of_x.y}, {of_y.x, of_y.y}};
    }
    if (at >= tokens) return TwoTokens{{x_fill, x_fill}, {y_fill, y_fill}};
    return TwoTokens{{x[at], x_fill}, {y[at], y_fill}};
  };
  const int target = row.target - first;
  if (target >= 0 && target < kTile && lane % 4 == 0) {
    p.x_targets[row.r] = x[target];
    p.y_targets[row.r] = y[target];
  }
  float x_max = -kInfinity, y_max = -kInfinity;
#pragma unroll kUnroll
  for (int i = 0; i < kRowSums; i += 2) {
    const TwoTokens two = read(i, -kInfinity, -kInfinity);
    x_max = fmaxf(x_max, fmaxf(two.x[0], two.x[1]));
    y_max = fmaxf(y_max, fmaxf(two.y[0], two.y[1]));
  }
  const auto max_over_quad = [](float max) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    return fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
  };
  x_max = max_over_quad(x_max);
  y_max = max_over_quad(y_max);
  row.x_max = row.r < 0 ? 0.0f : x_max;
  row.y_max = row.r < 0 ? 0.0f : y_max;
  const float x_fill = PairRow::Fill(row.XShift(), row.x_factor);
  const float y_fill = PairRow::Fill(row.YShift(), row.y_factor);
  row.Sum<kUnroll>(
      p, first, from.vocab, lane, [&](int i) { return read(i, x_fill, y_fill); }, [] {},
      [&](int i) {
        return float2{x[TokenOf(lane, i)], y[TokenOf(lane, i)]};
      });
}

namespace {

// ---- the end of a row --------------------------------------------------------------------------

constexpr int kFinishThreads = 128;
constexpr int kFinishWarps = kFinishThreads / 32;

// Adds a tile's sums, whose maxima are at a = x_above and b = y_above of their rows. -inf: no token
// of the tile counts in that row.
__device__ inline void AddTile(DivergenceSums& to, const DivergenceSums& tile, double x_above,
                               double y_above) {
  const bool has_x = x_above != -kInfinity, has_y = y_above != -kInfinity;
  const double x_factor = exp(x_above), y_factor = exp(y_above);
  to.found |= has_x && has_y ? tile.found : has_x ? kDivergenceOnlyX : has_y ? kDivergenceOnlyY : 0;
  if (has_x) {
    to.x_sum += x_factor * tile.x_sum;
    to.x_moment += x_factor * (tile.x_moment + x_above * tile.x_sum);
  }
  if (has_y) {
    to.y_sum += y_factor * tile.y_sum;
    to.y_moment += y_factor * (tile.y_moment + y_above * tile.y_sum);
  }
  if (has_x && has_y) {
    const double apart = x_above - y_above;
    to.x_apart += x_factor * (tile.x_apart + apart * tile.x_sum);
    to.y_apart += y_factor * (tile.y_apart - apart * tile.y_sum);
  }
}

constexpr double kLn2InDouble = 0.69314718055994530942;

// a of a row, of the shift of a tile whose sums are plain.
__device__ inline double ShiftBelowMax(float tile_max, float row_max, float factor) {
  if (row_max == kInfinity) return -kInfinity;
  return kLn2InDouble * (double{__fmul_rn(tile_max, factor)} - double{row_max} * double{factor});
}

__device__ inline DivergenceSums InNaturalUnits(const PairTile& tile) {
  return {.x_sum = tile.x_sum,
          .y_sum = tile.y_sum,
          .x_moment = kLn2InDouble * tile.x_moment,
          .y_moment = kLn2InDouble * tile.y_moment,
          .x_apart = kLn2InDouble * tile.x_apart,
          .y_apart = kLn2InDouble * tile.y_apart};
}

__device__ inline void Add(DivergenceSums& to, const DivergenceSums& more) {
  to.x_sum += more.x_sum;
  to.y_sum += more.y_sum;
  to.x_moment += more.x_moment;
  to.y_moment += more.y_moment;
  to.x_apart += more.x_apart;
  to.y_apart += more.y_apart;
  to.found |= more.found;
}

// A row's largest logits, and its first NaN.
struct PairTop {
  float x_max = -kInfinity, y_max = -kInfinity;
  int32_t nan = kNoToken;
};

// A block for each row merges its tiles and writes its answers.
__global__ void __launch_bounds__(kFinishThreads)
    FinishPairsKernel(const __grid_constant__ DivergenceArgs args,
                      const __grid_constant__ PairParams p) {
  __shared__ PairTop tops[kFinishWarps];
  __shared__ DivergenceSums all_sums[kFinishWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t r = blockIdx.x;
  const DivergenceRow ask = args.rows[r];
  if (ask.active == 0) return;
  const PairTile* tiles = p.tiles + r * p.row_tiles;
  const CarefulTile* careful = p.careful + r * p.row_tiles;
  PairTop top;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.row_tiles; i += kFinishThreads) {
    const float4 tile = *reinterpret_cast<const float4*>(tiles + i);
    top.x_max = fmaxf(top.x_max, tile.x);
    top.y_max = fmaxf(top.y_max, tile.y);
    if (isnan(tile.z)) top.nan = min(top.nan, careful[i].nan);
  }
  top = {WarpMax(top.x_max), WarpMax(top.y_max), __reduce_min_sync(kFullWarp, top.nan)};
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (const PairTop& other : tops) {
    top = {fmaxf(top.x_max, other.x_max), fmaxf(top.y_max, other.y_max), min(top.nan, other.nan)};
  }
  if (top.nan != kNoToken) {
    if (threadIdx.x == 0) AnswerNan(args.answers, r, top.nan);
    return;
  }
  DivergenceRows of = {.x_max = top.x_max, .y_max = top.y_max};
  const float x_factor = DivergenceScale(ask.temperature);
  const float y_factor = DivergenceScale(ask.reference_temperature);
  DivergenceSums sums;
  for (int i = threadIdx.x; i < p.row_tiles; i += kFinishThreads) {
    const PairTile tile = tiles[i];
    if (isnan(tile.x_sum)) {
      AddTile(sums, careful[i].sums, BelowMax(tile.x_max, of.x_max, ask.temperature),
              BelowMax(tile.y_max, of.y_max, ask.reference_temperature));
    } else {
      AddTile(sums, InNaturalUnits(tile), ShiftBelowMax(tile.x_max, top.x_max, x_factor),
              ShiftBelowMax(tile.y_max, top.y_max, y_factor));
    }
  }
  sums = MergeLanes(sums);
  if (lane == 0) all_sums[warp] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int other = 1; other < kFinishWarps; ++other) Add(sums, all_sums[other]);
  of.x_log = log(sums.x_sum);
  of.y_log = log(sums.y_sum);
  if (ask.target != kIgnoredTarget) {
    of.x_target = BelowMax(p.x_targets[r], of.x_max, ask.temperature);
    of.y_target = BelowMax(p.y_targets[r], of.y_max, ask.reference_temperature);
  }
  AnswerWhole(args.answers, r, ask, sums, of);
}

// ---- launch ------------------------------------------------------------------------------------

constexpr int64_t kRowsAtOnce = 16384;
constexpr int64_t kSlackBytes = 4096;  // for the alignment of the pieces

int64_t AsideVectors(const Scratch& scratch) {
  return int64_t{scratch.multiprocessors} * 2 * kRowVectors * kKeepThreads;
}
int64_t FixedBytes(const Scratch& scratch) {
  return AsideVectors(scratch) * static_cast<int64_t>(sizeof(float4)) + kSlackBytes;
}
// Bytes that a row leaves.
int64_t RowBytes(int64_t vocab) {
  return CeilDiv(vocab, kTile) * static_cast<int64_t>(sizeof(PairTile) + sizeof(CarefulTile)) +
         2 * static_cast<int64_t>(sizeof(float));
}

// The rows of a pass: as many as fit into `scratch`, in whole groups, or fewer, so that all passes
// have about the same.
int64_t RowsOfPass(int64_t rows, int64_t vocab, const Scratch& scratch) {
  const int64_t room = static_cast<int64_t>(scratch.left()) - FixedBytes(scratch);
  const int64_t most = std::clamp<int64_t>(room / RowBytes(vocab) / kBlockRows * kBlockRows,
                                           kBlockRows, kRowsAtOnce);
  return RoundUp(CeilDiv(rows, CeilDiv(rows, most)), kBlockRows);
}

// Rows whose sums go through memory: the weights' read takes the time, or the other product would
// pay for many absent rows.
bool GoThroughMemory(int64_t rows, int64_t vocab, const Scratch& scratch) {
  constexpr int64_t kFewestRows = 16;  // both ways take the same time
  constexpr int64_t kMostRows = kMiddleBlocks * kMostMiddleBlockRows;
  if (rows > kMostRows ||
      2 * rows * RoundUp(vocab, 32) * 4 + kSlackBytes > static_cast<int64_t>(scratch.left()) / 2) {
    return false;
  }
  const int64_t paid = RoundUp(rows, 2 * kGroupRows);
  return rows <= kFewestRows ||
         (rows > 2 * kGroupRows && paid * 10 >= int64_t{MiddlePlanOf(rows).PaidRows()} * 11);
}

cudaError_t SumThroughMemory(const LinearDivergenceArgs& args, const PairParams& p,
                             const Scratch& given, cudaStream_t stream) {
  Scratch scratch = given;
  const int64_t rows = args.hidden.rows;
  const int64_t stride = RoundUp(args.vocab(), 32);
  float* const x = scratch.Take<float>(static_cast<size_t>(rows * stride));
  float* const y = scratch.Take<float>(static_cast<size_t>(rows * stride));
  if (x == nullptr || y == nullptr) return cudaErrorMemoryAllocation;
  const auto make = [&](const TensorView& hidden, const HeadView& head, float* to) {
    return Logits(hidden, head, to, stride, scratch, stream);
  };
  cudaError_t error = make(args.hidden, args.head, x);
  if (error == cudaSuccess) error = make(args.reference_hidden, args.reference_head, y);
  if (error != cudaSuccess) return error;
  const PairMemory from = {
      .x = x, .y = y, .stride = stride, .rows = rows, .vocab = static_cast<int32_t>(args.vocab())};
  return LaunchKernel(
      &PairTilesKernel,
      {.grid = GridFor(rows * p.row_tiles * 4, kTilesThreads), .threads = kTilesThreads}, stream, p,
      from);
}

cudaError_t SumInOneKernel(const LinearDivergenceArgs& args, const PairParams& p,
                           const Scratch& scratch, cudaStream_t stream) {
  return Visit16Bit(args.head.weight.dtype, [&]<class T>() {
    return LaunchProduct<T, PairEpilogue>(
        {{args.hidden, args.head.weight}, {args.reference_hidden, args.reference_head.weight}},
        nullptr, p, scratch, stream);
  });
}

cudaError_t LaunchPass(const LinearDivergenceArgs& args, const DivergenceArgs& divergence,
                       Scratch scratch, cudaStream_t stream) {
  const int64_t rows = args.hidden.rows;
  const int64_t tiles = CeilDiv(args.vocab(), kTile);
  const PairParams p = {.rows = divergence.rows,
                        .aside = scratch.Take<float4>(static_cast<size_t>(AsideVectors(scratch))),
                        .tiles = scratch.Take<PairTile>(static_cast<size_t>(rows * tiles)),
                        .careful = scratch.Take<CarefulTile>(static_cast<size_t>(rows * tiles)),
                        .x_targets = scratch.Take<float>(static_cast<size_t>(rows)),
                        .y_targets = scratch.Take<float>(static_cast<size_t>(rows)),
                        .x_scale = args.head.scale,
                        .y_scale = args.reference_head.scale,
                        .row_tiles = static_cast<int32_t>(tiles)};
  if (p.aside == nullptr || p.tiles == nullptr || p.careful == nullptr || p.x_targets == nullptr ||
      p.y_targets == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  const auto sum =
      GoThroughMemory(rows, args.vocab(), scratch) ? &SumThroughMemory : &SumInOneKernel;
  const cudaError_t error = sum(args, p, scratch, stream);
  if (error != cudaSuccess) return error;
  return LaunchKernel(&FinishPairsKernel, {.grid = GridFor(rows), .threads = kFinishThreads},
                      stream, divergence, p);
}

}  // namespace

bool HaveRoomForDivergences(int64_t vocab, const Scratch& scratch) {
  return FixedBytes(scratch) + kBlockRows * RowBytes(vocab) <=
         static_cast<int64_t>(scratch.bytes) / 2;
}

cudaError_t Divergences(const LinearDivergenceArgs& args, const Scratch& scratch,
                        cudaStream_t stream) {
  const int64_t all = args.rows();
  const int64_t step = RowsOfPass(all, args.vocab(), scratch);
  for (int64_t first = 0; first < all; first += step) {
    const int64_t rows = std::min(step, all - first);
    LinearDivergenceArgs part = args;
    part.hidden = RowsOf(args.hidden, first, rows);
    part.reference_hidden = RowsOf(args.reference_hidden, first, rows);
    const cudaError_t error = LaunchPass(part, RowsFrom(args.divergence, first), scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda::hopper
