// linear_cross_entropy on Hopper: the product of hopper/product.cuh, its epilogue the sums of the
// losses. No logit leaves the chip.
//
// When a tile is done, the four threads of a row take the maximum of its 256 logits and the sum of
// their exponentials, in fp32, and merge them with those of the tiles before. A cell of 1024 tokens
// goes to scratch: 12 bytes for 1024 logits. Where the plan is one for few rows, a warpgroup's item
// is a tile, and 12 bytes a tile go to scratch. A last kernel, a block a row, merges tiles into
// cells and cells into the row, in their order, and writes the losses.
//
// Tiles and cells are of the vocabulary alone and are summed in one order, so a row's bits are its
// own, whatever the rows beside it, the plan and the grid. Work is dealt out by spans of the
// vocabulary, for groups of rows that L2 has room for. It does not keep all it has room for: 4096
// rows of 4096 x 128256 read about 6 GB of HBM, as cuBLASLt's product does, where the weights of
// both groups and the states are 2.1.
//
// For 16-bit heads without bias and softcap (HopperLossServes), and rows that ask for neither rank,
// entropy nor tops; forward.cu sends rows that ask for more to the other kernels. The logits of
// extras are products of their own, a warp each; an extra that is the target has the logit of the
// loss, so that both have the same bits.
//
// Cost: the product, 2 * rows * hidden * vocab operations; epilogues about 2500 clocks of 65536 a
// tile at hidden 4096. Memory beside inputs and outputs: rows * vocab / 1024 * 12 bytes, at most 12
// MiB. Limited by: the tensor cores, at the clock their power allows; few rows by HBM.
// Measured (bench/results/h200/kernels.json), bf16, as a share of the bare product by cuBLASLt:
// 4096 x 4096 x 128256, 6.36 ms, 98%; 16384 rows, 25.9 ms, 97%; 8192 x 2048 x 256000, 12.9 ms, 98%;
// 256 rows, 0.454 ms, 96%; 128, 64 and 1 rows, 0.277, 0.267 and 0.267 ms, where one read of the
// weights is 0.226.
#include "kernels/cuda/linear/hopper/loss.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/linear/hopper/loss_tile.cuh"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {
namespace {

constexpr int kTilesOfCell = kCell / hopper::kTile;
constexpr size_t kPartsBytes = size_t{12} << 20;
constexpr int64_t kRowsAtOnce = 16384;
static_assert(hopper::ManyRows::kClusterRows == kLossGroupRows);
static_assert(hopper::ManyRows::kSpan == kCell && hopper::kTile * kTilesOfCell == kCell);

using Part = hopper::LossPart;  // of a cell, or a tile

__device__ inline Stats Merge(Stats a, Stats b, float c) {
  const float max = fmaxf(a.max, b.max);
  const Exponential exponential(max, c);
  return {max, fmaf(a.sum, exponential.Factor(a.max), __fmul_rn(b.sum, exponential.Factor(b.max)))};
}

// A part that has met nothing, and one that meets the next tile.
__device__ inline Part EmptyPart() { return {{-kInfinity, 0.0f}, 0.0f}; }
__device__ inline Part Next(Part part, Part tile, float c) {
  return {Merge(part.stats, tile.stats, c), part.total + tile.total};
}

// ---- epilogue ----------------------------------------------------------------------------------

struct LossParams {
  const CrossEntropyRow* asks;  // [rows]
  Part* parts;                  // [rows, row_parts]
  float* target_logits;         // [rows]
  int32_t row_parts;
  float scale;
};

// kPartTiles: tiles of an item of one thread, which make a part.
template <int kPartTiles>
struct LossEpilogue {
  using Params = LossParams;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Params& p;
  const int vocab;
  const hopper::LossRow upper;
  const hopper::LossRow lower;
  int at = -1;  // the parts' place
  Part upper_part = EmptyPart();
  Part lower_part = EmptyPart();

  __device__ LossEpilogue(const Params& params, const hopper::ProductParams& product, int64_t row,
                          int /*lane*/)
      : p(params),
        vocab(product.vocab),
        upper(RowOf(params, row, product.rows)),
        lower(RowOf(params, row + 8, product.rows)) {}

  __device__ static hopper::LossRow RowOf(const Params& p, int64_t r, int rows) {
    hopper::LossRow row{.r = r < rows ? static_cast<int>(r) : -1};
    if (r >= rows || p.asks[r].active == 0) return row;
    row.target = p.asks[r].target;
    row.smooth = p.asks[r].label_smoothing > 0 ? 1 : 0;
    row.power = Log2EOverTemperature(0.0f, p.asks[r].temperature);
    return row;
  }

