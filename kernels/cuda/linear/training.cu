// linear_cross_entropy and its backward in one: three products, because the logits are made once.
//
// Between the passes the logits are kept as their exponentials E, in bf16: of the logit itself where
// the largest of its tile, 256 tokens of a row, is moderate, else relative to that one, so that no E
// that matters over- or underflows. E is kept in the memory of d_weight, which is unused until
// d_weight is written. The vocabulary is processed in chunks, and E of a chunk is where d_weight of
// the chunk before it will be; E of the first chunk is in scratch, and so is a maximum for every row
// and tile.
//
//   pass 1, for every chunk   logits (product 1), E, their maxima, the rows' sums. On Hopper one
//                             kernel does it for all chunks (hopper/training.cu), without logits.
//   then                      losses and statuses, and the factor from a row's E to its gradients G.
//                             It becomes a part of the row's hidden state, in bf16, and of its
//                             d_hidden at the end. Where no factor serves all of a row (logits or
//                             factors that are not moderate, label smoothing) its E becomes G
//   pass 2, chunks backwards  E weight is added to d_hidden in fp32 (product 2), and E^T hidden is
//                             the chunk's d_weight (product 3), written over E of the chunk after it
//
// A target's E is made from its G, and that from its logit, as in the backward: near a probability
// of 1 the rounded E loses its digits.
//
// The head and the device fix chunks and the products' algorithms, so that the bits of a row's
// answers and d_hidden do not depend on other rows. Ignored and skipped rows are rows of zeros in
// products 2 and 3.
//
// Serves bf16 heads without bias and softcap (linear/routes.cu), where d_bias is not wanted,
// d_weight has no gaps, and the rows' E fit into it (up to `hidden` rows, twice as many where it is
// f32), the rest into scratch. Any other call is the two ops, one after the other.
//
// On a shard of a head the passes are two calls, on Hopper only (shard_training.h). Each shard sends
// the maxima and sums of its tiles to all others, and all add the tiles of the vocabulary in the
// order of one device, so that losses have its bits. d_hidden is whole before the last product 3,
// which its exchange overlaps. Long because a call and its halves share the passes.
//
// Cost: three products, the floor; in addition a write of E, one read and write of d_hidden in fp32
// for every chunk of up to 16384 tokens, and except on Hopper a write and a read of the logits, in
// part out of L2. Where E becomes G, a read and a write of it. Memory in addition to inputs and
// outputs: at 4096 rows of 4096, a chunk's E (128 MiB), d_hidden in fp32 (64; in pass 1 the tiles'
// sums are there), hidden states (32), the library's workspace (18 to 32), maxima (8; except on
// Hopper 16 of logits). Limited by: the tensor cores, at the clock that the power limit allows
// (bench/results/h100/products_power.json).
// Measured on an H100 (the same file, run 3), within 290 MiB: 4096 x 4096 x 128256 18.4 ms, 97% of
// three bare products of the run; 2048 x 5120 x 151936 14.1 ms, 94%.
// Tried and dropped: pass 1 by cuBLASLt and a kernel on its logits (4% slower on an H200). G in place
// of every E, by a kernel before product 2 (3% slower on an H100; 8% where product 2 takes 1024 rows
// at a time). Product 2 by the algorithm for 4096 rows (the same), chunks of 8192 tokens (1%
// slower), cuBLASLt's second choices (the same within 1%).
#include <algorithm>
#include <limits>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/linear/shards.cuh"
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = kTrainingTile;
constexpr int kLaneTokens = kTile / 32;
constexpr int kGroupRows = 64;
static_assert(kLaneTokens * sizeof(Bf16) == 16);
static_assert(kGroupRows % kWarps == 0);

// ---- kernels -----------------------------------------------------------------------------------

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

