// cross_entropy_training: a block, or a cluster, reads a row as cross_entropy does, then reads it
// again, out of L2, and writes its gradient as the backward does: one read of HBM, one write.
//
// Where that is faster, two calls serve: cross_entropy, then its backward (BlocksOf).
//
// Cost: reads rows * vocab * sizeof(T) once and writes as much: the floor is a copy. Limited by:
// what L2 holds; a row's blocks neither read nor write between its last cell and its first gradient
// (about a quarter of its cycles, by the clocks of one thread); label smoothing by instructions.
// Measured on an H200 (bench/results/h200/kernels_b3ca3a40.json), bf16, as a share of the copy, in
// brackets the two calls: 8192 x 32000 82% (65%), 50257 74% (64%), 128256 73% (68%), with rank and
// entropy 67% (64%); 4096 x 151936 78% (68%). Dropped: rows held in shared memory by a cluster (2%
// faster to 15% slower, f32 10% slower: few rows find room); blocks of 4 warps, 6 a multiprocessor,
// 8 a row (2% faster at 128256 tokens, smoothing 5% slower); a ring of rows with warps by role
// (61%).
#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/cross_entropy_training.h"
#include "kernels/cuda/loss/row_gradient.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/plan.h"
#include "kernels/cuda/rows/row_block.cuh"

namespace logitd::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kResident = 3;

struct Params {
  CrossEntropyTrainingArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
};

template <class T>
struct Block : BlockShape<T, SmallPool, kWarps, sizeof(T) == 4 ? 2 : 3, kResident> {
  struct Shared {
    typename Block::Ring::Storage rings[kWarps];
  };
};

// A cell's sums, and where it has a NaN.
struct alignas(8) KnownCell : CellSums {
  int32_t nan;  // where the sum is NaN: the lowest index of one in the row; vocab: none in the cell
};
static_assert(sizeof(KnownCell) == 24);

// The lowest index of a NaN in the cell at `first`; `none` where it has none.
template <class T>
__device__ inline int NanOf(const LaneCell<T>& x, int first, int none, int lane) {
  int nan = none;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    if (isnan(x[e])) nan = min(nan, first + CellIndex<T>(lane, e));
  }
  return __reduce_min_sync(kFullWarp, nan);
}

template <class T>
struct BlockMemory {
  typename Block<T>::Shared rings;
  CrossEntropyRow ask;
  RowGradient<T> gradient;
  KnownCell cells[1];  // [p.cells]

  __device__ static BlockMemory& Of() {
    extern __shared__ __align__(128) uint4 dynamic[];
    return *reinterpret_cast<BlockMemory*>(dynamic);
  }
};

// Leaves the logits of a row's extra ids in the place of their answers: those from `first` on,
// every step-th. A gradient in place overwrites them before the answers are known.
template <class T>
__device__ inline void KeepExtras(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                  const T* row, int first, int step) {
  for (int i = first; i < ask.extra_count; i += step) {
    args.answers.extra_logprobs[ask.first_extra_entry + i] =
        ToFloat(row[args.extra_ids[ask.first_extra + i]]);
  }
}
// Makes answers of them, by the same lanes.
__device__ inline void WriteExtras(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                   const Outcome& outcome, int first, int step) {
  for (int i = first; i < ask.extra_count; i += step) {
    float* logprob = args.answers.extra_logprobs + ask.first_extra_entry + i;
    *logprob = static_cast<float>(outcome.Logprob(*logprob));
  }
}

