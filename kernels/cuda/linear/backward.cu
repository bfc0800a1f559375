// Backward of linear_cross_entropy: three products a block, and no [rows, vocab].
//
// The vocabulary goes by in chunks, the rows in blocks. For each, the logits are made again
// (product 1), their gradients G are written in the weight's dtype, and G weight is added to
// d_hidden in fp32 (product 2). When a chunk has met all rows, G^T hidden is its d_weight, in one
// product over all of them (product 3), rounded once. Blocks and chunks are fixed by the head and
// the device, so that d_hidden's bits are a row's own. Rows too many for scratch take two turns,
// one for d_hidden and one for d_weight, with the logits made in both.
//
// f16 has not the range of gradients. Under an f16 head G is rounded to TF32, which has f16's
// digits and fp32's range, and products 2 and 3 take weights and hidden states, which TF32 holds
// exactly, as f32: at half the rate.
//
// Ignored and skipped rows are rows of zeros in every product: what they hold reaches nobody.
//
// Cost: three products (18.6 ms at 4096 x 4096 x 128256 in bf16, as bare products); beside them, a
// write and a read of the logits and of G, in part out of L2, and one read and write of d_hidden in
// fp32 for every chunk of 8192 tokens. Measured (bench/results/h200/kernels.json) under an f16
// head, with the forward: 67.9 ms at that shape, of which products in TF32 take most; a bf16 head
// goes by training.cu.
#include <algorithm>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/scratch.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = kCopyThreads;
constexpr int kGroupRows = 64;  // that a block of GradientKernel takes
constexpr int kRowsAhead = 8;   // of them, whose logits are on their way together
static_assert(kGroupRows % kRowsAhead == 0);

struct RowGradient {
  Gradient gradient;  // all 0 where the row is not counted
  int32_t target;     // -1 where it is not
  RowUse use;
};

// ---- kernels -----------------------------------------------------------------------------------

// `count` rows from `first` on; those from `rows` on are skipped.
__global__ void __launch_bounds__(kThreads)
    PlanRowsKernel(const CrossEntropyRow* asks, const float* logsumexp, const float* upstream,
                   int64_t first, int64_t rows, int64_t count, int64_t vocab, float softcap,
                   RowGradient* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t r = first + i;
  RowGradient plan{.gradient = {}, .target = -1, .use = RowUse::kSkipped};
  if (r < rows && asks[r].active != 0) {
    CrossEntropyRow ask = asks[r];
    ask.softcap = softcap;
    plan.use = ask.target < 0 ? RowUse::kIgnored : RowUse::kCounted;
    if (ask.target >= 0) {
      plan.gradient = Gradient::Of(ask, logsumexp[r], upstream[r], vocab);
      plan.target = ask.target;
    }
  }
  to[i] = plan;
}

// As f32.
__global__ void __launch_bounds__(kThreads)
    WidenKernel(const __half* from, int64_t from_stride, int size, float* to, int64_t to_stride) {
  const int64_t r = blockIdx.x;
  for (int i = threadIdx.x; i < size; i += kThreads)
    to[r * to_stride + i] = __half2float(from[r * from_stride + i]);
}

__device__ inline float RoundToTf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return __uint_as_float(rounded);
}

// Turns logits [rows, columns] into their gradients. A thread takes two columns down the rows of a
// group, and where `column_sums` [groups, stride] is not null leaves their sums there. `columns`
// may be odd: there is room for one more.
template <class T, bool kCapped, bool kTf32>
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
      if constexpr (kTf32) {
        *reinterpret_cast<float2*>(to) = {RoundToTf32(g0), RoundToTf32(g1)};
      } else if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float2*>(to) = {g0, g1};
      } else {
        *reinterpret_cast<uint32_t*>(to) = PackPair<T>(g0, g1);
      }
    }
  }
  if (column_sums == nullptr) return;
  *reinterpret_cast<float2*>(column_sums + blockIdx.y * stride + column) = {sum0, sum1};
}

// Adds the groups' sums, in order, to d_bias; `fresh`: in place of what is there.
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

// How a call's work is cut. All but `group` is fixed by the head and the device.
struct Cut {
  int64_t block = 1024;  // rows of products 1 and 2
  int64_t chunk = 8192;  // tokens
  int64_t group = 0;     // rows that scratch holds at once, a multiple of block
  int64_t hidden_stride = 0;

