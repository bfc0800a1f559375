// cross_entropy_training of many short rows: a warp holds several rows at once.
//
// A warp has a ring of four cells: four rows of one, or two of two. It sums them one after the other,
// then a lane for each row merges it, writes its answers and makes the factors of its gradient, in
// double. Then the warp writes the gradients and asks for the next rows. So what a row costs besides
// its elements is paid once for all rows of the ring.
//
// Cost: reads rows * vocab * sizeof(T) once and writes as much: the floor is a copy. Limited by:
// instructions and latencies of a row's end. Measured on an H100
// (bench/results/h100/cross_entropy_training_lengths.json), as a share of the copy, bf16: 500 tokens
// 31%, 1000 tokens 52%, 2000 tokens 59%; a block a row 20%, 40%, 55%. f32: 69% and 75% for 1000 and
// 2000 tokens. Tried and dropped: rows of three and four cells (bf16 7% slower than a block a row, f32
// 2% faster); a ring of eight cells for rows of five to eight (5% faster than a block of two warps at
// five, where one of them has three cells; up to 6% slower at the others).
#include "kernels/cuda/loss/short_training.h"

#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/held_cells.cuh"
#include "kernels/cuda/loss/training_kernels.h"

namespace logitd::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kStages = 4;  // cells of a warp
template <class T>
constexpr int kResident = sizeof(T) == 4 ? 3 : 5;  // what shared memory holds

struct Params {
  CrossEntropyTrainingArgs args;
  int32_t cells;    // of a row
  int32_t at_once;  // rows that a warp holds
  int32_t warps;    // of the grid that have rows
};

// What a warp has in shared memory.
template <class T>
struct WarpMemory {
  typename CellRing<T, kStages>::Storage ring;
  RowGradient<T> gradients[kStages];  // of the rows it holds
  Outcome outcomes[kStages];
  KnownCell cells[kStages];  // row by row

  __device__ static WarpMemory& Of() {
    extern __shared__ __align__(128) uint4 dynamic[];
    return reinterpret_cast<WarpMemory*>(dynamic)[threadIdx.x / 32];
  }
};

// The cells of row k of those that the warp holds.
template <class T>
__device__ inline HeldCells<T, kStages> CellsOf(const Params& p, int k) {
  const int32_t vocab = static_cast<int32_t>(p.args.loss.logits.cols);
  return {WarpMemory<T>::Of().ring,
          {.first_place = k * p.cells, .turns = p.cells, .begin = 0, .step = kCell, .end = vocab},
          vocab};
}

// As in cross_entropy_training.cu: each loop over cells is a function of its own.
template <class T, Summing kSumming>
__device__ __noinline__ void SumCells(const Params& p, int64_t r, int k, CellAsk ask, int target) {
  WarpMemory<T>& memory = WarpMemory<T>::Of();
  const int lane = threadIdx.x % 32;
  CellsOf<T>(p, k).template Sum<kSumming>(
      RowOf<T>(p.args, r), ask, target,
      [&](int i, const CellSums& sums, int nan) {
        if (lane == 0) memory.cells[k * p.cells + i] = {sums, nan};
      },
      [&](float logit) {
        if (lane == 0) memory.gradients[k].target_logit = logit;
      });
}

template <class T, Writing kWriting>
__device__ __noinline__ void WriteCells(const Params& p, int64_t r, const T* next, int k) {
  HeldCells<T, kStages> cells = CellsOf<T>(p, k);
  WriteHeld<kWriting>(p.args, r, next, WarpMemory<T>::Of().gradients[k], cells);
}

