// The sinks' gradient: blocks of a head add up its rows' terms in doubles, in an order fixed by the
// rows.
//
// Cost: reads 8 bytes a row.
#include "kernels/cuda/attention/sink_gradient.h"

#include <algorithm>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/reductions.cuh"

namespace logitd::cuda::attention {
namespace {

constexpr int kSinkThreads = 256;
// Blocks of a head, where there are too few heads to fill the device.
constexpr int kSinkSplits = 32;
constexpr int64_t kSplitHeads = 1024;
constexpr int64_t kHeadsAtOnce = int64_t{1} << 20;

struct SinkParams {
  int64_t heads;
  int64_t queries;
  int64_t begin;  // rows [begin, end) of the tensor: the pass
  int64_t end;
  int64_t first_head;  // heads [first_head, first_head + head_count): the launch
  int64_t head_count;
  const float* dots;       // [end - begin]
  const float* logsumexp;  // [end - begin]
  const float* sinks;
  double* sums;  // [head_count, splits]
  int splits;

  // Rows of the head before row `row` of the tensor.
  __device__ int64_t RowsBefore(int64_t head, int64_t row) const {
    const int64_t of_batch = heads * queries;
    return row / of_batch * queries +
           min(max(row % of_batch - head * queries, int64_t{0}), queries);
  }
};

// sums = the heads' parts of -d_sinks over the pass, each summed in an order fixed by the rows.
__global__ void __launch_bounds__(kSinkThreads)
    SinkTermsKernel(const __grid_constant__ SinkParams p) {
  __shared__ double warp_sums[kSinkThreads / 32];
  for (int64_t item = blockIdx.x; item < p.head_count * p.splits; item += gridDim.x) {
    const int64_t head = p.first_head + item / p.splits;
    const float sink = p.sinks[head];
    const int64_t last = p.RowsBefore(head, p.end);
    double sum = 0;
    for (int64_t i = p.RowsBefore(head, p.begin) + item % p.splits * kSinkThreads + threadIdx.x;
         i < last; i += p.splits * kSinkThreads) {
      const int64_t row = (i / p.queries * p.heads + head) * p.queries + i % p.queries - p.begin;
      const double share =
          sink == -kInfinity ? 0.0 : exp(static_cast<double>(sink) - p.logsumexp[row]);
      sum += share * p.dots[row];
    }
    sum = WarpSum(sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double all = 0;
      for (double warp_sum : warp_sums) all += warp_sum;
      p.sums[item] = all;
    }
    __syncthreads();
  }
}

// d_sinks -= the head's sums, in order. The first pass starts at 0.
__global__ void AddSinkTermsKernel(const double* sums, int64_t heads, int splits, bool first,
                                   double* d_sinks) {
  for (int64_t head = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; head < heads;
       head += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    double sum = 0;
    for (int s = 0; s < splits; ++s) sum += sums[head * splits + s];
    d_sinks[head] = (first ? 0.0 : d_sinks[head]) - sum;
  }
}

}  // namespace

SinkScratch TakeSinkScratch(const AttentionShape& shape, Scratch& scratch) {
  return {.dots = scratch.Take<float>(std::min(shape.rows, kSinkPassRows)),
          .sums = scratch.Take<double>(
              std::max(kSplitHeads * kSinkSplits, std::min(shape.heads, kHeadsAtOnce)))};
}

cudaError_t AddSinkTerms(const AttentionSoftmaxBackwardArgs& args, int64_t begin, int64_t count,
                         const SinkScratch& scratch, cudaStream_t stream) {
  const int64_t heads = args.shape.heads;
  for (int64_t head = 0; head < heads; head += kHeadsAtOnce) {
    const SinkParams p{.heads = heads,
                       .queries = args.shape.queries,
                       .begin = args.shape.first_row + begin,
                       .end = args.shape.first_row + begin + count,
                       .first_head = head,
                       .head_count = std::min(kHeadsAtOnce, heads - head),
                       .dots = scratch.dots,
                       .logsumexp = args.logsumexp + begin,
                       .sinks = args.sinks,
                       .sums = scratch.sums,
                       .splits = heads > kSplitHeads ? 1 : kSinkSplits};
    cudaError_t error = LaunchKernel(
        &SinkTermsKernel, {.grid = GridFor(p.head_count * p.splits), .threads = kSinkThreads},
        stream, p);
    if (error != cudaSuccess) return error;
    error = LaunchKernel(&AddSinkTermsKernel,
                         {.grid = GridFor(p.head_count, kSinkThreads), .threads = kSinkThreads},
                         stream, p.sums, p.head_count, p.splits, begin == 0, args.d_sinks + head);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda::attention
