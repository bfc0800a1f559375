// cross_entropy of rows with supports: a block gathers the row's few logits. Sums are of integers,
// by the weights of sample, so log-probabilities have its bits.
//
// Cost: 4 bytes of ids and one read of 32 bytes for each token of a support; latency of two
// dependent reads and three barriers. Not measured.
#include "kernels/cuda/loss/support.h"

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/rows/reductions.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kOfThread = kMaxSupport / kThreads;

struct SupportShared {
  float max[kWarps];
  uint32_t nan[kWarps];
  uint64_t total[kWarps];
  double moment[kWarps];
  float target;
};

// Writes the answers of row r, by one thread. `moment`: sum of weight * (max - x).
__device__ inline void AnswerSupported(const CrossEntropyArgs& args, int64_t r, float max,
                                       float target, uint64_t total, double moment) {
  const CrossEntropyRow& ask = args.rows[r];
  const CrossEntropyAnswers& to = args.answers;
  const double temperature = fmaxf(ask.temperature, kLeastTemperature);
  const bool empty = max == -kInfinity;
  const double log_sum = empty ? 0.0 : log(static_cast<double>(total) / kWeightOne);
  double logprob = 0, loss = 0;
  if (ask.target >= 0) {
    logprob = empty ? -kInfinity : LogprobOf(target, max, temperature, log_sum);
    loss = empty ? kNanInDouble : 0 - logprob;  // no -0
  }
  to.status[r] = {empty ? RowCode::kEmptySupport : RowCode::kOk, -1};
  to.loss[r] = static_cast<float>(loss);
  to.logsumexp[r] = isinf(max) ? max : static_cast<float>(max / temperature + log_sum);
  to.target_logprob[r] = static_cast<float>(logprob);
  if (to.rank != nullptr) to.rank[r] = 0;
  if (to.entropy == nullptr) return;
  const double entropy =
      empty ? kNanInDouble : log_sum + moment / temperature / static_cast<double>(total);
  to.entropy[r] = (ask.want & kWantEntropy) != 0 ? static_cast<float>(entropy) : 0.0f;
}

__device__ inline void AnswerNan(const CrossEntropyArgs& args, int64_t r, int32_t nan) {
  const CrossEntropyAnswers& to = args.answers;
  const float kNan = __int_as_float(0x7fffffff);
  to.status[r] = {RowCode::kNanLogit, nan};
  to.loss[r] = to.logsumexp[r] = to.target_logprob[r] = kNan;
  if (to.rank != nullptr) to.rank[r] = 0;
  if (to.entropy != nullptr) to.entropy[r] = (args.rows[r].want & kWantEntropy) != 0 ? kNan : 0.0f;
}

// A block for each row. Rows without supports are skipped, except those that are left out.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SupportKernel(const __grid_constant__ CrossEntropyArgs args) {
  __shared__ SupportShared s;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  const CrossEntropyRow& ask = args.rows[r];
  if (ask.active == 0) return;
  if (IsLeftOut(args, ask)) {
    if (thread == 0) AnswerLeftOut(args.answers, r);
    return;
  }
  const int count = ask.support_count;
  if (count == 0) return;
  const T* row = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  const int32_t* ids = args.support_ids + ask.first_support;
  const Cap cap = Cap::Of(ask.softcap);
  const float softcap = cap.on() ? Cap::Clamped(ask.softcap) : 1.0f;

  float x[kOfThread];
  float max = -kInfinity;
  uint32_t nan = ~0u;
#pragma unroll
  for (int k = 0; k < kOfThread; ++k) {
    const int i = thread + k * kThreads;
    x[k] = -kInfinity;
    if (i >= count) continue;
    const int32_t id = ids[i];
    x[k] = ToFloat(row[id]);
    if (cap.on()) x[k] = __fmul_rn(cap.Tanh(x[k]), softcap);
    if (isnan(x[k])) nan = min(nan, static_cast<uint32_t>(id));
    if (id == ask.target) s.target = x[k];
    max = fmaxf(max, x[k]);
  }
  max = WarpMax(max);
  nan = __reduce_min_sync(kFullWarp, nan);
  if (lane == 0) {
    s.max[warp] = max;
    s.nan[warp] = nan;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    max = fmaxf(max, s.max[w]);
    nan = min(nan, s.nan[w]);
  }
  if (nan != ~0u) {
    if (thread == 0) AnswerNan(args, r, static_cast<int32_t>(nan));
    return;
  }
  const Weigher weigh(max, fmaxf(ask.temperature, kLeastTemperature));
  uint64_t total = 0;
  double moment = 0;
#pragma unroll
  for (int k = 0; k < kOfThread; ++k) {
    if (x[k] == -kInfinity) continue;
    const uint64_t weight = weigh(x[k]);
    total += weight;
    if (weight > 0 && max < kInfinity)
      moment += static_cast<double>(weight) * (static_cast<double>(max) - x[k]);
  }
  total = WarpSum(total);
#pragma unroll
  for (int half = 16; half > 0; half /= 2) moment += __shfl_xor_sync(kFullWarp, moment, half);
  if (lane == 0) {
    s.total[warp] = total;
    s.moment[warp] = moment;
  }
  __syncthreads();
  if (thread != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    total += s.total[w];
    moment += s.moment[w];
  }
  AnswerSupported(args, r, max, s.target, total, moment);
}

}  // namespace

cudaError_t SupportedCrossEntropy(const CrossEntropyArgs& args, const Scratch&,
                                  cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  return VisitDType(args.logits.dtype, [&]<class T>() {
    return LaunchKernel(&SupportKernel<T>, {.grid = GridFor(args.logits.rows), .threads = kThreads},
                        stream, args);
  });
}

}  // namespace logitd::cuda
