// cross_entropy_training: a row stays in shared memory between its loss and its gradient: one read,
// one write.
//
// A block, or a cluster of up to 8 for a longer row, holds the row's cells. It sums them as
// cross_entropy does (cell_sums.cuh), one warp merges them and writes the answers, and all warps
// write the gradient from shared memory. Each cell's place is filled with the next row's as soon as
// it has been read for the last time, so that a row is read while the one before it is written.
// Blocks stay for many rows; two or three of them share a multiprocessor, so that one row's merge
// runs during another's copies.
//
//   reading    a warp takes cells of 1024 logits from its ring of copies and leaves their sums in
//              every block of the cluster
//   merging    one warp of every block merges them all: the blocks need not wait for an answer
//   writing    vectors of 16 bytes, aligned as the output is; a row's few elements before and
//              after them one by one
//
// Which kernels serve a call is a rule of its own (training_kernels.h): many short rows are held by
// warps (short_training.cu), and calls that two kernels serve faster take cross_entropy's and its
// backward's. So do rows longer than a cluster holds (393,216 tokens of 16 bits, 196,608 of f32;
// without clusters 49,152 and 24,576) and calls with top tokens.
//
// Cost: reads rows * vocab * sizeof(T) once and writes as much: the floor is a copy. Limited by, for 16
// bits on an H100 (bench/results/h100/profile.json, 8192 x 128256): neither HBM (72% of its peak; a
// copy reaches 84%) nor instructions (41% of what can be issued), but by how few rows shared memory
// holds: three blocks a multiprocessor, whose warps spend 39% of their time at the barrier around a
// row's merge and 25% in waiting for logits. f32 rows reach 90% of a copy. With a softcap, about 40
// instructions an element, 57% is issued. Rows of a few cells are limited by what a row costs besides
// its elements.
// Measured: bench/results/h100/cross_entropy_training.json, beside the two calls;
// cross_entropy_training_lengths.json.
// Tried and dropped, on an H100: 4 blocks a multiprocessor with 64 registers (4 to 14% slower:
// spills); 4 warps with twice the cells each (0 to 7%; f32 1 to 3% faster); Gradient::At for all rows
// (8 to 14%). All loops in one function, and a barrier of the cluster to exchange sums (together 8%
// at 32000 tokens, 13% at 128256): spills find no room in L1 beside the rows, and the barrier waits
// for the gradients' writes. More warps for rows of 5 and 16 cells (3 to 23% slower).
//
// racecheck takes the merge of a cluster's row for a race with the writing of the row before: it does
// not follow the inbox. A warp sends its cells after it has written, and the merge waits for all.
#include "kernels/cuda/loss/cross_entropy_training.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/held_cells.cuh"
#include "kernels/cuda/loss/short_training.h"
#include "kernels/cuda/loss/training_kernels.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cluster_blocks.h"
#include "kernels/cuda/rows/cluster_inbox.cuh"
#include "kernels/cuda/rows/clusters_at_once.h"
#include "kernels/cuda/rows/row_block.cuh"

namespace logitd::cuda {
namespace {

struct Params {
  CrossEntropyTrainingArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
};

constexpr int kMostWarps = 8;
constexpr int kResident = 3;

// ---- a block's shared memory -------------------------------------------------------------------

// A row that is merged, until its answers are written.
struct Merged {
  ClusterInbox inbox;  // of the row's cells and its target's logit
  Outcome outcome;
  double log_of_sum;
  RowSums sums;
  float target_logit;
  int nan;  // as KnownCell's, of the row
};

template <class T, int kStages>
struct BlockMemory {
  Merged* merged;
  RowGradient<T>* gradient;
  KnownCell* cells;                               // [of the row]
  typename CellRing<T, kStages>::Storage* rings;  // [warps]

