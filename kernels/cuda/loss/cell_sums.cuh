// What cross_entropy sums over a cell, besides its softmax statistics.
#ifndef LOGITD_KERNELS_CUDA_LOSS_CELL_SUMS_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_CELL_SUMS_CUH_

#include <cstdint>

#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {

// A cell's sums, or a lane's share of them.
struct CellSums {
  Stats stats;     // of the values
  float weighted;  // sum of e log2(e), for the e of stats.sum; 0 where not wanted
  float total;     // sum of the values, times kTotalUnit; 0 where not wanted
  int32_t before;  // tokens before the target; 0 where not wanted
};
static_assert(sizeof(CellSums) % 4 == 0);
static_assert(kCell * kTotalUnit == 1.0f);

// The binary logarithm of Exponential::Factor; at least kLeastPower.
constexpr float kLeastPower = -1000.0f;  // 2^kLeastPower is 0
__device__ inline float FactorPower(const Exponential& to, float other_max) {
  float power = __fmul_rn(other_max - to.max, to.log2e_over_temperature);
  if (to.plain) {
    power = __fmul_rn(other_max, to.log2e_over_temperature) + to.shift;
  } else if (other_max == to.max) {
    power = 0;
  } else {
    const Exponential other(other_max, to.log2e_over_temperature);
    if (other.plain) power -= fmaf(other_max, other.log2e_over_temperature, other.shift);
  }
  return fmaxf(power, kLeastPower);
}

// `weighted` of a part, made relative to a maximum that is not below the part's own.
__device__ inline float Reweighted(const Exponential& to, Stats part, float weighted) {
  if (part.max == -kInfinity) return 0.0f;
  return __fmul_rn(to.Factor(part.max), fmaf(FactorPower(to, part.max), part.sum, weighted));
}

// A lane's sums of a cell. Bit e of `valid` says whether element e is in the row; the others are
// -inf. Without a softcap stats.sum has the bits of LaneStats.
template <bool kCapped, class T>
__device__ inline CellSums LaneSums(const LaneCell<T>& x, float lane_max, Cap cap,
                                    float log2e_over_temperature, uint32_t valid) {
  const float max = kCapped ? cap.Tanh(lane_max) : lane_max;
  const Exponential exponential(max == -kInfinity ? 0.0f : max, log2e_over_temperature);
  float sums[kSums];
  float weighted[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = weighted[i] = 0.0f;
  float total = 0.0f;
  const auto add = [&](int e, auto power_of) {
    const bool is_valid = (valid >> e & 1) != 0;
    float value = x[e];
    if constexpr (kCapped) {
      value = cap.Tanh(value);
      value = value > max ? max : value;  // tanhf may not rise everywhere; NaN stays
      if (!is_valid) value = -kInfinity;
    }
    float power = power_of(value);
    power = power < kLeastPower ? kLeastPower : power;
    const float weight = Exp2(power);
    sums[e / kSumElements] += weight;
    weighted[e / kSumElements] = fmaf(weight, power, weighted[e / kSumElements]);
    total = fmaf(is_valid ? value : 0.0f, kTotalUnit, total);
  };
  if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e)
      add(e, [&](float value) {
        return fmaf(value, exponential.log2e_over_temperature, exponential.shift);
      });
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      add(e, [&](float value) {
        if (exponential.plain)
          return fmaf(value, exponential.log2e_over_temperature, exponential.shift);
        return value == exponential.max
                   ? 0.0f
                   : (value - exponential.max) * exponential.log2e_over_temperature;
      });
    }
  }
  return {.stats = {max, (sums[0] + sums[1]) + (sums[2] + sums[3])},
          .weighted = (weighted[0] + weighted[1]) + (weighted[2] + weighted[3]),
          .total = total,
          .before = 0};
}

// Which of a lane's elements of the cell are among its first `count`.
template <class T>
__device__ inline uint32_t ValidElements(int count, int lane) {
  if (count >= kCell) return ~0u;
  uint32_t valid = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) valid |= (CellIndex<T>(lane, e) < count ? 1u : 0u) << e;
  return valid;
}

// How many of the lane's elements of the cell at `first` rank before the target.
template <class T>
__device__ inline int CountBefore(const LaneCell<T>& x, int first, int lane, int target,
                                  float target_logit) {
  int before = 0;
  if (first + kCell <= target) {  // an equal logit ranks before the target
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) before += x[e] >= target_logit;
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) before += x[e] > target_logit;
    if (first <= target) {
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e)
        before += x[e] == target_logit && first + CellIndex<T>(lane, e) < target;
    }
  }
  return before;
}

// What a row asks of its cells.
struct CellAsk {
  int target;          // whose rank is wanted; else kIgnoredTarget
  float target_logit;  // where there is a target
  bool summed;         // weighted and total are wanted
  Cap cap;
  float log2e_over_temperature;
};

// The sums of the cell at `first` of a row that ends at `end`, the same in every lane.
template <class T>
__device__ inline CellSums SumCell(const LaneCell<T>& x, float lane_max, const CellAsk& ask,
                                   int first, int end, int lane) {
  CellSums sums{};
  const float log2e_over_temperature = ask.log2e_over_temperature;
  if (ask.cap.on() || ask.summed) {
    const uint32_t valid = ValidElements<T>(end - first, lane);
    sums = ask.cap.on() ? LaneSums<true>(x, lane_max, ask.cap, log2e_over_temperature, valid)
                        : LaneSums<false>(x, lane_max, ask.cap, log2e_over_temperature, valid);
    const Stats stats = MergeLanes(sums.stats, log2e_over_temperature);
    sums.weighted = WarpSum(
        Reweighted(Exponential(stats.max, log2e_over_temperature), sums.stats, sums.weighted));
    sums.total = WarpSum(sums.total);
    sums.stats = stats;
  } else {
    sums.stats = MergeLanes(LaneStats(x, lane_max, log2e_over_temperature), log2e_over_temperature);
  }
  if (ask.target >= 0)
    sums.before =
        __reduce_add_sync(kFullWarp, CountBefore<T>(x, first, lane, ask.target, ask.target_logit));
  return sums;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_CELL_SUMS_CUH_
