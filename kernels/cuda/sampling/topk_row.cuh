// The parameters of all forms of softmax_topk, and a row's answers.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_ROW_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_ROW_CUH_

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/select.cuh"
#include "kernels/softmax_topk.h"

namespace logitd::cuda {

struct TopKParams {
  SoftmaxTopKArgs args;
  int32_t vocab;
  int32_t cells;     // of a row
  Stats* row_stats;  // [rows], for the sorted form; else null

  template <class T>
  __device__ const T* Row(int64_t row) const {
    return static_cast<const T*>(args.logits.data) + row * args.logits.row_stride;
  }
};

// What is known of a row once its statistics are.
struct RowResult {
  Stats stats;
  Exponential exponential;
  double log2e_over_temperature;
  float weight;  // of an element at the maximum: what makes its exponential a probability

  RowResult() = default;
  __device__ RowResult(Stats row, float temperature)
      : RowResult(row, kLog2E / temperature, Log2EOver(temperature)) {}
  // For a caller that keeps what depends only on the temperature, in float and in double.
  __device__ RowResult(Stats row, float log2e_over_row_temperature, double exactly)
      : stats(row),
        exponential(row.max, log2e_over_row_temperature),
        log2e_over_temperature(exactly),
        weight(exponential.AtMax() / row.sum) {}

  __device__ static double Log2EOver(float temperature) { return 1.4426950408889634 / temperature; }
  __device__ bool Nan() const { return isnan(stats.sum); }
  __device__ bool Empty() const { return stats.max == -kInfinity; }
  // In double up to the power of two: in the far tail a rounded exponent costs digits.
  __device__ float Probability(float x) const {
    if (Empty()) return 0.0f;
    if (x == stats.max) return weight;
    const double binary_log =
        fmax((static_cast<double>(x) - stats.max) * log2e_over_temperature, -1000.0);
    const double whole = rint(binary_log);
    const float scaled = exp2f(static_cast<float>(binary_log - whole)) * weight;
    const int exponent = static_cast<int>(whole);
    // The same bits: a product with a power of two is rounded as scalbnf rounds.
    return exponent >= -126 ? scaled * __int_as_float((exponent + 127) << 23)
                            : scalbnf(scaled, exponent);
  }
};

// Fills the entries of a row that holds NaN: nothing of an earlier batch may be read there.
__device__ inline void EmitNothing(const SoftmaxTopKArgs& args, const SoftmaxTopKRow& ask,
                                   int thread, int threads) {
  for (int i = thread; i < ask.k; i += threads) {
    args.indices[ask.first_entry + i] = -1;
    args.probs[ask.first_entry + i] = 0.0f;
  }
}

// Writes logsumexp and status, by one warp. `cell_is_nan(i)` tells whether cell i holds a NaN.
template <class T, class CellIsNan>
__device__ inline void WriteRow(const TopKParams& p, int64_t row_index, const SoftmaxTopKRow& ask,
                                const RowResult& result, int lane, CellIsNan cell_is_nan) {
  RowStatus status{RowCode::kOk, -1};
  float logsumexp = result.exponential.LogSum(result.stats.sum, ask.temperature);
  if (result.Nan()) {
    int cell = 0;
    while (cell + 1 < p.cells && !cell_is_nan(cell)) ++cell;
    status = {RowCode::kNanLogit, FindNan(p.Row<T>(row_index), cell * kCell, p.vocab, lane)};
  } else if (result.Empty()) {
    status.code = RowCode::kEmptySupport;
    logsumexp = -kInfinity;
  }
  if (lane == 0) {
    p.args.logsumexp[row_index] = logsumexp;
    p.args.status[row_index] = status;
    if (p.row_stats != nullptr) p.row_stats[row_index] = result.stats;
  }
}

// For any k: a row's statistics, then a radix sort of all of it. Enqueues only. Scratch must hold a
// row's keys and values twice.
cudaError_t SortedTopK(const SoftmaxTopKArgs& args, Scratch scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_ROW_CUH_
