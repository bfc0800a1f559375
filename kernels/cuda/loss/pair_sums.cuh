// The sums of tokens of two rows, beside each other, and those of a warp's lanes.
#ifndef LOGITD_KERNELS_CUDA_LOSS_PAIR_SUMS_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_PAIR_SUMS_CUH_

#include "kernels/cuda/rows/exponential.cuh"
#include "kernels/cuda/rows/reductions.cuh"
#include "kernels/divergence_sums.h"

namespace logitd::cuda {

// a and b as in kernels/divergence_sums.h, in units of ln 2.
struct PairSums {
  float x_sum = 0, y_sum = 0;
  float x_moment = 0, y_moment = 0;
  float x_apart = 0, y_apart = 0;

  __device__ void Add(float a, float b) {
    const float x_weight = Exp2(a), y_weight = Exp2(b), apart = a - b;
    x_sum += x_weight;
    y_sum += y_weight;
    x_moment = fmaf(x_weight, a, x_moment);
    y_moment = fmaf(y_weight, b, y_moment);
    x_apart = fmaf(x_weight, apart, x_apart);
    y_apart = fmaf(y_weight, -apart, y_apart);
  }
  // Adds a pair of which a row may lack its token: a token that is not there adds nothing.
  __device__ void AddWithCare(float a, float b, bool has_x, bool has_y) {
    const float x_weight = has_x ? Exp2(a) : 0.0f, y_weight = has_y ? Exp2(b) : 0.0f;
    x_sum += x_weight;
    y_sum += y_weight;
    if (x_weight > 0) x_moment = fmaf(x_weight, a, x_moment);
    if (y_weight > 0) y_moment = fmaf(y_weight, b, y_moment);
    if (x_weight > 0 && has_y) x_apart = fmaf(x_weight, a - b, x_apart);
    if (y_weight > 0 && has_x) y_apart = fmaf(y_weight, b - a, y_apart);
  }
};

__device__ inline DivergenceSums MergeLanes(const DivergenceSums& lane) {
  return {.x_sum = WarpSum(lane.x_sum),
          .y_sum = WarpSum(lane.y_sum),
          .x_moment = WarpSum(lane.x_moment),
          .y_moment = WarpSum(lane.y_moment),
          .x_apart = WarpSum(lane.x_apart),
          .y_apart = WarpSum(lane.y_apart),
          .found = static_cast<int32_t>(__reduce_or_sync(kFullWarp, lane.found))};
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_PAIR_SUMS_CUH_