  __device__ void Take(float (&acc)[hopper::kSums], int first, int lane) {
    at = first / (kPartTiles * hopper::kTile);
    hopper::MakeLogits(acc, p.scale, first, vocab, lane);
    upper_part =
        Next(upper_part, hopper::TakeRow<0>(upper, acc, first, vocab, lane, p.target_logits),
             upper.power);
    lower_part =
        Next(lower_part, hopper::TakeRow<1>(lower, acc, first, vocab, lane, p.target_logits),
             lower.power);
  }

  __device__ void Leave(int lane) {
    if (at < 0 || lane % 4 != 0) return;
    if (upper.r >= 0) p.parts[static_cast<int64_t>(upper.r) * p.row_parts + at] = upper_part;
    if (lower.r >= 0) p.parts[static_cast<int64_t>(lower.r) * p.row_parts + at] = lower_part;
  }
#endif
};

// ---- the end of a row --------------------------------------------------------------------------

// The logit of one token, but for the order of its sum, by one warp.
template <class T>
__device__ inline float Dot(const T* state, const T* weight, int size, int lane) {
  float sum = 0.0f;
  for (int i = lane; i < size; i += 32) sum = fmaf(ToFloat(weight[i]), ToFloat(state[i]), sum);
  return WarpSum(sum);
}

// The lowest token of the cell at `first` whose logit is NaN, by one warp; `first` where sums in
// this order make none. A scale of 0 makes NaN of an infinite sum.
template <class T>
__device__ __noinline__ int FindNanLogit(const T* state, const T* weights, int64_t weights_stride,
                                         int size, float scale, int first, int vocab, int lane) {
  for (int token = first; token < min(first + kCell, vocab); ++token) {
    if (isnan(scale * Dot(state, weights + token * weights_stride, size, lane))) return token;
  }
  return first;
}

constexpr int kFinishThreads = 128;

// Merges a row's parts and writes what it is asked beside extras, by one warp.
template <class T>
__device__ inline Outcome ConcludeRow(const CrossEntropyArgs& args, int64_t r, const Part* parts,
                                      int cells, int row_parts, float target_logit, const T* state,
                                      const T* weights, int64_t weights_stride, int size,
                                      float scale, int lane) {
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const float c = Log2EOverTemperature(0.0f, args.rows[r].temperature);
  const auto cell_of = [&](int i) {
    if (row_parts == cells) return parts[i];
    Part cell = EmptyPart();
    for (int tile = i * kTilesOfCell; tile < min((i + 1) * kTilesOfCell, row_parts); ++tile)
      cell = Next(cell, parts[tile], c);
    return cell;
  };
  const Stats stats = MergeCells(cells, c, lane, [&](int i) { return cell_of(i).stats; });
  double total = 0.0;
  for (int i = lane; i < cells; i += 32) total += cell_of(i).total;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
  int nan = vocab;
  if (isnan(stats.sum)) {
    int cell = 0;
    while (cell + 1 < cells && !isnan(cell_of(cell).stats.sum)) ++cell;
    nan = FindNanLogit(state, weights, weights_stride, size, scale, cell * kCell, vocab, lane);
  }
  return Conclude(args, r, {stats, 0.0f, total, 0}, target_logit, nan, lane);
}

// A block a row: its first warp the losses, all of them the extras.
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    FinishKernel(const __grid_constant__ CrossEntropyArgs args, const Part* parts,
                 const float* target_logits, int cells, int row_parts, const T* states,
                 int64_t states_stride, const T* weights, int64_t weights_stride, int size,
                 float scale) {
  constexpr int kWarps = kFinishThreads / 32;
  __shared__ Outcome told;  // what the first warp tells the others
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t r = blockIdx.x;
  if (args.rows[r].active == 0) return;
  const CrossEntropyRow& ask = args.rows[r];
  const float target_logit = ask.target < 0 ? 0.0f : target_logits[r];
  if (warp == 0) {
    const Outcome outcome =
        ConcludeRow(args, r, parts + r * row_parts, cells, row_parts, target_logit,
                    states + r * states_stride, weights, weights_stride, size, scale, lane);
    if (lane == 0) told = outcome;
  }
  if (ask.extra_count == 0) return;
  __syncthreads();
  for (int i = warp; i < ask.extra_count; i += kWarps) {
    const int64_t token = args.extra_ids[ask.first_extra + i];
    const float x = token == ask.target ? target_logit
                                        : scale * Dot(states + r * states_stride,
                                                      weights + token * weights_stride, size, lane);
    if (lane == 0)
      args.answers.extra_logprobs[ask.first_extra_entry + i] = static_cast<float>(told.Logprob(x));
  }
}

// ---- launch ------------------------------------------------------------------------------------

template <class T>
cudaError_t Launch(const LinearCrossEntropyArgs& args, const int32_t* groups,
                   const Scratch& scratch, cudaStream_t stream) {
  const HeadView& head = args.head;
  const int64_t vocab = head.vocab();
  const int64_t cells = (vocab + kCell - 1) / kCell;
  // As many rows at once as there is room for the parts of, in whole groups. Few rows have a part a
  // tile and not a cell: there is room for those of a call of them at any vocabulary.
  constexpr int64_t kFewRows = hopper::Rows128::kClusterRows;
  static_assert(kFewRows * (sizeof(Part) * (kMaxVocab / hopper::kTile) + 4) <= kPartsBytes);
  const int64_t row_bytes = cells * static_cast<int64_t>(sizeof(Part)) + 4;
  const int64_t room = static_cast<int64_t>(
      std::min(kPartsBytes, scratch.bytes - Scratch::kCounterBytes - size_t{4096}));
  const int64_t pass = std::clamp<int64_t>(room / row_bytes / kLossGroupRows * kLossGroupRows,
                                           kLossGroupRows, kRowsAtOnce);
  for (int64_t first = 0; first < args.hidden.rows; first += pass) {
    const int64_t rows = std::min(pass, args.hidden.rows - first);
    const bool many = rows > kFewRows;
    const int64_t row_parts = many ? cells : (vocab + hopper::kTile - 1) / hopper::kTile;
    Carver carver(scratch);
    Part* parts = carver.Take<Part>(static_cast<size_t>(rows * row_parts));
    float* target_logits = carver.Take<float>(static_cast<size_t>(rows));
    if (parts == nullptr || target_logits == nullptr) return cudaErrorMemoryAllocation;
    const T* hidden = static_cast<const T*>(args.hidden.data) + first * args.hidden.row_stride;
    CrossEntropyArgs part = RowsFrom(args.cross_entropy, first);
    part.logits.cols = vocab;
    const LossParams p{.asks = part.rows,
                       .parts = parts,
                       .target_logits = target_logits,
                       .row_parts = static_cast<int32_t>(row_parts),
                       .scale = head.scale};
    const auto launch = many ? &hopper::LaunchProduct<T, hopper::ManyRows, LossEpilogue<4>>
                        : rows > hopper::Rows64::kClusterRows
                            ? &hopper::LaunchProduct<T, hopper::Rows128, LossEpilogue<1>>
                            : &hopper::LaunchProduct<T, hopper::Rows64, LossEpilogue<1>>;
    cudaError_t error = launch(
        {hidden, head.weight.dtype, rows, head.hidden(), args.hidden.row_stride}, head.weight,
        groups == nullptr ? nullptr : groups + first / kLossGroupRows, p, scratch, stream);
    if (error != cudaSuccess) return error;
    FinishKernel<T><<<static_cast<unsigned>(rows), kFinishThreads, 0, stream>>>(
        part, parts, target_logits, static_cast<int>(cells), static_cast<int>(row_parts), hidden,
        args.hidden.row_stride, static_cast<const T*>(head.weight.data), head.weight.row_stride,
        static_cast<int>(head.hidden()), head.scale);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

bool HopperLossServes(const HeadView& head, const Scratch& scratch) {
  return head.weight.dtype != DType::kF32 && head.bias == nullptr && head.softcap == 0 &&
         hopper::CanRun<&hopper::ProductKernel<__nv_bfloat16, hopper::ManyRows, LossEpilogue<4>>>(
             scratch);
}

cudaError_t HopperLoss(const LinearCrossEntropyArgs& args, const int32_t* groups,
                       const Scratch& scratch, cudaStream_t stream) {
  return args.head.weight.dtype == DType::kF16
             ? Launch<__half>(args, groups, scratch, stream)
             : Launch<__nv_bfloat16>(args, groups, scratch, stream);
}

}  // namespace logitd::cuda
