// The gradients of a head, chunk by chunk of its vocabulary, from those of its logits, whichever
// loss they are of.
//
// The vocabulary is processed in chunks, the rows in blocks: logits (product 1), their gradients G
// in the weight's dtype, and d_hidden += G weight in fp32 (product 2). When all rows have met a
// chunk, G^T hidden is its d_weight (product 3), rounded once. The heads and the device fix blocks
// and chunks, so that the bits of a row of d_hidden do not depend on other rows. Where scratch
// cannot hold all rows there are two passes, one for d_hidden and one for d_weight. Under an f16
// head G has powers of two as factors (backward.cuh). Rows that are not counted are rows of zeros
// in every product, so their contents cannot affect any gradient.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_GRADIENT_CHUNKS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_GRADIENT_CHUNKS_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/head.h"

namespace logitd::cuda {

constexpr int kGroupRows = 64;  // rows of a block of a kernel that makes G
constexpr int kRowsAhead = 8;   // of these, rows whose logits are loaded together
static_assert(kGroupRows % kRowsAhead == 0);

// The inputs of a gradient, and the places of its results.
struct HeadGradients {
  TensorView hidden;
  const HeadView& head;
  MutableTensorView d_hidden;  // data null: not wanted; likewise below
  MutableTensorView d_weight;
  float* d_bias;
};

// ---- kernels -----------------------------------------------------------------------------------

// Copies rows of f16 with the factors that product 3 takes out; block 0 writes that of the product.
template <class Row>
__global__ void __launch_bounds__(kCopyThreads)
    ScaleKernel(const __half* from, int64_t stride, int size, const Row* plans,
                float product_factor, bool fresh, __half* to, HalfScale* scale) {
  const int64_t r = blockIdx.x;
  if (r == 0 && threadIdx.x == 0) scale->SetProduct(product_factor, fresh ? 0.0f : 1.0f);
  const bool counted = plans[r].use == RowUse::kCounted;
  const float factor = counted ? scale->StateFactor(plans[r].exponent) : 0.0f;
  for (int i = threadIdx.x; i < size; i += kCopyThreads)
    to[r * stride + i] = __float2half_rn(__half2float(from[r * stride + i]) * factor);
}

// Writes the gradients of two columns of a row, g0 and g1, at `to`.
template <class T>
__device__ inline void WriteGradients(T* to, float g0, float g1, int exponent) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(to) = {g0, g1};
  } else if constexpr (std::is_same_v<T, __half>) {
    const float grow = GradientFactor(exponent);
    *reinterpret_cast<uint32_t*>(to) = PackPair<T>(g0 * grow, g1 * grow);
  } else {
    *reinterpret_cast<uint32_t*>(to) = PackPair<T>(g0, g1);
  }
}

// Adds the groups' sums, in order, to d_bias, which starts at 0 where `fresh`.
template <int kThreads>
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

// How a call's work is cut. The heads and the device fix all but `group`.
struct ChunkCut {
  int64_t block = 1024;  // rows of products 1 and 2
  int64_t chunk = 8192;  // tokens
  int64_t group = 0;     // rows that scratch holds at once, a multiple of block
  int64_t hidden_stride = 0;

