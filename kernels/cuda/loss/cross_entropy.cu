// cross_entropy: one read of the logits leaves every cell's sums; one warp merges them and writes
// the losses.
//
// For each cell of 1024 logits: the maximum and the sum of exponentials; where the row asks for
// them, the sum of p ln p, the sum of the logits, the number of tokens before the target. What a
// row asks is a loop of its own (Summing). Rows with top tokens have a kernel of their own (more
// shared memory). Cells merge in one order. Forms (rows/plan.h): a block or a cluster a row; for
// short rows a warp takes up to 16 rows and a lane concludes each. Logarithms, differences and
// means, once a row, are in double.
//
// Cost: reads rows * vocab * sizeof(T) once, writes 16 to 24 bytes a row. Limited by: HBM; options
// and short rows by instructions (a softcap takes 14 to 24 an element), and then by the card's
// power. Measured, bf16 (bench/results/h200/kernels_a6bebcf6.json): 8192 x 128256 96% of one read,
// entropy 80%, softcap 73%; 8192 x 32000 89%; 65536 x 1000 70%; one row 5.7 us.
// Dropped: one loop for all options (spills); ranks by tensor cores; merging and concluding apart.
#include <algorithm>
#include <array>
#include <span>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/row_tails.cuh"
#include "kernels/cuda/loss/support.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/row_kernel.cuh"

namespace logitd::cuda {
namespace {

static_assert(kMaxScoreTopLogprobs <= SmallPool::kMaxK);
// OfferGroups numbers a block's groups in 16 bits, and a block may hold all of a row.
static_assert(kMaxVocab / kCell <= SmallPool::kMostCells);

// ---- stages of a row ---------------------------------------------------------------------------

// The lowest NaN of a row whose sum is NaN, by one warp.
template <class T>
__device__ inline int FindNanOfRow(const T* row, const CellSums* cells, int count, int32_t vocab) {
  int cell = 0;
  while (cell + 1 < count && !isnan(cells[cell].stats.sum)) ++cell;
  return FindNan(row, cell * kCell, vocab, static_cast<int>(threadIdx.x % 32));
}

// Merges a row's cells and writes its answers except tops and extras, by one warp. Not inlined: one
// body for all callers gives a row the same bits.
template <class T>
__device__ __noinline__ Outcome ConcludeRow(const CrossEntropyArgs& p, int64_t r, const T* row,
                                            const CellSums* cells) {
  const int lane = threadIdx.x % 32;
  const CrossEntropyRow& ask = p.rows[r];
  const int32_t vocab = static_cast<int32_t>(p.logits.cols);
  const float log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature);
  const int count = CellsOf(vocab);
  const RowSums sums =
      MergeRow(count, log2e_over_temperature, lane, [=](int i) { return cells[i]; });
  int nan = vocab;
  if (isnan(sums.stats.sum)) nan = FindNanOfRow(row, cells, count, vocab);
  const float target_logit = ask.target < 0 ? 0.0f : ToFloat(row[ask.target]);
  return Conclude(p, r, sums, target_logit, nan, lane);
}

template <class T>
__device__ inline void WriteExtras(const CrossEntropyArgs& p, const CrossEntropyRow& ask,
                                   int extras, const T* row, const Outcome& outcome) {
  const int32_t* ids = p.extra_ids + ask.first_extra;
  float* logprobs = p.answers.extra_logprobs;
  const int64_t first = ask.first_extra_entry;
  for (int i = threadIdx.x; i < extras; i += static_cast<int>(blockDim.x))
    logprobs[first + i] = static_cast<float>(outcome.Logprob(ToFloat(row[ids[i]])));
}

// Writes the `top` largest tokens, from the pool.
template <class Block>
__device__ inline void WriteTops(const CrossEntropyArgs& p, const CrossEntropyRow& ask, int top,
                                 const Outcome& outcome) {
  constexpr int kThreads = Block::kThreads;
  int32_t* ids = p.answers.top_ids + ask.first_top_entry;
  float* logprobs = p.answers.top_logprobs + ask.first_top_entry;
  if (outcome.Nan()) {
    for (int i = threadIdx.x; i < top; i += kThreads) {
      ids[i] = -1;
      logprobs[i] = outcome.sum;
    }
    return;
  }
  auto& s = Pool<SmallPool>();
  const int n = Trim<kThreads, SmallPool>(top, SmallPool::kPool / 2);
  EmitByRank<kThreads>(s.pool, n, s.pool + SmallPool::kPool / 2, s.select, [&](int rank, Key key) {
    if (rank >= top) return;
    ids[rank] = KeyIndex(key);
    logprobs[rank] = static_cast<float>(outcome.Logprob(KeyLogit(key)));
  });
}

// ---- the op ------------------------------------------------------------------------------------

// A row's loss, on the skeleton of rows. kTop: rows may want their largest tokens.
template <class T, bool kTop>
class LossOp : public RowOp {
 public:
  using Element = T;
  using Params = CrossEntropyArgs;
  using Cell = CellSums;
  using Shared = Outcome;  // from warp 0 to the others
  static constexpr bool kTops = kTop;

