// Backward of linear_cross_entropy: three products a block, and no [rows, vocab].
//
// The vocabulary is processed in chunks, the rows in blocks: logits (product 1), their gradients G
// in the weight's dtype, and d_hidden += G weight in fp32 (product 2). When all rows have met a
// chunk, G^T hidden is its d_weight (product 3), rounded once. The head and the device fix blocks
// and chunks, so that the bits of a row of d_hidden do not depend on other rows. Where scratch
// cannot hold all rows there are two passes, one for d_hidden and one for d_weight. Under an f16
// head G has powers of two as factors (backward.cuh). Rows that are not counted are rows of zeros
// in every product, so their contents cannot affect any gradient.
//
// Cost: three products; a write and a read of the logits and of G, in part out of L2, and one read
// and write of d_hidden in fp32 for every chunk. training.cu serves 16-bit heads where it can.
#include <algorithm>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = kCopyThreads;
constexpr int kGroupRows = 64;  // rows of a block of GradientKernel
constexpr int kRowsAhead = 8;   // of these, rows whose logits are loaded together
static_assert(kGroupRows % kRowsAhead == 0);

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

// Copies rows of f16 with the factors that product 3 takes out; block 0 writes that of the product.
__global__ void __launch_bounds__(kThreads)
    ScaleKernel(const __half* from, int64_t stride, int size, const RowGradient* plans,
                float product_factor, bool fresh, __half* to, HalfScale* scale) {
  const int64_t r = blockIdx.x;
  if (r == 0 && threadIdx.x == 0) scale->SetProduct(product_factor, fresh ? 0.0f : 1.0f);
  const bool counted = plans[r].use == RowUse::kCounted;
  const float factor = counted ? scale->StateFactor(plans[r].exponent) : 0.0f;
  for (int i = threadIdx.x; i < size; i += kThreads)
    to[r * stride + i] = __float2half_rn(__half2float(from[r * stride + i]) * factor);
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
      T* to = gradients + first + (begin + i) * stride;
      if constexpr (std::is_same_v<T, float>) {
        *reinterpret_cast<float2*>(to) = {g0, g1};
      } else if constexpr (std::is_same_v<T, __half>) {
        const float grow = GradientFactor(row.exponent);
        *reinterpret_cast<uint32_t*>(to) = PackPair<T>(g0 * grow, g1 * grow);
      } else {
        *reinterpret_cast<uint32_t*>(to) = PackPair<T>(g0, g1);
      }
    }
  }
  if (column_sums == nullptr) return;
  *reinterpret_cast<float2*>(column_sums + blockIdx.y * stride + column) = {sum0, sum1};
}

// Adds the groups' sums, in order, to d_bias, which starts at 0 where `fresh`.
__global__ void __launch_bounds__(kThreads)
    BiasKernel(const float* column_sums, int groups, int64_t stride, int columns, bool fresh,
               float* d_bias) {
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= columns) return;
  float sum = fresh ? 0.0f : d_bias[column];
  for (int i = 0; i < groups; ++i) sum += column_sums[i * stride + column];
  d_bias[column] = sum;
}

// ---- launch ------------------------------------------------------------------------------------

// How a call's work is cut. The head and the device fix all but `group`.
struct Cut {
  int64_t block = 1024;  // rows of products 1 and 2
  int64_t chunk = 8192;  // tokens
  int64_t group = 0;     // rows that scratch holds at once, a multiple of block
  int64_t hidden_stride = 0;

  Cut(const HeadView& head, int64_t rows, int64_t bytes) {
    const int64_t size = static_cast<int64_t>(SizeOf(head.weight.dtype));
    const int64_t scaled = head.weight.dtype == DType::kF16 ? size : 0;
    hidden_stride = RoundUp(head.hidden(), 64);
    chunk = std::min(chunk, RoundUp(head.vocab(), 64));
    constexpr int64_t kSlack = int64_t{1} << 20;  // for the alignment of the pieces
    const auto fixed = [&] {
      return chunk * (4 * block + 4 * hidden_stride + 4 * (block / kGroupRows)) + kSlack;
    };
    const auto per_row = [&] {
      return hidden_stride * (size + 4 + scaled) + chunk * size +
             static_cast<int64_t>(sizeof(RowGradient));
    };
    // The least block and chunk fit Scratch::kMinBytes at the largest hidden size.
    while (fixed() + block * per_row() > bytes) {
      if ((chunk > block && chunk > 64) || block <= kGroupRows) {
        chunk = RoundUp(chunk / 2, 64);
      } else {
        block /= 2;
      }
    }
    group = std::min((bytes - fixed()) / per_row() / block * block, RoundUp(rows, block));
    group = std::max(group, block);
  }
};

