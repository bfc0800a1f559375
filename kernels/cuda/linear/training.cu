// linear_cross_entropy and its backward in one: three products, for the logits are made once.
//
// What is kept of the logits between the passes are their exponentials E, in bf16, relative to the
// maximum of their tile: 256 tokens of a row, so that none over- or underflows that matters.
// d_weight's own memory is their home, for it is free until d_weight is written. The vocabulary
// goes by in chunks, and E of a chunk lies where d_weight of the chunk before it will; that of the
// first in scratch. Beside it, in scratch, a maximum for every row and tile.
//
//   pass 1, for every chunk   logits (product 1), E, their maxima, the rows' sums; on Hopper by one
//                             kernel for all chunks (hopper/training.cu): no logits there
//   then                      losses and statuses; of every maximum what makes E gradients
//   pass 2, chunks backwards  by blocks of rows E becomes G, in place, and G weight is added to
//                             d_hidden in fp32 (product 2); then G^T hidden is the chunk's d_weight
//                             (product 3), written where the E were of the chunk behind it
//
// A target's G is made of its logit, as in the backward. Near 1, where its digits would be lost,
// any other probability is a maximum's, and E of that is 1.
//
// Blocks of rows and chunks are fixed by the head and the device, so that the bits of a row's
// answers and d_hidden are its own. Ignored and skipped rows are rows of zeros in products 2 and 3.
//
// It serves bf16 heads without bias and softcap, where d_bias is not wanted, d_weight has no gaps,
// and the rows' E fit into it (up to `hidden` rows, twice as many where it is f32), the rest into
// scratch. Any other call is the two ops, one after the other.
//
// Cost: three products (18.6 ms at 4096 x 4096 x 128256, as bare products: the floor); beside them,
// a write of E and a read and a write of G (3.2 GB), one read and write of d_hidden in fp32 for
// every chunk of up to 16384 tokens, and but for Hopper a write and a read of the logits, in part
// out of L2. Memory beside inputs and outputs: at 4096 rows of 4096, a chunk's E (128 MiB),
// d_hidden in fp32 (64), hidden states (32), the library's workspace (18 to 32), maxima and sums
// (23; but for Hopper 10, and 16 of logits). Measured (bench/results/h200/kernels.json), within 290
// MiB: 19.8 ms, 94% of three bare products. Tried and dropped: pass 1 by cuBLASLt and a kernel on
// its logits (20.8 ms); all of a chunk's G before product 2 (the same within 1%).
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/hopper/training.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/scratch.h"
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = kTrainingTile;
constexpr int kLaneTokens = kTile / 32;
constexpr int kRowsAhead = 8;  // of a warp of GradientKernel
constexpr int kGroupRows = 64;
static_assert(kLaneTokens * sizeof(Bf16) == 16);
static_assert(kGroupRows % kRowsAhead == 0 && kGroupRows % kWarps == 0);

// ---- kernels -----------------------------------------------------------------------------------

// `count` rows; those from `rows` on are skipped.
__global__ void __launch_bounds__(kThreads)
    BeginKernel(const CrossEntropyRow* asks, int64_t rows, int64_t count, RowState* to) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (r >= count) return;
  RowState row{.use = RowUse::kSkipped,
               .target = -1,
               .power = 0.0f,
               .smooth = 0,
               .stats = {-kInfinity, 0.0f},
               .total = 0.0,
               .first_nan = -1,
               .flat = 0.0f,
               .more = 0.0f,
               .hit = 0.0f};
  if (r < rows && asks[r].active != 0) {
    const CrossEntropyRow& ask = asks[r];
    row.use = ask.target < 0 ? RowUse::kIgnored : RowUse::kCounted;
    row.target = ask.target < 0 ? -1 : ask.target;
    row.power = PowerOf(Cap::Rate(0.0f, ask.temperature));
    row.smooth = ask.label_smoothing > 0 ? 1 : 0;
  }
  to[r] = row;
}

// A warp takes a tile of a row of logits [rows, stride], which are those of the rows from `first`
// on.
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
  const Exponential exponential = TileExponential(max, row.power);
  float e[kLaneTokens];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    e[i] = exponential(x[i]);
    sum += e[i];
  }
  *reinterpret_cast<uint4*>(chunk.e.At(r, chunk.first + begin)) = {
      PackPair<Bf16>(e[0], e[1]), PackPair<Bf16>(e[2], e[3]), PackPair<Bf16>(e[4], e[5]),
      PackPair<Bf16>(e[6], e[7])};
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

// The first token of the chunk whose exponential is NaN, by one warp: there is one.
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

