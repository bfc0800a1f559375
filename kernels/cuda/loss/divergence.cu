// divergence: one read of both rows leaves six sums a cell, against the cell's own maxima; one warp
// merges them in double precision.
//
// The skeleton of ops on rows (rows/row_kernel.cuh) cuts and reads the logits' row; a warp reads
// the reference's cell itself, while it waits for the other one. A cell with -inf, with NaN, or
// with a number beyond f32 makes a sum NaN, and is summed again with care. Rows with +inf are read
// again, token by token, by the warp that merges. softmax_topk reads an input whose top tokens are
// wanted once more, and a warp a row turns its tokens' logits into log-probabilities.
//
// Cost at 512 x 131072 f32: reads 537 MB once, which is the floor; two exponentials and 12 further
// operations a pair of tokens. A reference row that is not aligned to 16 bytes is read by elements.
// Measured on an H200 (bench/results/h200/divergence.json): 512 x 131072 f32 91% of the floor, bf16
// 75%. Two heads on Hopper: linear/hopper/divergence.cu.
#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/pair_sums.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/row_kernel.cuh"
#include "kernels/divergence_sums.h"

namespace logitd::cuda {
namespace {

template <bool kCareful, class T>
__device__ DivergenceCell SumPair(const LaneCell<T>& x, const LaneCell<T>& y, float x_max,
                                  float y_max, float x_scale, float y_scale) {
  // Any base serves a cell without tokens.
  const float x_base = kCareful && x_max == -kInfinity ? 0.0f : x_max;
  const float y_base = kCareful && y_max == -kInfinity ? 0.0f : y_max;
  PairSums sums;
  int found = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    const float a = (x[e] - x_base) * x_scale, b = (y[e] - y_base) * y_scale;
    if constexpr (kCareful) {
      const bool has_x = x[e] != -kInfinity, has_y = y[e] != -kInfinity;
      if (has_x != has_y) found |= has_x ? kDivergenceOnlyX : kDivergenceOnlyY;
      if (isnan(x[e]) || isnan(y[e])) found |= kDivergenceNan;
      if (x[e] == kInfinity || y[e] == kInfinity) found |= kDivergenceCertain;
      // Logits of a cell that are more than f32's largest number apart.
      if (has_x && x[e] - x_base == -kInfinity) found |= kDivergenceCertain;
      if (has_y && y[e] - y_base == -kInfinity) found |= kDivergenceCertain;
      sums.AddWithCare(a, b, has_x, has_y);
    } else {
      sums.Add(a, b);
    }
  }
  return {.x_max = x_max,
          .y_max = y_max,
          .x_sum = WarpSum(sums.x_sum),
          .y_sum = WarpSum(sums.y_sum),
          .x_moment = WarpSum(sums.x_moment),
          .y_moment = WarpSum(sums.y_moment),
          .x_apart = WarpSum(sums.x_apart),
          .y_apart = WarpSum(sums.y_apart),
          .found = kCareful ? static_cast<int32_t>(__reduce_or_sync(kFullWarp, found)) : 0};
}

// Out of line and by value, so that common cells stay in registers.
template <class T>
__device__ __noinline__ DivergenceCell SumPairWithCare(LaneCell<T> x, LaneCell<T> y, float x_max,
                                                       float y_max, float x_scale, float y_scale) {
  return SumPair<true>(x, y, x_max, y_max, x_scale, y_scale);
}

// Adds up a row's tokens one by one.
template <class T>
__device__ __noinline__ DivergenceSums SumTokens(const T* x, const T* y, int vocab, float x_max,
                                                 float y_max, const DivergenceRow& ask, int lane) {
  DivergenceSums sums;
#pragma unroll 1
  for (int i = lane; i < vocab; i += 32) {
    const double a = BelowMax(ToFloat(x[i]), x_max, ask.temperature);
    const double b = BelowMax(ToFloat(y[i]), y_max, ask.reference_temperature);
    AddToken(sums, a, b, exp(a), exp(b));
  }
  return sums;
}

template <class T>
struct DivergenceOp : RowOp {
  using Element = T;
  using Params = DivergenceArgs;
  using Cell = DivergenceCell;

  const DivergenceRow ask;
  const T* const reference;

  __device__ DivergenceOp(const Params& p, int64_t r)
      : ask(p.rows[r]),
        reference(static_cast<const T*>(p.reference_logits.data) +
                  r * p.reference_logits.row_stride) {}
  __device__ bool Active() const { return ask.active != 0; }

