// linear_topk, linear_sample, linear_cross_entropy: the logits of a block of rows are made in
// scratch, in fp32, and the op that takes logits runs on them. Where the head and the device allow
// it, hopper/loss.cu computes linear_cross_entropy without logits, for the rows that want only
// losses and extras. linear/routes.cu says which kernel makes the logits.
//
// A row's bits do not depend on other rows. Products of cuBLASLt have one fixed shape and use one
// algorithm, which splits no sum: the head and the device decide the number of rows in a block, and
// rows after the last are zeros. Scale and bias are part of the product; a softcap is a pass of its
// own over the block.
//
// Cost of linear_cross_entropy: the product, and one write and one read of the logits of a block
// (134 MB at 256 x 131072), of which L2 takes a part. Limited by: the product, 256 rows at a time.
// On Hopper, a call in which any row wants rank, entropy or top tokens multiplies twice: all rows
// through logits, and in hopper/loss.cu the groups of 256 rows that have a row that wants none of
// these. The row decides which kernel takes it, and the host does not read rows.
// Measured where the product is: hopper/loss.cu, hopper/logits.cu; an f32 head with sample after
// it, 64 rows of 4096 x 128256, 1.55 ms, 92% of the bare product (bench/results/h200/kernels.json).
#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/decode.h"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/logit.cuh"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;

// ---- kernels -----------------------------------------------------------------------------------

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

// Splits rows into two lists of the same length: `plain`, which want only losses and extras, and
// `more`. A row is skipped in the list of the other kind. Block i says whether any of its rows is
// plain.
__global__ void __launch_bounds__(hopper::kLossGroupRows)
    SplitRowsKernel(const CrossEntropyRow* rows, int64_t count, CrossEntropyRow* plain,
                    CrossEntropyRow* more, int32_t* plain_groups) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * hopper::kLossGroupRows + threadIdx.x;
  const CrossEntropyRow row = r < count ? rows[r] : CrossEntropyRow{};
  const bool wants_more = row.want != 0 || row.top_logprobs > 0;
  const int any_plain = __syncthreads_or(row.active != 0 && !wants_more);
  if (threadIdx.x == 0) plain_groups[blockIdx.x] = any_plain;
  if (r >= count) return;
  plain[r] = wants_more ? CrossEntropyRow{} : row;
  more[r] = wants_more ? row : CrossEntropyRow{};
}

// ---- launch ------------------------------------------------------------------------------------

int64_t PreparedStride(const HeadView& head) { return RoundUp(head.hidden(), 64); }

// Writes the hidden states after the head's norm to `to`, padded with zeros to `padded_rows` rows,
// and makes `states` a view of them.
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

// Makes the logits of blocks of rows, in pieces of `scratch`.
class BlockLogits {
 public:
  // scratch_share: logits take at most 1 / scratch_share of scratch.
  BlockLogits(const HeadView& head, const LinearRoute& route, int scratch_share, Products& products,
              Scratch& scratch, cudaStream_t stream)
      : head_(head),
        route_(route),
        products_(products),
        stream_(stream),
        stride_(RoundUp(head.vocab(), 32)),
        rows_(route.block_rows) {
    if (route.cublas_lt) workspace_ = scratch.Take<std::byte>(products.workspace_bytes());
    const int64_t room = static_cast<int64_t>(scratch.bytes) / scratch_share;
    while (rows_ > 1 && rows_ * stride_ * 4 > room) rows_ /= 2;
    logits_ = scratch.Take<float>(rows_ * stride_);
    prepared_ = scratch.Take<std::byte>(rows_ * PreparedStride(head) *
                                        static_cast<int64_t>(SizeOf(head.weight.dtype)));
  }

  // Rows of a block. They do not depend on the call.
  int64_t rows() const { return rows_; }

  TensorView View(int64_t rows) const {
    return {logits_, DType::kF32, rows, head_.vocab(), stride_};
  }

  // Writes View(states.rows). `scratch` is what the constructor left.
  cudaError_t Make(TensorView states, const Scratch& scratch) const {
    const bool is_product = route_.kernel == LinearKernel::kProduct;
    // A product always takes prepared states: with another stride it may take another algorithm.
    if (head_.norm != nullptr || is_product) {
      const int64_t padded_rows = is_product ? rows_ : states.rows;
      const cudaError_t error = Prepare(head_, padded_rows, prepared_, states, stream_);
      if (error != cudaSuccess) return error;
    }
    if (is_product) return Multiply(states);
    const auto make =
        route_.kernel == LinearKernel::kHopperLogits ? &hopper::Logits : &DecodeLogits;
    return make(states, head_, logits_, stride_, scratch, stream_);
  }

 private:
  cudaError_t Multiply(const TensorView& states) const {
    TensorView padded = states;
    padded.rows = rows_;
    const cudaError_t error = products_.Enqueue({.a = padded,
                                                 .b = head_.weight,
                                                 .transpose_b = true,
                                                 .out = {logits_, DType::kF32, rows_, 0, stride_},
                                                 .bias = head_.bias,
                                                 .alpha = head_.scale,
                                                 .workspace = workspace_},
                                                stream_);
    if (error != cudaSuccess || head_.softcap == 0) return error;
    const int64_t blocks = std::min<int64_t>(64, CeilDiv(head_.vocab(), kThreads));
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(states.rows));
    return LaunchKernel(&SoftcapKernel, {.grid = grid, .threads = kThreads}, stream_, logits_,
                        stride_, static_cast<int>(head_.vocab()), head_.softcap);
  }

  const HeadView& head_;
  const LinearRoute& route_;
  Products& products_;
  const cudaStream_t stream_;
  const int64_t stride_;
  int64_t rows_;
  std::byte* workspace_ = nullptr;
  float* logits_;
  std::byte* prepared_;
};

