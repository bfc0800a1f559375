// Backward of linear_cross_entropy: three products a block, and no [rows, vocab].
// gradient_chunks.cuh has the steps; here are the rows' plans and the kernel that turns logits into
// their gradients.
//
// Cost: three products; a write and a read of the logits and of G, in part out of L2, and one read
// and write of d_hidden in fp32 for every chunk. training.cu serves 16-bit heads where it can.
#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/gradient_chunks.cuh"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = kCopyThreads;

struct RowGradient {
  Gradient gradient;  // all 0 where the row is not counted
  int32_t exponent;   // as RowState::exponent
  int32_t target;     // from the head's first token on; a shard may not have it
  int32_t at;         // in the group
  RowUse use;

  __device__ float OfHidden() const { return HiddenFactor(exponent); }
};

// ---- kernels -----------------------------------------------------------------------------------

// Plans `count` rows from `first` on; rows from `rows` on are skipped.
__global__ void __launch_bounds__(kThreads)
    PlanRowsKernel(const CrossEntropyRow* params, const float* logsumexp, const float* upstream,
                   int64_t first, int64_t rows, int64_t count, int32_t first_token, int64_t vocab,
                   float softcap, bool half, RowGradient* to, HalfScale* scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t r = first + i;
  RowGradient plan{.gradient = {},
                   .exponent = kGradientExponent,
                   .target = -1,
                   .at = static_cast<int32_t>(i),
                   .use = RowUse::kSkipped};
  if (r < rows && params[r].active != 0) {
    CrossEntropyRow row = params[r];
    row.softcap = softcap;
    plan.use = row.target < 0 ? RowUse::kIgnored : RowUse::kCounted;
    if (row.target >= 0) {
      plan.gradient = Gradient::Of(row, logsumexp[r], upstream[r], vocab);
      plan.target = row.target - first_token;
      if (half) plan.exponent = TakeExponent(plan.gradient, scale);
    }
  }
  to[i] = plan;
}

// Turns logits [rows, columns] into their gradients. A thread takes two columns of all rows of a
// group. It writes the columns' sums to `column_sums` [groups, stride] unless that is null.
// `columns` may be odd: there is memory for one more.
template <class T, bool kCapped>
__global__ void __launch_bounds__(kThreads)
    GradientKernel(const float* __restrict__ logits, T* __restrict__ gradients, int64_t stride,
                   int columns, int first_column, const RowGradient* __restrict__ plans,
                   float* __restrict__ column_sums) {
  __shared__ RowGradient rows[kGroupRows];
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kGroupRows;
  if (threadIdx.x < kGroupRows) rows[threadIdx.x] = plans[first_row + threadIdx.x];
  __syncthreads();
  const int column = 2 * static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (column >= columns) return;
  float sum0 = 0.0f;
  float sum1 = 0.0f;
  const int64_t first = first_row * stride + column;
#pragma unroll 1
  for (int begin = 0; begin < kGroupRows; begin += kRowsAhead) {
    float2 pairs[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
      pairs[i] = *reinterpret_cast<const float2*>(logits + first + (begin + i) * stride);
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const RowGradient& row = rows[begin + i];
      const int place = row.target - first_column - column;
      const bool counted = row.use == RowUse::kCounted;  // else a bias of -inf would make NaN
      const float g0 = counted ? row.gradient.At<kCapped>(pairs[i].x, place == 0) : 0.0f;
      const float g1 = counted ? row.gradient.At<kCapped>(pairs[i].y, place == 1) : 0.0f;
      sum0 += g0;
      sum1 += g1;
      WriteGradients(gradients + first + (begin + i) * stride, g0, g1, row.exponent);
    }
  }
  if (column_sums == nullptr) return;
  *reinterpret_cast<float2*>(column_sums + blockIdx.y * stride + column) = {sum0, sum1};
}

// ---- launch ------------------------------------------------------------------------------------

// The loss of GradientChunks. The head has the tokens of a vocabulary from first_token on.
class CrossEntropyLoss {
 public:
  using Row = RowGradient;

  CrossEntropyLoss(const LinearCrossEntropyBackwardArgs& args, int64_t first_token, int64_t vocab)
      : args_(args), first_token_(static_cast<int32_t>(first_token)), vocab_(vocab) {}

  const HeadView* reference() const { return nullptr; }
  void Take(Scratch&, const ChunkCut&) {}