// A block, or a cluster, takes a row: reads it and sums it as cross_entropy does, then reads it
// again, from L2, and writes its gradient.
template <class T>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    TrainingKernel(const __grid_constant__ Params p) {
  if (p.blocks > 1) ClusterArriveEmpty();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const CrossEntropyArgs& loss = p.args.loss;
  const int32_t vocab = static_cast<int32_t>(loss.logits.cols);
  const int64_t r = blockIdx.x / p.blocks;
  const Part part = Part::Of(static_cast<int>(blockIdx.x - r * p.blocks), p.blocks, p.cells, vocab);
  const T* row = static_cast<const T*>(loss.logits.data) + r * loss.logits.row_stride;
  T* to = static_cast<T*>(p.args.d_logits.data) + r * p.args.d_logits.row_stride;
  BlockMemory<T>& memory = BlockMemory<T>::Of();
  // What the row asks, requested before the copies begin, or it arrives after all of them.
  constexpr unsigned kAskParts = sizeof(CrossEntropyRow) / sizeof(uint2);
  uint2 asked = {};
  if (threadIdx.x < kAskParts) asked = reinterpret_cast<const uint2*>(loss.rows + r)[threadIdx.x];
  RowStream<Block<T>> stream(memory.rings, row, part.begin, part.end);
  if (threadIdx.x < kAskParts) reinterpret_cast<uint2*>(&memory.ask)[threadIdx.x] = asked;
  __syncthreads();
  if (p.blocks > 1) ClusterWait();  // all blocks have begun: their memory is there
  const CrossEntropyRow& ask = memory.ask;
  if (ask.active == 0) return stream.Abandon();
  const auto target_logit = [&] { return ask.target >= 0 ? ToFloat(row[ask.target]) : 0.0f; };
  // One thread prepares the gradient. It reads its inputs before the blocks meet: after that,
  // another block may have written the target's gradient over its logit.
  const bool prepares = threadIdx.x == kWarps * 32 - 1;
  const float upstream = prepares ? p.args.upstream[r] : 0.0f;
  const float prepared_logit = prepares ? target_logit() : 0.0f;
  const CellAsk cell_ask{
      .target = (ask.want & kWantRank) != 0 ? ask.target : kIgnoredTarget,
      .target_logit = (ask.want & kWantRank) != 0 ? target_logit() : 0.0f,
      .weighted = (ask.want & kWantEntropy) != 0,
      .total = ask.label_smoothing > 0,
      .softcap = ask.softcap,
      .log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature)};
  const bool answers = warp == 0 && part.block == 0;
  if (answers) KeepExtras(loss, ask, row, lane, 32);

  // The sums of a cell go to every block of the cluster.
  const KnownCell* cells = memory.cells;
  KnownCell* to_cells = memory.cells;
  if (p.blocks > 1) to_cells = InBlock(to_cells, min(lane, p.blocks - 1));
  const auto max_of = [](const LaneCell<T>& x) { return x.Max(0, kLaneElements); };
  const auto known = [=](const CellSums& sums, const LaneCell<T>& x, int first) {
    return KnownCell{sums, isnan(sums.stats.sum) ? NanOf(x, first, vocab, lane) : vocab};
  };
  VisitSumming(SummingOf(cell_ask), [&](auto summing) {
    SumCells<summing, T>(stream, cell_ask, part.end, lane < p.blocks, to_cells, max_of, known);
  });
  if (prepares) memory.gradient.Prepare(ask, upstream, ask.target >= 0, prepared_logit, vocab);
  if (p.blocks > 1) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
  }
  GradientWriter<T, kWarps * 32> writer(row, to, part.begin, part.end);
  if (warp == 0) {
    const float log2e_over_temperature = cell_ask.log2e_over_temperature;
    const Stats stats =
        MergeCells(p.cells, log2e_over_temperature, lane, [=](int i) { return cells[i].stats; });
    const double log_of_sum = log(static_cast<double>(stats.sum));
    const Outcome outcome = OutcomeOf(ask, stats, log_of_sum);
    if (lane == 0) memory.gradient.Finish(static_cast<float>(outcome.LogSumExp()));
    __syncthreads();
    if (answers) {
      RowSums sums{.stats = stats};
      if (SummingOf(cell_ask) != Summing::kPlain) {
        sums = MergeMore(stats, p.cells, log2e_over_temperature, lane,
                         [=](int i) -> const CellSums& { return cells[i]; });
      }
      int nan = vocab;
      for (int i = 0; isnan(stats.sum) && i < p.cells; ++i) nan = min(nan, cells[i].nan);
      WriteExtras(loss, ask, outcome, lane, 32);
      const float logit = ask.target >= 0 ? memory.gradient.target_logit : 0.0f;
      if (lane == 0) WriteAnswers(loss, ask, r, sums, log_of_sum, outcome, logit, nan);
    }
  } else {
    __syncthreads();
  }
  writer.Write(true, memory.gradient);
}

// ---- launch ------------------------------------------------------------------------------------

// The blocks of a row, by its bytes: L2 holds the rows that are under way, or most of them. Longer
// rows, or shorter than kLeastCells, take less time in two calls.
constexpr struct {
  int64_t most_bytes;
  int blocks;
} kBlocksOfRows[] = {{int64_t{112} << 10, 1}, {int64_t{280} << 10, 2}, {int64_t{1} << 20, 4}};
constexpr int kLeastCells = 9;

// 0: the call takes less time in two.
int BlocksOf(const CrossEntropyTrainingArgs& args, const Scratch& scratch) {
  const TensorView& logits = args.loss.logits;
  const int64_t bytes = logits.cols * static_cast<int64_t>(SizeOf(logits.dtype));
  // A softcap takes more instructions an element than fit beside the reading of 16 bits.
  if (args.loss.max_top_logprobs > 0 || (args.softcap && SizeOf(logits.dtype) == 2)) return 0;
  if (logits.cols <= int64_t{kLeastCells - 1} * kCell) return 0;
  for (const auto& of : kBlocksOfRows) {
    if (bytes > of.most_bytes) continue;
    if (!scratch.clusters) return of.blocks == 1 ? 1 : 0;
    return std::max(of.blocks, ClusterBlocksAtOnce(logits.rows, scratch));
  }
  return 0;
}

template <class T>
cudaError_t Launch(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  return LaunchKernel(
      &TrainingKernel<T>,
      {.grid = GridFor(p.args.loss.logits.rows * p.blocks),
       .threads = kWarps * 32,
       .cluster = p.blocks,
       .shared_bytes = static_cast<int>(sizeof(BlockMemory<T>) + p.cells * sizeof(KnownCell)),
       .most_shared_bytes = scratch.block_shared_bytes},
      stream, p);
}

}  // namespace

cudaError_t CrossEntropyTraining(const CrossEntropyTrainingArgs& args, const Scratch& scratch,
                                 cudaStream_t stream) {
  const CrossEntropyArgs& loss = args.loss;
  if (loss.logits.rows == 0) return cudaSuccess;
  if (const int blocks = BlocksOf(args, scratch); blocks > 0) {
    const Params p{.args = args,
                   .cells = static_cast<int32_t>(CeilDiv(loss.logits.cols, kCell)),
                   .blocks = blocks};
    return VisitDType(loss.logits.dtype, [&]<class T>() { return Launch<T>(p, scratch, stream); });
  }
  const cudaError_t error = CrossEntropy(loss, scratch, stream);
  return error != cudaSuccess ? error : CrossEntropyBackward(args.Backward(), stream);
}

}  // namespace logitd::cuda