// A warp adds the chunk's tiles to a row's sums.
__global__ void __launch_bounds__(kThreads) AddKernel(RowState* rows, Chunk chunk) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const TilePart* parts = chunk.parts + r * chunk.parts_stride;
  const float* maxima = chunk.maxima + r * chunk.maxima_stride;
  const Stats more = MergeCells(chunk.Tiles(), row.power, lane, [&](int i) {
    return Stats{maxima[i], parts[i].sum};
  });
  const Stats before = row.stats;
  const Stats stats = MergeCells(2, row.power, lane, [&](int i) { return i == 0 ? before : more; });
  double total = 0.0;
  if (row.smooth != 0) {
    for (int i = lane; i < chunk.Tiles(); i += 32) total += parts[i].total;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      total += __shfl_xor_sync(kFullWarp, total, offset);
  }
  int32_t first_nan = row.first_nan;
  if (first_nan < 0 && isnan(more.sum)) first_nan = FindNanToken(chunk, r, lane);
  __syncwarp();
  if (lane != 0) return;
  row.stats = stats;
  row.total += total;
  row.first_nan = first_nan;
}

// What makes the exponentials of a tile probabilities. By the row's sums and not by its logsumexp,
// which is rounded: where it is large p would be off by orders.
__device__ inline float ProbabilityOfMax(const Outcome& outcome, float power, float max) {
  if (max == -kInfinity) return 0.0f;  // all are 0
  const Exponential exponential(max, power);
  const float p = static_cast<float>(exp(outcome.AboveMax(max) - outcome.log_sum));
  return exponential.plain
             ? p * Exp2(-fmaf(max, exponential.log2e_over_temperature, exponential.shift))
             : p;
}

// Finite, but NaN stays: 0 times it is 0.
__device__ inline float Finite(float x) {
  constexpr float kMost = std::numeric_limits<float>::max();
  return fabsf(x) > kMost ? copysignf(kMost, x) : x;
}

// A warp writes a row's answers, and turns its maxima into rates.
__global__ void __launch_bounds__(kThreads)
    ConcludeKernel(const __grid_constant__ CrossEntropyArgs args, const float* upstream,
                   const float* target_logits, RowState* rows, float* maxima, int tiles) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const float target_logit = row.target < 0 ? 0.0f : target_logits[r];
  const Outcome outcome =
      Conclude(args, r, {row.stats, 0.0f, row.total, 0}, target_logit, row.first_nan, lane);
  if (row.use != RowUse::kCounted) return;
  const Gradient gradient = Gradient::Of(args.rows[r], static_cast<float>(outcome.LogSumExp()),
                                         upstream[r], args.logits.cols);
  for (int i = lane; i < tiles; i += 32) {
    float& at = maxima[r * tiles + i];
    at = Finite(ProbabilityOfMax(outcome, row.power, at) * gradient.weight * gradient.scale);
  }
  if (lane != 0) return;
  const float p = static_cast<float>(exp(outcome.Logprob(target_logit)));
  row.flat = gradient.flat * gradient.scale;
  row.more = gradient.more;
  row.hit = (fmaf(p, gradient.weight, -gradient.flat) - gradient.hit) * gradient.scale * row.more;
}

// Makes the packed hidden states of ignored rows zeros, a block a row.
__global__ void __launch_bounds__(kThreads)
    ClearIgnoredKernel(const RowState* rows, Bf16* states, int64_t stride) {
  const int64_t r = blockIdx.x;
  if (rows[r].use != RowUse::kIgnored) return;
  for (int64_t i = threadIdx.x; i < stride; i += kThreads) states[r * stride + i] = Bf16(0.0f);
}

// Turns a chunk's exponentials into gradients, in place, from `first_row` on. A warp takes a tile
// of kRowsAhead rows. Rows that are not counted become zeros, whatever lies there.
__global__ void __launch_bounds__(kThreads)
    GradientKernel(const RowState* __restrict__ rows, int64_t first_row, Chunk chunk) {
  const int lane = threadIdx.x % 32;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (tile >= chunk.Tiles()) return;
  const int64_t first = first_row + static_cast<int64_t>(blockIdx.y) * kRowsAhead;
  const int begin = tile * kTile + lane * kLaneTokens;
  Bf16* at = chunk.e.At(first, chunk.first + begin);
  const int64_t stride = chunk.e.chunk;
  uint4 vectors[kRowsAhead];
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i)
    vectors[i] = __ldcs(reinterpret_cast<const uint4*>(at + i * stride));
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i) {
    const RowState& row = rows[first + i];
    uint4 out = {};
    if (row.use == RowUse::kCounted) {
      const float rate = chunk.maxima[(first + i) * chunk.maxima_stride + tile];
      const float flat = row.flat;
      const float more = row.more;
      const uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
      const int64_t place = row.target - chunk.first - begin;
      float g[kLaneTokens];
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) {
        g[j] = __fmul_rn(fmaf(WordElement<Bf16>(words, j), rate, -flat), more);
        if (place == j) g[j] = row.hit;
      }
      out = {PackPair<Bf16>(g[0], g[1]), PackPair<Bf16>(g[2], g[3]), PackPair<Bf16>(g[4], g[5]),
             PackPair<Bf16>(g[6], g[7])};
    }
    *reinterpret_cast<uint4*>(at + i * stride) = out;
  }
}

