// The merge of the blocks of all shards, of the linear ops on a sharded head (kernels/shards.h).
//
// It adds cells and writes answers by the functions of the ops on one device, in their order: so
// the answers have their bits.
//
// Cost: reads the blocks, a block of threads a row. Where blocks are logits: writes and reads 4
// bytes a token and row, then runs the op that takes logits; linear_sample of one row on shards of
// one size only runs it.
#include <algorithm>
#include <array>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/merge_keys.cuh"
#include "kernels/cuda/linear/shards.cuh"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/support.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/topk_row.cuh"
#include "kernels/cuda/sampling/verify.h"

namespace logitd::cuda {
namespace {

constexpr int kMergeThreads = 128;

struct TopKMergeParams {
  Shards shards;
  TopKPartials blocks;  // the first
  int64_t row_keys;
  SoftmaxTopKArgs args;
};

// Blocks (x, r) share the entries of row r; the first one also writes its logsumexp and status.
__global__ void __launch_bounds__(kMergeThreads)
    TopKMergeKernel(const __grid_constant__ TopKMergeParams p) {
  const int64_t r = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const SoftmaxTopKRow ask = p.args.rows[r];
  if (ask.k == 0) return;
  const Stats stats =
      MergeCells(p.shards.cells, kLog2E / ask.temperature, lane, [&](int i) -> Stats {
        return {p.shards.CellOf(p.blocks.max, r, i), p.shards.CellOf(p.blocks.sum, r, i)};
      });
  const RowResult result(stats, ask.temperature);
  if (blockIdx.x == 0 && threadIdx.x < 32) {
    RowStatus status{RowCode::kOk, -1};
    float logsumexp = result.exponential.LogSum(stats.sum, ask.temperature);
    if (result.Nan()) {
      status = {RowCode::kNanLogit, FirstNan(p.shards, p.blocks.nan, r, lane)};
    } else if (result.Empty()) {
      status.code = RowCode::kEmptySupport;
      logsumexp = -kInfinity;
    }
    if (lane == 0) {
      p.args.logsumexp[r] = logsumexp;
      p.args.status[r] = status;
    }
  }
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  if (result.Nan()) return EmitNothing(p.args, ask, thread, threads);
  MergeKeys(p.shards, p.blocks.keys, r * p.row_keys, ask.k, thread, threads,
            [&](int rank, Key key) {
              p.args.indices[ask.first_entry + rank] = KeyIndex(key);
              p.args.probs[ask.first_entry + rank] = result.Probability(KeyLogit(key));
            });
}

struct LossMergeParams {
  Shards shards;
  LossPartials blocks;  // the first
  int64_t row_keys;
  int32_t max_extra;
  CrossEntropyArgs args;  // logits.cols is the vocabulary
};

// Merges a row's cells and writes its answers except tops and extras, by one warp.
__device__ inline Outcome ConcludeShards(const LossMergeParams& p, int64_t r, int lane) {
  const CrossEntropyRow& ask = p.args.rows[r];
  const Shards& shards = p.shards;
  const float log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature);
  const auto stats_of = [&](int i) -> Stats {
    return {shards.CellOf(p.blocks.max, r, i), shards.CellOf(p.blocks.sum, r, i)};
  };
  const Stats stats = MergeCells(shards.cells, log2e_over_temperature, lane, stats_of);
  RowSums sums{.stats = stats, .weighted = 0.0f, .total = 0.0, .before = 0};
  if ((ask.want & kWantEntropy) != 0) {
    const Exponential exponential(stats.max, log2e_over_temperature);
    float weighted = 0.0f;
    for (int i = lane; i < shards.cells; i += 32)
      weighted += Reweighted(exponential, stats_of(i), shards.CellOf(p.blocks.moment, r, i));
    sums.weighted = WarpSum(weighted);
  }
  if (ask.label_smoothing > 0) {
    double total = 0.0;
    for (int i = lane; i < shards.cells; i += 32) total += shards.CellOf(p.blocks.total, r, i);
    sums.total = WarpSum(total);
  }
  if ((ask.want & kWantRank) != 0 && ask.target >= 0) {
    int before = 0;
    for (int s = lane; s < shards.count; s += 32) before += shards.Of(p.blocks.before, s)[r];
    sums.before = __reduce_add_sync(kFullWarp, before);
  }
  int nan = shards.vocab;
  if (isnan(stats.sum)) nan = FirstNan(shards, p.blocks.nan, r, lane);
  const float target_logit =
      ask.target < 0 ? 0.0f : shards.Of(p.blocks.target, shards.OwnerOf(ask.target))[r];
  return Conclude(p.args, r, sums, target_logit, nan, lane);
}

// A block for each row.
__global__ void __launch_bounds__(kMergeThreads)
    LossMergeKernel(const __grid_constant__ LossMergeParams p) {
  __shared__ Outcome shared_outcome;  // from the first warp to the others
  const int64_t r = blockIdx.x;
  const CrossEntropyRow& ask = p.args.rows[r];
  if (ask.active == 0) return;
  if (threadIdx.x < 32) {
    const Outcome outcome = ConcludeShards(p, r, static_cast<int>(threadIdx.x));
    if (threadIdx.x == 0) shared_outcome = outcome;
  }
  if (ask.extra_count == 0 && ask.top_logprobs == 0) return;
  __syncthreads();
  const Outcome outcome = shared_outcome;
  const CrossEntropyAnswers& to = p.args.answers;
  for (int i = threadIdx.x; i < ask.extra_count; i += kMergeThreads) {
    const int owner = p.shards.OwnerOf(p.args.extra_ids[ask.first_extra + i]);
    const float logit = p.shards.Of(p.blocks.extra, owner)[r * p.max_extra + i];
    to.extra_logprobs[ask.first_extra_entry + i] = static_cast<float>(outcome.Logprob(logit));
  }
  int32_t* ids = to.top_ids + ask.first_top_entry;
  float* logprobs = to.top_logprobs + ask.first_top_entry;
  if (outcome.Nan()) {
    for (int i = threadIdx.x; i < ask.top_logprobs; i += kMergeThreads) {
      ids[i] = -1;
      logprobs[i] = outcome.sum;
    }
    return;
  }
  MergeKeys(p.shards, p.blocks.keys, r * p.row_keys, ask.top_logprobs,
            static_cast<int>(threadIdx.x), kMergeThreads, [&](int rank, Key key) {
              ids[rank] = KeyIndex(key);
              logprobs[rank] = static_cast<float>(outcome.Logprob(KeyLogit(key)));
            });
}

// Whether the blocks of one row of logits are that row: each block is full where another one has
// tokens after it.
bool IsOneRow(const VocabShards& shards) {
  for (int s = 0; s < shards.count; ++s) {
    if (shards.at(s).tokens > 0 && shards.at(s).first != s * shards.most_tokens()) return false;
  }
  return true;
}

// Puts the logits of all shards together, as many rows at a time as scratch has room for, and calls
// run(first row, logits of each input, the rest of scratch).
template <class Run>
cudaError_t ForWholeRows(const SamplePartialShape& shape, const std::byte* blocks, Scratch scratch,
                         cudaStream_t stream, const Run& run) {
  const VocabShards& shards = shape.shards;
  const int64_t stride = RoundUp(shards.vocab, 32);
  const int64_t room = static_cast<int64_t>(scratch.bytes) / 4;
  const int64_t step = std::clamp<int64_t>(room / (shape.inputs * stride * 4), 1, 256);
  float* const logits = scratch.Take<float>(static_cast<size_t>(shape.inputs * step * stride));
  if (logits == nullptr) return cudaErrorMemoryAllocation;
  for (int64_t first = 0; first < shape.rows; first += step) {
    const int64_t count = std::min(step, shape.rows - first);
    std::array<TensorView, 2> whole;
    for (int i = 0; i < shape.inputs; ++i) {
      float* const to = logits + i * step * stride;
      whole[static_cast<size_t>(i)] = {to, DType::kF32, count, shards.vocab, stride};
      std::array<RowsCopy, kMaxShards> copies;
      size_t copied = 0;
      for (int s = 0; s < shards.count; ++s) {
        const VocabShard shard = shards.at(s);
        if (shard.tokens == 0) continue;
        const float* const from = shape.Of(blocks, s, i) + first * shards.most_tokens();
        copies[copied++] = {.from = reinterpret_cast<const std::byte*>(from),
                            .from_stride = static_cast<size_t>(shards.most_tokens()) * 4,
                            .to = reinterpret_cast<std::byte*>(to + shard.first),
                            .to_stride = static_cast<size_t>(stride) * 4,
                            .row_bytes = static_cast<size_t>(shard.tokens) * 4,
                            .rows = count,
                            .from_device = true};
      }
      const cudaError_t error = GatherRows({copies.data(), copied}, stream);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = run(first, whole.data(), scratch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LinearTopKMerge(const LinearTopKMergeArgs& args, cudaStream_t stream) {
  const TopKPartialShape& shape = args.shape;
  if (shape.rows == 0) return cudaSuccess;
  const TopKMergeParams p{.shards = Shards(shape.shards, shape.bytes()),
                          .blocks = shape.Of(args.blocks, 0),
                          .row_keys = shape.keys(),
                          .args = args.topk};
  constexpr int64_t kMostBlocks = 64;   // of a row
  constexpr int64_t kMostRows = 32768;  // of a launch
  const int64_t blocks = std::clamp<int64_t>(CeilDiv(shape.keys(), kMergeThreads), 1, kMostBlocks);
  for (int64_t first = 0; first < shape.rows; first += kMostRows) {
    TopKMergeParams part = p;
    const int64_t cells = first * shape.shards.most_cells();
    part.blocks.max += cells;
    part.blocks.sum += cells;
    part.blocks.nan += first;
    part.blocks.keys = From(part.blocks.keys, first * shape.keys());
    part.args = RowsFrom(args.topk, first);
    const dim3 grid(static_cast<unsigned>(blocks),
                    static_cast<unsigned>(std::min(kMostRows, shape.rows - first)));
    const cudaError_t error =
        LaunchKernel(&TopKMergeKernel, {.grid = grid, .threads = kMergeThreads}, stream, part);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LinearSampleMerge(const LinearSampleMergeArgs& args, Scratch scratch,
                              cudaStream_t stream) {
  const SamplePartialShape& shape = args.shape;
  const VocabShards& shards = shape.shards;
  if (shape.rows == 1 && IsOneRow(shards)) {
    SampleArgs whole = args.sample;
    whole.logits = {shape.Of(args.blocks, 0), DType::kF32, 1, shards.vocab, shards.vocab};
    return Sample(whole, scratch, stream);
  }
  return ForWholeRows(shape, args.blocks, scratch, stream,
                      [&](int64_t first, const TensorView* logits, const Scratch& left) {
                        SampleArgs part = RowsFrom(args.sample, first);
                        part.logits = *logits;
                        return Sample(part, left, stream);
                      });
}

cudaError_t LinearVerifyMerge(const LinearVerifyMergeArgs& args, Scratch scratch,
                              cudaStream_t stream) {
  if (args.verify.sequence_count == 0 || args.all_rows == 0) return cudaSuccess;
  Scratch state = {.data = args.state, .bytes = VerifyStateBytes(args.all_rows)};
  const VerifySteps steps(args.verify, args.all_rows, state, stream);
  const auto verify = [&](int64_t first, const TensorView* logits, const Scratch& left) {
    return steps.Rows(args.pass, *logits, args.first_row + first, left);
  };
  cudaError_t error = cudaSuccess;
  if (args.pass == 0 && args.first_row == 0) error = steps.Begin();
  if (error == cudaSuccess) {
    error = args.blocks == nullptr ? verify(0, &args.verify.sample.logits, scratch)
                                   : ForWholeRows(args.shape, args.blocks, scratch, stream, verify);
  }
  const bool is_last = args.first_row + args.shape.rows == args.all_rows;
  return error == cudaSuccess && is_last ? steps.End(args.pass) : error;
}

cudaError_t LinearDivergenceMerge(const LinearDivergenceMergeArgs& args, Scratch scratch,
                                  cudaStream_t stream) {
  return ForWholeRows(args.shape, args.blocks, scratch, stream,
                      [&](int64_t first, const TensorView* logits, const Scratch& left) {
                        DivergenceArgs part = RowsFrom(args.divergence, first);
                        const int64_t rows = logits->rows;
                        part.logits = args.has_first ? *logits++ : RowsOf(part.logits, first, rows);
                        part.reference_logits = args.has_reference
                                                    ? *logits
                                                    : RowsOf(part.reference_logits, first, rows);
                        return Divergence(part, left, stream);
                      });
}

cudaError_t LinearSupportMerge(const LinearSupportMergeArgs& args, Scratch scratch,
                               cudaStream_t stream) {
  if (args.blocks == nullptr) return SupportedCrossEntropy(args.cross_entropy, scratch, stream);
  return ForWholeRows(args.shape, args.blocks, scratch, stream,
                      [&](int64_t first, const TensorView* logits, const Scratch& left) {
                        CrossEntropyArgs part = RowsFrom(args.cross_entropy, first);
                        part.logits = *logits;
                        return SupportedCrossEntropy(part, left, stream);
                      });
}

cudaError_t LinearCrossEntropyMerge(const LinearCrossEntropyMergeArgs& args, cudaStream_t stream) {
  const LossPartialShape& shape = args.shape;
  if (shape.rows == 0) return cudaSuccess;
  LossMergeParams p{.shards = Shards(shape.shards, shape.bytes()),
                    .blocks = shape.Of(args.blocks, 0),
                    .row_keys = shape.keys(),
                    .max_extra = shape.max_extra,
                    .args = args.cross_entropy};
  p.args.logits.cols = shape.shards.vocab;
  return LaunchKernel(&LossMergeKernel, {.grid = GridFor(shape.rows), .threads = kMergeThreads},
                      stream, p);
}

}  // namespace logitd::cuda
