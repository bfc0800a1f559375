// Rows of an op, made on the device, a warp a row; and losses of rows in one number, by one block.
//
// Bytes: the parameters' arrays and lists, read once, and the rows, 16 to 176 bytes each; targets
// and losses, 12 bytes a row. A call has thousands of rows at most: its launches are what it costs.
#include "kernels/c_api/cuda/fill_rows.h"
#include "kernels/cuda/launch.cuh"

namespace logitd::c_api {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) FillRowsKernel(const __grid_constant__ RowFill fill) {
  const int64_t r = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (r >= fill.rows) return;  // whole warps
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int32_t refused = MakeRow(fill, r, lane, kWarp);
  const unsigned by = __ballot_sync(~0u, refused != 0);
  if (by == 0) return;
  const int32_t parameter = __shfl_sync(~0u, refused, __ffs(by) - 1);
  __syncwarp();  // the first lane has written the row
  RefuseRow(fill, r, parameter, lane, kWarp);
}

constexpr int kReducers = 1024;

// The sum of each thread's value, for all threads of the one block.
template <class T>
__device__ T SumOfBlock(T value) {
  __shared__ T sums[kReducers];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = value;
  for (int half = kReducers / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  __syncthreads();
  return sums[0];
}

__global__ void __launch_bounds__(kReducers) WeighKernel(const __grid_constant__ Reduction of) {
  float weight = 1;
  if (of.mean) {
    int64_t count = 0;
    for (int64_t r = threadIdx.x; r < of.rows; r += kReducers)
      count += of.targets[r] != of.ignored ? 1 : 0;
    weight = static_cast<float>(1.0 / static_cast<double>(SumOfBlock(count)));
  }
  for (int64_t r = threadIdx.x; r < of.rows; r += kReducers)
    of.weights[r] = of.targets[r] != of.ignored ? weight : 0.0f;
  if (threadIdx.x == 0) of.weights[of.rows] = weight;
}

__global__ void __launch_bounds__(kReducers) TotalKernel(const __grid_constant__ Reduction of) {
  double sum = 0;
  for (int64_t r = threadIdx.x; r < of.rows; r += kReducers)
    sum += of.targets[r] != of.ignored ? double{of.losses[r]} : 0.0;
  sum = SumOfBlock(sum);
  if (threadIdx.x == 0) *of.total = static_cast<float>(sum * double{of.weights[of.rows]});
}

}  // namespace

cudaError_t WeighRows(const Reduction& of, cudaStream_t stream) {
  return cuda::LaunchKernel(&WeighKernel, {.grid = dim3(1), .threads = kReducers}, stream, of);
}

cudaError_t TotalRows(const Reduction& of, cudaStream_t stream) {
  return cuda::LaunchKernel(&TotalKernel, {.grid = dim3(1), .threads = kReducers}, stream, of);
}

cudaError_t FillRows(const RowFill& fill, cudaStream_t stream) {
  return cuda::LaunchKernel(
      &FillRowsKernel, {.grid = cuda::GridFor(fill.rows, kThreads / kWarp), .threads = kThreads},
      stream, fill);
}

}  // namespace logitd::c_api