class Backward {
 public:
  // `vocab`: of the whole head; `first_token`: the first of args.head.
  Backward(const LinearCrossEntropyBackwardArgs& args, int64_t first_token, int64_t vocab,
           Products& products, Scratch scratch, cudaStream_t stream)
      : args_(args),
        first_token_(static_cast<int32_t>(first_token)),
        vocab_(vocab),
        steps_(products, scratch, stream),
        dtype_(args.head.weight.dtype),
        cut_(args.head, args.hidden.rows, static_cast<int64_t>(scratch.left())) {
    const auto take = [&](DType dtype, int64_t rows, int64_t cols, int64_t stride) {
      const size_t bytes = static_cast<size_t>(rows * stride) * SizeOf(dtype);
      return MutableTensorView{scratch.Take<std::byte>(bytes), dtype, rows, cols, stride};
    };
    const int64_t hidden = args.head.hidden();
    plans_ = scratch.Take<RowGradient>(cut_.group);
    states_ = take(dtype_, cut_.group, hidden, cut_.hidden_stride);
    d_states_ = take(DType::kF32, cut_.group, hidden, cut_.hidden_stride);
    gradients_ = take(dtype_, cut_.group, cut_.chunk, cut_.chunk);
    logits_ = take(DType::kF32, cut_.block, cut_.chunk, cut_.chunk);
    d_weight_ = take(DType::kF32, cut_.chunk, hidden, cut_.hidden_stride);
    column_sums_ = scratch.Take<float>(cut_.block / kGroupRows * cut_.chunk);
    if (!IsHalf()) return;
    scaled_states_ = take(dtype_, cut_.group, hidden, cut_.hidden_stride);
    scale_ = scratch.Take<HalfScale>(1);
  }

  cudaError_t Run() {
    const int64_t rows = args_.hidden.rows;
    const int64_t vocab = args_.head.vocab();
    if (rows <= cut_.group) {
      PlanRows(0);
      for (int64_t v = 0; v < vocab; v += cut_.chunk)
        TakeChunk(v, 0, /*hidden=*/true, /*weight=*/true);
      StoreHidden(0);
      return steps_.error();
    }
    for (int64_t first = 0; first < rows; first += cut_.group) {
      PlanRows(first);
      for (int64_t v = 0; v < vocab; v += cut_.chunk)
        TakeChunk(v, first, /*hidden=*/true, /*weight=*/false);
      StoreHidden(first);
    }
    for (int64_t v = 0; v < vocab; v += cut_.chunk) {
      for (int64_t first = 0; first < rows; first += cut_.group) {
        PlanRows(first);
        TakeChunk(v, first, /*hidden=*/false, /*weight=*/true);
      }
    }
    return steps_.error();
  }

 private:
  bool IsHalf() const { return dtype_ == DType::kF16; }

  // Copies the rows of the group at `first`, padded to whole blocks, to scratch.
  void PlanRows(int64_t first) {
    const TensorView hidden = RowsOf(args_.hidden, first, args_.hidden.rows - first);
    padded_rows_ = std::min(cut_.group, RoundUp(hidden.rows, cut_.block));
    if (IsHalf()) steps_.Do([&] { return HalfScale::Clear(scale_, steps_.stream()); });
    steps_.Launch(&PlanRowsKernel, GridFor(padded_rows_, kThreads), kThreads, args_.rows,
                  args_.logsumexp, args_.upstream, first, args_.hidden.rows, padded_rows_,
                  first_token_, vocab_, args_.head.softcap, IsHalf(), plans_, scale_);
    VisitDType(dtype_, [&]<class T>() {
      steps_.Launch(&PackKernel<T, RowGradient>, GridFor(padded_rows_), kThreads,
                    static_cast<const T*>(hidden.data), hidden.row_stride,
                    static_cast<int>(args_.head.hidden()), plans_, RowUse::kCounted,
                    static_cast<T*>(states_.data), states_.row_stride);
    });
    if (!IsHalf()) return;
    steps_.Launch(&ScaleKernel, GridFor(padded_rows_), kThreads,
                  static_cast<const __half*>(states_.data), states_.row_stride,
                  static_cast<int>(args_.head.hidden()), plans_, args_.head.scale,
                  /*fresh=*/first == 0, static_cast<__half*>(scaled_states_.data), scale_);
  }

  // Tokens [v, v + chunk) and the planned group, whose first row is `first`: adds to d_hidden, to
  // d_weight or to both.
  void TakeChunk(int64_t v, int64_t first, bool hidden, bool weight) {
    const HeadView& head = args_.head;
    const int64_t tokens = std::min(cut_.chunk, head.vocab() - v);
    const TensorView weights = RowsOf(head.weight, v, tokens);
    MutableTensorView gradients = gradients_;
    gradients.cols = tokens;
    for (int64_t r = 0; r < padded_rows_; r += cut_.block) {
      const MutableTensorView block_gradients = RowsOf(gradients, r, cut_.block);
      steps_.Multiply({.a = RowsOf(states_, r, cut_.block),  // product 1
                       .b = weights,
                       .transpose_b = true,
                       .out = logits_,
                       .bias = head.bias == nullptr ? nullptr : head.bias + v,
                       .alpha = head.scale});
      MakeGradients(v, plans_ + r, block_gradients, weight && args_.d_bias != nullptr,
                    /*fresh=*/first == 0 && r == 0);
      if (!hidden) continue;
      steps_.Multiply({.a = block_gradients,  // product 2
                       .b = weights,
                       .out = RowsOf(d_states_, r, cut_.block),
                       .alpha = head.scale,
                       .beta = v == 0 ? 0.0f : 1.0f});
    }
    if (weight) AddToWeight(v, first, gradients);
  }

