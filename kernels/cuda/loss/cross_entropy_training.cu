// cross_entropy_training: a block, or a cluster, reads a row as cross_entropy does, then reads it again,
// out of L2, and writes its gradient as the backward does: one read of HBM, one write.
//
// Where that is faster, two calls serve: cross_entropy, then its backward (BlocksOf).
//
// Cost: reads rows * vocab * sizeof(T) once and writes as much: the floor is a copy. Limited by: HBM while
// all blocks of a multiprocessor read or all write; what L2 holds (rows of 256 KB and more are read in part
// again); label smoothing by instructions. Measured on an H200, bf16, as a share of the copy, in brackets
// the two calls: 8192 x 32000 77% (64%), 50257 74% (62%), 128256 72% (68%); 777 x 151936 69% (63%).
// Dropped: rows held in shared memory by a cluster (67% at 128256 tokens: few rows find room, and their
// merge is not hidden); a ring of rows with warps by role (61%); 8 blocks a row (54%).
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
struct alignas(8) KnownCell {
  CellSums sums;
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
  RowGradient<T> gradient;
  KnownCell cells[1];  // [p.cells]

  __device__ static BlockMemory& Of() {
    extern __shared__ __align__(128) uint4 dynamic[];
    return *reinterpret_cast<BlockMemory*>(dynamic);
  }
};

// Calls sum(std::integral_constant<Summing, summing>).
template <class Sum>
__device__ inline void VisitSumming(Summing summing, const Sum& sum) {
  switch (summing) {
    case Summing::kPlain:
      return sum(std::integral_constant<Summing, Summing::kPlain>());
    case Summing::kWithRankOrTotal:
      return sum(std::integral_constant<Summing, Summing::kWithRankOrTotal>());
    case Summing::kWeighted:
      return sum(std::integral_constant<Summing, Summing::kWeighted>());
    case Summing::kMildlyCapped:
      return sum(std::integral_constant<Summing, Summing::kMildlyCapped>());
    case Summing::kMildlyCappedAll:
      return sum(std::integral_constant<Summing, Summing::kMildlyCappedAll>());
    case Summing::kCapped:
      return sum(std::integral_constant<Summing, Summing::kCapped>());
  }
  __builtin_unreachable();
}

// Sums the block's part of a row: the sums of its cells go to every block of the cluster.
template <Summing kSumming, class T>
__device__ inline void SumPart(RowStream<Block<T>>& stream, const CellAsk& ask, const Part& part) {
  const int lane = threadIdx.x % 32;
  KnownCell* cells = BlockMemory<T>::Of().cells;
  if (part.blocks > 1) cells = InBlock(cells, min(lane, part.blocks - 1));
  LaneCell<T> x;
  RankCounter<T> rank(ask.target, ask.target_logit);
  int last = -1;  // cell
#pragma unroll 1
  while (stream.Next(x)) {
    const int first = stream.first();
    stream.Release();
    const float lane_max = x.Max(0, kLaneElements);
    if constexpr (kSumming != Summing::kPlain) {
      if (ask.target >= 0) rank.Add(x, first, lane);
    }
    KnownCell known{SumCell<kSumming, T>(x, lane_max, ask, first, part.end, lane),
                    part.row_elements};
    if (isnan(known.sums.stats.sum)) known.nan = NanOf(x, first, part.row_elements, lane);
    last = first / kCell;
    if (lane < part.blocks) cells[last] = known;
  }
  if (kSumming != Summing::kPlain && ask.target >= 0 && last >= 0) {
    const int before = rank.Total();
    if (lane < part.blocks) cells[last].sums.before = before;
  }
}

// Leaves the logits of a row's extra ids in the place of their answers: those from `first` on, every
// step-th. A gradient in place overwrites them before the answers are known.
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

// A block, or a cluster, takes a row: reads it and sums it as cross_entropy does, then reads it again, from
// L2, and writes its gradient.
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
  const CrossEntropyRow& ask = loss.rows[r];
  BlockMemory<T>& memory = BlockMemory<T>::Of();

  const bool active = ask.active != 0;
  const int target = ask.target;
  const int want = ask.want;
  const float softcap = ask.softcap;
  const float temperature = ask.temperature;
  const float smoothing = ask.label_smoothing;
  RowStream<Block<T>> stream(memory.rings, row, part.begin, part.end);
  if (p.blocks > 1) ClusterWait();  // all blocks have begun: their memory is there
  if (!active) return stream.Abandon();
  const float target_logit = target >= 0 ? ToFloat(row[target]) : 0.0f;
  const CellAsk cell_ask{.target = (want & kWantRank) != 0 ? target : kIgnoredTarget,
                         .target_logit = target_logit,
                         .weighted = (want & kWantEntropy) != 0,
                         .total = smoothing > 0,
                         .softcap = softcap,
                         .log2e_over_temperature = Log2EOverTemperature(softcap, temperature)};
  const bool answers = warp == 0 && part.block == 0;
  if (answers) KeepExtras(loss, ask, row, lane, 32);
  VisitSumming(SummingOf(cell_ask),
               [&](auto summing) { SumPart<summing, T>(stream, cell_ask, part); });
  if (p.blocks > 1) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
  }
  GradientWriter<T, kWarps * 32> writer(row, to, part.begin, part.end);
  if (warp == 0) {
    const KnownCell* cells = memory.cells;
    const RowSums sums = MergeRow(p.cells, cell_ask.log2e_over_temperature, lane,
                                  [=](int i) { return cells[i].sums; });
    int nan = vocab;
    if (isnan(sums.stats.sum)) {
      for (int i = 0; i < p.cells; ++i) {
        if (isnan(cells[i].sums.stats.sum)) nan = min(nan, cells[i].nan);
      }
    }
    const double log_of_sum = log(static_cast<double>(sums.stats.sum));
    const Outcome outcome = OutcomeOf(ask, sums.stats, log_of_sum);
    if (lane == 0)
      memory.gradient.Fill(ask, static_cast<float>(outcome.LogSumExp()), p.args.upstream[r],
                           target >= 0, target_logit, vocab);
    __syncthreads();
    if (answers) {
      WriteExtras(loss, ask, outcome, lane, 32);
      if (lane == 0) WriteAnswers(loss, r, sums, log_of_sum, outcome, target_logit, nan);
    }
  } else {
    __syncthreads();
  }
  writer.Write(active, memory.gradient);
}

// ---- launch ------------------------------------------------------------------------------------

// The blocks of a row, by its bytes: L2 holds the rows that are under way, or most of them. Longer rows,
// or shorter than kLeastCells, take less time in two calls.
constexpr struct {
  int64_t most_bytes;
  int blocks;
} kBlocksOfRows[] = {{int64_t{112} << 10, 1}, {int64_t{400} << 10, 2}, {int64_t{1} << 20, 4}};
constexpr int kLeastCells = 9;

// 0: the call takes less time in two.
int BlocksOf(const CrossEntropyTrainingArgs& args, const Scratch& scratch) {
  const TensorView& logits = args.loss.logits;
  const int64_t bytes = logits.cols * static_cast<int64_t>(SizeOf(logits.dtype));
  // More instructions an element than fit beside the reading of 16 bits.
  const bool busy = args.softcap || (args.loss.want & kWantEntropy) != 0;
  if (args.loss.max_top_logprobs > 0 || (busy && SizeOf(logits.dtype) == 2)) return 0;
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
