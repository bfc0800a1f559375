// cross_entropy: one read of the logits leaves every cell's sums; one warp merges them and writes
// the losses.
//
// A warp takes cells of 1024 logits (cell.cuh) from a ring of copies. For each cell it leaves the
// maximum and the sum of exponentials. Where the row asks for them it also leaves the sum of p ln
// p, the sum of the logits and the number of tokens before the target. What a row asks is a loop of
// its own (Summing), the same in all its threads. Without a softcap the bits of the sum of
// exponentials are the same in every loop. Rows with top tokens have a kernel of their own, because
// tops need shared memory that would cost the others residency: it keeps softmax_topk's sketch of
// the row and selects from it. Where a block may have 99 KB, f32 rows with tops end at about
// 460,000 tokens (cudaErrorNotSupported). Cells merge in one order, whatever the grid:
//
//   many rows a warp  rows of up to 4 cells, or 8 where they are many (of 16 bits, 9, 10 and 13 too):
//                     up to 32 rows, 16 or 8, one after the other; then a lane for each of them
//                     merges and concludes. Last cells of few tokens are taken together
//   cluster per row   at most as many rows as multiprocessors: up to 8 blocks leave their cells in
//                     the first block's shared memory (sm_90; before that a large block a row)
//   block per row     all other rows
//
// Logarithms, differences and means, once a row, are in double. A softcap is a polynomial of the
// logit (softcap.cuh), or tanhf where it is extreme or the row also wants entropy or smoothing: the
// sums are of tanh(l / softcap), and the softcap is a factor of the exponent.
//
// Cost: reads rows * vocab * sizeof(T) once, writes 16 to 24 bytes a row. Limited by: HBM; bf16
// takes about 7 instructions and one ex2 an element, 50% and 57% of what a multiprocessor issues at
// the read ceiling. Of 16-bit logits the sum is taken by tensor cores, and two are compared with
// the target's at once, so that smoothing and rank cost little. A softcap takes 14 to 24
// instructions, by how large the logits are, and is limited by them, as tops with entropy (14).
// Short rows are limited by instructions too (about 330 a row of 1000).
// Measured (bench/results/h200/losses.json), as a share of one read, bf16: 8192 x 128256, 96%;
// 8192 x 32000, 88%; with rank 92%; label smoothing 85%; entropy 75%; rank, entropy and 5 tops 70%;
// softcap 62%, 46% where logits are larger than it; softcap and entropy 32%; 65536 x 1000, 49%; 64
// rows 12 us, one row 7.1. With many instructions the card reaches its power limit in the bench, and
// its clock falls.
// On an H100 (bench/results/h100/short_rows.json; in brackets the tree before): 65536 x 1000 77% (70%),
// 32768 x 5000 88%; 65536 x 1025 58 us (87), with a softcap 66 (128), as a few tokens above a cell's
// border are summed for several rows at once (row_tails.cuh). 16 to 32 rows of 128256 9 to 10 us, one
// row 7.2 (rows_and_draws.json).
// Tried and dropped at 32000 tokens, where the ends of rows are not hidden: blocks of 2 warps (1%
// slower), of one warp (5%), fewer stages and more blocks (3%). One loop for all that rows may ask:
// spills, 4% slower for plain rows. Counting ranks by tensor cores (10% slower with entropy: their
// latency). Merging and concluding a row as two functions (3%, at the ends of rows). 24 warps of
// short rows a multiprocessor for 20, what a row asks in shared memory (1000 tokens 10% slower). f32
// rows of 9 to 16 cells by warps (up to 15% slower). For tops, groups of a lane's own elements, which
// need no shuffles (nothing).
#include <algorithm>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/row_tails.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/candidates.cuh"
#include "kernels/cuda/rows/cluster_blocks.h"
#include "kernels/cuda/rows/row_block.cuh"

namespace logitd::cuda {
namespace {

struct Params {
  CrossEntropyArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
};

// ---- blocks ------------------------------------------------------------------------------------

// Blocks that select tops, and blocks that only read rows: they need no memory for a pool.
template <class T, int kWarps, int kStages, int kResident, bool kCluster = false>
struct TopShape : BlockShape<T, SmallPool, kWarps, kStages, kResident, kCluster> {
  static constexpr bool kTop = true;
  using OneBlock = BlockShape<T, SmallPool, kWarps, kStages, kResident>;
};
template <class T, int kWarps, int kStages, int kResident, bool kCluster = false>
struct StreamShape : BlockShape<T, SmallPool, kWarps, kStages, kResident, kCluster> {
  static constexpr bool kTop = false;
  struct Shared {
    typename CellRing<T, kStages>::Storage rings[kWarps];
  };
};
static_assert(kMaxTopLogprobs <= SmallPool::kMaxK);
// OfferGroups numbers a block's groups in 16 bits, and a block may hold all of a row.
static_assert(kMaxVocab / kCell * SmallPool::kGroupsOfCell <= 65536);

// Room for a row's cells: what follows them is aligned to 16 bytes, as the sketch must be.
__host__ __device__ inline int CellPlaces(const Params& p) { return (p.cells + 3) / 4 * 4; }
static_assert(sizeof(Outcome) % 16 == 0);

// A block's shared memory.
template <class Block>
struct BlockMemory {
  typename Block::Shared& shared;
  Outcome* outcome;           // from warp 0 to the others
  CellSums* cells;            // [CellPlaces(p)], in the first block of a cluster
  SmallPool::Sketch* sketch;  // [cells of the block, 32]; only where there are tops