  template <class Block>
  __device__ __forceinline__ float Read(RowStream<Block>& stream, const Part& part, Cell* cells,
                                        const OpMemory<DivergenceOp, Block>&) {
    const int lane = threadIdx.x % 32;
    const float x_scale = DivergenceScale(ask.temperature);
    const float y_scale = DivergenceScale(ask.reference_temperature);
    const bool aligned = reinterpret_cast<uintptr_t>(reference) % 16 == 0;
    LaneCell<T> x, y;
#pragma unroll 1
    for (;;) {
      const int first = stream.first();
      if (first < part.end) ReadReference(first, part.end, aligned, lane, y);
      if (!stream.Next(x)) return 0;
      stream.Release();
      const float x_max = WarpMax(x.Max(0, kLaneElements));
      const float y_max = WarpMax(y.Max(0, kLaneElements));
      Cell cell = SumPair<false>(x, y, x_max, y_max, x_scale, y_scale);
      const float all = cell.x_moment + cell.y_moment + cell.x_apart + cell.y_apart;
      if (!(fabsf(all) < kInfinity)) cell = SumPairWithCare(x, y, x_max, y_max, x_scale, y_scale);
      if (lane == 0) cells[first / kCell] = cell;
    }
  }

  __device__ void Finish(const Params& p, int64_t r, const Cell* cells, int count, int lane) const {
    const int vocab = static_cast<int>(p.logits.cols);
    const T* x = static_cast<const T*>(p.logits.data) + r * p.logits.row_stride;
    DivergenceRows rows = {.x_max = -kInfinity, .y_max = -kInfinity};
    int nan_cell = count;
    for (int i = lane; i < count; i += 32) {
      if ((cells[i].found & kDivergenceNan) != 0) nan_cell = min(nan_cell, i);
      rows.x_max = fmaxf(rows.x_max, cells[i].x_max);
      rows.y_max = fmaxf(rows.y_max, cells[i].y_max);
    }
    nan_cell = __reduce_min_sync(kFullWarp, nan_cell);
    if (nan_cell < count) {
      const int first = nan_cell * kCell;
      const int nan = min(FindNan(x, first, vocab, lane), FindNan(reference, first, vocab, lane));
      if (lane == 0) AnswerNan(p.answers, r, nan);
      return;
    }
    rows.x_max = WarpMax(rows.x_max);
    rows.y_max = WarpMax(rows.y_max);
    DivergenceSums sums;
    for (int i = lane; i < count; i += 32) {
      const double a = BelowMax(cells[i].x_max, rows.x_max, ask.temperature);
      const double b = BelowMax(cells[i].y_max, rows.y_max, ask.reference_temperature);
      AddCell(sums, cells[i], a, b, exp(a), exp(b));
    }
    sums = MergeLanes(sums);
    if (NeedsTokens(sums))
      sums = MergeLanes(SumTokens(x, reference, vocab, rows.x_max, rows.y_max, ask, lane));
    if (lane != 0) return;
    rows.x_log = log(sums.x_sum);
    rows.y_log = log(sums.y_sum);
    if (ask.target != kIgnoredTarget) {
      rows.x_target = BelowMax(ToFloat(x[ask.target]), rows.x_max, ask.temperature);
      rows.y_target =
          BelowMax(ToFloat(reference[ask.target]), rows.y_max, ask.reference_temperature);
    }
    AnswerWhole(p.answers, r, ask, sums, rows);
  }

 private:
  __device__ __forceinline__ void ReadReference(int first, int end, bool aligned, int lane,
                                                LaneCell<T>& y) const {
    const T* from = reference + first + lane * kVector<T>;
    if (aligned && end - first >= kCell) {
      y.Read(reinterpret_cast<const uint4*>(from));
      return;
    }
#pragma unroll
    for (int v = 0; v < kLaneElements / kVector<T>; ++v) {
      const int at = v * 32 * kVector<T>;
      y.SetVector(v, LoadVector(from + at, aligned, end - first - lane * kVector<T> - at,
                                kMinusInfinities<T>));
    }
  }
};

// Everything except the top tokens.
cudaError_t Measure(const DivergenceArgs& args, const Scratch& scratch, cudaStream_t stream) {
  return VisitDType(args.logits.dtype,
                    [&]<class T>() { return RunRows<DivergenceOp<T>>(args, scratch, stream); });
}

// ---- top tokens --------------------------------------------------------------------------------

constexpr int kTopThreads = 128;
constexpr int64_t kTopRows = 32768;  // rows whose top tokens are found at once

__global__ void __launch_bounds__(kTopThreads)
    AskTopsKernel(DivergenceTops tops, const DivergenceRow* rows, int64_t count,
                  SoftmaxTopKRow* asks) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTopThreads + threadIdx.x;
  if (r < count) asks[r] = tops.Ask(rows[r]);
}

// A warp a row.
template <class T>
__global__ void __launch_bounds__(kTopThreads)
    AnswerTopsKernel(DivergenceTops tops, TensorView logits, const DivergenceRow* rows,
                     const DivergenceNorms* norms, const RowStatus* status) {
  const int64_t r =
      static_cast<int64_t>(blockIdx.x) * (kTopThreads / 32) + static_cast<int>(threadIdx.x / 32);
  if (r >= logits.rows) return;
  const DivergenceRow row = rows[r];
  const SoftmaxTopKRow ask = tops.Ask(row);
  const T* const x = static_cast<const T*>(logits.data) + r * logits.row_stride;
  const int lane = threadIdx.x % 32;
  const bool is_nan = ask.k > 0 && status[r].code == RowCode::kNanLogit;
  for (int64_t i = ask.first_entry + lane; i < ask.first_entry + ask.k; i += 32) {
    if (is_nan) {
      tops.WriteNan(i);
    } else {
      tops.Write(i, ToFloat(x[tops.ids[i]]), row, norms[r]);
    }
  }
}

// Memory for kTopRows rows, or fewer.
struct TopsMemory {
  SoftmaxTopKRow* asks;
  float* logsumexp;
  RowStatus* status;

  TopsMemory(int64_t rows, Scratch& scratch)
      : asks(scratch.Take<SoftmaxTopKRow>(static_cast<size_t>(rows))),
        logsumexp(scratch.Take<float>(static_cast<size_t>(rows))),
        status(scratch.Take<RowStatus>(static_cast<size_t>(rows))) {}
  bool IsThere() const { return asks != nullptr && logsumexp != nullptr && status != nullptr; }
};

// Writes the top tokens of one input, after Measure.
cudaError_t FindTops(const DivergenceArgs& args, DivergenceInput input, const TopsMemory& memory,
                     const Scratch& scratch, cudaStream_t stream) {
  const DivergenceTops tops = DivergenceTops::Of(args, input);
  if (tops.max_k == 0) return cudaSuccess;
  const TensorView& logits = input == DivergenceInput::kFirst ? args.logits : args.reference_logits;
  cudaError_t error = LaunchKernel(
      &AskTopsKernel, {.grid = GridFor(logits.rows, kTopThreads), .threads = kTopThreads}, stream,
      tops, args.rows, logits.rows, memory.asks);
  if (error != cudaSuccess) return error;
  error = SoftmaxTopK({.logits = logits,
                       .rows = memory.asks,
                       .max_k = tops.max_k,
                       .indices = tops.ids,
                       .probs = tops.logprobs,
                       .logsumexp = memory.logsumexp,
                       .status = memory.status},
                      scratch, stream);
  if (error != cudaSuccess) return error;
  return VisitDType(logits.dtype, [&]<class T>() {
    return LaunchKernel(&AnswerTopsKernel<T>,
                        {.grid = GridFor(logits.rows, kTopThreads / 32), .threads = kTopThreads},
                        stream, tops, logits, args.rows, args.answers.norms, args.answers.status);
  });
}

// Calls op(args of some rows), for as many rows at a time as TopsMemory has room for.
template <class Op>
cudaError_t ForTopRows(const DivergenceArgs& args, const Op& op) {
  const int64_t all = args.logits.rows, most = std::min(all, kTopRows);
  for (int64_t first = 0; first < all; first += most) {
    const int64_t rows = std::min(most, all - first);
    DivergenceArgs part = RowsFrom(args, first);
    part.logits = RowsOf(args.logits, first, rows);
    part.reference_logits = RowsOf(args.reference_logits, first, rows);
    const cudaError_t error = op(part);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t TopsOfDivergence(const DivergenceArgs& args, const Scratch& given,
                             cudaStream_t stream) {
  Scratch scratch = given;
  const TopsMemory memory(std::min(args.logits.rows, kTopRows), scratch);
  if (!memory.IsThere()) return cudaErrorMemoryAllocation;
  return ForTopRows(args, [&](const DivergenceArgs& part) {
    const cudaError_t error = FindTops(part, DivergenceInput::kFirst, memory, scratch, stream);
    return error != cudaSuccess
               ? error
               : FindTops(part, DivergenceInput::kReference, memory, scratch, stream);
  });
}

cudaError_t Divergence(const DivergenceArgs& args, const Scratch& given, cudaStream_t stream) {
  if (!WantsTops(args)) return Measure(args, given, stream);
  Scratch scratch = given;
  DivergenceNorms* const norms =
      scratch.Take<DivergenceNorms>(static_cast<size_t>(std::min(args.logits.rows, kTopRows)));
  if (norms == nullptr) return cudaErrorMemoryAllocation;
  return ForTopRows(args, [&](DivergenceArgs part) {
    if (part.answers.norms == nullptr) part.answers.norms = norms;
    const cudaError_t error = Measure(part, scratch, stream);
    return error == cudaSuccess ? TopsOfDivergence(part, scratch, stream) : error;
  });
}

}  // namespace logitd::cuda