  void Plan(Steps& steps, int64_t first, int64_t count, RowGradient* rows, HalfScale* scale) const {
    steps.Launch(&PlanRowsKernel, GridFor(count, kThreads), kThreads, args_.rows, args_.logsumexp,
                 args_.upstream, first, args_.hidden.rows, count, first_token_, vocab_,
                 args_.head.softcap, scale != nullptr, rows, scale);
  }

  void Make(Steps& steps, const GradientBlock<RowGradient>& block) const {
    VisitDType(args_.head.weight.dtype, [&]<class T>() {
      const auto kernel =
          args_.head.softcap > 0 ? &GradientKernel<T, true> : &GradientKernel<T, false>;
      steps.Launch(kernel, GradientGrid(block.rows, block.tokens), kThreads, block.logits,
                   static_cast<T*>(block.gradients.data), block.stride, block.tokens,
                   static_cast<int>(block.first_token), block.plans, block.column_sums);
    });
  }

 private:
  const LinearCrossEntropyBackwardArgs& args_;
  const int32_t first_token_;
  const int64_t vocab_;
};

HeadGradients GradientsOf(const LinearCrossEntropyBackwardArgs& args) {
  return {.hidden = args.hidden,
          .head = args.head,
          .d_hidden = args.d_hidden,
          .d_weight = args.d_weight,
          .d_bias = args.d_bias};
}

cudaError_t MakeGradients(const LinearCrossEntropyBackwardArgs& args, int64_t first_token,
                          int64_t vocab, Products& products, const Scratch& scratch,
                          cudaStream_t stream) {
  if (args.hidden.rows == 0) return ClearSums(GradientsOf(args), stream);
  CrossEntropyLoss loss(args, first_token, vocab);
  return GradientChunks(GradientsOf(args), loss, products, scratch, stream).Run();
}

// Block r adds the parts of row r. That of an ignored row may have met an infinite weight.
template <class T>
__global__ void __launch_bounds__(kThreads)
    AddPartsKernel(const __grid_constant__ AddPartsArgs p, int64_t rows, int size, T* to,
                   int64_t to_stride) {
  const int64_t r = blockIdx.x;
  const CrossEntropyRow& row = p.rows[r];
  if (row.active == 0) return;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    float sum = p.first[r * p.stride + i];
    for (int s = 0; s + 1 < p.shards; ++s) sum += p.others[(s * rows + r) * p.stride + i];
    to[r * to_stride + i] = FromFloat<T>(row.target < 0 ? 0.0f : sum);
  }
}

}  // namespace

cudaError_t LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream) {
  return MakeGradients(args, /*first_token=*/0, args.head.vocab(), products, scratch, stream);
}

cudaError_t LinearCrossEntropyBackwardPartial(const LinearCrossEntropyBackwardPartialArgs& args,
                                              Products& products, const Scratch& scratch,
                                              cudaStream_t stream) {
  const LinearCrossEntropyBackwardArgs& gradient = args.gradient;
  if (args.shard.tokens > 0)
    return MakeGradients(gradient, args.shard.first, args.vocab, products, scratch, stream);
  const MutableTensorView& part = gradient.d_hidden;
  if (part.rows == 0) return cudaSuccess;
  return cudaMemset2DAsync(part.data, static_cast<size_t>(part.row_stride) * sizeof(float), 0,
                           static_cast<size_t>(part.cols) * sizeof(float),
                           static_cast<size_t>(part.rows), stream);
}

cudaError_t AddParts(const AddPartsArgs& args, cudaStream_t stream) {
  const MutableTensorView& to = args.d_hidden;
  if (to.rows == 0) return cudaSuccess;
  return VisitDType(to.dtype, [&]<class T>() {
    return LaunchKernel(&AddPartsKernel<T>, {.grid = GridFor(to.rows), .threads = kThreads}, stream,
                        args, to.rows, static_cast<int>(to.cols), static_cast<T*>(to.data),
                        to.row_stride);
  });
}

cudaError_t LinearCrossEntropyBackwardMerge(const LinearCrossEntropyBackwardMergeArgs& args,
                                            cudaStream_t stream) {
  return AddParts({.first = args.parts,
                   .others = args.parts + args.d_hidden.rows * args.d_hidden.cols,
                   .shards = args.shards,
                   .stride = args.d_hidden.cols,
                   .rows = args.rows,
                   .d_hidden = args.d_hidden},
                  stream);
}

}  // namespace logitd::cuda