  __device__ static BlockMemory Of(const Params& p) {
    extern __shared__ __align__(128) uint4 dynamic[];
    auto* shared = reinterpret_cast<typename Block::Shared*>(dynamic);
    auto* outcome = reinterpret_cast<Outcome*>(shared + 1);
    auto* cells = reinterpret_cast<CellSums*>(outcome + 1);
    return {*shared, outcome, cells, reinterpret_cast<SmallPool::Sketch*>(cells + CellPlaces(p))};
  }
};

// ---- stages of a row ---------------------------------------------------------------------------

// Reads the block's part of a row, which ends at `end`: leaves the sums of its cells and, where
// there are tops, their sketch. Returns the largest logit the lane has seen, also only for tops.
template <Summing kSumming, class Block>
__device__ inline float ReadCellsBy(RowStream<Block>& stream, const CellAsk& ask, int end,
                                    CellSums* cells, SmallPool::Sketch* sketch) {
  using T = typename Block::Element;
  const int lane = threadIdx.x % 32;
  float lane_best = -kInfinity;
  SmallPool::Sketch* sketch_to = sketch + threadIdx.x;
  LaneCell<T> x;
  RankCounter<T> rank(ask.target, ask.target_logit);
  int last = -1;  // cell
#pragma unroll 1
  while (stream.Next(x)) {
    const int first = stream.first();
    stream.Release();
    float lane_max;
    if constexpr (Block::kTop) {
      *sketch_to = SketchOf<SmallPool>(x, lane_max);
      lane_best = fmaxf(lane_best, lane_max);
      sketch_to += Block::kThreads;
    } else {
      lane_max = x.Max(0, kLaneElements);
    }
    if constexpr (kSumming != Summing::kPlain) {
      if (ask.target >= 0) rank.Add(x, first, lane);
    }
    const CellSums sums = SumCell<kSumming, T>(x, lane_max, ask, first, end, lane);
    last = first / kCell;
    if (lane == 0) cells[last] = sums;
  }
  if (kSumming != Summing::kPlain && ask.target >= 0 && last >= 0) {
    const int before = rank.Total();
    if (lane == 0) cells[last].before = before;
  }
  return lane_best;
}

template <class Block>
__device__ inline float ReadCells(RowStream<Block>& stream, const CellAsk& ask, int end,
                                  CellSums* cells, SmallPool::Sketch* sketch) {
  switch (SummingOf(ask)) {
    case Summing::kPlain:
      return ReadCellsBy<Summing::kPlain>(stream, ask, end, cells, sketch);
    case Summing::kWithRankOrTotal:
      return ReadCellsBy<Summing::kWithRankOrTotal>(stream, ask, end, cells, sketch);
    case Summing::kWeighted:
      return ReadCellsBy<Summing::kWeighted>(stream, ask, end, cells, sketch);
    case Summing::kMildlyCapped:
      return ReadCellsBy<Summing::kMildlyCapped>(stream, ask, end, cells, sketch);
    case Summing::kMildlyCappedAll:
      return ReadCellsBy<Summing::kMildlyCappedAll>(stream, ask, end, cells, sketch);
    case Summing::kCapped:
      return ReadCellsBy<Summing::kCapped>(stream, ask, end, cells, sketch);
  }
  __builtin_unreachable();
}

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
__device__ __noinline__ Outcome ConcludeRow(const Params& p, int64_t r, const T* row,
                                            const CellSums* cells) {
  const int lane = threadIdx.x % 32;
  const CrossEntropyRow& ask = p.args.rows[r];
  const int32_t vocab = static_cast<int32_t>(p.args.logits.cols);
  const float log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature);
  const RowSums sums =
      MergeRow(p.cells, log2e_over_temperature, lane, [=](int i) { return cells[i]; });
  int nan = vocab;
  if (isnan(sums.stats.sum)) nan = FindNanOfRow(row, cells, p.cells, vocab);
  const float target_logit = ask.target < 0 ? 0.0f : ToFloat(row[ask.target]);
  return Conclude(p.args, r, sums, target_logit, nan, lane);
}

template <class Block>
__device__ inline void WriteExtras(const Params& p, const CrossEntropyRow& ask, int extras,
                                   const typename Block::Element* row, const Outcome& outcome) {
  const int32_t* ids = p.args.extra_ids + ask.first_extra;
  float* logprobs = p.args.answers.extra_logprobs;
  const int64_t first = ask.first_extra_entry;
  for (int i = threadIdx.x; i < extras; i += Block::kThreads)
    logprobs[first + i] = static_cast<float>(outcome.Logprob(ToFloat(row[ids[i]])));
}

// Writes the `top` largest tokens, from the pool.
template <class Block>
__device__ inline void WriteTops(const Params& p, const CrossEntropyRow& ask, int top,
                                 const Outcome& outcome) {
  constexpr int kThreads = Block::kThreads;
  int32_t* ids = p.args.answers.top_ids + ask.first_top_entry;
  float* logprobs = p.args.answers.top_logprobs + ask.first_top_entry;
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

// ---- the kernel --------------------------------------------------------------------------------

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident)
    CrossEntropyKernel(const __grid_constant__ Params p) {
  using T = typename Block::Element;
  if constexpr (Block::kCluster) ClusterArriveEmpty();
  AwaitEarlierKernels();
  const auto memory = BlockMemory<Block>::Of(p);
  const int64_t r = p.blocks == 1 ? blockIdx.x : blockIdx.x / p.blocks;
  const int block = static_cast<int>(blockIdx.x - r * p.blocks);
  const int32_t vocab = static_cast<int32_t>(p.args.logits.cols);
  const Part part = Part::Of(block, p.blocks, p.cells, vocab);
  const T* row = static_cast<const T*>(p.args.logits.data) + r * p.args.logits.row_stride;

  // Loaded before the copies begin: after them it would arrive last. Used once they are under way.
  const CrossEntropyRow* ask = p.args.rows + r;
  const int is_active = ask->active;
  const int want = ask->want;
  const int asked_target = ask->target;
  const float softcap = ask->softcap;
  const float temperature = ask->temperature;
  const float smoothing = ask->label_smoothing;
  const int top = Block::kTop ? ask->top_logprobs : 0;
  RowStream<Block> stream(memory.shared, row, part.begin, part.end);
  if constexpr (Block::kCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (is_active == 0) return stream.Abandon();
  const int target = (want & kWantRank) != 0 ? asked_target : kIgnoredTarget;
  const float log2e_over_temperature = Log2EOverTemperature(softcap, temperature);
  const CellAsk cell_ask{.target = target,
                         .target_logit = target >= 0 ? ToFloat(row[target]) : 0.0f,
                         .weighted = (want & kWantEntropy) != 0,
                         .total = smoothing > 0,
                         .softcap = softcap,
                         .log2e_over_temperature = log2e_over_temperature};
  CellSums* row_cells = memory.cells;
  if constexpr (Block::kCluster) {
    if (p.blocks > 1) row_cells = InBlock(memory.cells, 0);
  }
  const float lane_best = ReadCells<Block>(stream, cell_ask, part.end, row_cells, memory.sketch);

  __syncthreads();  // from here on the rings' memory is the pool's
  if constexpr (Block::kTop) {
    if (top > 0 && Block::kCluster && p.blocks == 1) {  // a device without clusters, or many rows
      GatherRow<typename Block::OneBlock>(row, part, memory.sketch, lane_best, top, memory.shared);
    } else if (top > 0) {
      GatherRow<Block>(row, part, memory.sketch, lane_best, top, memory.shared);
    }
  }
  if constexpr (Block::kCluster) {
    if (p.blocks > 1) {
      if (top == 0) {
        ClusterArrive();
        ClusterWait();
      }
      if (block != 0) return;
    }
  }

  const int extras = ask->extra_count;
  if (threadIdx.x < 32) {
    const Outcome outcome = ConcludeRow<T>(p, r, row, memory.cells);
    if (threadIdx.x == 0) *memory.outcome = outcome;
  }
  if (top == 0 && extras == 0) return;
  __syncthreads();
  const Outcome outcome = *memory.outcome;
  WriteExtras<Block>(p, *ask, extras, row, outcome);
  if constexpr (Block::kTop) {
    if (top > 0) WriteTops<Block>(p, *ask, top, outcome);
  }
}

// ---- short rows --------------------------------------------------------------------------------

// The most cells of a row that one warp takes, where rows are many, and where they are few: then
// blocks end a row of more cells sooner.
constexpr int32_t kShortCells = 8;
constexpr int32_t kShortCellsOfFewRows = 4;
// The same of many rows of 16 bits whose cells do not go round a block's warps evenly.
constexpr int32_t kShortCellsOfManyRows = 16;
constexpr int64_t kManyRows = 512;
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
    ring_.PushShort(ahead_ + ahead_first_, vocab_ - ahead_first_);
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
// The same of a row that asks for nothing more than its loss: a loop of its own, in few instructions.
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
__device__ inline void WriteShortExtras(const Params& p, int64_t first_row, int extras,
                                        const Outcome& outcome, Outcome& shared) {
  const int lane = threadIdx.x % 32;
  for (unsigned left = __ballot_sync(kFullWarp, extras > 0); left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    __syncwarp();
    if (lane == k) shared = outcome;
    __syncwarp();
    const Outcome of_row = shared;
    const CrossEntropyRow& ask = p.args.rows[first_row + k];
    const T* row =
        static_cast<const T*>(p.args.logits.data) + (first_row + k) * p.args.logits.row_stride;
    for (int i = lane; i < ask.extra_count; i += 32) {
      const float logit = ToFloat(row[p.args.extra_ids[ask.first_extra + i]]);
      p.args.answers.extra_logprobs[ask.first_extra_entry + i] =
          static_cast<float>(of_row.Logprob(logit));
    }
  }
}

// Rows of up to kCells cells: a warp takes `rows_of_warp` of them one after the other. What a row
// asks is read by a lane for each row before, and a lane for each row concludes after: in
// double, once for all.
template <class T, int kCells>
__global__ void __launch_bounds__(kShortWarps * 32, kShortResident)
    ShortRowsKernel(const __grid_constant__ Params p, int rows_of_warp) {
  __shared__ ShortShared<T, kCells> shared;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kShortWarps + warp) * rows_of_warp;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(rows_of_warp), p.args.logits.rows - first_row));
  if (rows <= 0) return;
  const int32_t vocab = static_cast<int32_t>(p.args.logits.cols);

  // The lane's row.
  const bool has_row = lane < rows;
  const int64_t r = first_row + (has_row ? lane : 0);
  const CrossEntropyRow& own = p.args.rows[r];
  const bool active = has_row && own.active != 0;
  const int own_target = own.target;
  const int own_want = own.want;
  const T* own_row = static_cast<const T*>(p.args.logits.data) + r * p.args.logits.row_stride;
  const float own_target_logit = active && own_target >= 0 ? ToFloat(own_row[own_target]) : 0.0f;
  const float own_scale = active ? Log2EOverTemperature(own.softcap, own.temperature) : 1.0f;
  CellAsk own_ask{.target = (own_want & kWantRank) != 0 ? own_target : kIgnoredTarget,
                  .target_logit = own_target_logit,
                  .weighted = (own_want & kWantEntropy) != 0,
                  .total = own.label_smoothing > 0,
                  .softcap = own.softcap,
                  .log2e_over_temperature = own_scale};
  const Summing own_summing = SummingOf(own_ask);
  // The compiler divides by it for all rows, and a division by 0 takes long.
  if (own_ask.softcap == 0) own_ask.softcap = 1.0f;

  // f32 rows, limited by HBM, gain nothing from tails. With few rows the latency of tails is longer than
  // what a last cell takes without a softcap.
  const bool capped = has_row && own.softcap > 0;
  const bool with_tails =
      sizeof(T) == 2 && (rows >= kRowsWorthTails || __any_sync(kFullWarp, capped));
  const int tail = with_tails ? TailOf<T>(vocab) : 0;
  const int end = vocab - tail;
  ShortRows<T> stream(shared.rings[warp], p.args.logits, end, first_row, rows);
  if constexpr (sizeof(T) == 2) {
    const auto store_tail = [cells = shared.cells[warp], last = p.cells - 1](
                                int k, const CellSums& sums) { cells[k][last] = sums; };
    if (tail > 0) SumTails<T>(p.args.logits, first_row, rows, own_summing, own_ask, store_tail);
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
      SumPlainRow<T>(stream, __shfl_sync(kFullWarp, own_scale, k), end, lane, store);
    } else {
      SumRow<T>(stream, summing, AskOfRow(own_ask, k), end, lane, store);
    }
  }
  WaitAsync<0>();
  __syncwarp();

  RowSums sums{};
  if (active)
    sums = MergeShort<kCells>(
        p.cells, own_scale, [&](int i) -> const CellSums& { return shared.cells[warp][lane][i]; });
  int first_nan = vocab;
  for (unsigned left = __ballot_sync(kFullWarp, isnan(sums.stats.sum)); left != 0;
       left &= left - 1) {
    const int k = __ffs(left) - 1;
    const T* row =
        static_cast<const T*>(p.args.logits.data) + (first_row + k) * p.args.logits.row_stride;
    const int nan = FindNanOfRow(row, shared.cells[warp][k], p.cells, vocab);
    if (lane == k) first_nan = nan;
  }
  Outcome outcome{};
  if (active) outcome = Conclude(p.args, r, sums, own_target_logit, first_nan, /*lane=*/0);
  __syncwarp();
  WriteShortExtras<T>(p, first_row, active ? own.extra_count : 0, outcome, shared.outcomes[warp]);
}