  __device__ static BlockMemory Of() {
    extern __shared__ __align__(128) uint4 dynamic[];
    auto* rings = reinterpret_cast<typename CellRing<T, kStages>::Storage*>(dynamic);
    auto* merged = reinterpret_cast<Merged*>(rings + blockDim.x / 32);
    auto* gradient = reinterpret_cast<RowGradient<T>*>(merged + 1);
    return {merged, gradient, reinterpret_cast<KnownCell*>(gradient + 1), rings};
  }
  static int Bytes(int warps, int blocks) {
    return static_cast<int>(warps * sizeof(typename CellRing<T, kStages>::Storage) +
                            sizeof(Merged) + sizeof(RowGradient<T>) +
                            blocks * warps * kStages * sizeof(KnownCell));
  }
};

// ---- stages of a row ---------------------------------------------------------------------------

// The loops over cells are functions of their own, and so are the merge and the answers: each has all
// registers of a thread.

template <class T, int kStages>
__device__ inline HeldCells<T, kStages> CellsOf(const BlockMemory<T, kStages>& memory,
                                                const Part& part, const CrossEntropyArgs& loss) {
  const int warp = threadIdx.x / 32;
  return {memory.rings[warp],
          {.first_place = 0,
           .turns = kStages,
           .begin = part.begin + warp * kCell,
           .step = static_cast<int>(blockDim.x) / 32 * kCell,
           .end = part.end},
          static_cast<int>(loss.logits.cols)};
}

// Sums the warp's cells of a row for every block of the cluster.
template <class T, int kStages, Summing kSumming>
__device__ __noinline__ void SumCells(const Params& p, int64_t r, Part part, CellAsk ask,
                                      int target) {
  const auto memory = BlockMemory<T, kStages>::Of();
  const int lane = threadIdx.x % 32;
  // Leaves a value at `here` in every block, by a lane for each.
  const auto leave = [&](auto* here, const auto& value) {
    if (lane >= part.blocks) return;
    if (part.blocks == 1) {
      *here = value;
    } else {
      uint32_t words[sizeof(value) / 4];
      memcpy(words, &value, sizeof(value));
      memory.merged->inbox.Send(here, words, lane);
    }
  };
  CellsOf(memory, part, p.args.loss)
      .template Sum<kSumming>(
          RowOf<T>(p.args, r), ask, target,
          [&](int i, const CellSums& sums, int nan) {
            leave(memory.cells + i, KnownCell{sums, nan});
          },
          [&](float logit) { leave(&memory.gradient->target_logit, logit); });
}

// Merges a row's cells and leaves what its answers and its gradient need, by one warp.
template <class T, int kStages>
__device__ __noinline__ void MergeRow(const Params& p, int64_t r) {
  const auto memory = BlockMemory<T, kStages>::Of();
  const int lane = threadIdx.x % 32;
  const KnownCell* cells = memory.cells;
  const CrossEntropyRow& ask = p.args.loss.rows[r];
  const int32_t vocab = static_cast<int32_t>(p.args.loss.logits.cols);
  const float log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature);
  const RowSums sums =
      cuda::MergeRow(p.cells, log2e_over_temperature, lane, [=](int i) { return cells[i].sums; });
  int nan = vocab;
  if (isnan(sums.stats.sum)) {
    for (int i = lane; i < p.cells; i += 32) {
      if (isnan(cells[i].sums.stats.sum)) nan = min(nan, cells[i].nan);
    }
    nan = __reduce_min_sync(kFullWarp, nan);
  }
  if (lane != 0) return;
  const double log_of_sum = log(static_cast<double>(sums.stats.sum));
  const Outcome outcome = OutcomeOf(ask, sums.stats, log_of_sum);
  RowGradient<T>& gradient = *memory.gradient;
  const float logit = ask.target < 0 ? 0.0f : gradient.target_logit;
  Merged& merged = *memory.merged;
  merged.outcome = outcome;
  merged.log_of_sum = log_of_sum;
  merged.sums = sums;
  merged.target_logit = logit;
  merged.nan = nan;
  FillIn(gradient, ask, outcome, gradient.upstream, vocab);
}

// Writes the answers of a merged row, by one warp.
template <class T, int kStages>
__device__ __noinline__ void AnswerRow(const Params& p, int64_t r) {
  const Merged& merged = *BlockMemory<T, kStages>::Of().merged;
  WriteExtras(p.args.loss, p.args.loss.rows[r], merged.outcome);
  if (threadIdx.x % 32 != 0) return;
  WriteAnswers(p.args.loss, r, merged.sums, merged.log_of_sum, merged.outcome, merged.target_logit,
               merged.nan);
}

template <class T, int kStages, Writing kWriting>
__device__ __noinline__ void WriteCells(const Params& p, int64_t r, int64_t next, Part part) {
  const auto memory = BlockMemory<T, kStages>::Of();
  HeldCells<T, kStages> cells = CellsOf(memory, part, p.args.loss);
  const T* next_row = next < p.args.loss.logits.rows ? RowOf<T>(p.args, next) : nullptr;
  WriteHeld<kWriting>(p.args, r, next_row, *memory.gradient, cells);
}

// ---- the kernel --------------------------------------------------------------------------------

// Copies 4 bytes into shared memory asynchronously.
__device__ inline void CopyAsync4(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

// Clusters take every teams-th row.
template <class T, int kStages>
__global__ void __launch_bounds__(kMostWarps * 32, kResident)
    TrainingKernel(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32;
  const CrossEntropyArgs& loss = p.args.loss;
  const int32_t vocab = static_cast<int32_t>(loss.logits.cols);
  const int teams = static_cast<int>(gridDim.x) / p.blocks;
  const int team = static_cast<int>(blockIdx.x) / p.blocks;
  const Part part =
      Part::Of(static_cast<int>(blockIdx.x) - team * p.blocks, p.blocks, p.cells, vocab);
  const auto memory = BlockMemory<T, kStages>::Of();
  if (p.blocks > 1) {
    if (threadIdx.x == 0) memory.merged->inbox.Open();
    ClusterArrive();
  }
  CellsOf(memory, part, loss).Fill(RowOf<T>(p.args, team));
  int round = 0;  // of the inbox
#pragma unroll 1
  for (int64_t r = team; r < loss.logits.rows; r += teams) {
    const CrossEntropyRow& ask = loss.rows[r];
    const bool active = ask.active != 0;
    // All blocks have begun, or merged the row before: they are ready to get the row's cells.
    if (p.blocks > 1) ClusterWait();
    if (active) {
      if (threadIdx.x == 0) {
        CopyAsync4(&memory.gradient->upstream, p.args.upstream + r);
        const size_t bytes = p.cells * sizeof(KnownCell) + (ask.target >= 0 ? sizeof(float) : 0);
        if (p.blocks > 1) memory.merged->inbox.Expect(static_cast<int>(bytes));
      }
      const int ranked = (ask.want & kWantRank) != 0 ? ask.target : kIgnoredTarget;
      const CellAsk cell_ask{
          .target = ranked,
          .target_logit = ranked >= 0 ? ToFloat(RowOf<T>(p.args, r)[ranked]) : 0.0f,
          .weighted = (ask.want & kWantEntropy) != 0,
          .total = ask.label_smoothing > 0,
          .softcap = ask.softcap,
          .log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature)};
      if (warp == 0 && part.block == 0) KeepExtras(loss, ask, RowOf<T>(p.args, r));
      VisitSumming(SummingOf(cell_ask), [&](auto summing) {
        SumCells<T, kStages, summing>(p, r, part, cell_ask, ask.target);
      });
      if (p.blocks == 1) __syncthreads();
      if (warp == 0) {
        if (p.blocks > 1) memory.merged->inbox.Wait(round);
        WaitAsync<0>();  // for upstream
        MergeRow<T, kStages>(p, r);
      }
      ++round;
      __syncthreads();
      if (warp == 0 && part.block == 0) AnswerRow<T, kStages>(p, r);
    }
    const int64_t next = r + teams;
    if (next < loss.logits.rows) {
      if (p.blocks > 1) ClusterArriveEmpty();
      PrefetchToL2(loss.rows + next);
    }
    VisitWriting(WritingOf(active, *memory.gradient),
                 [&](auto writing) { WriteCells<T, kStages, writing>(p, r, next, part); });
  }
  WaitAsync<0>();
}

// ---- launch ------------------------------------------------------------------------------------

// The shape of a launch; no threads: a row does not fit into a cluster.
template <class T, int kStages>
LaunchShape ShapeOf(Params& p, const Scratch& scratch) {
  const int64_t rows = p.args.loss.logits.rows;
  p.blocks = static_cast<int32_t>(CeilDiv(p.cells, kMostWarps * kStages));
  int64_t stages = kStages;
  if (scratch.clusters && rows <= scratch.multiprocessors) {
    // More blocks and warps end a row sooner.
    p.blocks = std::max(p.blocks, std::min(p.cells, ClusterBlocksAtOnce(rows, scratch)));
    stages = 1;
  }
  const int64_t part = CeilDiv(p.cells, p.blocks);
  const int warps = static_cast<int>(std::min<int64_t>(kMostWarps, CeilDiv(part, stages)));
  const LaunchShape shape{.threads = warps * 32,
                          .cluster = p.blocks,
                          .shared_bytes = BlockMemory<T, kStages>::Bytes(warps, p.blocks),
                          .most_shared_bytes = scratch.block_shared_bytes};
  const bool fits = p.blocks <= (scratch.clusters ? kMaxClusterBlocks : 1) &&
                    shape.shared_bytes <= scratch.block_shared_bytes;
  return fits ? shape : LaunchShape{};
}

// ClustersAtOnce, asked once for every shape of a device.
template <class T, int kStages>
cudaError_t TeamsAtOnce(const LaunchShape& shape, const Scratch& scratch, int* teams) {
  constexpr int kDevices = 64;
  static std::array<std::array<std::array<std::atomic<int>, kMaxClusterBlocks>, kMostWarps>,
                    kDevices>
      known;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::atomic<int>& of_shape = known[device % kDevices][shape.threads / 32 - 1][shape.cluster - 1];
  *teams = of_shape.load(std::memory_order_relaxed);
  if (*teams > 0 && device < kDevices) return cudaSuccess;
  const cudaError_t error = ClustersAtOnce(
      reinterpret_cast<const void*>(&TrainingKernel<T, kStages>), shape, scratch, teams);
  of_shape.store(*teams, std::memory_order_relaxed);
  return error;
}

template <class T, int kStages>
cudaError_t Launch(const Params& p, LaunchShape shape, const Scratch& scratch,
                   cudaStream_t stream) {
  int teams = 0;
  const cudaError_t error = TeamsAtOnce<T, kStages>(shape, scratch, &teams);
  if (error != cudaSuccess) return error;
  if (teams == 0) return cudaErrorNotSupported;
  shape.grid = GridFor(std::min<int64_t>(teams, p.args.loss.logits.rows) * p.blocks);
  return LaunchKernel(&TrainingKernel<T, kStages>, shape, stream, p);
}

}  // namespace