// Runs `op`, which takes logits, on blocks of rows; `args` are those of all rows.
template <class Args>
cudaError_t RunOnLogits(LinearOp linear_op, const TensorView& hidden, const HeadView& head,
                        const Args& args,
                        cudaError_t (*op)(const Args&, const Scratch&, cudaStream_t),
                        Products& products, Scratch scratch, cudaStream_t stream) {
  const LinearRoute& route = RouteOf(linear_op, head, scratch, /*logits=*/true);
  // Ops that choose tokens need more scratch of their own than cross_entropy.
  const int scratch_share = linear_op == LinearOp::kTokens ? 4 : 2;
  const BlockLogits block(head, route, scratch_share, products, scratch, stream);
  for (int64_t first = 0; first < hidden.rows; first += block.rows()) {
    const int64_t rows = std::min(block.rows(), hidden.rows - first);
    cudaError_t error = block.Make(RowsOf(hidden, first, rows), scratch);
    if (error != cudaSuccess) return error;
    Args block_args = RowsFrom(args, first);
    block_args.logits = block.View(rows);
    error = op(block_args, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LossesFromLogits(const LinearCrossEntropyArgs& args, Products& products,
                             const Scratch& scratch, cudaStream_t stream) {
  return RunOnLogits(LinearOp::kLosses, args.hidden, args.head, args.cross_entropy, &CrossEntropy,
                     products, scratch, stream);
}

// The rows of `args` by hopper/loss.cu. Where `mixed`, rows that want more than losses and extras
// go through logits.
cudaError_t HopperLosses(LinearCrossEntropyArgs args, bool mixed, Products& products,
                         Scratch scratch, cudaStream_t stream) {
  const int64_t rows = args.hidden.rows;
  cudaError_t error = cudaSuccess;
  int32_t* plain_groups = nullptr;
  if (mixed) {
    const dim3 grid = GridFor(rows, hopper::kLossGroupRows);
    CrossEntropyRow* plain = scratch.Take<CrossEntropyRow>(rows);
    CrossEntropyRow* more = scratch.Take<CrossEntropyRow>(rows);
    plain_groups = scratch.Take<int32_t>(grid.x);
    error = LaunchKernel(&SplitRowsKernel, {.grid = grid, .threads = hopper::kLossGroupRows},
                         stream, args.cross_entropy.rows, rows, plain, more, plain_groups);
    if (error != cudaSuccess) return error;
    args.cross_entropy.rows = more;
    error = LossesFromLogits(args, products, scratch, stream);
    if (error != cudaSuccess) return error;
    args.cross_entropy.rows = plain;
  }
  if (args.head.norm != nullptr) {
    std::byte* states = scratch.Take<std::byte>(rows * PreparedStride(args.head) *
                                                static_cast<int64_t>(SizeOf(args.hidden.dtype)));
    error = Prepare(args.head, rows, states, args.hidden, stream);
    if (error != cudaSuccess) return error;
  }
  return hopper::Losses(args, plain_groups, scratch, stream);
}

}  // namespace

cudaError_t LinearTopK(const LinearTopKArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream) {
  return RunOnLogits(LinearOp::kTokens, args.hidden, args.head, args.topk, &SoftmaxTopK, products,
                     scratch, stream);
}

cudaError_t LinearSample(const LinearSampleArgs& args, Products& products, const Scratch& scratch,
                         cudaStream_t stream) {
  return RunOnLogits(LinearOp::kTokens, args.hidden, args.head, args.sample, &Sample, products,
                     scratch, stream);
}

cudaError_t LinearCrossEntropy(const LinearCrossEntropyArgs& args, Products& products,
                               const Scratch& scratch, cudaStream_t stream) {
  const LinearRoute& route = RouteOf(LinearOp::kLosses, args.head, scratch);
  if (route.kernel != LinearKernel::kHopperLosses)
    return LossesFromLogits(args, products, scratch, stream);
  const bool mixed = args.cross_entropy.want != 0 || args.cross_entropy.max_top_logprobs > 0;
  int64_t pass = 16384;
  if (mixed || args.head.norm != nullptr) {
    // Scratch holds the pass's lists and prepared states.
    constexpr int64_t kGroup = hopper::kLossGroupRows;
    const int64_t state_bytes =
        PreparedStride(args.head) * static_cast<int64_t>(SizeOf(args.head.weight.dtype));
    pass = std::clamp<int64_t>(
        static_cast<int64_t>(scratch.bytes) / 4 / state_bytes / kGroup * kGroup, kGroup, pass);
  }
  for (int64_t first = 0; first < args.hidden.rows; first += pass) {
    const int64_t rows = std::min(pass, args.hidden.rows - first);
    const cudaError_t error =
        HopperLosses(RowsOf(args, first, rows), mixed, products, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda
