// The sums of the last cells of several rows at once, where each row has few tokens in its last
// cell.
//
// A cell costs a warp some 200 instructions however little of it is in the row. So rows of a few
// tokens above a cell's border give those tokens to as many lanes as they need, and the warp takes
// the tails of up to 32 rows at once. A lane has the elements that it has in cell.cuh, and lanes
// merge in the same order, so the bits are those of SumCell.
#ifndef LOGITD_KERNELS_CUDA_LOSS_ROW_TAILS_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_ROW_TAILS_CUH_

#include "kernels/cuda/loss/cell_sums.cuh"

namespace logitd::cuda {

constexpr int kMostTailLanes = 16;  // of a row

// The tokens of a row after its last whole cell, where they are few; else 0.
template <class T>
__host__ __device__ constexpr int TailOf(int vocab) {
  const int left = vocab % kCell;
  return vocab > kCell && left <= kMostTailLanes * kVector<T> ? left : 0;
}

// A lane's sums of the first `count` of its elements, at most a vector; of none, what a lane has
// whose elements are -inf.
template <class T>
__device__ inline CellSums LaneTailSums(Summing summing, const CellAsk& ask,
                                        const float (&x)[kVector<T>], int count) {
  float lane_max = -kInfinity;
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) {
    if (e < count) lane_max = fmaxf(lane_max, x[e]);
  }
  CellSums sums{};
  const auto add = [&](float power) {
    const float weight = Exp2(power);
    sums.stats.sum += weight;
    sums.weighted = fmaf(weight, power, sums.weighted);
  };
  if (summing == Summing::kMildlyCapped || summing == Summing::kMildlyCappedAll) {
    const auto powers = CappedPowers::Of(ask.softcap, ask.log2e_over_temperature);
    const auto powers_of = CappedPowers::OfAny::Of(powers);
    sums.stats.max = NearMax(powers, lane_max);
    const float shift = -__fmul_rn(sums.stats.max, ask.log2e_over_temperature);
#pragma unroll
    for (int e = 0; e < kVector<T>; e += 2) {
      const float2 two = powers_of(x[e], x[e + 1], shift);
      if (e < count) add(two.x), sums.total += two.x;
      if (e + 1 < count) add(two.y), sums.total += two.y;
    }
    sums.total = TotalOfPowers(sums.total, max(0, min(count, kVector<T>)), sums.stats.max,
                               ask.log2e_over_temperature);
    return sums;
  }
  const Cap cap = Cap::Of(summing == Summing::kCapped ? ask.softcap : 0.0f);
  const auto value_of = [&](float logit) {
    return cap.on() ? CappedValue(cap, logit, sums.stats.max) : logit;
  };
  sums.stats.max = cap(lane_max);
  const Exponential exponential(sums.stats.max == -kInfinity ? 0.0f : sums.stats.max,
                                ask.log2e_over_temperature);
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) {
    if (e < count) add(MaxOrNan(Power(exponential, value_of(x[e])), kLeastPower));
  }
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) {
    if (e < count) sums.total = fmaf(value_of(x[e]), kTotalUnit, sums.total);
  }
  return sums;
}

// The sums of a cell from those of its first `lanes` lanes, a power of two, the same in each of
// them.
__device__ inline CellSums MergeTail(Summing summing, const CellAsk& ask, const CellSums& part,
                                     int lanes) {
  const auto sum = [=](auto value) {
#pragma unroll 1
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
  };
  uint32_t max = OrderedBits(part.stats.max);
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    max = ::max(max, __shfl_xor_sync(kFullWarp, max, offset));
  const Exponential exponential(FromOrderedBits(max), ask.log2e_over_temperature);
  const bool capped = summing == Summing::kCapped || summing == Summing::kMildlyCappedAll;
  const bool weighted = capped || summing == Summing::kWeighted;
  const bool total = capped || (ask.total && summing != Summing::kMildlyCapped);
  const float reweighted = Reweighted(exponential, part.stats, part.weighted);
  return {.stats = {exponential.max, sum(part.stats.sum * exponential.Factor(part.stats.max))},
          .weighted = sum(weighted ? reweighted : 0.0f),
          .total = sum(total ? part.total : 0.0f),
          .before = sum(part.before)};
}

// What row `k` of a warp asks, from the lane of that number.
__device__ inline CellAsk AskOfRow(const CellAsk& own, int k) {
  return {.target = __shfl_sync(kFullWarp, own.target, k),
          .target_logit = __shfl_sync(kFullWarp, own.target_logit, k),
          .weighted = __shfl_sync(kFullWarp, own.weighted, k) != 0,
          .total = __shfl_sync(kFullWarp, own.total, k) != 0,
          .softcap = __shfl_sync(kFullWarp, own.softcap, k),
          .log2e_over_temperature = __shfl_sync(kFullWarp, own.log2e_over_temperature, k)};
}

// Leaves the tails' sums of a warp's `rows` rows, from `first_row` on: store(row, sums) for each.
// `own_ask` is of the row with the lane's number. Not inlined: it is once for all of a warp's rows.
template <class T, class Store>
__device__ __noinline__ void SumTails(const TensorView& logits, int64_t first_row, int rows,
                                      Summing own_summing, CellAsk own_ask, Store store) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int vocab = static_cast<int>(logits.cols);
  const int tail = TailOf<T>(vocab);
  int lanes = 1;  // of a row
  while (lanes * kVector<T> < tail) lanes *= 2;
  const int first_element = lane % lanes * kVector<T>;
#pragma unroll 1
  for (int first = 0; first < rows; first += 32 / lanes) {
    const int k = first + lane / lanes;
    const int from = min(k, rows - 1);
    const T* elements = static_cast<const T*>(logits.data) +
                        (first_row + from) * logits.row_stride + (vocab - tail + first_element);
    const int count = tail - first_element;
    float x[kVector<T>];
#pragma unroll
    for (int e = 0; e < kVector<T>; ++e) x[e] = e < count ? ToFloat(elements[e]) : -kInfinity;
    const auto summing =
        static_cast<Summing>(__shfl_sync(kFullWarp, static_cast<int>(own_summing), from));
    const CellAsk ask = AskOfRow(own_ask, from);
    CellSums part = LaneTailSums<T>(summing, ask, x, count);
    if (ask.target >= 0) {
#pragma unroll
      for (int e = 0; e < kVector<T>; ++e) {
        const bool equal_before =
            vocab - tail + first_element + e < ask.target && x[e] == ask.target_logit;
        part.before += e < count && (x[e] > ask.target_logit || equal_before);
      }
    }
    const CellSums sums = MergeTail(summing, ask, part, lanes);
    if (k < rows && first_element == 0) store(k, sums);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_ROW_TAILS_CUH_
