// Cost: reads and writes the hidden states of the rows that are taken; noise beside the product.
#include "kernels/cuda/linear/counted_rows.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/counted_rows.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kOrderThreads)
    FindKernel(const __grid_constant__ CrossEntropyArgs args, int64_t rows, int64_t count,
               int32_t* places, CrossEntropyRow* taken) {
  const auto take = [&](int64_t r) {
    const CrossEntropyRow& row = args.rows[r];
    places[r] = -1;
    if (row.active == 0) return false;
    if (!AsksForNothing(row)) return true;
    AnswerLeftOut(args.answers, r);
    return false;
  };
  const int64_t found = ForEachTaken(rows, take, [&](int64_t r, int64_t place) {
    if (place >= count) return;
    places[r] = static_cast<int32_t>(place);
    taken[place] = args.rows[r];
  });
  for (int64_t i = found + threadIdx.x; i < count; i += kOrderThreads) taken[i] = {};
}

// Block r copies the hidden state of row r, 16 bytes at a time, to its place.
__global__ void __launch_bounds__(kThreads)
    CopyKernel(const std::byte* from, int64_t from_stride, int64_t bytes, const int32_t* places,
               std::byte* to, int64_t to_stride) {
  const int64_t r = blockIdx.x;
  if (places[r] < 0) return;
  from += r * from_stride;
  to += places[r] * to_stride;
  const int64_t vectors = bytes / 16;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  const int64_t i = vectors * 16 + threadIdx.x;
  if (i < bytes) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    ScatterKernel(const __grid_constant__ CrossEntropyAnswers from, const int32_t* places,
                  int64_t rows, const __grid_constant__ CrossEntropyAnswers to) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t i = r < rows ? places[r] : -1;
  if (i < 0) return;
  to.loss[r] = from.loss[i];
  to.logsumexp[r] = from.logsumexp[i];
  to.target_logprob[r] = from.target_logprob[i];
  to.status[r] = from.status[i];
  if (to.rank != nullptr) to.rank[r] = from.rank[i];
  if (to.entropy != nullptr) to.entropy[r] = from.entropy[i];
}

int64_t StrideOf(const TensorView& hidden) { return RoundUp(hidden.cols, 64); }

}  // namespace

int64_t CountedRows::MostRows(const LinearCrossEntropyArgs& args, const Scratch& scratch) {
  const int64_t of_row = StrideOf(args.hidden) * static_cast<int64_t>(SizeOf(args.hidden.dtype)) +
                         static_cast<int64_t>(sizeof(CrossEntropyRow) + sizeof(RowStatus)) + 6 * 4;
  return std::max<int64_t>(1, static_cast<int64_t>(scratch.left()) / 2 / of_row);
}

cudaError_t CountedRows::Gather(const LinearCrossEntropyArgs& whole, Scratch& scratch,
                                cudaStream_t stream) {
  const TensorView& hidden = whole.hidden;
  const int64_t size = static_cast<int64_t>(SizeOf(hidden.dtype));
  const int64_t count = std::clamp<int64_t>(whole.cross_entropy.counted_rows, 1, hidden.rows);
  args_ = whole;
  auto* const rows = scratch.Take<CrossEntropyRow>(count);
  auto* const states = scratch.Take<std::byte>(count * StrideOf(hidden) * size);
  places_ = scratch.Take<int32_t>(hidden.rows);
  CrossEntropyAnswers& to = args_.cross_entropy.answers;
  to.loss = scratch.Take<float>(count);
  to.logsumexp = scratch.Take<float>(count);
  to.target_logprob = scratch.Take<float>(count);
  to.status = scratch.Take<RowStatus>(count);
  if (to.rank != nullptr) to.rank = scratch.Take<int32_t>(count);
  if (to.entropy != nullptr) to.entropy = scratch.Take<float>(count);
  args_.hidden = {states, hidden.dtype, count, hidden.cols, StrideOf(hidden)};
  args_.cross_entropy.rows = rows;
  cudaError_t error = LaunchKernel(&FindKernel, {.grid = 1, .threads = kOrderThreads}, stream,
                                   whole.cross_entropy, hidden.rows, count, places_, rows);
  if (error != cudaSuccess) return error;
  return LaunchKernel(&CopyKernel, {.grid = GridFor(hidden.rows), .threads = kThreads}, stream,
                      static_cast<const std::byte*>(hidden.data), hidden.row_stride * size,
                      hidden.cols * size, places_, states, StrideOf(hidden) * size);
}

cudaError_t CountedRows::Scatter(const LinearCrossEntropyArgs& whole, cudaStream_t stream) const {
  const int64_t rows = whole.hidden.rows;
  return LaunchKernel(&ScatterKernel, {.grid = GridFor(rows, kThreads), .threads = kThreads},
                      stream, args_.cross_entropy.answers, places_, rows,
                      whole.cross_entropy.answers);
}

}  // namespace logitd::cuda