  // Writes the gradients of a block of logits; their sums over rows go to d_bias where `bias`.
  void MakeGradients(int64_t v, const RowGradient* plans, const MutableTensorView& gradients,
                     bool bias, bool fresh) {
    const int tokens = static_cast<int>(gradients.cols);
    const int groups = static_cast<int>(cut_.block / kGroupRows);
    const dim3 grid(GridFor(tokens, 2 * kThreads).x, static_cast<unsigned>(groups));
    VisitDType(dtype_, [&]<class T>() {
      const auto kernel =
          args_.head.softcap > 0 ? &GradientKernel<T, true> : &GradientKernel<T, false>;
      steps_.Launch(kernel, grid, kThreads, static_cast<const float*>(logits_.data),
                    static_cast<T*>(gradients.data), cut_.chunk, tokens, static_cast<int>(v), plans,
                    bias ? column_sums_ : nullptr);
    });
    if (!bias) return;
    steps_.Launch(&BiasKernel, GridFor(tokens, kThreads), kThreads, column_sums_, groups,
                  cut_.chunk, tokens, fresh, args_.d_bias + v);
  }

  // Product 3, into d_weight itself where a product can write it, else through scratch.
  void AddToWeight(int64_t v, int64_t first, const TensorView& gradients) {
    const int64_t count = std::min(cut_.group, args_.hidden.rows - first);
    const bool last = first + count == args_.hidden.rows;
    const MutableTensorView to = RowsOf(args_.d_weight, v, gradients.cols);
    const bool aligned = reinterpret_cast<uintptr_t>(args_.d_weight.data) % 16 == 0 &&
                         to.row_stride * static_cast<int64_t>(SizeOf(to.dtype)) % 16 == 0;
    const bool direct = aligned && (to.dtype == DType::kF32 || (first == 0 && last));
    const int64_t rows = RoundUp(count, kGroupRows);
    steps_.Multiply({.a = RowsOf(gradients, 0, rows),
                     .transpose_a = true,
                     .b = RowsOf(IsHalf() ? scaled_states_ : states_, 0, rows),
                     .out = direct ? to : d_weight_,
                     .alpha = args_.head.scale,
                     .beta = first == 0 ? 0.0f : 1.0f,
                     .device_factors = IsHalf() ? scale_->product : nullptr});
    if (direct || !last) return;
    const RowGradient* all_counted = nullptr;
    steps_.Store(d_weight_, all_counted, to);
  }

  void StoreHidden(int64_t first) {
    const int64_t count = std::min(cut_.group, args_.hidden.rows - first);
    steps_.Store(d_states_, plans_, RowsOf(args_.d_hidden, first, count));
  }

  const LinearCrossEntropyBackwardArgs& args_;
  const int32_t first_token_;
  const int64_t vocab_;
  Steps steps_;
  const DType dtype_;
  const Cut cut_;
  int64_t padded_rows_ = 0;          // of the planned group, in whole blocks
  RowGradient* plans_;               // [group]
  MutableTensorView states_;         // [group, hidden], the weight's dtype
  MutableTensorView d_states_;       // [group, hidden], f32
  MutableTensorView gradients_;      // [group, chunk]
  MutableTensorView logits_;         // [block, chunk], f32
  MutableTensorView d_weight_;       // [chunk, hidden], f32
  float* column_sums_;               // [block / kGroupRows, chunk]
  MutableTensorView scaled_states_;  // [group, hidden], under an f16 head
  HalfScale* scale_ = nullptr;       // under an f16 head
};

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

// The gradients of a call without rows.
cudaError_t ClearSums(const LinearCrossEntropyBackwardArgs& args, cudaStream_t stream) {
  const size_t size = SizeOf(args.d_weight.dtype);
  const size_t vocab = static_cast<size_t>(args.head.vocab());
  const cudaError_t error =
      cudaMemset2DAsync(args.d_weight.data, static_cast<size_t>(args.d_weight.row_stride) * size, 0,
                        static_cast<size_t>(args.head.hidden()) * size, vocab, stream);
  if (error != cudaSuccess || args.d_bias == nullptr) return error;
  return cudaMemsetAsync(args.d_bias, 0, vocab * sizeof(float), stream);
}

}  // namespace

cudaError_t LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream) {
  if (args.hidden.rows == 0) return ClearSums(args, stream);
  return Backward(args, /*first_token=*/0, args.head.vocab(), products, scratch, stream).Run();
}

cudaError_t LinearCrossEntropyBackwardPartial(const LinearCrossEntropyBackwardPartialArgs& args,
                                              Products& products, const Scratch& scratch,
                                              cudaStream_t stream) {
  const LinearCrossEntropyBackwardArgs& gradient = args.gradient;
  const VocabShard shard = args.shards.at(args.shard);
  if (gradient.hidden.rows == 0 && shard.tokens > 0) return ClearSums(gradient, stream);
  if (shard.tokens > 0)
    return Backward(gradient, shard.first, args.shards.vocab, products, scratch, stream).Run();
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