// The factor that turns E of a tile into probabilities. It comes from the row's sums and not from
// its logsumexp, which is rounded: where that is large, p would be off by orders of magnitude.
__device__ inline float ProbabilityOfUnit(const Outcome& outcome) {  // where E is not relative
  return static_cast<float>(exp(outcome.AboveMax(0.0) - outcome.log_sum));
}
__device__ inline float ProbabilityOfMax(const Outcome& outcome, float log2e_over_temperature,
                                         float max) {
  if (max == -kInfinity) return 0.0f;  // all are 0
  if (IsModerateTile(max, log2e_over_temperature)) return ProbabilityOfUnit(outcome);
  const Exponential exponential(max, log2e_over_temperature);
  const float p = static_cast<float>(exp(outcome.AboveMax(max) - outcome.log_sum));
  return exponential.plain
             ? p * Exp2(-fmaf(max, exponential.log2e_over_temperature, exponential.shift))
             : p;
}

// What a shard tells the others of a tile, and of a row.
struct TileSums {
  float max;
  float sum;
  float total;
};
struct TrainingBlock {
  TileSums* tiles;  // [rows, most_tiles]
  int32_t* nan;     // [rows]: the first token of the shard that is NaN; -1: none
  float* target;    // [rows]: the target's logit, where the shard has the target
  int64_t most_tiles;
  size_t bytes;

  TrainingBlock(std::byte* block, const VocabShards& shards, int64_t rows)
      : most_tiles(shards.most_cells() * (kCell / kTile)) {
    const int64_t tiles_bytes = rows * most_tiles * static_cast<int64_t>(sizeof(TileSums));
    tiles = reinterpret_cast<TileSums*>(block);
    nan = reinterpret_cast<int32_t*>(block + tiles_bytes);
    target = reinterpret_cast<float*>(nan + rows);
    bytes = static_cast<size_t>(RoundUp(tiles_bytes + 8 * rows, 16));
  }
};

// Writes a shard's block, a row by each warp.
__global__ void __launch_bounds__(kThreads)
    TellShardsKernel(const RowState* rows, int64_t count, Chunk all, int32_t first_token,
                     const __grid_constant__ TrainingBlock to) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= count || rows[r].use == RowUse::kSkipped) return;
  for (int i = lane; i < all.Tiles(); i += 32) {
    const TilePart part = all.parts[r * all.parts_stride + i];
    to.tiles[r * to.most_tiles + i] = {all.maxima[r * all.maxima_stride + i], part.sum, part.total};
  }
  if (lane != 0) return;
  to.nan[r] = rows[r].first_nan < 0 ? -1 : first_token + rows[r].first_nan;
  if (rows[r].target >= 0) to.target[r] = all.target_logits[r];
}

// Makes the rows' sums those of all shards, and their target's logit known, a row by each warp. The
// order is that of AddKernel. `first`: the block of the first shard.
__global__ void __launch_bounds__(kThreads)
    AddShardsKernel(RowState* rows, int64_t count, const CrossEntropyRow* params,
                    const __grid_constant__ TrainingBlock first,
                    const __grid_constant__ Shards shards, int tiles, float* target_logits) {
  constexpr int kCellTiles = kCell / kTile;
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= count) return;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const auto tile = [&](int i) -> const TileSums& {
    const int shard = shards.OwnerOfCell(i / kCellTiles);
    return shards.Of(first.tiles,
                     shard)[r * first.most_tiles + i - shards.FirstCell(shard) * kCellTiles];
  };
  const Stats more = MergeCells(tiles, row.log2e_over_temperature, lane, [&](int i) {
    return Stats{tile(i).max, tile(i).sum};
  });
  const Stats before = {-kInfinity, 0.0f};
  const Stats stats = MergeCells(2, row.log2e_over_temperature, lane,
                                 [&](int i) { return i == 0 ? before : more; });
  double total = 0.0;
  if (row.smooth != 0) {
    for (int i = lane; i < tiles; i += 32) total += tile(i).total;
    total = WarpSum(total);
  }
  int32_t first_nan = -1;  // of the first shard that has one
  for (int s = shards.count - 1; s >= 0; --s) {
    const int32_t nan = shards.Of(first.nan, s)[r];
    if (nan >= 0) first_nan = nan;
  }
  __syncwarp();
  if (lane != 0) return;
  row.stats = stats;
  row.total = total;
  row.first_nan = first_nan;
  const int32_t target = params[r].target;
  if (target >= 0) target_logits[r] = shards.Of(first.target, shards.OwnerOf(target))[r];
}