// ---- launch ------------------------------------------------------------------------------------

// How the work is cut: fixed by the head and the device.
struct Cut {
  int64_t block = kGroupRows;  // rows of products 1 and 2
  int64_t chunk = 16384;       // tokens, a multiple of kTile
  bool in_one = false;         // pass 1 is one kernel, which takes the whole vocabulary
  int64_t part = 0;            // else of a chunk: tokens of product 1, a multiple of kTile
  int64_t tiles = 0;           // of the vocabulary
  int64_t part_tiles = 0;      // that a row has sums of at once
  int64_t hidden_stride = 0;

  // The largest chunk with which as many rows as `hidden` fit into `bytes`.
  Cut(const HeadView& head, int64_t bytes, bool one_kernel) : in_one(one_kernel) {
    constexpr int64_t kMostRows = 1024;
    constexpr int64_t kMostLogits = int64_t{4} << 20;  // L2 holds them, and the weights of a part
    constexpr int64_t kLeastChunk = 2048;
    hidden_stride = RoundUp(head.hidden(), 64);
    tiles = (head.vocab() + kTile - 1) / kTile;
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

  int64_t Padded(int64_t rows) const { return RoundUp(rows, block); }

  // Of scratch, for calls of so many rows.
  int64_t Bytes(int64_t rows) const {
    constexpr int64_t kSlack = 4096;  // of pieces' alignment
    const int64_t size = static_cast<int64_t>(sizeof(Bf16));
    const int64_t of_row = hidden_stride * (size + 4) + chunk * size + tiles * 4 +
                           part_tiles * static_cast<int64_t>(sizeof(TilePart)) + 4 +
                           static_cast<int64_t>(sizeof(RowState));
    return (in_one ? 0 : block * part * 4) + Padded(rows) * of_row + kSlack;
  }
};

int64_t RoomOf(const Scratch& scratch, const Products& products) {
  return static_cast<int64_t>(scratch.bytes - Scratch::kCounterBytes - products.workspace_bytes());
}

bool Serves(const LinearCrossEntropyBackwardArgs& args, const Cut& cut, int64_t room) {
  const HeadView& head = args.head;
  const MutableTensorView& d_weight = args.d_weight;
  const int64_t row_bytes = head.hidden() * static_cast<int64_t>(SizeOf(d_weight.dtype));
  return head.weight.dtype == DType::kBF16 && head.bias == nullptr && head.softcap == 0 &&
         args.d_bias == nullptr && d_weight.dtype != DType::kF16 &&
         // A product can write it, and its memory has no gaps that are someone else's.
         reinterpret_cast<uintptr_t>(d_weight.data) % 16 == 0 && row_bytes % 16 == 0 &&
         d_weight.row_stride == head.hidden() &&
         cut.Padded(args.hidden.rows) * static_cast<int64_t>(sizeof(Bf16)) <= row_bytes &&
         cut.Bytes(args.hidden.rows) <= room;
}

class Training {
 public:
  Training(const LinearCrossEntropyTrainingArgs& args, const Cut& cut, Products& products,
           Scratch scratch, cudaStream_t stream)
      : args_(args.gradient),
        forward_(args.Forward().cross_entropy),
        cut_(cut),
        padded_(cut.Padded(args.gradient.hidden.rows)),
        products_(products),
        stream_(stream),
        scratch_(scratch),
        workspace_(TakeFromEnd<std::byte>(scratch, products.workspace_bytes())),
        rows_(TakeFromEnd<RowState>(scratch, padded_)),
        target_logits_(TakeFromEnd<float>(scratch, padded_)),
        maxima_(TakeFromEnd<float>(scratch, padded_ * cut.tiles)),
        parts_(TakeFromEnd<TilePart>(scratch, padded_ * cut.part_tiles)),
        states_(TakeFromEnd<Bf16>(scratch, padded_ * cut.hidden_stride)),
        d_states_(TakeFromEnd<float>(scratch, padded_ * cut.hidden_stride)),
        first_e_(TakeFromEnd<Bf16>(scratch, padded_ * cut.chunk)),
        logits_(TakeFromEnd<float>(scratch, cut.in_one ? 0 : cut.block * cut.part)) {
    forward_.logits.cols = args_.head.vocab();
  }