  // reference: a head whose logits are needed beside those of `head`, or null. plan_bytes: of what
  // a loss plans for a row.
  ChunkCut(const HeadView& head, const HeadView* reference, int64_t plan_bytes, int64_t rows,
           int64_t bytes) {
    const int64_t size = static_cast<int64_t>(SizeOf(head.weight.dtype));
    const int64_t scaled = head.weight.dtype == DType::kF16 ? size : 0;
    const int64_t logits = reference == nullptr ? 4 : 8;  // bytes of both
    const int64_t reference_bytes = reference == nullptr
                                        ? 0
                                        : RoundUp(reference->hidden(), 64) *
                                              static_cast<int64_t>(SizeOf(reference->weight.dtype));
    hidden_stride = RoundUp(head.hidden(), 64);
    chunk = std::min(chunk, RoundUp(head.vocab(), 64));
    constexpr int64_t kSlack = int64_t{1} << 20;  // for the alignment of the pieces
    const auto fixed = [&] {
      return chunk * (logits * block + 4 * hidden_stride + 4 * (block / kGroupRows)) + kSlack;
    };
    const auto per_row = [&] {
      return hidden_stride * (size + 4 + scaled) + chunk * size + reference_bytes + plan_bytes;
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

// The rows of a block of G, and where it goes.
template <class Row>
struct GradientBlock {
  int64_t first_token;  // of the chunk
  int tokens;
  int64_t first_row;    // in the group
  int64_t rows;         // ChunkCut::block
  const Row* plans;     // [rows]
  const float* logits;  // [rows, stride], before the softcap
  int64_t stride;
  MutableTensorView gradients;  // [rows, tokens], row stride as `stride`
  float* column_sums;           // [rows / kGroupRows, stride]; null: not wanted
};

// The grid of a kernel of kCopyThreads threads, each of which takes two columns of kGroupRows rows.
// `tokens` may be odd: there is memory for one more.
inline dim3 GradientGrid(int64_t rows, int64_t tokens) {
  return dim3(GridFor(tokens, 2 * kCopyThreads).x, static_cast<unsigned>(rows / kGroupRows));
}

// Makes the gradients. A Loss has
//   Row              what it plans for a row: use, at, exponent and OfHidden(), as backward.cuh
//                    wants them; not counted: G is 0
//   reference()      another head whose logits it needs, or null
//   Take(scratch, cut)                     takes its own memory
//   Plan(steps, first, count, rows, scale) plans the rows from `first` of the call on, `count` with
//                    skipped ones at the end; scale: null unless the head is f16
//   Make(steps, GradientBlock<Row>)        writes G of a block, before the head's scale
template <class Loss>
class GradientChunks {
 public:
  using Row = typename Loss::Row;

  GradientChunks(const HeadGradients& of, Loss& loss, Products& products, Scratch scratch,
                 cudaStream_t stream)
      : of_(of),
        loss_(loss),
        steps_(products, scratch, stream),
        dtype_(of.head.weight.dtype),
        cut_(of.head, loss.reference(), sizeof(Row), of.hidden.rows,
             static_cast<int64_t>(scratch.left())) {
    const auto take = [&](DType dtype, int64_t rows, int64_t cols, int64_t stride) {
      const size_t bytes = static_cast<size_t>(rows * stride) * SizeOf(dtype);
      return MutableTensorView{scratch.Take<std::byte>(bytes), dtype, rows, cols, stride};
    };
    const int64_t hidden = of.head.hidden();
    plans_ = scratch.Take<Row>(cut_.group);
    states_ = take(dtype_, cut_.group, hidden, cut_.hidden_stride);
    d_states_ = take(DType::kF32, cut_.group, hidden, cut_.hidden_stride);
    gradients_ = take(dtype_, cut_.group, cut_.chunk, cut_.chunk);
    logits_ = take(DType::kF32, cut_.block, cut_.chunk, cut_.chunk);
    d_weight_ = take(DType::kF32, cut_.chunk, hidden, cut_.hidden_stride);
    column_sums_ = scratch.Take<float>(cut_.block / kGroupRows * cut_.chunk);
    loss.Take(scratch, cut_);
    if (!IsHalf()) return;
    scaled_states_ = take(dtype_, cut_.group, hidden, cut_.hidden_stride);
    scale_ = scratch.Take<HalfScale>(1);
  }

  cudaError_t Run() {
    const int64_t rows = of_.hidden.rows;
    const int64_t vocab = of_.head.vocab();
    const bool hidden = of_.d_hidden.data != nullptr;
    const bool sums = of_.d_weight.data != nullptr || of_.d_bias != nullptr;
    if (!hidden && !sums) return steps_.error();
    if (rows <= cut_.group) {
      PlanRows(0);
      for (int64_t v = 0; v < vocab; v += cut_.chunk) TakeChunk(v, 0, hidden, sums);
      if (hidden) StoreHidden(0);
      return steps_.error();
    }
    for (int64_t first = 0; hidden && first < rows; first += cut_.group) {
      PlanRows(first);
      for (int64_t v = 0; v < vocab; v += cut_.chunk)
        TakeChunk(v, first, /*hidden=*/true, /*sums=*/false);
      StoreHidden(first);
    }
    for (int64_t v = 0; sums && v < vocab; v += cut_.chunk) {
      for (int64_t first = 0; first < rows; first += cut_.group) {
        PlanRows(first);
        TakeChunk(v, first, /*hidden=*/false, /*sums=*/true);
      }
    }
    return steps_.error();
  }

 private:
  bool IsHalf() const { return dtype_ == DType::kF16; }

  // Copies the rows of the group at `first`, padded to whole blocks, to scratch.
  void PlanRows(int64_t first) {
    const TensorView hidden = RowsOf(of_.hidden, first, of_.hidden.rows - first);
    padded_rows_ = std::min(cut_.group, RoundUp(hidden.rows, cut_.block));
    if (IsHalf()) steps_.Do([&] { return HalfScale::Clear(scale_, steps_.stream()); });
    loss_.Plan(steps_, first, padded_rows_, plans_, scale_);
    VisitDType(dtype_, [&]<class T>() {
      steps_.Launch(&PackKernel<T, Row>, GridFor(padded_rows_), kCopyThreads,
                    static_cast<const T*>(hidden.data), hidden.row_stride,
                    static_cast<int>(of_.head.hidden()), plans_, RowUse::kCounted,
                    static_cast<T*>(states_.data), states_.row_stride);
    });
    if (!IsHalf()) return;
    steps_.Launch(&ScaleKernel<Row>, GridFor(padded_rows_), kCopyThreads,
                  static_cast<const __half*>(states_.data), states_.row_stride,
                  static_cast<int>(of_.head.hidden()), plans_, of_.head.scale,
                  /*fresh=*/first == 0, static_cast<__half*>(scaled_states_.data), scale_);
  }

  // Tokens [v, v + chunk) and the planned group, whose first row is `first`: adds to d_hidden, to
  // the sums over rows (d_weight and d_bias) or to both.
  void TakeChunk(int64_t v, int64_t first, bool hidden, bool sums) {
    const HeadView& head = of_.head;
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
      const bool bias = sums && of_.d_bias != nullptr;
      const GradientBlock<Row> block = {.first_token = v,
                                        .tokens = static_cast<int>(tokens),
                                        .first_row = r,
                                        .rows = cut_.block,
                                        .plans = plans_ + r,
                                        .logits = static_cast<const float*>(logits_.data),
                                        .stride = cut_.chunk,
                                        .gradients = block_gradients,
                                        .column_sums = bias ? column_sums_ : nullptr};
      loss_.Make(steps_, block);
      if (bias) AddToBias(block, /*fresh=*/first == 0 && r == 0);
      if (!hidden) continue;
      steps_.Multiply({.a = block_gradients,  // product 2
                       .b = weights,
                       .out = RowsOf(d_states_, r, cut_.block),
                       .alpha = head.scale,
                       .beta = v == 0 ? 0.0f : 1.0f});
    }
    if (sums && of_.d_weight.data != nullptr) AddToWeight(v, first, gradients);
  }

  void AddToBias(const GradientBlock<Row>& block, bool fresh) {
    steps_.Launch(&BiasKernel<kCopyThreads>, GridFor(block.tokens, kCopyThreads), kCopyThreads,
                  column_sums_, static_cast<int>(cut_.block / kGroupRows), cut_.chunk, block.tokens,
                  fresh, of_.d_bias + block.first_token);
  }

  // Product 3, into d_weight itself where a product can write it, else through scratch.
  void AddToWeight(int64_t v, int64_t first, const TensorView& gradients) {
    const int64_t count = std::min(cut_.group, of_.hidden.rows - first);
    const bool last = first + count == of_.hidden.rows;
    const MutableTensorView to = RowsOf(of_.d_weight, v, gradients.cols);
    const bool aligned = reinterpret_cast<uintptr_t>(of_.d_weight.data) % 16 == 0 &&
                         to.row_stride * static_cast<int64_t>(SizeOf(to.dtype)) % 16 == 0;
    const bool direct = aligned && (to.dtype == DType::kF32 || (first == 0 && last));
    const int64_t rows = RoundUp(count, kGroupRows);
    steps_.Multiply({.a = RowsOf(gradients, 0, rows),
                     .transpose_a = true,
                     .b = RowsOf(IsHalf() ? scaled_states_ : states_, 0, rows),
                     .out = direct ? to : d_weight_,
                     .alpha = of_.head.scale,
                     .beta = first == 0 ? 0.0f : 1.0f,
                     .device_factors = IsHalf() ? scale_->product : nullptr});
    if (direct || !last) return;
    const Row* all_counted = nullptr;
    steps_.Store(d_weight_, all_counted, to);
  }

  void StoreHidden(int64_t first) {
    const int64_t count = std::min(cut_.group, of_.hidden.rows - first);
    steps_.Store(d_states_, plans_, RowsOf(of_.d_hidden, first, count));
  }

  const HeadGradients of_;
  Loss& loss_;
  Steps steps_;
  const DType dtype_;
  const ChunkCut cut_;
  int64_t padded_rows_ = 0;          // of the planned group, in whole blocks
  Row* plans_;                       // [group]
  MutableTensorView states_;         // [group, hidden], the weight's dtype
  MutableTensorView d_states_;       // [group, hidden], f32
  MutableTensorView gradients_;      // [group, chunk]
  MutableTensorView logits_;         // [block, chunk], f32
  MutableTensorView d_weight_;       // [chunk, hidden], f32
  float* column_sums_;               // [block / kGroupRows, chunk]
  MutableTensorView scaled_states_;  // [group, hidden], under an f16 head
  HalfScale* scale_ = nullptr;       // under an f16 head
};

// The gradients of a call without rows.
inline cudaError_t ClearSums(const HeadGradients& of, cudaStream_t stream) {
  const MutableTensorView& d_weight = of.d_weight;
  const size_t size = SizeOf(d_weight.dtype);
  const size_t vocab = static_cast<size_t>(of.head.vocab());
  cudaError_t error = cudaSuccess;
  if (d_weight.data != nullptr) {
    error = cudaMemset2DAsync(d_weight.data, static_cast<size_t>(d_weight.row_stride) * size, 0,
                              static_cast<size_t>(of.head.hidden()) * size, vocab, stream);
  }
  if (error != cudaSuccess || of.d_bias == nullptr) return error;
  return cudaMemsetAsync(of.d_bias, 0, vocab * sizeof(float), stream);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_GRADIENT_CHUNKS_CUH_