// Infinities become finite, so that 0 times them is 0. NaN stays.
__device__ inline float Finite(float x) {
  constexpr float kMost = std::numeric_limits<float>::max();
  return fabsf(x) > kMost ? copysignf(kMost, x) : x;
}

// The factor of a row's G, if one is enough for all its tiles, and moderate, so that it can be a
// factor of the hidden state in bf16 (elements of 2^-66 to 2^97 keep their digits); else 0.
__device__ inline float FactorOfRow(const Outcome& outcome, const Gradient& gradient,
                                    float log2e_over_temperature) {
  constexpr float kLeast = 0x1p-60f;
  constexpr float kMost = 0x1p30f;
  if (!IsModerateTile(outcome.max, log2e_over_temperature) || gradient.flat != 0.0f ||
      gradient.more != 1.0f) {
    return 0.0f;
  }
  const float factor = ProbabilityOfUnit(outcome) * gradient.weight * gradient.scale;
  return fabsf(factor) >= kLeast && fabsf(factor) <= kMost ? factor : 0.0f;  // NaN: 0
}

// Writes the rows' answers and makes their factors, a row by each warp. The maxima of rows that have
// no factor for all tiles become those of their tiles.
__global__ void __launch_bounds__(kThreads)
    ConcludeKernel(const __grid_constant__ CrossEntropyArgs args, const float* upstream,
                   const float* target_logits, RowState* rows, float* maxima, int tiles) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const float target_logit = row.use == RowUse::kIgnored ? 0.0f : target_logits[r];
  const Outcome outcome =
      Conclude(args, r, {row.stats, 0.0f, row.total, 0}, target_logit, row.first_nan, lane);
  if (row.use != RowUse::kCounted) return;
  const Gradient gradient = Gradient::Of(args.rows[r], static_cast<float>(outcome.LogSumExp()),
                                         upstream[r], args.logits.cols);
  const float factor = FactorOfRow(outcome, gradient, row.log2e_over_temperature);
  for (int i = lane; i < tiles && factor == 0.0f; i += 32) {
    float& at = maxima[r * tiles + i];
    at = Finite(ProbabilityOfMax(outcome, row.log2e_over_temperature, at) * gradient.weight *
                gradient.scale);
  }
  if (lane != 0) return;
  const float p = static_cast<float>(exp(outcome.Logprob(target_logit)));
  row.factor = factor;
  row.flat = gradient.flat * gradient.scale;
  row.more = gradient.more;
  row.hit = (fmaf(p, gradient.weight, -gradient.flat) - gradient.hit) * gradient.scale * row.more;
}

// Brings the rows' factors into their packed hidden states, a block a row. Those of ignored rows
// become zeros. Also makes the target's E what its G is, over the factor.
__global__ void __launch_bounds__(kThreads)
    ScaleStatesKernel(const RowState* rows, Bf16* states, int64_t stride, Chunk all) {
  const int64_t r = blockIdx.x;
  const RowState& row = rows[r];
  const bool plain = row.use == RowUse::kCounted && row.IsPlain();
  if (!plain && row.use != RowUse::kIgnored) return;
  const float factor = plain ? row.factor : 0.0f;
  if (plain && threadIdx.x == 0 && row.target >= 0)
    *all.e.At(r, row.target) = Bf16(row.hit / factor);
  uint4* vectors = reinterpret_cast<uint4*>(states + r * stride);
  for (int64_t i = threadIdx.x; i < stride / kLaneTokens; i += kThreads) {
    uint4 out = {};
    if (plain) {
      const uint4 vector = vectors[i];
      const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
      uint32_t scaled[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scaled[j] = PackPair<Bf16>(WordElement<Bf16>(words, 2 * j) * factor,
                                   WordElement<Bf16>(words, 2 * j + 1) * factor);
      }
      out = {scaled[0], scaled[1], scaled[2], scaled[3]};
    }
    vectors[i] = out;
  }
}

