// Rows of an op, made on the device: a warp a row.
//
// Bytes: the parameters' arrays and lists, read once, and the rows, 16 to 176 bytes each. A call
// has thousands of rows at most, so the launch is what it costs: 2 to 3 us on an H200.
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

}  // namespace

cudaError_t FillRows(const RowFill& fill, cudaStream_t stream) {
  return cuda::LaunchKernel(
      &FillRowsKernel, {.grid = cuda::GridFor(fill.rows, kThreads / kWarp), .threads = kThreads},
      stream, fill);
}

}  // namespace logitd::c_api
