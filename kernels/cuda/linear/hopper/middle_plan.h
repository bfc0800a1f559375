// How hopper/middle_rows.cuh shares rows among blocks.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_PLAN_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_PLAN_H_

#include <cstdint>

#include "kernels/cuda/linear/hopper/schedule.h"

namespace logitd::cuda::hopper {

constexpr int kMiddleBlocks = 2;           // of a cluster
constexpr int kMostMiddleBlockRows = 160;  // what registers have room for

// Each cluster multiplies a group of rows at a time. All groups and all blocks have as many rows.
struct MiddlePlan {
  int groups;
  int block_rows;  // a multiple of 8
};

// As few groups as have room.
inline MiddlePlan MiddlePlanOf(int64_t rows) {
  const auto up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit; };
  const int64_t groups = up(rows, kMiddleBlocks * kMostMiddleBlockRows);
  return {.groups = static_cast<int>(groups),
          .block_rows = static_cast<int>(up(rows, groups * kMiddleBlocks * 8) * 8)};
}

// Whether losses pay: the rows are one group, for which product.cuh would pay a fifth more.
inline bool PaysForLosses(int64_t rows) {
  constexpr int64_t kPaidRows = 2 * kGroupRows;  // product.cuh pays for multiples of it
  const int64_t paid = (rows + kPaidRows - 1) / kPaidRows * kPaidRows;
  return rows > kPaidRows && MiddlePlanOf(rows).groups == 1 && paid * 5 >= rows * 6;
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_MIDDLE_PLAN_H_