  Cut(const HeadView& head, int64_t rows, int64_t bytes) {
    const int64_t size = static_cast<int64_t>(SizeOf(head.weight.dtype));
    const int64_t wide = head.weight.dtype == DType::kF16 ? 4 : 0;
    hidden_stride = RoundUp(head.hidden(), 64);
    chunk = std::min(chunk, RoundUp(head.vocab(), 64));
    constexpr int64_t kSlack = int64_t{1} << 20;  // of pieces' alignment
    const auto fixed = [&] {
      return chunk * (4 * block + (4 + wide) * hidden_stride + 4 * (block / kGroupRows)) + kSlack;
    };
    const auto per_row = [&] {
      return hidden_stride * (size + 4 + wide) + chunk * std::max(size, wide) +
             static_cast<int64_t>(sizeof(RowGradient));
    };
    // The least of both fits Scratch::kMinBytes at the largest hidden size.
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
  Backward(const LinearCrossEntropyBackwardArgs& args, Products& products, Scratch scratch,
           cudaStream_t stream)
      : args_(args),
        products_(products),
        stream_(stream),
        dtype_(args.head.weight.dtype),
        product_type_(dtype_ == DType::kF16 ? DType::kF32 : dtype_),
        workspace_(TakeFromEnd<std::byte>(scratch, products.workspace_bytes())),
        cut_(args.head, args.hidden.rows,
             static_cast<int64_t>(scratch.bytes - Scratch::kCounterBytes)) {
    const int64_t size = static_cast<int64_t>(SizeOf(dtype_));
    plans_ = TakeFromEnd<RowGradient>(scratch, cut_.group);
    states_ = TakeFromEnd<std::byte>(scratch, cut_.group * cut_.hidden_stride * size);
    d_states_ = TakeFromEnd<float>(scratch, cut_.group * cut_.hidden_stride);
    gradients_ = TakeFromEnd<std::byte>(scratch, cut_.group * cut_.chunk * ProductSize());
    logits_ = TakeFromEnd<float>(scratch, cut_.block * cut_.chunk);
    d_weight_ = TakeFromEnd<float>(scratch, cut_.chunk * cut_.hidden_stride);
    column_sums_ = TakeFromEnd<float>(scratch, cut_.block / kGroupRows * cut_.chunk);
    if (IsWide()) {
      wide_states_ = TakeFromEnd<float>(scratch, cut_.group * cut_.hidden_stride);
      wide_weights_ = TakeFromEnd<float>(scratch, cut_.chunk * cut_.hidden_stride);
    }
  }

  cudaError_t Run() {
    const int64_t rows = args_.hidden.rows;
    const int64_t vocab = args_.head.vocab();
    if (rows <= cut_.group) {
      Plan(0);
      for (int64_t v = 0; v < vocab; v += cut_.chunk) Chunk(v, 0, /*hidden=*/true, /*weight=*/true);
      StoreHidden(0);
      return error_;
    }
    for (int64_t first = 0; first < rows; first += cut_.group) {
      Plan(first);
      for (int64_t v = 0; v < vocab; v += cut_.chunk)
        Chunk(v, first, /*hidden=*/true, /*weight=*/false);
      StoreHidden(first);
    }
    for (int64_t v = 0; v < vocab; v += cut_.chunk) {
      for (int64_t first = 0; first < rows; first += cut_.group) {
        Plan(first);
        Chunk(v, first, /*hidden=*/false, /*weight=*/true);
      }
    }
    return error_;
  }

 private:
  // Whether products 2 and 3 are of f32 in place of f16.
  bool IsWide() const { return product_type_ != dtype_; }
  int64_t ProductSize() const { return static_cast<int64_t>(SizeOf(product_type_)); }

  void Widen(const void* from, int64_t from_stride, int64_t rows, float* to) {
    if (error_ != cudaSuccess) return;
    WidenKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream_>>>(
        static_cast<const __half*>(from), from_stride, static_cast<int>(args_.head.hidden()), to,
        cut_.hidden_stride);
    Keep(cudaGetLastError());
  }

  // The first error of all that is enqueued; after it nothing is.
  void Keep(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  int64_t RowsOf(int64_t first) const {
    return std::min(cut_.group, RoundUp(args_.hidden.rows - first, cut_.block));
  }

  // Brings the group's rows from `first` on, padded to whole blocks, into scratch.
  void Plan(int64_t first) {
    if (error_ != cudaSuccess) return;
    const int64_t count = RowsOf(first);
    PlanRowsKernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                     stream_>>>(args_.rows, args_.logsumexp, args_.upstream, first,
                                args_.hidden.rows, count, args_.head.vocab(), args_.head.softcap,
                                plans_);
    Keep(cudaGetLastError());
    AsType(dtype_, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      PackKernel<<<static_cast<unsigned>(count), kThreads, 0, stream_>>>(
          static_cast<const T*>(args_.hidden.data) + first * args_.hidden.row_stride,
          args_.hidden.row_stride, static_cast<int>(args_.head.hidden()), plans_, RowUse::kCounted,
          reinterpret_cast<T*>(states_), cut_.hidden_stride);
    });
    Keep(cudaGetLastError());
    if (IsWide()) Widen(states_, cut_.hidden_stride, count, wide_states_);
  }

  // Tokens [v, v + chunk) of the planned group.
  void Chunk(int64_t v, int64_t first, bool hidden, bool weight) {
    const int64_t size = static_cast<int64_t>(SizeOf(dtype_));
    const int64_t tokens = std::min(cut_.chunk, args_.head.vocab() - v);
    const int64_t rows = RowsOf(first);
    const HeadView& head = args_.head;
    const void* weights =
        static_cast<const std::byte*>(head.weight.data) + v * head.weight.row_stride * size;
    if (hidden && IsWide()) Widen(weights, head.weight.row_stride, tokens, wide_weights_);
    for (int64_t r = 0; r < rows && error_ == cudaSuccess; r += cut_.block) {
      std::byte* gradients = gradients_ + r * cut_.chunk * ProductSize();
      Enqueue({.inputs = dtype_,
               .output = DType::kF32,
               .transpose_a = true,
               .bias = head.bias != nullptr,
               .m = tokens,
               .n = cut_.block,
               .k = head.hidden(),
               .a_stride = head.weight.row_stride,
               .b_stride = cut_.hidden_stride,
               .out_stride = cut_.chunk},
              {.a = weights,
               .b = states_ + r * cut_.hidden_stride * size,
               .out = logits_,
               .bias = head.bias == nullptr ? nullptr : head.bias + v,
               .alpha = head.scale});
      EnqueueGradients(v, tokens, plans_ + r, gradients, weight && args_.d_bias != nullptr,
                       /*fresh=*/first == 0 && r == 0);
      if (hidden) {
        Enqueue({.inputs = product_type_,
                 .output = DType::kF32,
                 .tf32 = IsWide(),
                 .m = head.hidden(),
                 .n = cut_.block,
                 .k = tokens,
                 .a_stride = IsWide() ? cut_.hidden_stride : head.weight.row_stride,
                 .b_stride = cut_.chunk,
                 .out_stride = cut_.hidden_stride},
                {.a = IsWide() ? wide_weights_ : weights,
                 .b = gradients,
                 .out = d_states_ + r * cut_.hidden_stride,
                 .alpha = head.scale,
                 .beta = v == 0 ? 0.0f : 1.0f});
      }
    }
    if (weight) AddToWeight(v, tokens, first);
  }

  void EnqueueGradients(int64_t v, int64_t tokens, const RowGradient* plans, std::byte* gradients,
                        bool bias, bool fresh) {
    if (error_ != cudaSuccess) return;
    const int groups = static_cast<int>(cut_.block / kGroupRows);
    const dim3 grid(static_cast<unsigned>((tokens + 2 * kThreads - 1) / (2 * kThreads)),
                    static_cast<unsigned>(groups));
    AsType(dtype_, [&](auto* type) {
      constexpr bool kTf32 = std::is_same_v<std::remove_pointer_t<decltype(type)>, __half>;
      using T = std::conditional_t<kTf32, float, std::remove_pointer_t<decltype(type)>>;
      const auto kernel = args_.head.softcap > 0 ? &GradientKernel<T, true, kTf32>
                                                 : &GradientKernel<T, false, kTf32>;
      kernel<<<grid, kThreads, 0, stream_>>>(logits_, reinterpret_cast<T*>(gradients), cut_.chunk,
                                             static_cast<int>(tokens), static_cast<int>(v), plans,
                                             bias ? column_sums_ : nullptr);
    });
    Keep(cudaGetLastError());
    if (!bias) return;
    BiasKernel<<<static_cast<unsigned>((tokens + kThreads - 1) / kThreads), kThreads, 0, stream_>>>(
        column_sums_, groups, cut_.chunk, static_cast<int>(tokens), fresh, args_.d_bias + v);
    Keep(cudaGetLastError());
  }

  // Product 3, into d_weight itself where it can be, else by way of scratch.
  void AddToWeight(int64_t v, int64_t tokens, int64_t first) {
    const int64_t count = args_.hidden.rows - first;
    const bool last = count <= cut_.group;
    const MutableTensorView& to = args_.d_weight;
    const int64_t to_size = static_cast<int64_t>(SizeOf(to.dtype));
    std::byte* out = static_cast<std::byte*>(to.data) + v * to.row_stride * to_size;
    const bool aligned =
        reinterpret_cast<uintptr_t>(to.data) % 16 == 0 && to.row_stride * to_size % 16 == 0;
    const bool direct = aligned && (to.dtype == DType::kF32 || (first == 0 && last && !IsWide()));
    Enqueue({.inputs = product_type_,
             .output = direct ? to.dtype : DType::kF32,
             .transpose_b = true,
             .tf32 = IsWide(),
             .m = args_.head.hidden(),
             .n = tokens,
             .k = RoundUp(std::min(cut_.group, count), kGroupRows),
             .a_stride = cut_.hidden_stride,
             .b_stride = cut_.chunk,
             .out_stride = direct ? to.row_stride : cut_.hidden_stride},
            {.a = IsWide() ? static_cast<const void*>(wide_states_) : states_,
             .b = gradients_,
             .out = direct ? static_cast<void*>(out) : d_weight_,
             .alpha = args_.head.scale,
             .beta = first == 0 ? 0.0f : 1.0f});
    if (direct || !last) return;
    Store(d_weight_, tokens, nullptr, to.dtype, out, to.row_stride);
  }

  void StoreHidden(int64_t first) {
    const MutableTensorView& to = args_.d_hidden;
    Store(d_states_, std::min(cut_.group, args_.hidden.rows - first), plans_, to.dtype,
          static_cast<std::byte*>(to.data) +
              first * to.row_stride * static_cast<int64_t>(SizeOf(to.dtype)),
          to.row_stride);
  }

  void Store(const float* sums, int64_t rows, const RowGradient* plans, DType dtype, void* to,
             int64_t to_stride) {
    if (error_ != cudaSuccess) return;
    AsType(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      StoreKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream_>>>(
          sums, cut_.hidden_stride, static_cast<int>(args_.head.hidden()), plans,
          static_cast<T*>(to), to_stride);
    });
    Keep(cudaGetLastError());
  }

  void Enqueue(const ProductShape& shape, ProductOperands operands) {
    if (error_ != cudaSuccess) return;
    operands.workspace = workspace_;
    Keep(products_.Enqueue(shape, operands, stream_));
  }

  const LinearCrossEntropyBackwardArgs& args_;
  Products& products_;
  const cudaStream_t stream_;
  const DType dtype_;
  const DType product_type_;  // of what products 2 and 3 take
  std::byte* const workspace_;
  const Cut cut_;
  RowGradient* plans_;             // [group]
  std::byte* states_;              // [group, hidden_stride], the weight's dtype
  float* d_states_;                // [group, hidden_stride]
  std::byte* gradients_;           // [group, chunk], of product_type_
  float* logits_;                  // [block, chunk]
  float* d_weight_;                // [chunk, hidden_stride]
  float* column_sums_;             // [block / kGroupRows, chunk]
  float* wide_states_ = nullptr;   // [group, hidden_stride], of an f16 head
  float* wide_weights_ = nullptr;  // [chunk, hidden_stride]
  cudaError_t error_ = cudaSuccess;
};

// What no rows come to.
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
  return Backward(args, products, scratch, stream).Run();
}

}  // namespace logitd::cuda