  cudaError_t Run() {
    const int64_t vocab = args_.head.vocab();
    const int64_t last = (vocab - 1) / cut_.chunk * cut_.chunk;
    Begin();
    Pack();
    if (cut_.in_one) {
      const Chunk all = TokensAt(0, vocab);
      Enqueue([&] {
        return HopperExponentials(
            {states_, DType::kBF16, padded_, args_.head.hidden(), cut_.hidden_stride}, args_.head,
            rows_, all, scratch_, stream_);
      });
      AddToRows(all);
    } else {
      for (int64_t v = 0; v <= last; v += cut_.chunk) {
        const Chunk chunk = ChunkAt(v);
        MakeExponentials(chunk);
        AddToRows(chunk);
      }
    }
    ConcludeRows();
    ClearIgnored();
    for (int64_t v = last; v >= 0; v -= cut_.chunk) {
      const Chunk chunk = ChunkAt(v);
      for (int64_t r = 0; r < padded_; r += cut_.block) {
        MakeGradients(chunk, r);
        AddToHidden(chunk, r, /*fresh=*/v == last);
      }
      WriteWeight(chunk);
    }
    StoreHidden();
    return error_;
  }

 private:
  // The first error of all that is enqueued; after it nothing is.
  template <class Launch>
  void Enqueue(const Launch& launch) {
    if (error_ != cudaSuccess) return;
    if constexpr (std::is_same_v<decltype(launch()), cudaError_t>) {
      error_ = launch();
    } else {
      launch();
      error_ = cudaGetLastError();
    }
  }
  void Enqueue(const ProductShape& shape, ProductOperands operands) {
    if (error_ != cudaSuccess) return;
    operands.workspace = workspace_;
    error_ = products_.Enqueue(shape, operands, stream_);
  }

  // Blocks of as many threads as there are rows of, with a warp for each.
  unsigned RowBlocks() const { return static_cast<unsigned>(padded_ / kWarps); }
  static unsigned TileBlocks(const Chunk& chunk) {
    return static_cast<unsigned>((chunk.Tiles() + kWarps - 1) / kWarps);
  }