// Makes G of the E of a tile, in place, by one warp. A row that is not counted becomes zeros, whatever
// its memory holds.
__device__ inline void MakeGradient(const RowState& row, int64_t r, int tile, const Chunk& all,
                                    int lane) {
  const int64_t begin = int64_t{tile} * kTile + lane * kLaneTokens;
  uint4* at = reinterpret_cast<uint4*>(all.e.At(r, begin));
  uint4 out = {};
  if (row.use == RowUse::kCounted) {
    const float max = all.maxima[r * all.maxima_stride + tile];
    const bool plain = row.IsPlain();  // then only E becomes what it is in other tiles
    const float factor = plain ? Exp2(__fmul_rn(max, row.log2e_over_temperature)) : max;
    const float flat = plain ? 0.0f : row.flat;
    const float more = plain ? 1.0f : row.more;
    const uint4 vector = *at;
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    const int64_t place = plain ? -1 : row.target - begin;
    float g[kLaneTokens];
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      g[j] = __fmul_rn(fmaf(WordElement<Bf16>(words, j), factor, -flat), more);
      if (place == j) g[j] = row.hit;
    }
    out = {PackPair<Bf16>(g[0], g[1]), PackPair<Bf16>(g[2], g[3]), PackPair<Bf16>(g[4], g[5]),
           PackPair<Bf16>(g[6], g[7])};
  }
  *at = out;
}

// Makes G of the E that have no factor for all tiles of their row, a warp for up to 32 tiles of a row.
// Comes before ScaleStatesKernel, which writes the targets of the others.
__global__ void __launch_bounds__(kThreads) GradientKernel(const RowState* rows, Chunk all) {
  const int lane = threadIdx.x % 32;
  const int first =
      (static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32) * 32;
  const int64_t r = blockIdx.x;
  const RowState& row = rows[r];
  const int tile = first + lane;
  bool wanted = tile < all.Tiles();
  if (wanted && row.use == RowUse::kCounted && row.IsPlain()) {
    const float max = all.maxima[r * all.maxima_stride + tile];
    wanted = max != -kInfinity && !IsModerateTile(max, row.log2e_over_temperature);
  }
  for (unsigned left = __ballot_sync(kFullWarp, wanted); left != 0; left &= left - 1)
    MakeGradient(row, r, first + __ffs(left) - 1, all, lane);
}

// Writes d_hidden of the rows, a block for each: their sums times their factors. Zeros where a row is
// ignored, nothing where it is skipped.
template <class T>
__global__ void __launch_bounds__(kThreads)
    StoreHiddenKernel(const float* sums, int64_t sums_stride, int size, const RowState* rows, T* to,
                      int64_t to_stride) {
  const int64_t r = blockIdx.x;
  const RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const float factor = row.IsPlain() ? row.factor : 1.0f;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    to[r * to_stride + i] =
        FromFloat<T>(row.use == RowUse::kCounted ? sums[r * sums_stride + i] * factor : 0.0f);
  }
}

// ---- launch ------------------------------------------------------------------------------------

// How the work is cut. The head and the device fix it.
struct Cut {
  int64_t block = kGroupRows;  // rows of product 1, and those that product 2 is chosen for
  int64_t chunk = 16384;       // tokens, a multiple of kTile
  bool in_one = false;         // pass 1 is one kernel, which takes the whole vocabulary
  int64_t part = 0;            // else: tokens of product 1, in a chunk, a multiple of kTile
  int64_t tiles = 0;           // tiles of the vocabulary
  int64_t part_tiles = 0;      // tiles whose sums a row has at once
  int64_t hidden_stride = 0;

  // The largest chunk with which as many rows as `hidden` fit into `bytes`.
  Cut(const HeadView& head, int64_t bytes, bool one_kernel) : in_one(one_kernel) {
    constexpr int64_t kMostRows = 1024;
    constexpr int64_t kMostLogits = int64_t{4} << 20;  // L2 holds them, and the weights of a part
    constexpr int64_t kLeastChunk = 2048;
    hidden_stride = RoundUp(head.hidden(), 64);
    tiles = CeilDiv(head.vocab(), kTile);
    while (block < kMostRows && 2 * block <= head.hidden()) block *= 2;
    const auto set_chunk = [&](int64_t tokens) {
      chunk = tokens;
      part = std::min(chunk, kMostLogits / block);
      part_tiles = in_one ? tiles : chunk / kTile;
    };
    set_chunk(std::min(chunk, tiles * kTile));
    while (chunk > kLeastChunk && Bytes(head.hidden()) > bytes)
      set_chunk(RoundUp(chunk / 2, kTile));
  }

