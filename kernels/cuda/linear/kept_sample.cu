// The merge of linear_sample on shards where every row needs only a few of its first tokens
// (kernels/sampling_rules.h): a block merges a row's cells and lists, and draws from the list.
//
// Cells, filter, draw and report are sample's, by its functions and in its order, so the answers
// have its bits.
//
// Cost: reads about 8 bytes for each row and cell, and 8 for each row, shard and token of a list.
// What shards exchange is a few KiB a row, where logits are 4 bytes a token. Limited by latencies:
// the merge of lists and the draw, as at the end of sample. Measured on two H100s by NCCL
// (bench/results/h100/shards.json, machine d): 64 rows of 4096 x 128256 293 us, with logits 410.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/merge_keys.cuh"
#include "kernels/cuda/linear/shards.cuh"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/sampling/draw_row.cuh"
#include "kernels/cuda/sampling/report.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 128;
static_assert(kMostKept <= kListed, "the kept tokens are a list of sample's");

struct KeptMergeParams {
  Shards shards;
  TopKPartials blocks;  // the first
  int64_t row_keys;
  SampleArgs args;
};

// Filters the first `kept` tokens, which are in s.sorted, and draws from them.
__device__ inline Drawn DrawKept(const SampleRow& ask, int vocab, float peak, int kept,
                                 DrawShared& s) {
  if (IsGreedy(ask)) return DrawGreedy(s);
  const DrawInput in{.peak = peak,
                     .stats = nullptr,
                     .cells = 0,
                     .sums_needed = false,  // top_k is on
                     .log2e_over_temperature = kLog2E,
                     .listed = kept,
                     .cell_sums = nullptr,
                     .bits = UniformBits(ask.seed, ask.position)};
  const ListedSupport support =
      FilterListed<kThreads>(ask, vocab, LowestKept(ask, peak), Weigher(peak, ask), in, s);
  Drawn drawn;
  drawn.last = s.sorted[support.count - 1];
  drawn.total = support.total;
  drawn.token = DrawListed<kThreads>(support.count, DrawTarget(in.bits, support.total), s);
  drawn.log_sum = log(static_cast<double>(drawn.total) / kWeightOne);
  return drawn;
}

// A block for each row.
__global__ void __launch_bounds__(kThreads)
    KeptMergeKernel(const __grid_constant__ KeptMergeParams p) {
  __shared__ __align__(alignof(DrawShared)) unsigned char memory[sizeof(DrawShared)];
  DrawShared& s = *reinterpret_cast<DrawShared*>(memory);
  const int64_t r = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int thread = static_cast<int>(threadIdx.x);
  const SampleArgs& args = p.args;
  const SampleRow& ask = args.rows[r];
  if (ask.active == 0) return;
  const Stats raw = MergeCells(p.shards.cells, kLog2E, lane, [&](int i) -> Stats {
    return {p.shards.CellOf(p.blocks.max, r, i), p.shards.CellOf(p.blocks.sum, r, i)};
  });
  if (isnan(raw.sum)) {
    if (thread < 32) {
      const int first = FirstNan(p.shards, p.blocks.nan, r, lane);
      if (lane == 0) {
        args.logsumexp[r] = __int_as_float(0x7fffffff);
        s.found = first;
      }
    }
    __syncthreads();
    return Refuse(args, r, ask, {RowCode::kNanLogit, s.found}, thread, kThreads);
  }
  if (raw.max == -kInfinity) {
    if (thread == 0) args.logsumexp[r] = -kInfinity;
    return Refuse(args, r, ask, {RowCode::kEmptySupport, -1}, thread, kThreads);
  }
  const int kept = KeptTokens(ask);
  MergeKeys(p.shards, p.blocks.keys, r * p.row_keys, kept, thread, kThreads,
            [&](int rank, Key key) { s.sorted[rank] = key; });
  __syncthreads();
  const Drawn drawn = DrawKept(ask, p.shards.vocab, raw.max, kept, s);
  const bool greedy = IsGreedy(ask);
  const Support support =
      ask.logprob_mode == LogprobMode::kRaw
          ? RawSupport(raw)
          : Support{drawn.last, raw.max, greedy ? 1.0 : ActingTemperature(ask), drawn.log_sum};
  for (int i = thread; i < kept; i += kThreads) {
    if (KeyIndex(s.sorted[i]) != drawn.token) continue;
    args.tokens[r] = drawn.token;
    args.logprobs[r] = support.Logprob(KeyLogit(s.sorted[i]), drawn.token);
    args.ranks[r] = ask.want_rank ? i + 1 : 0;
  }
  if (thread == 0) {
    args.logsumexp[r] = Exponential(raw.max, kLog2E).LogSum(raw.sum, 1.0f);
    args.status[r] = {RowCode::kOk, -1};
    if (args.edited) {  // the row wants none of these
      args.support_size[r] = 0;
      args.entropies[r] = args.raw_entropies[r] = 0;
    }
  }
  // No row has ids whose log-probability is wanted, so no other logit is looked at.
  ReportLists(args, ask, static_cast<const float*>(nullptr), support, s);
}

}  // namespace

cudaError_t KeptSampleMerge(const KeptSampleMergeArgs& args, cudaStream_t stream) {
  const TopKPartialShape& shape = args.shape;
  if (shape.rows == 0) return cudaSuccess;
  const KeptMergeParams p{.shards = Shards(shape.shards, shape.bytes()),
                          .blocks = shape.Of(args.blocks, 0),
                          .row_keys = shape.keys(),
                          .args = args.sample};
  return LaunchKernel(&KeptMergeKernel, {.grid = GridFor(shape.rows), .threads = kThreads}, stream,
                      p);
}

}  // namespace logitd::cuda