template <class T, int kCells>
cudaError_t LaunchShort(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  const int64_t rows = p.args.logits.rows;
  const int64_t at_once = int64_t{kShortResident} * kShortWarps * scratch.multiprocessors;
  const int64_t of_warp = std::min<int64_t>(CeilDiv(rows, at_once), kMostShortRows<kCells>);
  return LaunchKernel(&ShortRowsKernel<T, kCells>,
                      {.grid = GridFor(rows, of_warp * kShortWarps), .threads = kShortWarps * 32},
                      stream, p, static_cast<int>(of_warp));
}

// ---- launch ------------------------------------------------------------------------------------

template <class Block>
int SharedBytes(const Params& p) {
  const int part_cells = (p.cells + p.blocks - 1) / p.blocks;
  return static_cast<int>(sizeof(typename Block::Shared) + sizeof(Outcome) +
                          CellPlaces(p) * sizeof(CellSums) +
                          (Block::kTop ? part_cells * 32 * sizeof(SmallPool::Sketch) : 0));
}

// Sets p.blocks: the blocks of a row's cluster. There are more than would be best where the row's
// sketch needs the room. False: a block does not have the room.
template <class Block>
bool Fit(Params& p, const Scratch& scratch) {
  p.blocks = 1;
  if (Block::kCluster && scratch.clusters) {
    const int32_t worth = (p.cells + Block::kWarps - 1) / Block::kWarps;
    p.blocks = std::min(worth, ClusterBlocksAtOnce(p.args.logits.rows, scratch));
    while (SharedBytes<Block>(p) > scratch.block_shared_bytes && p.blocks < kMaxClusterBlocks)
      ++p.blocks;
  }
  return SharedBytes<Block>(p) <= scratch.block_shared_bytes;
}