  int64_t Padded(int64_t rows) const { return RoundUp(rows, in_one ? kGroupRows : block); }

  // Bytes of a row's sums: of its tiles in pass 1, and of d_hidden in pass 2, in the same memory.
  int64_t SumsBytes() const {
    return std::max<int64_t>(hidden_stride * 4,
                             part_tiles * static_cast<int64_t>(sizeof(TilePart)));
  }

  // Bytes of scratch for a call with so many rows.
  int64_t Bytes(int64_t rows) const {
    constexpr int64_t kSlack = 4096;  // for the alignment of the pieces
    const int64_t size = static_cast<int64_t>(sizeof(Bf16));
    const int64_t of_row = hidden_stride * size + SumsBytes() + chunk * size + tiles * 4 + 4 +
                           static_cast<int64_t>(sizeof(RowState));
    return (in_one ? 0 : block * part * 4) + Padded(rows) * of_row + kSlack;
  }
};

// Whether a call on a route of training fits.
bool Fits(const LinearCrossEntropyBackwardArgs& args, const Cut& cut, int64_t room) {
  const int64_t hidden = args.head.hidden();
  const MutableTensorView& d_weight = args.d_weight;
  const int64_t row_bytes = hidden * static_cast<int64_t>(SizeOf(d_weight.dtype));
  return args.d_bias == nullptr &&
         // A product can write d_weight, and its memory has no gaps that belong to others.
         reinterpret_cast<uintptr_t>(d_weight.data) % 16 == 0 && row_bytes % 16 == 0 &&
         d_weight.row_stride == hidden &&
         cut.Padded(args.hidden.rows) * static_cast<int64_t>(sizeof(Bf16)) <= row_bytes &&
         cut.Bytes(args.hidden.rows) <= room;
}

// The tokens that a call has of a vocabulary, which may be a shard.
struct Place {
  int64_t first_token = 0;
  int64_t vocab = 0;
};

class Training {
 public:
  Training(const LinearCrossEntropyTrainingArgs& args, const Place& place, const Cut& cut,
           Products& products, Scratch scratch, cudaStream_t stream)
      : args_(args.gradient),
        forward_(args.Forward().cross_entropy),
        place_(place),
        cut_(cut),
        padded_(cut.Padded(args.gradient.hidden.rows)),
        device_(scratch),
        steps_(products, scratch, stream),
        rows_(scratch.Take<RowState>(padded_)),
        target_logits_(scratch.Take<float>(padded_)),
        maxima_(scratch.Take<float>(padded_ * cut.tiles)),
        sums_(scratch.Take<std::byte>(padded_ * cut.SumsBytes())),
        states_(scratch.Take<Bf16>(padded_ * cut.hidden_stride)),
        first_e_(scratch.Take<Bf16>(padded_ * cut.chunk)),
        logits_(scratch.Take<float>(cut.in_one ? 0 : cut.block * cut.part)) {
    forward_.logits.cols = place.vocab;
  }

  cudaError_t Run() {
    MakeSums();
    Conclude();
    MakeAllGradients([] {});
    const int64_t rows = args_.hidden.rows;
    StoreHidden(RowsOf(args_.d_hidden, 0, rows));
    return steps_.error();
  }

  // The first call of a shard: cut_.in_one.
  cudaError_t Begin(const TrainingBlock& block) {
    MakeSums();
    steps_.Launch(&TellShardsKernel, WarpGrid(args_.hidden.rows), kThreads, rows_,
                  args_.hidden.rows, TokensAt(0, args_.head.vocab()),
                  static_cast<int32_t>(place_.first_token), block);
    return steps_.error();
  }