  __device__ LossOp(const CrossEntropyArgs& p, int64_t r)
      : row_(static_cast<const T*>(p.logits.data) + r * p.logits.row_stride), ask_(p.rows[r]) {}
  __device__ bool Active() const { return IsWhole(ask_); }
  __device__ int Tops() const { return ask_.top_logprobs; }

  // Leaves the sums of the block's cells and, where there are tops, their sketch.
  template <class Block>
  __device__ __forceinline__ float Read(RowStream<Block>& stream, const Part& part, CellSums* cells,
                                        const OpMemory<LossOp, Block>& memory) {
    const auto ask = CellAsk::Of(ask_, [&] { return ToFloat(row_[ask_.target]); });
    float lane_best = -kInfinity;
    SmallPool::Sketch* sketch_to = memory.sketch + threadIdx.x;
    const auto max_of = [&](const LaneCell<T>& x) {
      if constexpr (kTop) {
        float lane_max;
        *sketch_to = SketchOf<SmallPool>(x, lane_max);
        sketch_to += Block::kThreads;
        lane_best = fmaxf(lane_best, lane_max);
        return lane_max;
      } else {
        return x.Max(0, kLaneElements);
      }
    };
    VisitSumming(SummingOf(ask), [&](auto summing) {
      SumCells<summing, T>(stream, ask, part.end, threadIdx.x % 32 == 0, cells, max_of,
                           [](const CellSums& sums, const auto&...) { return sums; });
    });
    return lane_best;
  }

  template <class Block>
  __device__ __forceinline__ void FinishBlock(const CrossEntropyArgs& p, int64_t r, const Part&,
                                              const OpMemory<LossOp, Block>& memory) {
    const CrossEntropyRow& ask = p.rows[r];
    const int top = kTop ? ask_.top_logprobs : 0;
    const int extras = ask.extra_count;
    if (threadIdx.x < 32) {
      const Outcome outcome = ConcludeRow<T>(p, r, row_, memory.cells);
      if (threadIdx.x == 0) memory.of_op = outcome;
    }
    if (top == 0 && extras == 0) return;
    __syncthreads();
    const Outcome outcome = memory.of_op;
    WriteExtras<T>(p, ask, extras, row_, outcome);
    if constexpr (kTop) {
      if (top > 0) WriteTops<Block>(p, ask, top, outcome);
    }
  }

 private:
  const T* const row_;
  const CrossEntropyRow ask_;
};

// ---- short rows --------------------------------------------------------------------------------

constexpr int kShortWarps = 4;
constexpr int kShortResident = 5;
constexpr int kShortStages = 2;
constexpr int kRowsWorthTails = 4;  // of a warp (row_tails.cuh)
// The most rows of a warp: a lane concludes a row.
template <int kCells>
constexpr int kMostShortRows = 128 / kCells;

// For rows of up to kCells cells, 4, 8 or 16.
template <class T, int kCells>
struct ShortShared {
  static_assert(kMostShortRows<kCells> <= 32);
  typename CellRing<T, kShortStages>::Storage rings[kShortWarps];
  Outcome outcomes[kShortWarps];
  CellSums cells[kShortWarps][kMostShortRows<kCells>][kCells];
};

// The rows of a warp, cell by cell, copied ahead: without their tails (row_tails.cuh).
template <class T>
class ShortRows {
 public:
  // Reads only the first `vocab` tokens of each row.
  __device__ ShortRows(typename CellRing<T, kShortStages>::Storage& storage,
                       const TensorView& logits, int vocab, int64_t first_row, int rows)
      : ring_(storage, static_cast<int>(threadIdx.x % 32)),
        vocab_(vocab),
        stride_(logits.row_stride),
        ahead_(static_cast<const T*>(logits.data) + first_row * logits.row_stride),
        ahead_rows_(rows),
        row_(ahead_) {
#pragma unroll
    for (int stage = 0; stage < kShortStages; ++stage) Push();
  }

