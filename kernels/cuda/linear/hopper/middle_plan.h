// How hopper/middle_rows.cuh shares rows among blocks.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_PLAN_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_PLAN_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/linear/hopper/schedule.h"

namespace logitd::cuda::hopper {

constexpr int kMiddleBlocks = 2;           // of a cluster
constexpr int kMiddleRowUnit = 8;          // rows of a block are paid for by this number
constexpr int kLeastMiddleBlockRows = 88;  // fewer are paid as so many
constexpr int kMostMiddleBlockRows = 160;  // what registers have room for

// Each cluster multiplies a group of rows at a time. All groups have as many rows, or the last
// ones, which are small, have kMiddleRowUnit fewer in each block. A row has the same bits in any
// group.
struct MiddlePlan {
  int32_t groups;
  int32_t block_rows;  // of a group that is not small, in each block; a multiple of kMiddleRowUnit
  int32_t large;       // groups that are not small

  __host__ __device__ bool IsSmall(int group) const { return group >= large; }
  __host__ __device__ int BlockRows(int group) const {
    return IsSmall(group) ? block_rows - kMiddleRowUnit : block_rows;
  }
  __host__ __device__ int FirstRow(int group) const {
    const int small = IsSmall(group) ? group - large : 0;
    return kMiddleBlocks * (group * block_rows - small * kMiddleRowUnit);
  }
  // Rows that are paid for.
  __host__ __device__ int PaidRows() const {
    return FirstRow(groups - 1) + kMiddleBlocks * BlockRows(groups - 1);
  }
};

// As few groups as have room.
inline MiddlePlan MiddlePlanOf(int64_t rows) {
  const auto up = [](int64_t n, int64_t unit) {
    return static_cast<int32_t>((n + unit - 1) / unit);
  };
  const int32_t groups = up(rows, kMiddleBlocks * kMostMiddleBlockRows);
  const int32_t units = up(rows, kMiddleBlocks * kMiddleRowUnit);  // of all groups
  const int32_t block_rows = up(units, groups) * kMiddleRowUnit;
  const bool equal = units % groups == 0 || block_rows <= kLeastMiddleBlockRows;
  return {.groups = groups, .block_rows = block_rows, .large = equal ? groups : units % groups};
}

// Whether losses of so many rows pay: the weights are read once, or product.cuh would pay more.
inline bool PaysForLosses(int64_t rows) {
  constexpr int64_t kPaidRows = 2 * kGroupRows;  // product.cuh pays for multiples of it
  constexpr int64_t kMostRows = 1024;
  const int64_t paid = (rows + kPaidRows - 1) / kPaidRows * kPaidRows;
  const MiddlePlan plan = MiddlePlanOf(rows);
  return rows > kPaidRows && rows <= kMostRows &&
         (plan.groups == 1 || paid * 20 >= int64_t{plan.PaidRows()} * 21);
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_PLAN_H_