  // The second, in the same scratch. `first`: the block of the first shard.
  cudaError_t End(const VocabShards& shards, const TrainingBlock& first,
                  absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) {
    const int64_t rows = args_.hidden.rows;
    steps_.Launch(&AddShardsKernel, WarpGrid(rows), kThreads, rows_, rows, args_.rows, first,
                  Shards(shards, first.bytes), static_cast<int>(CeilDiv(shards.vocab, kTile)),
                  target_logits_);
    Conclude();
    MakeAllGradients([&] {
      StoreHidden(DStates(0, rows));
      steps_.Do([&] { return hidden_done(DStates(0, rows)); });
    });
    return steps_.error();
  }

 private:
  // A grid with a warp for each of `count` items.
  static dim3 WarpGrid(int64_t count) { return GridFor(count, kWarps); }

  // Pass 1.
  void MakeSums() {
    const int64_t vocab = args_.head.vocab();
    steps_.Launch(&BeginKernel, GridFor(padded_, kThreads), kThreads, args_.rows, args_.hidden.rows,
                  padded_, static_cast<int32_t>(place_.first_token), static_cast<int32_t>(vocab),
                  rows_);
    Pack();
    if (cut_.in_one) {
      const Chunk all = TokensAt(0, vocab);
      MakeAllExponentials(all);
      AddToRows(all);
      return;
    }
    for (int64_t v = 0; v < vocab; v += cut_.chunk) {
      const Chunk chunk = TokensAt(v, cut_.chunk);
      MakeExponentials(chunk);
      AddToRows(chunk);
    }
  }

  void Conclude() {
    steps_.Launch(&ConcludeKernel, WarpGrid(padded_), kThreads, forward_, args_.upstream,
                  target_logits_, rows_, maxima_, static_cast<int>(cut_.tiles));
    const Chunk all = TokensAt(0, args_.head.vocab());
    const dim3 grid(static_cast<unsigned>(padded_), WarpGrid(CeilDiv(cut_.tiles, 32)).x);
    steps_.Launch(&GradientKernel, grid, kThreads, rows_, all);
    steps_.Launch(&ScaleStatesKernel, GridFor(padded_), kThreads, rows_, states_,
                  cut_.hidden_stride, all);
  }

  // Pass 2. hidden_is_whole() is called before the last product 3: all of d_hidden is added up.
  template <class HiddenIsWhole>
  void MakeAllGradients(const HiddenIsWhole& hidden_is_whole) {
    const int64_t last = (args_.head.vocab() - 1) / cut_.chunk * cut_.chunk;
    for (int64_t v = last; v >= 0; v -= cut_.chunk) {
      const Chunk chunk = TokensAt(v, cut_.chunk);
      AddToHidden(chunk, /*fresh=*/v == last);
      if (v == 0) hidden_is_whole();
      WriteWeight(chunk);
    }
  }

  Chunk TokensAt(int64_t v, int64_t count) const {
    return {.first = v,
            .tokens = std::min(count, args_.head.vocab() - v),
            .e = {.first = first_e_,
                  .others = static_cast<std::byte*>(args_.d_weight.data),
                  .chunk = cut_.chunk,
                  .chunk_bytes = cut_.chunk * args_.head.hidden() *
                                 static_cast<int64_t>(SizeOf(args_.d_weight.dtype))},
            .maxima = maxima_ + v / kTile,
            .maxima_stride = cut_.tiles,
            .parts = reinterpret_cast<TilePart*>(sums_),
            .parts_stride = cut_.part_tiles,
            .target_logits = target_logits_};
  }

  TensorView Weights(const Chunk& chunk) const {
    return RowsOf(args_.head.weight, chunk.first, chunk.tokens);
  }
  TensorView States(int64_t first, int64_t count) const {
    return {states_ + first * cut_.hidden_stride, DType::kBF16, count, args_.head.hidden(),
            cut_.hidden_stride};
  }
  MutableTensorView DStates(int64_t first, int64_t count) const {
    return {reinterpret_cast<float*>(sums_) + first * cut_.hidden_stride, DType::kF32, count,
            args_.head.hidden(), cut_.hidden_stride};
  }
  static TensorView Gradients(const Chunk& chunk, int64_t first, int64_t count) {
    return {chunk.e.At(first, chunk.first), DType::kBF16, count, chunk.tokens, chunk.e.chunk};
  }

