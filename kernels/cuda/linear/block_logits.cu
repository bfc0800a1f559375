#include "kernels/cuda/linear/block_logits.h"

#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/logit.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;

// Block r writes row r of `to`: the hidden state after the head's norm; zeros from `rows` on.
template <class T>
__global__ void __launch_bounds__(kThreads)
    PrepareKernel(const T* hidden, int64_t hidden_stride, int rows, int size, const float* norm,
                  float epsilon, T* to, int64_t to_stride) {
  const int r = blockIdx.x;
  const T* from = hidden + r * hidden_stride;
  to += r * to_stride;
  if (r >= rows) {
    for (int i = threadIdx.x; i < size; i += kThreads) to[i] = FromFloat<T>(0.0f);
    return;
  }
  if (norm == nullptr) {
    for (int i = threadIdx.x; i < size; i += kThreads) to[i] = from[i];
    return;
  }
  __shared__ float sums[kThreads / 32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const float h = ToFloat(from[i]);
    sum = fmaf(h, h, sum);
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (float part : sums) sum += part;
  const float inverse_rms = 1.0f / sqrtf(sum / static_cast<float>(size) + epsilon);
  for (int i = threadIdx.x; i < size; i += kThreads)
    to[i] = FromFloat<T>(ToFloat(from[i]) * inverse_rms * norm[i]);
}

__global__ void __launch_bounds__(kThreads)
    SoftcapKernel(float* logits, int64_t stride, int vocab, float softcap) {
  float* row = logits + blockIdx.y * stride;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x)
    row[i] = ApplySoftcap(row[i], softcap);
}

}  // namespace

int64_t PreparedStride(const HeadView& head) { return RoundUp(head.hidden(), 64); }

cudaError_t Prepare(const HeadView& head, int64_t padded_rows, std::byte* to, TensorView& states,
                    cudaStream_t stream) {
  const int64_t stride = PreparedStride(head);
  const cudaError_t error = VisitDType(head.weight.dtype, [&]<class T>() {
    return LaunchKernel(&PrepareKernel<T>, {.grid = GridFor(padded_rows), .threads = kThreads},
                        stream, static_cast<const T*>(states.data), states.row_stride,
                        static_cast<int>(states.rows), static_cast<int>(head.hidden()), head.norm,
                        head.norm_epsilon, reinterpret_cast<T*>(to), stride);
  });
  states.data = to;
  states.row_stride = stride;
  return error;
}

BlockLogits::BlockLogits(const HeadView& head, int64_t whole_vocab, const LinearRoute& route,
                         int scratch_share, Products& products, Scratch& scratch,
                         cudaStream_t stream)
    : head_(head),
      whole_vocab_(whole_vocab),
      route_(route),
      products_(products),
      stream_(stream),
      stride_(RoundUp(head.vocab(), 32)),
      rows_(route.block_rows) {
  if (route.cublas_lt) workspace_ = scratch.Take<std::byte>(products.workspace_bytes());
  const int64_t room = static_cast<int64_t>(scratch.bytes) / scratch_share;
  while (rows_ > 1 && rows_ * RoundUp(whole_vocab, 32) * 4 > room)
    rows_ -= rows_ > 256 ? 128 : rows_ / 2;
  logits_ = scratch.Take<float>(rows_ * stride_);
  prepared_ = scratch.Take<std::byte>(rows_ * PreparedStride(head) *
                                      static_cast<int64_t>(SizeOf(head.weight.dtype)));
}

cudaError_t BlockLogits::Make(TensorView states, const HeadView& head, float* logits,
                              int64_t stride, const Scratch& scratch) const {
  const bool is_product = route_.kernel == LinearKernel::kProduct;
  // A product always takes prepared states: with another stride it may take another algorithm.
  if (head.norm != nullptr || is_product) {
    const int64_t padded_rows = is_product ? rows_ : states.rows;
    const cudaError_t error = Prepare(head, padded_rows, prepared_, states, stream_);
    if (error != cudaSuccess) return error;
  }
  if (is_product) return Multiply(states, head, logits, stride);
  return hopper::Logits(states, head, logits, stride, scratch, stream_);
}

cudaError_t BlockLogits::Multiply(const TensorView& states, const HeadView& head, float* logits,
                                  int64_t stride) const {
  TensorView padded = states;
  padded.rows = rows_;
  const cudaError_t error = products_.Enqueue({.a = padded,
                                               .b = head.weight,
                                               .transpose_b = true,
                                               .out = {logits, DType::kF32, rows_, 0, stride},
                                               .asked_cols = whole_vocab_,
                                               .bias = head.bias,
                                               .alpha = head.scale,
                                               .workspace = workspace_},
                                              stream_);
  if (error != cudaSuccess || head.softcap == 0) return error;
  const int64_t blocks = std::min<int64_t>(64, CeilDiv(head.vocab(), kThreads));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(states.rows));
  return LaunchKernel(&SoftcapKernel, {.grid = grid, .threads = kThreads}, stream_, logits, stride,
                      static_cast<int>(head.vocab()), head.softcap);
}

}  // namespace logitd::cuda
