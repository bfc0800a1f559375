// linear_cross_entropy on Hopper without logits in memory: the product, with an epilogue that
// leaves a maximum and a sum for every row and cell (product.cuh) or tile (middle_rows.cuh), and a
// kernel that merges them and writes the answers.
//
// Serves 16-bit heads without bias and softcap, and rows that want neither rank,
// entropy nor top tokens; forward.cc sends other rows to other kernels. The logit of an extra is a
// product of its own, by one warp; an extra that is the target takes the logit of the loss.
//
// Cost: the product; epilogues of about 2500 clocks of 65536 a tile at hidden 4096. Memory: rows *
// vocab / 1024 * 12 bytes, four times as much of middle_rows.cuh, at most 12 MiB. Limited by: the
// tensor cores; few rows by HBM. Measured (bench/results/h200/kernels.json), as a share of
// cuBLASLt's product: 4096 x 4096 x 128256 98%, 8192 x 2048 x 256000 98%, 256 rows 97%, 128, 64 and
// 1 rows 0.282, 0.267, 0.268 ms.
// Dropped: a warp for each row in middle_rows.cuh's epilogue (300 rows 84% for 91%); warpgroups in
// turn, so that one multiplies in the other's epilogue (the same: the power limit sets the clock).
#include <algorithm>
#include <cstddef>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/hopper/loss_parts.cuh"
#include "kernels/cuda/linear/hopper/loss_tile.cuh"
#include "kernels/cuda/linear/hopper/middle_loss.cuh"
#include "kernels/cuda/linear/hopper/middle_rows.cuh"
#include "kernels/cuda/linear/hopper/product.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda::hopper {

static_assert(kBlockRows == kLossGroupRows && kSpan == kCell);

// ---- epilogue ----------------------------------------------------------------------------------

struct LossEpilogue : LossRows<LossParams> {
  const int split;
  int tile = -1;  // the last one taken
  LossPart upper_part = EmptyPart();
  LossPart lower_part = EmptyPart();

  __device__ LossEpilogue(const Params& params, const ProductParams& product,
                          const SumsPlace& place)
      : LossRows(params, product, place), split(place.split) {}

  __device__ void Take(float (&acc)[kThreadSums], int first, int lane) {
    tile = first / kTile;
    MakeLogits(acc, first, lane);
    upper_part = Merge(upper_part, SumRow<0>(acc, first, lane), upper.log2e_over_temperature);
    lower_part = Merge(lower_part, SumRow<1>(acc, first, lane), lower.log2e_over_temperature);
  }

  __device__ void Leave(int lane) {
    if (tile < 0 || lane % 4 != 0) return;
    if (upper.r >= 0) PlaceOf(upper.r) = upper_part;
    if (lower.r >= 0) PlaceOf(lower.r) = lower_part;
  }

  __device__ LossPart& PlaceOf(int r) const {
    return split < 0 ? p.parts.Cell(r, tile / kSpanTiles) : p.parts.Tile(split, r, tile);
  }
};

namespace {

// ---- the end of a row --------------------------------------------------------------------------

constexpr int kFinishThreads = 128;

// The operands of the product, for logits one at a time.
template <class T>
struct Operands {
  const T* states;
  const T* weights;
  int64_t states_stride;
  int64_t weights_stride;
  int size;
  float scale;

  // The logit of one token, by one warp; the product sums it in another order.
  __device__ float Logit(int64_t r, int64_t token, int lane) const {
    const T* state = states + r * states_stride;
    const T* weight = weights + token * weights_stride;
    float sum = 0.0f;
    for (int i = lane; i < size; i += 32) sum = fmaf(ToFloat(weight[i]), ToFloat(state[i]), sum);
    return scale * WarpSum(sum);
  }