  // Copies the hidden states of all rows except skipped ones. Those of ignored rows become zeros
  // later: an ignored row has a logsumexp and a status.
  void Pack() {
    steps_.Launch(&PackKernel<Bf16, RowState>, GridFor(padded_), kCopyThreads,
                  static_cast<const Bf16*>(args_.hidden.data), args_.hidden.row_stride,
                  static_cast<int>(args_.head.hidden()), rows_, RowUse::kIgnored, states_,
                  cut_.hidden_stride);
  }

  void MakeAllExponentials(const Chunk& all) {
    steps_.Do([&] {
      return hopper::Exponentials(States(0, args_.hidden.rows), args_.head, rows_, all, device_,
                                  steps_.stream());
    });
  }

  // Product 1 and the exponentials of its logits.
  void MakeExponentials(const Chunk& chunk) {
    for (int64_t offset = 0; offset < chunk.tokens; offset += cut_.part) {
      const Chunk part = chunk.Part(offset, cut_.part);
      for (int64_t r = 0; r < padded_; r += cut_.block) {
        steps_.Multiply({.a = States(r, cut_.block),
                         .b = Weights(part),
                         .transpose_b = true,
                         .out = {logits_, DType::kF32, cut_.block, part.tokens, cut_.part},
                         .alpha = args_.head.scale});
        const dim3 grid(WarpGrid(part.Tiles()).x, static_cast<unsigned>(cut_.block));
        steps_.Launch(&ExponentialKernel, grid, kThreads, logits_, cut_.part, rows_, r, part);
      }
    }
  }

  void AddToRows(const Chunk& chunk) {
    steps_.Launch(&AddKernel, WarpGrid(padded_), kThreads, rows_, chunk);
  }

  // Writes or, in place, scales d_hidden.
  void StoreHidden(const MutableTensorView& to) {
    const MutableTensorView sums = DStates(0, to.rows);
    VisitDType(to.dtype, [&]<class T>() {
      steps_.Launch(&StoreHiddenKernel<T>, GridFor(to.rows), kThreads,
                    static_cast<const float*>(sums.data), sums.row_stride,
                    static_cast<int>(to.cols), rows_, static_cast<T*>(to.data), to.row_stride);
    });
  }

  // Product 2.
  void AddToHidden(const Chunk& chunk, bool fresh) {
    steps_.Multiply({.a = Gradients(chunk, 0, padded_),
                     .b = Weights(chunk),
                     .out = DStates(0, padded_),
                     .asked_rows = cut_.block,
                     .alpha = args_.head.scale,
                     .beta = fresh ? 0.0f : 1.0f});
  }

  // Product 3.
  void WriteWeight(const Chunk& chunk) {
    const int64_t rows = RoundUp(args_.hidden.rows, kGroupRows);
    steps_.Multiply({.a = Gradients(chunk, 0, rows),
                     .transpose_a = true,
                     .b = States(0, rows),
                     .out = RowsOf(args_.d_weight, chunk.first, chunk.tokens),
                     .alpha = args_.head.scale});
  }

  const LinearCrossEntropyBackwardArgs& args_;
  CrossEntropyArgs forward_;
  const Place place_;
  const Cut cut_;
  const int64_t padded_;  // rows, in whole blocks or, where all are taken at once, in groups
  const Scratch device_;  // only what it says of the device is used
  Steps steps_;
  RowState* const rows_;        // [padded]
  float* const target_logits_;  // [padded]
  float* const
      maxima_;  // [padded, tiles]; later the factors of G, of rows that have no factor for all tiles
  std::byte* const sums_;  // [padded, part_tiles] of TilePart, then d_hidden as f32
  Bf16* const states_;     // [padded, hidden_stride]
  Bf16* const first_e_;    // [padded, chunk]
  float* const logits_;    // [block, part]
};

