// row_entropy: the entropy of softmax(row), in nats, of every row. A new op on rows, as
// CONTRIBUTING.md describes it.
//
// Cost: reads rows * vocab * sizeof(T) once. On an H200, 8192 x 128256: bf16 478 us, 97% of one
// read, f32 934 us, 99% (bench/results/h200/rows.json; row_entropy_gpu_test prints it).
#ifndef LOGITD_EXAMPLES_ROW_ENTROPY_ROW_ENTROPY_CUH_
#define LOGITD_EXAMPLES_ROW_ENTROPY_ROW_ENTROPY_CUH_

#include "kernels/cuda/rows/row_kernel.cuh"

namespace logitd::examples {

struct RowEntropyParams {
  TensorView logits;  // [rows, vocab], f32 | f16 | bf16
  float* entropy;     // [rows]; NaN where a logit is NaN or +inf, or all are -inf
};

// A cell leaves its scale s, the maximum in powers of 2, rounded to a whole one; and with w = 2^(x
// log2 e - s) the sum of w and of w log2 w.
template <class T>
struct RowEntropy : cuda::RowOp {
  using Element = T;
  using Params = RowEntropyParams;
  struct Cell {
    float scale;
    float sum;
    float weighted;
  };

  __device__ RowEntropy(const Params&, int64_t) {}
  __device__ bool Active() const { return true; }

  __device__ Cell Add(const cuda::LaneCell<T>& x, int, int, int) const {
    const float max = cuda::WarpMax(x.Max(0, cuda::kLaneElements));
    const float scale = rintf(fmaxf(max, -kMost) * cuda::kLog2E);
    const Cell cell = Sum<false>(x, scale);
    return isnan(cell.weighted) ? Sum<true>(x, scale) : cell;  // 0 log 0 is 0: rows with -inf
  }

  __device__ void Finish(const Params& p, int64_t row, const Cell* cells, int count,
                         int lane) const {
    float scale = -cuda::kInfinity;
    for (int i = lane; i < count; i += 32) scale = fmaxf(scale, cells[i].scale);
    scale = cuda::WarpMax(scale);
    float sum = 0;
    float weighted = 0;
    for (int i = lane; i < count; i += 32) {
      const float power = fmaxf(cells[i].scale - scale, kLeastPower);
      const float factor = cuda::Exp2(power);
      sum += cells[i].sum * factor;
      weighted += (cells[i].weighted + cells[i].sum * power) * factor;
    }
    sum = cuda::WarpSum(sum);
    weighted = cuda::WarpSum(weighted);
    if (lane == 0) p.entropy[row] = cuda::kLn2 * (log2f(sum) - weighted / sum);
  }

 private:
  static constexpr float kMost = 0x1p127f;
  static constexpr float kLeastPower = -200;  // 2 to it is 0

  template <bool kHasMinusInfinity>
  __device__ static Cell Sum(const cuda::LaneCell<T>& x, float scale) {
    float sums[2] = {};
    float weighted[2] = {};
#pragma unroll
    for (int e = 0; e < cuda::kLaneElements; ++e) {
      float power = fmaf(x[e], cuda::kLog2E, -scale);
      if (kHasMinusInfinity && power < kLeastPower) power = kLeastPower;  // NaN stays
      const float w = cuda::Exp2(power);
      sums[e % 2] += w;
      weighted[e % 2] = fmaf(w, power, weighted[e % 2]);
    }
    return {scale, cuda::WarpSum(sums[0] + sums[1]), cuda::WarpSum(weighted[0] + weighted[1])};
  }
};

// Enqueues it for all rows. `scratch`: what the planner knows of the device.
template <class T>
cudaError_t RunRowEntropy(const RowEntropyParams& p, const cuda::Scratch& scratch,
                          cudaStream_t stream) {
  return cuda::RunRows<RowEntropy<T>>(p, scratch, stream);
}

}  // namespace logitd::examples

#endif  // LOGITD_EXAMPLES_ROW_ENTROPY_ROW_ENTROPY_CUH_