// Merges row r, the lane's own, and writes its answers.
template <class T>
__device__ __noinline__ void ConcludeRow(const Params& p, int64_t r, int lane) {
  WarpMemory<T>& memory = WarpMemory<T>::Of();
  const CrossEntropyArgs& loss = p.args.loss;
  const CrossEntropyRow& ask = loss.rows[r];
  const KnownCell* cells = memory.cells + lane * p.cells;
  const RowSums sums =
      MergeShort<kStages>(p.cells, Log2EOverTemperature(ask.softcap, ask.temperature),
                          [&](int i) -> const CellSums& { return cells[i].sums; });
  int nan = static_cast<int>(loss.logits.cols);
  if (isnan(sums.stats.sum)) {
    for (int i = 0; i < p.cells; ++i) {
      if (isnan(cells[i].sums.stats.sum)) nan = min(nan, cells[i].nan);
    }
  }
  const float target_logit = ask.target < 0 ? 0.0f : memory.gradients[lane].target_logit;
  const Outcome outcome = Conclude(loss, r, sums, target_logit, nan, /*lane=*/0);
  if (ask.extra_count > 0) memory.outcomes[lane] = outcome;
  FillIn(memory.gradients[lane], ask, outcome, p.args.upstream[r], loss.logits.cols);
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32, kResident<T>)
    ShortTrainingKernel(const __grid_constant__ Params p) {
  WarpMemory<T>& memory = WarpMemory<T>::Of();
  const CrossEntropyArgs& loss = p.args.loss;
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (warp >= p.warps) return;
  const int64_t end = (warp + 1) * loss.logits.rows / p.warps;
  int64_t first = warp * loss.logits.rows / p.warps;
  const auto row_or_null = [&](int64_t r) { return r < end ? RowOf<T>(p.args, r) : nullptr; };
  for (int k = 0; k < p.at_once; ++k) CellsOf<T>(p, k).Fill(row_or_null(first + k));
#pragma unroll 1
  for (; first < end; first += p.at_once) {
    const int rows = static_cast<int>(min(end - first, int64_t{p.at_once}));
    const CrossEntropyRow& own = loss.rows[first + min(lane, rows - 1)];
    const bool has_row = lane < rows && own.active != 0;
    const int own_target = own.target;
    const int own_want = own.want;
    const int own_extras = own.extra_count;
    const float own_softcap = own.softcap;
    const float own_smoothing = own.label_smoothing;
    const bool ranked = has_row && own_target >= 0 && (own_want & kWantRank) != 0;
    const float own_scale = has_row ? Log2EOverTemperature(own_softcap, own.temperature) : 1.0f;
    const float own_target_logit =
        ranked ? ToFloat(RowOf<T>(p.args, first + lane)[own_target]) : 0.0f;
    const unsigned active = __ballot_sync(kFullWarp, has_row);
    const unsigned with_extras = __ballot_sync(kFullWarp, has_row && own_extras > 0);
#pragma unroll 1
    for (int k = 0; k < rows; ++k) {
      const int64_t r = first + k;
      if ((active >> k & 1) == 0) {
        for (int s = 0; s < p.cells; ++s) CommitAsync();
        continue;
      }
      if ((with_extras >> k & 1) != 0) KeepExtras(loss, loss.rows[r], RowOf<T>(p.args, r));
      const int target = __shfl_sync(kFullWarp, own_target, k);
      const int want = __shfl_sync(kFullWarp, own_want, k);
      const CellAsk ask{.target = (want & kWantRank) != 0 ? target : kIgnoredTarget,
                        .target_logit = __shfl_sync(kFullWarp, own_target_logit, k),
                        .weighted = (want & kWantEntropy) != 0,
                        .total = __shfl_sync(kFullWarp, own_smoothing, k) > 0,
                        .softcap = __shfl_sync(kFullWarp, own_softcap, k),
                        .log2e_over_temperature = __shfl_sync(kFullWarp, own_scale, k)};
      VisitSumming(SummingOf(ask),
                   [&](auto summing) { SumCells<T, summing>(p, r, k, ask, target); });
    }
    __syncwarp();
    if (has_row) ConcludeRow<T>(p, first + lane, lane);
    __syncwarp();
    const int64_t next = first + p.at_once;
    if (lane < p.at_once && next + lane < end) PrefetchToL2(loss.rows + next + lane);
#pragma unroll 1
    for (int k = 0; k < rows; ++k) {
      const int64_t r = first + k;
      if ((with_extras >> k & 1) != 0) WriteExtras(loss, loss.rows[r], memory.outcomes[k]);
      VisitWriting(WritingOf((active >> k & 1) != 0, memory.gradients[k]),
                   [&](auto writing) { WriteCells<T, writing>(p, r, row_or_null(next + k), k); });
    }
  }
  WaitAsync<0>();
}

}  // namespace

static_assert(kShortTrainingVocab <= kStages * kCell);

cudaError_t ShortTraining(const CrossEntropyTrainingArgs& args, const Scratch& device,
                          cudaStream_t stream) {
  const TensorView& logits = args.loss.logits;
  const auto cells = static_cast<int32_t>(CeilDiv(logits.cols, kCell));
  return VisitDType(logits.dtype, [&]<class T>() {
    const int64_t at_once = int64_t{device.multiprocessors} * kWarps * kResident<T>;
    const Params p{.args = args,
                   .cells = cells,
                   .at_once = kStages / cells,  // whole: cells are 1 or 2
                   .warps = static_cast<int32_t>(std::min(logits.rows, at_once))};
    return LaunchKernel(&ShortTrainingKernel<T>,
                        {.grid = GridFor(p.warps, kWarps),
                         .threads = kWarps * 32,
                         .shared_bytes = kWarps * static_cast<int>(sizeof(WarpMemory<T>))},
                        stream, p);
  });
}

}  // namespace logitd::cuda