int64_t RoomFor(const Products& products, const Scratch& scratch) {
  return static_cast<int64_t>(scratch.left() - products.workspace_bytes());
}

// The work of a shard's call, in scratch that is cut the same way in both calls.
Training ShardTraining(const ShardTrainingArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream) {
  const Cut cut(args.training.gradient.head, RoomFor(products, scratch), /*one_kernel=*/true);
  const Place place = {.first_token = args.shards.at(args.shard).first, .vocab = args.shards.vocab};
  return Training(args.training, place, cut, products, scratch, stream);
}

// Where a shard without tokens has its part of d_hidden; no data where there is no room for it.
MutableTensorView ZerosOf(const LinearCrossEntropyBackwardArgs& args, Scratch scratch) {
  const int64_t hidden = args.hidden.cols;
  const int64_t stride = RoundUp(hidden, 64);
  const int64_t rows = args.hidden.rows;
  return {scratch.Take<float>(static_cast<size_t>(rows * stride)), DType::kF32, rows, hidden,
          stride};
}

}  // namespace

cudaError_t LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream) {
  if (args.gradient.hidden.rows == 0)
    return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
  const LinearRoute& route = RouteOf(LinearOp::kTraining, args.gradient.head, scratch);
  if (route.kernel != LinearKernel::kTwoOps) {
    const int64_t room = RoomFor(products, scratch);
    const Cut cut(args.gradient.head, room, route.kernel == LinearKernel::kHopperTraining);
    const Place place = {.first_token = 0, .vocab = args.gradient.head.vocab()};
    if (Fits(args.gradient, cut, room))
      return Training(args, place, cut, products, scratch, stream).Run();
  }
  const cudaError_t error = LinearCrossEntropy(args.Forward(), products, scratch, stream);
  if (error != cudaSuccess) return error;
  return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
}

size_t ShardTrainingBytes(const VocabShards& shards, int64_t rows) {
  return TrainingBlock(nullptr, shards, rows).bytes;
}

bool ShardTrainingFits(const ShardTrainingArgs& args, const Products& products,
                       const Scratch& scratch) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  const int64_t rows = gradient.hidden.rows;
  if (rows == 0 || RouteOf(LinearOp::kTraining, gradient.head, scratch).kernel !=
                       LinearKernel::kHopperTraining) {
    return false;
  }
  if (gradient.head.vocab() == 0) return ZerosOf(gradient, scratch).data != nullptr;
  const int64_t room = RoomFor(products, scratch);
  return Fits(gradient, Cut(gradient.head, room, /*one_kernel=*/true), room);
}

cudaError_t BeginShardTraining(const ShardTrainingArgs& args, Products& products, Scratch scratch,
                               cudaStream_t stream) {
  const int64_t rows = args.training.gradient.hidden.rows;
  const size_t bytes = ShardTrainingBytes(args.shards, rows);
  const TrainingBlock block(args.blocks + static_cast<size_t>(args.shard) * bytes, args.shards,
                            rows);
  if (args.training.gradient.head.vocab() == 0)  // -1 for every row; the rest is not read
    return cudaMemsetAsync(block.nan, 0xff, static_cast<size_t>(rows) * sizeof(int32_t), stream);
  return ShardTraining(args, products, scratch, stream).Begin(block);
}

cudaError_t EndShardTraining(const ShardTrainingArgs& args,
                             absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done,
                             Products& products, Scratch scratch, cudaStream_t stream) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  if (gradient.head.vocab() == 0) {
    const MutableTensorView part = ZerosOf(gradient, scratch);
    const size_t bytes = static_cast<size_t>(part.rows * part.row_stride) * sizeof(float);
    const cudaError_t error = cudaMemsetAsync(part.data, 0, bytes, stream);
    return error == cudaSuccess ? hidden_done(part) : error;
  }
  const TrainingBlock first(args.blocks, args.shards, gradient.hidden.rows);
  return ShardTraining(args, products, scratch, stream).End(args.shards, first, hidden_done);
}

}  // namespace logitd::cuda
