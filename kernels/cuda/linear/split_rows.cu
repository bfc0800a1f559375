#include "kernels/cuda/linear/split_rows.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"

namespace logitd::cuda {
namespace {

// Splits rows into two lists of the same length: `plain`, which want only losses and extras, and
// `more`. A row is skipped in the list of the other kind. Block i says whether any of its rows is
// plain.
__global__ void __launch_bounds__(hopper::kLossGroupRows)
    SplitRowsKernel(const CrossEntropyRow* rows, int64_t count, CrossEntropyRow* plain,
                    CrossEntropyRow* more, int32_t* plain_groups) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * hopper::kLossGroupRows + threadIdx.x;
  const CrossEntropyRow row = r < count ? rows[r] : CrossEntropyRow{};
  const bool wants_more = row.want != 0 || row.top_logprobs > 0;
  const int any_plain = __syncthreads_or(row.active != 0 && !wants_more);
  if (threadIdx.x == 0) plain_groups[blockIdx.x] = any_plain;
  if (r >= count) return;
  plain[r] = wants_more ? CrossEntropyRow{} : row;
  more[r] = wants_more ? row : CrossEntropyRow{};
}

}  // namespace

cudaError_t SplitRows(const CrossEntropyRow* rows, int64_t count, SplitRowLists& lists,
                      Scratch& scratch, cudaStream_t stream) {
  const dim3 grid = GridFor(count, hopper::kLossGroupRows);
  lists.plain = scratch.Take<CrossEntropyRow>(static_cast<size_t>(count));
  lists.more = scratch.Take<CrossEntropyRow>(static_cast<size_t>(count));
  lists.plain_groups = scratch.Take<int32_t>(grid.x);
  if (lists.plain == nullptr || lists.more == nullptr || lists.plain_groups == nullptr)
    return cudaErrorMemoryAllocation;
  return LaunchKernel(&SplitRowsKernel, {.grid = grid, .threads = hopper::kLossGroupRows}, stream,
                      rows, count, lists.plain, lists.more, lists.plain_groups);
}

}  // namespace logitd::cuda
