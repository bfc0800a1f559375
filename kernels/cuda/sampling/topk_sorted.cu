// softmax_topk for k > 1024: the rows' statistics, then CUB's radix sort of (row, logit).
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/row_kernel.cuh"
#include "kernels/cuda/sampling/topk_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;

// row << 32 | complement of the logit's ordered bits: ascending is most probable first.
using SortKey = uint64_t;

template <class T>
__global__ void SortKeysKernel(TensorView logits, int32_t vocab, int64_t elements, SortKey* keys,
                               int32_t* values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements;
       i += step) {
    const int64_t row = i / vocab;
    const int32_t column = static_cast<int32_t>(i % vocab);
    const T* from = static_cast<const T*>(logits.data) + row * logits.row_stride;
    keys[i] = static_cast<SortKey>(row) << 32 |
              static_cast<uint32_t>(~OrderedBits(ToFloat(from[column])));
    values[i] = column;
  }
}

__global__ void EmitSortedKernel(SoftmaxTopKArgs args, const Stats* row_stats, const SortKey* keys,
                                 const int32_t* values) {
  const int64_t row = blockIdx.y;
  const SoftmaxTopKRow ask = args.rows[row];
  if (ask.k == 0) return;
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  const RowResult result(row_stats[row], ask.temperature);
  if (result.Nan()) return EmitNothing(args, ask, thread, threads);
  for (int rank = thread; rank < ask.k; rank += threads) {
    const int64_t at = row * args.logits.cols + rank;
    args.indices[ask.first_entry + rank] = values[at];
    args.probs[ask.first_entry + rank] =
        result.Probability(FromOrderedBits(~static_cast<uint32_t>(keys[at])));
  }
}

// A row's statistics.
template <class T>
struct StatsOp : RowOp {
  using Element = T;
  using Params = TopKParams;
  using Cell = Stats;
  const SoftmaxTopKRow ask;
  const float log2e_over_temperature;

  __host__ __device__ static const TensorView& Logits(const Params& p) { return p.args.logits; }
  __device__ StatsOp(const Params& p, int64_t row)
      : ask(p.args.rows[row]), log2e_over_temperature(kLog2E / ask.temperature) {}
  __device__ bool Active() const { return ask.k != 0; }
  __device__ Stats Add(const LaneCell<T>& x, int, int, int) const {
    return MergeLanes(LaneStats(x, x.Max(0, kLaneElements), log2e_over_temperature),
                      log2e_over_temperature);
  }
  __device__ void Finish(const Params& p, int64_t row, const Stats* cells, int count,
                         int lane) const {
    const RowResult result(MergeCells(cells, count, log2e_over_temperature), ask.temperature);
    WriteRow<T>(p, row, ask, result, lane, [=](int i) { return isnan(cells[i].sum); });
  }
};

}  // namespace

cudaError_t SortedTopK(const SoftmaxTopKArgs& args, Scratch scratch, cudaStream_t stream) {
  const int64_t rows = args.logits.rows;
  Stats* const row_stats = scratch.Take<Stats>(rows);
  if (row_stats == nullptr) return cudaErrorMemoryAllocation;
  const TopKParams statistics{.args = args,
                              .vocab = static_cast<int32_t>(args.logits.cols),
                              .cells = CellsOf(static_cast<int>(args.logits.cols)),
                              .row_stats = row_stats};
  cudaError_t error = VisitDType(args.logits.dtype, [&]<class T>() {
    return RunRows<StatsOp<T>>(statistics, scratch, stream);
  });
  if (error != cudaSuccess) return error;
  const int64_t vocab = args.logits.cols;
  // Rows per pass: as many as scratch holds, in keys and values twice and what CUB asks besides.
  constexpr int64_t kMaxPass = 4096;
  const int64_t bytes_per_row = 2 * vocab * static_cast<int64_t>(sizeof(SortKey) + sizeof(int32_t));
  const int64_t budget = static_cast<int64_t>(scratch.bytes) * 3 / 4;
  const int64_t pass = std::clamp<int64_t>(budget / bytes_per_row, 1, std::min(rows, kMaxPass));
  cub::DoubleBuffer<SortKey> keys(scratch.Take<SortKey>(pass * vocab),
                                  scratch.Take<SortKey>(pass * vocab));
  cub::DoubleBuffer<int32_t> values(scratch.Take<int32_t>(pass * vocab),
                                    scratch.Take<int32_t>(pass * vocab));
  int row_bits = 0;
  while ((int64_t{1} << row_bits) < pass) ++row_bits;
  size_t temp_bytes = 0;
  const auto sort = [&](void* temp, int64_t elements) {
    return cub::DeviceRadixSort::SortPairs(temp, temp_bytes, keys, values,
                                           static_cast<int>(elements), 0, 32 + row_bits, stream);
  };
  error = sort(nullptr, pass * vocab);
  if (error != cudaSuccess) return error;
  std::byte* temp = scratch.Take<std::byte>(temp_bytes);
  if (temp == nullptr) return cudaErrorMemoryAllocation;
  for (int64_t first = 0; first < rows; first += pass) {
    SoftmaxTopKArgs part = RowsFrom(args, first);
    part.logits = RowsOf(args.logits, first, std::min(pass, rows - first));
    const int64_t elements = part.logits.rows * vocab;
    const int64_t blocks =
        std::min<int64_t>(CeilDiv(elements, kThreads), scratch.multiprocessors * 16);
    error = VisitDType(part.logits.dtype, [&]<class T>() {
      return LaunchKernel(&SortKeysKernel<T>, {.grid = GridFor(blocks), .threads = kThreads},
                          stream, part.logits, static_cast<int32_t>(vocab), elements,
                          keys.Current(), values.Current());
    });
    if (error != cudaSuccess) return error;
    error = sort(temp, elements);
    if (error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(CeilDiv(vocab, kThreads), 64)),
                    static_cast<unsigned>(part.logits.rows));
    error = LaunchKernel(&EmitSortedKernel, {.grid = grid, .threads = kThreads}, stream, part,
                         row_stats + first, keys.Current(), values.Current());
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda
