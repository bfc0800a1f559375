// cross_entropy: one read of the logits leaves every cell's sums; one warp merges them and writes
// the losses.
//
// A warp takes cells of 1024 logits (cell.cuh) from a ring of copies. For each cell it leaves the
// maximum and the sum of exponentials. Where the row asks for them it also leaves the sum of p ln
// p, the sum of the logits and the number of tokens before the target. These are branches of the
// row, the same in all its threads. They do not affect the bits of the sum of exponentials. Rows
// with top tokens have a kernel of their own, because tops need shared memory that would cost the
// others residency: it keeps softmax_topk's sketch of the row and selects from it. Where a block
// may have 99 KB, f32 rows with tops end at about 460,000 tokens (cudaErrorNotSupported). Cells
// merge in one order, whatever the grid:
//
//   warp per row      rows of up to 4 cells
//   cluster per row   at most as many rows as multiprocessors: up to 8 blocks leave their cells in
//                     the first block's shared memory (sm_90; before that a large block a row)
//   block per row     all other rows
//
// Logarithms, differences and means, once a row, are in double. A softcap is tanhf of every logit:
// the sums are of tanh(l / softcap), and the softcap is a factor of the exponent.
//
// Cost: reads rows * vocab * sizeof(T) once, writes 16 to 24 bytes a row. Limited by: HBM; bf16
// takes about 7 instructions and one ex2 an element, 50% and 57% of what a multiprocessor issues at
// the read ceiling. Softcap, entropy and smoothing take up to 30 instructions, and are limited by
// them.
// Measured (bench/results/h200/kernels.json), as a share of one read, bf16: 8192 x 128256, 96%;
// 8192 x 32000, 88%; with rank 87%; with rank, entropy and 5 tops 56%; label smoothing 66%; softcap
// 31%; 64 rows 11 us, one row 6.9.
// Tried and dropped at 32000 tokens, where the ends of rows are not hidden: blocks of 2 warps (1%
// slower), of one warp (5%), fewer stages and more blocks (3%).
#include <algorithm>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/candidates.cuh"
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
template <class Block>
__device__ inline float ReadCells(RowStream<Block>& stream, const CellAsk& ask, int end,
                                  CellSums* cells, SmallPool::Sketch* sketch) {
  using T = typename Block::Element;
  const int lane = threadIdx.x % 32;
  float lane_best = -kInfinity;
  SmallPool::Sketch* sketch_to = sketch + threadIdx.x;
  LaneCell<T> x;
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
    const CellSums sums = SumCell<T>(x, lane_max, ask, first, end, lane);
    if (lane == 0) cells[first / kCell] = sums;
  }
  return lane_best;
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
  const Stats stats =
      MergeCells(p.cells, log2e_over_temperature, lane, [&](int i) { return cells[i].stats; });
  const Exponential exponential(stats.max, log2e_over_temperature);
  float weighted = 0.0f;
  double total = 0.0;
  int before = 0;
  for (int i = lane; i < p.cells; i += 32) {
    weighted += Reweighted(exponential, cells[i].stats, cells[i].weighted);
    total += cells[i].total;
    before += cells[i].before;
  }
  const RowSums sums{stats, WarpSum(weighted), WarpSum(total),
                     __reduce_add_sync(kFullWarp, before)};
  int nan = vocab;
  if (isnan(stats.sum)) {
    int cell = 0;
    while (cell + 1 < p.cells && !isnan(cells[cell].stats.sum)) ++cell;
    nan = FindNan(row, cell * kCell, vocab, lane);
  }
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
  if constexpr (Block::kCluster) ClusterArrive();
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
  const CellAsk cell_ask{.target = target,
                         .target_logit = target >= 0 ? ToFloat(row[target]) : 0.0f,
                         .summed = (want & kWantEntropy) != 0 || smoothing > 0,
                         .cap = Cap::Of(softcap),
                         .log2e_over_temperature = Log2EOverTemperature(softcap, temperature)};
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
    p.blocks = static_cast<int32_t>(std::clamp<int64_t>(
        scratch.multiprocessors / p.args.logits.rows, 1, std::min(worth, kMaxClusterBlocks)));
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
                       .most_shared_bytes = scratch.block_shared_bytes},
                      stream, p);
}

// Cells of a row that one warp takes.
constexpr int32_t kShortCells = 4;

template <class T>
cudaError_t LaunchRows(Params p, const Scratch& scratch, cudaStream_t stream) {
  constexpr int kStages = sizeof(T) == 4 ? 2 : 3;
  constexpr int kResident = sizeof(T) == 4 ? 4 : 6;
  using WideTop = TopShape<T, 16, 2, 1, true>;
  using Wide = StreamShape<T, 16, 2, 1, true>;
  const bool few = p.args.logits.rows <= scratch.multiprocessors && p.cells > kShortCells;
  if (p.args.max_top_logprobs > 0) {
    return few && Fit<WideTop>(p, scratch)
               ? Launch<WideTop>(p, scratch, stream)
               : Launch<TopShape<T, 4, 2, kResident>>(p, scratch, stream);
  }
  if (few && Fit<Wide>(p, scratch)) return Launch<Wide>(p, scratch, stream);
  if (p.cells <= kShortCells) return Launch<StreamShape<T, 1, 2, 24>>(p, scratch, stream);
  return Launch<StreamShape<T, 4, kStages, kResident>>(p, scratch, stream);
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