  // The lowest token of the cell at `first` whose logit is NaN, by one warp; `first` where sums in
  // this order make none. A scale of 0 makes NaN of an infinite sum.
  __device__ __noinline__ int FindNan(int64_t r, int first, int vocab, int lane) const {
    for (int token = first; token < min(first + kCell, vocab); ++token) {
      if (isnan(Logit(r, token, lane))) return token;
    }
    return first;
  }
};

// The sums of cell i of row r.
__device__ inline LossPart CellOf(const LossParts& parts, const Schedule& schedule, int64_t r,
                                  int i, float log2e_over_temperature) {
  if (parts.all_tiles != nullptr) {
    LossPart cell = EmptyPart();
#pragma unroll
    for (int tile = 0; tile < kSpanTiles; ++tile) {
      const int at = i * kSpanTiles + tile;
      if (at >= parts.row_tiles) break;
      cell = Merge(cell, parts.all_tiles[r * parts.row_tiles + at], log2e_over_temperature);
    }
    return cell;
  }
  const Schedule::Place place = schedule.PlaceOf(static_cast<int32_t>(r), i);
  if (place.unit < schedule.whole) return parts.Cell(r, i);
  const int split = (place.unit - schedule.whole) * kClusterGroups + place.warpgroup;
  LossPart cell = EmptyPart();
#pragma unroll
  for (int tile = 0; tile < kSpanTiles; ++tile) {
    if (i * kSpanTiles + tile >= schedule.tiles) break;
    cell = Merge(cell, parts.Tile(split, r, tile), log2e_over_temperature);
  }
  return cell;
}

// Merges a row's parts and writes its answers except extras, by one warp.
template <class T>
__device__ inline Outcome ConcludeRow(const CrossEntropyArgs& args, int64_t r,
                                      const LossParts& parts, const Schedule& schedule,
                                      float target_logit, const Operands<T>& operands, int lane) {
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const int cells = parts.row_cells;
  const float log2e_over_temperature = Log2EOverTemperature(0.0f, args.rows[r].temperature);
  const auto cell_of = [&](int i) { return CellOf(parts, schedule, r, i, log2e_over_temperature); };
  const Stats stats =
      MergeCells(cells, log2e_over_temperature, lane, [&](int i) { return cell_of(i).stats; });
  double total = 0.0;
  if (args.rows[r].label_smoothing > 0) {
    for (int i = lane; i < cells; i += 32) total += cell_of(i).total;
    total = WarpSum(total);
  }
  int nan = vocab;
  if (isnan(stats.sum)) {
    int cell = 0;
    while (cell + 1 < cells && !isnan(cell_of(cell).stats.sum)) ++cell;
    nan = operands.FindNan(r, cell * kCell, vocab, lane);
  }
  return Conclude(args, r, {stats, 0.0f, total, 0}, target_logit, nan, lane);
}

// A warp for each row. Where `extras`, a block for each row: its first warp writes the losses, all
// of them the extras.
constexpr int kFinishWarps = kFinishThreads / 32;
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    FinishKernel(const __grid_constant__ CrossEntropyArgs args, int64_t rows, bool extras,
                 const __grid_constant__ LossParts parts, const __grid_constant__ Schedule schedule,
                 const float* target_logits, const __grid_constant__ Operands<T> operands) {
  __shared__ Outcome shared_outcome;  // from the first warp to the others
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t r = extras ? blockIdx.x : int64_t{blockIdx.x} * kFinishWarps + warp;
  if (r >= rows || args.rows[r].active == 0) return;
  const CrossEntropyRow& row = args.rows[r];
  const float target_logit = row.target < 0 ? 0.0f : target_logits[r];
  if (warp == 0 || !extras) {
    const Outcome outcome = ConcludeRow(args, r, parts, schedule, target_logit, operands, lane);
    if (lane == 0 && extras) shared_outcome = outcome;
  }
  if (!extras || row.extra_count == 0) return;
  __syncthreads();
  for (int i = warp; i < row.extra_count; i += kFinishWarps) {
    const int64_t token = args.extra_ids[row.first_extra + i];
    const float x = token == row.target ? target_logit : operands.Logit(r, token, lane);
    if (lane == 0) {
      args.answers.extra_logprobs[row.first_extra_entry + i] =
          static_cast<float>(shared_outcome.Logprob(x));
    }
  }
}

// ---- the end of a row of a shard ---------------------------------------------------------------

// A block for each row: writes its part of the shard's block.
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    FinishShardKernel(const __grid_constant__ ShardLossArgs args,
                      const __grid_constant__ LossParts parts,
                      const __grid_constant__ Schedule schedule, const float* target_logits,
                      const __grid_constant__ Operands<T> operands) {
  constexpr int kWarps = kFinishThreads / 32;
  __shared__ int first_nan;  // a cell
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t r = blockIdx.x;
  const CrossEntropyRow& row = args.rows[r];
  if (row.active == 0) return;
  const LossPartials& to = args.to;
  const int cells = parts.row_cells;
  const int tokens = static_cast<int>(args.head.weight.rows);
  const float log2e_over_temperature = Log2EOverTemperature(0.0f, row.temperature);
  if (threadIdx.x == 0) first_nan = cells;
  __syncthreads();
  for (int i = threadIdx.x; i < cells; i += kFinishThreads) {
    const LossPart cell = CellOf(parts, schedule, r, i, log2e_over_temperature);
    const int64_t at = r * args.row_cells + i;
    to.max[at] = cell.stats.max;
    to.sum[at] = cell.stats.sum;
    if (row.label_smoothing > 0) to.total[at] = cell.total;
    if (isnan(cell.stats.sum)) atomicMin(&first_nan, i);
  }
  __syncthreads();
  const int target = row.target - args.first_token;
  const bool holds = row.target >= 0 && target >= 0 && target < tokens;
  const float target_logit = holds ? target_logits[r] : 0.0f;
  if (warp == 0) {
    int nan = -1;
    if (first_nan < cells) {
      nan = args.first_token + operands.FindNan(r, first_nan * kCell, tokens, lane);
    }
    if (lane == 0) {
      to.nan[r] = nan;
      if (holds) to.target[r] = target_logit;
    }
  }
  for (int i = warp; i < row.extra_count; i += kWarps) {
    const int token = args.extra_ids[row.first_extra + i] - args.first_token;
    if (token < 0 || token >= tokens) continue;
    const float x = token == target ? target_logit : operands.Logit(r, token, lane);
    if (lane == 0) to.extra[r * args.max_extra + i] = x;
  }
}

// ---- launch ------------------------------------------------------------------------------------

constexpr size_t kPartsBytes = size_t{12} << 20;
constexpr int64_t kRowsAtOnce = 16384;

// Parts of the tiles of split units, of which there are fewer than clusters.
int64_t SplitParts(int64_t units) { return units * kBlockRows * kSpanTiles; }

// The rows of a pass: as many as fit into `scratch` at once, in whole groups, or fewer, so that all
// passes have about the same.
int64_t RowsOfPass(int64_t rows, int64_t cells, const Scratch& scratch) {
  constexpr int64_t kPart = sizeof(LossPart);
  constexpr int64_t kSlack = 4096;  // for the alignment of the pieces
  const int64_t tiles = SplitParts(scratch.multiprocessors / kCluster) * kPart;
  const int64_t room = static_cast<int64_t>(std::min(kPartsBytes, scratch.left()));
  const int64_t most =
      std::clamp<int64_t>((std::min<int64_t>(room, scratch.left() - tiles - kSlack)) /
                              (cells * kPart + 4) / kLossGroupRows * kLossGroupRows,
                          kLossGroupRows, kRowsAtOnce);
  return RoundUp(CeilDiv(rows, CeilDiv(rows, most)), kLossGroupRows);
}

// True where hopper/middle_rows.cuh takes a pass. It skips no groups of rows, and leaves a part of
// every tile, for which there may be no room.
bool IsMiddle(int64_t rows, int64_t tiles, const int32_t* groups, const Scratch& scratch) {
  constexpr int64_t kSlack = 4096;  // for the alignment of the pieces
  const int64_t bytes = rows * (tiles * static_cast<int64_t>(sizeof(LossPart)) + 4) + kSlack;
  return PaysForLosses(rows) && groups == nullptr &&
         bytes <= static_cast<int64_t>(std::min(kPartsBytes, scratch.left()));
}

// Multiplies all rows, whose parts fit into `scratch`, then enqueues finish(parts, schedule, target
// logits, operands), which reads what the product left.
template <class T, class Finish>
cudaError_t LaunchPass(const TensorView& hidden, const HeadView& head, int32_t first_token,
                       const CrossEntropyRow* rows, const int32_t* groups, Scratch scratch,
                       cudaStream_t stream, const Finish& finish) {
  const int64_t cells = CeilDiv(head.vocab(), kCell);
  const Schedule schedule = ScheduleOf(hidden.rows, hidden.cols, head.vocab(), scratch);
  const int64_t tiles = CeilDiv(head.vocab(), kTile);
  const bool middle = IsMiddle(hidden.rows, tiles, groups, scratch);
  LossParts parts{.row_cells = static_cast<int32_t>(cells),
                  .row_tiles = static_cast<int32_t>(tiles)};
  if (middle) {
    parts.all_tiles = scratch.Take<LossPart>(static_cast<size_t>(hidden.rows * tiles));
  } else {
    parts.cells = scratch.Take<LossPart>(static_cast<size_t>(hidden.rows * cells));
    parts.tiles =
        scratch.Take<LossPart>(static_cast<size_t>(SplitParts(schedule.units - schedule.whole)));
  }
  float* target_logits = scratch.Take<float>(static_cast<size_t>(hidden.rows));
  if (target_logits == nullptr ||
      (middle ? parts.all_tiles == nullptr : parts.cells == nullptr || parts.tiles == nullptr)) {
    return cudaErrorMemoryAllocation;
  }
  const LossParams p{.rows = rows,
                     .parts = parts,
                     .target_logits = target_logits,
                     .scale = head.scale,
                     .first_token = first_token};
  const cudaError_t error =
      middle ? LaunchMiddleRows<T, MiddleLoss>(hidden, head.weight, p, scratch, stream)
             : LaunchProduct<T, LossEpilogue>({{hidden, head.weight}}, groups, p, scratch, stream);
  if (error != cudaSuccess) return error;
  const Operands<T> operands{.states = static_cast<const T*>(hidden.data),
                             .weights = static_cast<const T*>(head.weight.data),
                             .states_stride = hidden.row_stride,
                             .weights_stride = head.weight.row_stride,
                             .size = static_cast<int>(head.hidden()),
                             .scale = head.scale};
  return finish(parts, schedule, target_logits, operands);
}

// Calls pass(first row, rows) for as many rows at a time as scratch has room for.
template <class Pass>
cudaError_t ForEachPass(int64_t rows, const HeadView& head, const Scratch& scratch,
                        const Pass& pass) {
  const int64_t most = RowsOfPass(rows, CeilDiv(head.vocab(), kCell), scratch);
  for (int64_t first = 0; first < rows; first += most) {
    const cudaError_t error = pass(first, std::min(most, rows - first));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The groups of the rows from `first` on, which is a multiple of kLossGroupRows.
const int32_t* GroupsFrom(const int32_t* groups, int64_t first) {
  return groups == nullptr ? nullptr : groups + first / kLossGroupRows;
}

}  // namespace

cudaError_t Losses(const LinearCrossEntropyArgs& args, const int32_t* groups,
                   const Scratch& scratch, cudaStream_t stream) {
  return ForEachPass(args.hidden.rows, args.head, scratch, [&](int64_t first, int64_t rows) {
    const LinearCrossEntropyArgs part = RowsOf(args, first, rows);
    CrossEntropyArgs losses = part.cross_entropy;
    losses.logits.cols = args.head.vocab();
    return Visit16Bit(args.head.weight.dtype, [&]<class T>() {
      return LaunchPass<T>(
          part.hidden, part.head, 0, losses.rows, GroupsFrom(groups, first), scratch, stream,
          [&](const LossParts& parts, const Schedule& schedule, const float* target_logits,
              const Operands<T>& operands) {
            const bool extras = losses.max_extra_ids > 0;
            return LaunchKernel(
                &FinishKernel<T>,
                {.grid = GridFor(rows, extras ? 1 : kFinishWarps), .threads = kFinishThreads},
                stream, losses, rows, extras, parts, schedule, target_logits, operands);
          });
    });
  });
}

cudaError_t ShardLosses(const ShardLossArgs& args, const int32_t* groups, const Scratch& scratch,
                        cudaStream_t stream) {
  return ForEachPass(args.hidden.rows, args.head, scratch, [&](int64_t first, int64_t rows) {
    ShardLossArgs part = args;
    part.hidden = RowsOf(args.hidden, first, rows);
    part.rows += first;
    part.to.max += first * args.row_cells;
    part.to.sum += first * args.row_cells;
    if (part.to.total != nullptr) part.to.total += first * args.row_cells;
    part.to.nan += first;
    part.to.target += first;
    if (part.to.extra != nullptr) part.to.extra += first * args.max_extra;
    return Visit16Bit(args.head.weight.dtype, [&]<class T>() {
      return LaunchPass<T>(part.hidden, part.head, part.first_token, part.rows,
                           GroupsFrom(groups, first), scratch, stream,
                           [&](const LossParts& parts, const Schedule& schedule,
                               const float* target_logits, const Operands<T>& operands) {
                             return LaunchKernel(&FinishShardKernel<T>,
                                                 {.grid = GridFor(rows), .threads = kFinishThreads},
                                                 stream, part, parts, schedule, target_logits,
                                                 operands);
                           });
    });
  });
}

}  // namespace logitd::cuda::hopper