cudaError_t CrossEntropyTraining(const CrossEntropyTrainingArgs& args, const Scratch& scratch,
                                 cudaStream_t stream) {
  const CrossEntropyArgs& loss = args.loss;
  if (loss.logits.rows == 0) return cudaSuccess;
  const TrainingKernels kernels = TrainingKernelsFor({.dtype = loss.logits.dtype,
                                                      .rows = loss.logits.rows,
                                                      .vocab = loss.logits.cols,
                                                      .softcap = args.softcap,
                                                      .tops = loss.max_top_logprobs > 0},
                                                     scratch.multiprocessors);
  if (kernels == TrainingKernels::kShortRows) return ShortTraining(args, scratch, stream);
  if (kernels == TrainingKernels::kHeldRows) {
    Params p{.args = args, .cells = static_cast<int32_t>(CeilDiv(loss.logits.cols, kCell))};
    bool launched = false;
    const cudaError_t error = VisitDType(loss.logits.dtype, [&]<class T>() {
      constexpr int kStages = sizeof(T) == 4 ? 2 : 4;
      constexpr int kMoreStages = sizeof(T) == 4 ? 3 : 6;  // two blocks on a multiprocessor
      if (const LaunchShape shape = ShapeOf<T, kStages>(p, scratch); shape.threads > 0) {
        launched = true;
        return Launch<T, kStages>(p, shape, scratch, stream);
      }
      if (const LaunchShape shape = ShapeOf<T, kMoreStages>(p, scratch); shape.threads > 0) {
        launched = true;
        return Launch<T, kMoreStages>(p, shape, scratch, stream);
      }
      return cudaSuccess;
    });
    if (launched) return error;
  }
  const cudaError_t error = CrossEntropy(loss, scratch, stream);
  return error != cudaSuccess ? error : CrossEntropyBackward(args.Backward(), stream);
}

}  // namespace logitd::cuda