  // The cell at `first` of the present row. Cells are asked for in order, and all of them.
  __device__ void Next(int first, LaneCell<T>& x) {
    const int count = vocab_ - first;
    if (count > kQuarter) {
      ring_.PopQuarters(row_ + first, count, x);
    } else {
#pragma unroll
      for (uint32_t& word : x.words) word = kMinusInfinities<T>;
      ring_.PopQuarter(row_ + first, count, x);
    }
    Push();
  }
  __device__ void NextRow() { row_ += stride_; }

 private:
  __device__ void Push() {
    if (ahead_rows_ <= 0) return ring_.PushNothing();
    ring_.Push(ahead_ + ahead_first_, vocab_ - ahead_first_);
    ahead_first_ += kCell;
    if (ahead_first_ < vocab_) return;
    ahead_first_ = 0;
    ahead_ += stride_;
    --ahead_rows_;
  }

  CellRing<T, kShortStages> ring_;
  const int vocab_;
  const int64_t stride_;
  const T* ahead_;
  int ahead_first_ = 0;
  int ahead_rows_;
  const T* row_;
};

template <class T>
__device__ inline CellSums SumCellOf(Summing summing, const LaneCell<T>& x, const CellAsk& ask,
                                     int first, int end, int lane) {
  const float lane_max = x.Max(0, kLaneElements);
  switch (summing) {
    case Summing::kPlain:
    case Summing::kWithRankOrTotal:
      return SumCell<Summing::kWithRankOrTotal, T, true>(x, lane_max, ask, first, end, lane);
    case Summing::kWeighted:
      return SumCell<Summing::kWeighted, T, true>(x, lane_max, ask, first, end, lane);
    case Summing::kMildlyCapped:
      return SumCell<Summing::kMildlyCapped, T, true>(x, lane_max, ask, first, end, lane);
    case Summing::kMildlyCappedAll:
      return SumCell<Summing::kMildlyCappedAll, T, true>(x, lane_max, ask, first, end, lane);
    case Summing::kCapped:
      return SumCell<Summing::kCapped, T, true>(x, lane_max, ask, first, end, lane);
  }
  __builtin_unreachable();
}

// Sums the cells of the row that `stream` is at, `end` tokens: store(cell, sums).
template <class T, class Store>
__device__ inline void SumRow(ShortRows<T>& stream, Summing summing, const CellAsk& ask, int end,
                              int lane, Store store) {
  RankCounter<T> rank(ask.target, ask.target_logit);
#pragma unroll 1
  for (int first = 0; first < end; first += kCell) {
    LaneCell<T> x;
    stream.Next(first, x);
    if (ask.target >= 0) rank.Add(x, first, lane);
    CellSums sums = SumCellOf<T>(summing, x, ask, first, end, lane);
    if (ask.target >= 0 && first + kCell >= end) sums.before = rank.Total();
    store(first / kCell, sums);
  }
}
// The same of a row that asks for nothing more than its loss: a loop of its own, in few
// instructions.
template <class T, class Store>
__device__ inline void SumPlainRow(ShortRows<T>& stream, float log2e_over_temperature, int end,
                                   int lane, Store store) {
  const CellAsk ask{.target = kIgnoredTarget, .log2e_over_temperature = log2e_over_temperature};
#pragma unroll 1
  for (int first = 0; first < end; first += kCell) {
    LaneCell<T> x;
    stream.Next(first, x);
    store(first / kCell,
          SumCell<Summing::kPlain, T, true>(x, x.Max(0, kLaneElements), ask, first, end, lane));
  }
}

// Writes the extras of the warp's rows, row by row. `outcome` is of the lane's row, which has
// `extras` of them; `shared` is the warp's.
template <class T>
__device__ inline void WriteShortExtras(const CrossEntropyArgs& p, int64_t first_row, int extras,
                                        const Outcome& outcome, Outcome& shared) {
  const int lane = threadIdx.x % 32;
  for (unsigned left = __ballot_sync(kFullWarp, extras > 0); left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    __syncwarp();
    if (lane == k) shared = outcome;
    __syncwarp();
    const Outcome of_row = shared;
    const CrossEntropyRow& ask = p.rows[first_row + k];
    const T* row = static_cast<const T*>(p.logits.data) + (first_row + k) * p.logits.row_stride;
    for (int i = lane; i < ask.extra_count; i += 32) {
      const float logit = ToFloat(row[p.extra_ids[ask.first_extra + i]]);
      p.answers.extra_logprobs[ask.first_extra_entry + i] =
          static_cast<float>(of_row.Logprob(logit));
    }
  }
}

// Rows of up to kCells cells: a warp takes `rows_of_warp` of them one after the other. What a row
// asks is read by a lane for each row before, and a lane for each row concludes after: in
// double, once for all.
template <class T, int kCells>
__global__ void __launch_bounds__(kShortWarps * 32, kShortResident)
    ShortRowsKernel(const __grid_constant__ CrossEntropyArgs p, int rows_of_warp) {
  __shared__ ShortShared<T, kCells> shared;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kShortWarps + warp) * rows_of_warp;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(rows_of_warp), p.logits.rows - first_row));
  if (rows <= 0) return;
  const int32_t vocab = static_cast<int32_t>(p.logits.cols);
  const int count = CellsOf(vocab);  // of a row's cells

  // The lane's row.
  const bool has_row = lane < rows;
  const int64_t r = first_row + (has_row ? lane : 0);
  const CrossEntropyRow& own = p.rows[r];
  const bool active = has_row && IsWhole(own);
  const int own_target = own.target;
  const T* own_row = static_cast<const T*>(p.logits.data) + r * p.logits.row_stride;
  const float own_target_logit = active && own_target >= 0 ? ToFloat(own_row[own_target]) : 0.0f;
  CellAsk own_ask = CellAsk::Of(own, [=] { return own_target_logit; });
  if (!active) own_ask.log2e_over_temperature = 1.0f;
  const Summing own_summing = SummingOf(own_ask);
  // The compiler divides by it for all rows, and a division by 0 takes long.
  if (own_ask.softcap == 0) own_ask.softcap = 1.0f;

  // f32 rows, limited by HBM, gain nothing from tails. With few rows the latency of tails is longer
  // than what a last cell takes without a softcap.
  const bool capped = has_row && own.softcap > 0;
  const bool with_tails =
      sizeof(T) == 2 && (rows >= kRowsWorthTails || __any_sync(kFullWarp, capped));
  const int tail = with_tails ? TailOf<T>(vocab) : 0;
  const int end = vocab - tail;
  ShortRows<T> stream(shared.rings[warp], p.logits, end, first_row, rows);
  if constexpr (sizeof(T) == 2) {
    const auto store_tail = [cells = shared.cells[warp], last = count - 1](
                                int k, const CellSums& sums) { cells[k][last] = sums; };
    if (tail > 0) SumTails<T>(p.logits, first_row, rows, own_summing, own_ask, store_tail);
  }