  Chunk ChunkAt(int64_t v) const { return TokensAt(v, cut_.chunk); }
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
            .parts = parts_,
            .parts_stride = cut_.part_tiles,
            .target_logits = target_logits_};
  }

  const Bf16* WeightsAt(int64_t v) const {
    return static_cast<const Bf16*>(args_.head.weight.data) + v * args_.head.weight.row_stride;
  }

  void Begin() {
    Enqueue([&] {
      BeginKernel<<<static_cast<unsigned>((padded_ + kThreads - 1) / kThreads), kThreads, 0,
                    stream_>>>(args_.rows, args_.hidden.rows, padded_, rows_);
    });
  }

  // The hidden states of all rows but those that are skipped: an ignored row has a logsumexp and a
  // status.
  void Pack() {
    Enqueue([&] {
      PackKernel<<<static_cast<unsigned>(padded_), kCopyThreads, 0, stream_>>>(
          static_cast<const Bf16*>(args_.hidden.data), args_.hidden.row_stride,
          static_cast<int>(args_.head.hidden()), rows_, RowUse::kIgnored, states_,
          cut_.hidden_stride);
    });
  }
  // Then zeros for ignored rows too.
  void ClearIgnored() {
    Enqueue([&] {
      ClearIgnoredKernel<<<static_cast<unsigned>(padded_), kThreads, 0, stream_>>>(
          rows_, states_, cut_.hidden_stride);
    });
  }

  // Product 1 and what it comes to.
  void MakeExponentials(const Chunk& chunk) {
    for (int64_t offset = 0; offset < chunk.tokens; offset += cut_.part) {
      const Chunk part = chunk.Part(offset, cut_.part);
      for (int64_t r = 0; r < padded_; r += cut_.block) {
        Enqueue({.inputs = DType::kBF16,
                 .output = DType::kF32,
                 .transpose_a = true,
                 .m = part.tokens,
                 .n = cut_.block,
                 .k = args_.head.hidden(),
                 .a_stride = args_.head.weight.row_stride,
                 .b_stride = cut_.hidden_stride,
                 .out_stride = cut_.part},
                {.a = WeightsAt(part.first),
                 .b = states_ + r * cut_.hidden_stride,
                 .out = logits_,
                 .alpha = args_.head.scale});
        Enqueue([&] {
          const dim3 grid(TileBlocks(part), static_cast<unsigned>(cut_.block));
          ExponentialKernel<<<grid, kThreads, 0, stream_>>>(logits_, cut_.part, rows_, r, part);
        });
      }
    }
  }

  void AddToRows(const Chunk& chunk) {
    Enqueue([&] { AddKernel<<<RowBlocks(), kThreads, 0, stream_>>>(rows_, chunk); });
  }

  void ConcludeRows() {
    Enqueue([&] {
      ConcludeKernel<<<RowBlocks(), kThreads, 0, stream_>>>(
          forward_, args_.upstream, target_logits_, rows_, maxima_, static_cast<int>(cut_.tiles));
    });
  }

  // Of a block of rows from the `first`-th on.
  void MakeGradients(const Chunk& chunk, int64_t first) {
    Enqueue([&] {
      const dim3 grid(TileBlocks(chunk), static_cast<unsigned>(cut_.block / kRowsAhead));
      GradientKernel<<<grid, kThreads, 0, stream_>>>(rows_, first, chunk);
    });
  }

  // Product 2 of the same block, while L2 has its gradients.
  void AddToHidden(const Chunk& chunk, int64_t first, bool fresh) {
    Enqueue({.inputs = DType::kBF16,
             .output = DType::kF32,
             .m = args_.head.hidden(),
             .n = cut_.block,
             .k = chunk.tokens,
             .a_stride = args_.head.weight.row_stride,
             .b_stride = chunk.e.chunk,
             .out_stride = cut_.hidden_stride},
            {.a = WeightsAt(chunk.first),
             .b = chunk.e.At(first, chunk.first),
             .out = d_states_ + first * cut_.hidden_stride,
             .alpha = args_.head.scale,
             .beta = fresh ? 0.0f : 1.0f});
  }

  // Product 3.
  void WriteWeight(const Chunk& chunk) {
    const MutableTensorView& to = args_.d_weight;
    Enqueue({.inputs = DType::kBF16,
             .output = to.dtype,
             .transpose_b = true,
             .m = args_.head.hidden(),
             .n = chunk.tokens,
             .k = RoundUp(args_.hidden.rows, kGroupRows),
             .a_stride = cut_.hidden_stride,
             .b_stride = chunk.e.chunk,
             .out_stride = to.row_stride},
            {.a = states_,
             .b = chunk.e.At(0, chunk.first),
             .out = static_cast<std::byte*>(to.data) +
                    chunk.first * to.row_stride * static_cast<int64_t>(SizeOf(to.dtype)),
             .alpha = args_.head.scale});
  }

  void StoreHidden() {
    AsType(args_.d_hidden.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      Enqueue([&] {
        StoreKernel<<<static_cast<unsigned>(args_.hidden.rows), kCopyThreads, 0, stream_>>>(
            d_states_, cut_.hidden_stride, static_cast<int>(args_.head.hidden()), rows_,
            static_cast<T*>(args_.d_hidden.data), args_.d_hidden.row_stride);
      });
    });
  }

  const LinearCrossEntropyBackwardArgs& args_;
  CrossEntropyArgs forward_;
  const Cut cut_;
  const int64_t padded_;  // rows, in whole blocks
  Products& products_;
  const cudaStream_t stream_;
  const Scratch scratch_;  // of which the pieces below are
  std::byte* const workspace_;
  RowState* const rows_;        // [padded]
  float* const target_logits_;  // [padded]
  float* const maxima_;         // [padded, tiles]; after ConcludeRows the rates of G
  TilePart* const parts_;       // [padded, part_tiles]
  Bf16* const states_;          // [padded, hidden_stride]
  float* const d_states_;       // [padded, hidden_stride]
  Bf16* const first_e_;         // [padded, chunk]
  float* const logits_;         // [block, part]
  cudaError_t error_ = cudaSuccess;
};

}  // namespace

cudaError_t LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream) {
  if (args.gradient.hidden.rows == 0)
    return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
  const int64_t room = RoomOf(scratch, products);
  const Cut cut(args.gradient.head, room, HopperExponentialsServes(args.gradient.head, scratch));
  if (Serves(args.gradient, cut, room)) return Training(args, cut, products, scratch, stream).Run();
  const cudaError_t error = LinearCrossEntropy(args.Forward(), products, scratch, stream);
  if (error != cudaSuccess) return error;
  return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
}

}  // namespace logitd::cuda