template <class Block>
cudaError_t Launch(Params p, const Scratch& scratch, cudaStream_t stream) {
  if (!Fit<Block>(p, scratch)) return cudaErrorNotSupported;
  return LaunchKernel(&CrossEntropyKernel<Block>,
                      {.grid = GridFor(p.args.logits.rows * p.blocks),
                       .threads = Block::kThreads,
                       .cluster = p.blocks,
                       .shared_bytes = SharedBytes<Block>(p),
                       .most_shared_bytes = scratch.block_shared_bytes,
                       .early = Block::kCluster && scratch.clusters},
                      stream, p);
}

template <class T>
cudaError_t LaunchRows(Params p, const Scratch& scratch, cudaStream_t stream) {
  constexpr int kStages = sizeof(T) == 4 ? 2 : 3;
  constexpr int kResident = sizeof(T) == 4 ? 4 : 6;
  using WideTop = TopShape<T, 16, 2, 1, true>;
  using Wide = StreamShape<T, 16, 2, 1, true>;
  const bool few = p.args.logits.rows <= scratch.multiprocessors && p.cells > kShortCellsOfFewRows;
  if (p.args.max_top_logprobs > 0) {
    return few && Fit<WideTop>(p, scratch)
               ? Launch<WideTop>(p, scratch, stream)
               : Launch<TopShape<T, 4, 2, kResident>>(p, scratch, stream);
  }
  if (few && Fit<Wide>(p, scratch)) return Launch<Wide>(p, scratch, stream);
  if (p.cells <= 4) return LaunchShort<T, 4>(p, scratch, stream);
  if (p.cells <= kShortCells) return LaunchShort<T, kShortCells>(p, scratch, stream);
  using Narrow = StreamShape<T, 4, kStages, kResident>;
  if constexpr (sizeof(T) == 2) {
    const bool warps_wait = 20 * RoundUp(p.cells, Narrow::kWarps) > 23 * p.cells;
    if (p.cells <= kShortCellsOfManyRows && p.args.logits.rows > kManyRows && warps_wait)
      return LaunchShort<T, kShortCellsOfManyRows>(p, scratch, stream);
  }
  return Launch<Narrow>(p, scratch, stream);
}

}  // namespace

cudaError_t CrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch,
                         cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  const Params p{.args = args, .cells = static_cast<int32_t>(CeilDiv(args.logits.cols, kCell))};
  return VisitDType(args.logits.dtype,
                    [&]<class T>() { return LaunchRows<T>(p, scratch, stream); });
}

}  // namespace logitd::cuda