#pragma unroll 1
  for (int k = 0; k < rows; ++k, stream.NextRow()) {
    CellSums* cells = shared.cells[warp][k];
    const auto store = [=](int cell, const CellSums& sums) {
      if (lane == 0) cells[cell] = sums;
    };
    const auto summing =
        static_cast<Summing>(__shfl_sync(kFullWarp, static_cast<int>(own_summing), k));
    if (summing == Summing::kPlain) {
      SumPlainRow<T>(stream, __shfl_sync(kFullWarp, own_ask.log2e_over_temperature, k), end, lane,
                     store);
    } else {
      SumRow<T>(stream, summing, AskOfRow(own_ask, k), end, lane, store);
    }
  }
  WaitAsync<0>();
  __syncwarp();

  RowSums sums{};
  if (active)
    sums = MergeShort<kCells>(count, own_ask.log2e_over_temperature, [&](int i) -> const CellSums& {
      return shared.cells[warp][lane][i];
    });
  int first_nan = vocab;
  for (unsigned left = __ballot_sync(kFullWarp, isnan(sums.stats.sum)); left != 0;
       left &= left - 1) {
    const int k = __ffs(left) - 1;
    const T* row = static_cast<const T*>(p.logits.data) + (first_row + k) * p.logits.row_stride;
    const int nan = FindNanOfRow(row, shared.cells[warp][k], count, vocab);
    if (lane == k) first_nan = nan;
  }
  Outcome outcome{};
  if (active) outcome = Conclude(p, r, sums, own_target_logit, first_nan, /*lane=*/0);
  __syncwarp();
  WriteShortExtras<T>(p, first_row, active ? own.extra_count : 0, outcome, shared.outcomes[warp]);
}

// ---- launch ------------------------------------------------------------------------------------

template <class T, int kCells>
cudaError_t LaunchShort(const CrossEntropyArgs& p, const RowsPlan& plan, const Scratch& scratch,
                        cudaStream_t stream) {
  const int64_t rows = p.logits.rows;
  const int64_t at_once = int64_t{plan.teams} * scratch.multiprocessors;
  const int64_t of_warp = std::min<int64_t>(CeilDiv(rows, at_once), kMostShortRows<kCells>);
  return LaunchKernel(&ShortRowsKernel<T, kCells>,
                      {.grid = GridFor(rows, of_warp * kShortWarps), .threads = kShortWarps * 32},
                      stream, p, static_cast<int>(of_warp));
}

struct LossForm {
  cudaError_t (*launch)(const CrossEntropyArgs&, const RowsPlan&, const Scratch&, cudaStream_t);
  RowForm rows;
};

template <class T, bool kTop, class Block>
constexpr LossForm BlockForm(CostOf cost) {
  return {&LaunchRowKernel<LossOp<T, kTop>, Block>, FormOf<LossOp<T, kTop>, Block>(cost)};
}
template <class T, int kCells>
constexpr LossForm ShortForm(CostOf cost) {
  return {&LaunchShort<T, kCells>,
          {.warps = kShortWarps,
           .resident = kShortResident,
           .warp_takes_row = true,
           .most_cells = kCells,
           .cost = cost}};
}

template <class T>
constexpr bool kWide = sizeof(T) == 4;

template <class T>
constexpr LossForm kForms[] = {
    ShortForm<T, 8>(CostOf::kLoss8),
    // f32 rows gain nothing by the next two: the form before once more.
    ShortForm<T, kWide<T> ? 8 : 4>(kWide<T> ? CostOf::kLoss8 : CostOf::kLoss4),
    ShortForm<T, kWide<T> ? 8 : 16>(kWide<T> ? CostOf::kLoss8 : CostOf::kLoss16),
    BlockForm<T, false, FewRowsStream<T>>(CostOf::kLossFewRows),
    BlockForm<T, false, ManyRowsStream<T>>(CostOf::kLossManyRows),
};
template <class T>
constexpr LossForm kTopForms[] = {
    BlockForm<T, true, BlockShape<T, SmallPool, 16, 2, 1, true>>(CostOf::kLossTopsFewRows),
    BlockForm<T, true, BlockShape<T, SmallPool, 4, 2, kWide<T> ? 4 : 6>>(CostOf::kLossTopsManyRows),
};

cudaError_t WholeCrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch,
                              cudaStream_t stream) {
  const bool tops = args.max_top_logprobs > 0;
  const std::span<const LossForm> forms =
      VisitDType(args.logits.dtype, [&]<class T>() -> std::span<const LossForm> {
        if (tops) return kTopForms<T>;
        return kForms<T>;
      });
  std::array<RowForm, std::size(kForms<float>)> rows;
  for (size_t i = 0; i < forms.size(); ++i) rows[i] = forms[i].rows;
  const RowsPlan plan = PlanRows(ShapeOf(args.logits), {rows.data(), forms.size()}, scratch);
  if (plan.form < 0) return cudaErrorNotSupported;
  return forms[plan.form].launch(args, plan, scratch, stream);
}

}  // namespace

cudaError_t CrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch,
                         cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  const bool supported = args.max_support > 0;
  cudaError_t error = cudaSuccess;
  if (!supported || !args.all_supported) error = WholeCrossEntropy(args, scratch, stream);
  if (error == cudaSuccess && supported) error = SupportedCrossEntropy(args, scratch, stream);
  return error;
}

}  // namespace logitd::cuda
