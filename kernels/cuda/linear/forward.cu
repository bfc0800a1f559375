// linear_topk, linear_sample, linear_cross_entropy: blocks of rows have their logits in scratch, in
// fp32, and the op that takes logits runs on them. Where hopper/loss.cu can, it takes the
// rows of linear_cross_entropy that want losses and extras alone.
//
// A row's bits are its own. On Hopper, the logits of 16-bit heads are hopper/logits.cu's.
// Elsewhere products are of one fixed shape, by one algorithm that splits no sum: 16-bit heads of
// linear_topk and linear_sample go 64 rows at a time through decode.cu, all else, and f32
// heads everywhere, through cuBLASLt (product.h), in blocks of rows whose number the head and the
// device decide; rows behind the last are zeros. Scale and bias come with the product; a softcap is
// then a pass of its own over the block.
//
// Cost of linear_cross_entropy: the product, and one write and one read of the logits of a block
// (134 MB at 256 x 131072), of which L2 takes a part. Limited by: the product, 256 rows at a time.
// On Hopper, a call in which any row wants rank, entropy or tops has the product of all rows by way
// of logits, and a second one, in hopper/loss.cu, of the 256 rows around each that wants
// none of these: which kernel takes a row is for the row to say, and the host does not read rows.
// Measured where the product is: hopper/loss.cu, hopper/logits.cu; an f32 head with
// sample behind it, 64 rows of 4096 x 128256, 1.53 ms, 94% of the bare product
// (bench/results/h200/kernels.json).
#include <algorithm>

#include "kernels/cuda/linear/decode.h"
#include "kernels/cuda/linear/hopper/logits.h"
#include "kernels/cuda/linear/hopper/loss.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/scratch.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

// ---- kernels -----------------------------------------------------------------------------------

constexpr int kPrepareThreads = 256;

// Block r writes row r of `to`: the hidden state after the head's norm; zeros from `rows` on.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads)
    PrepareKernel(const T* hidden, int64_t hidden_stride, int rows, int size, const float* norm,
                  float epsilon, T* to, int64_t to_stride) {
  const int r = blockIdx.x;
  const T* from = hidden + r * hidden_stride;
  to += r * to_stride;
  if (r >= rows) {
    for (int i = threadIdx.x; i < size; i += kPrepareThreads) to[i] = FromFloat<T>(0.0f);
    return;
  }
  if (norm == nullptr) {
    for (int i = threadIdx.x; i < size; i += kPrepareThreads) to[i] = from[i];
    return;
  }
  __shared__ float sums[kPrepareThreads / 32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < size; i += kPrepareThreads) {
    const float h = ToFloat(from[i]);
    sum = fmaf(h, h, sum);
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (float part : sums) sum += part;
  const float rate = 1.0f / sqrtf(sum / static_cast<float>(size) + epsilon);
  for (int i = threadIdx.x; i < size; i += kPrepareThreads)
    to[i] = FromFloat<T>(ToFloat(from[i]) * rate * norm[i]);
}

__global__ void __launch_bounds__(256)
    SoftcapKernel(float* logits, int64_t stride, int vocab, float softcap) {
  float* row = logits + blockIdx.y * stride;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x)
    row[i] = softcap * tanhf(row[i] / softcap);
}

// Deals rows out to two lists of as many, in each of which those of the other are skipped. Block i
// says whether any of its rows is on the plain list.
__global__ void __launch_bounds__(kLossGroupRows)
    SplitRowsKernel(const CrossEntropyRow* rows, int64_t count, CrossEntropyRow* plain,
                    CrossEntropyRow* more, int32_t* plain_groups) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kLossGroupRows + threadIdx.x;
  const CrossEntropyRow row = r < count ? rows[r] : CrossEntropyRow{};
  const bool wants_more = row.want != 0 || row.top_logprobs > 0;
  const int any_plain = __syncthreads_or(row.active != 0 && !wants_more);
  if (threadIdx.x == 0) plain_groups[blockIdx.x] = any_plain;
  if (r >= count) return;
  plain[r] = wants_more ? CrossEntropyRow{} : row;
  more[r] = wants_more ? row : CrossEntropyRow{};
}

// ---- launch ------------------------------------------------------------------------------------

template <class T>
cudaError_t LaunchPrepare(const void* hidden, int64_t hidden_stride, int rows, int block_rows,
                          const HeadView& head, void* to, int64_t to_stride, cudaStream_t stream) {
  PrepareKernel<T><<<block_rows, kPrepareThreads, 0, stream>>>(
      static_cast<const T*>(hidden), hidden_stride, rows, static_cast<int>(head.hidden()),
      head.norm, head.norm_epsilon, static_cast<T*>(to), to_stride);
  return cudaGetLastError();
}

cudaError_t Prepare(const void* hidden, int64_t hidden_stride, int rows, int block_rows,
                    const HeadView& head, void* to, int64_t to_stride, cudaStream_t stream) {
  const auto launch = head.weight.dtype == DType::kF32   ? &LaunchPrepare<float>
                      : head.weight.dtype == DType::kF16 ? &LaunchPrepare<__half>
                                                         : &LaunchPrepare<__nv_bfloat16>;
  return launch(hidden, hidden_stride, rows, block_rows, head, to, to_stride, stream);
}

// What makes the logits. kDecode and kProduct are what callers ask for; where the device and the
// head have it, kHopper is taken.
enum class Route { kDecode, kProduct, kHopper };

// Calls op(first row, logits of a block of rows, scratch that is left) for all rows, block by
// block.
template <class Op>
cudaError_t ForEachBlock(const TensorView& hidden, const HeadView& head, Route route,
                         Products& products, Scratch scratch, cudaStream_t stream, Op op) {
  const DType dtype = head.weight.dtype;
  const bool op_needs_scratch = route == Route::kDecode;
  if (dtype == DType::kF32) route = Route::kProduct;
  if (HopperLogitsServes(head, scratch)) route = Route::kHopper;
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  const int64_t logits_stride = (head.vocab() + 31) / 32 * 32;
  const int64_t prepared_stride = (head.hidden() + 63) / 64 * 64;
  void* workspace = nullptr;
  if (route == Route::kProduct)
    workspace = TakeFromEnd<std::byte>(scratch, products.workspace_bytes());
  // As many rows as a share of scratch holds, whatever the call's rows.
  int block_rows = route == Route::kDecode || dtype == DType::kF32 ? kDecodeRows : kMaxProductRows;
  const int64_t room = static_cast<int64_t>(scratch.bytes) / (op_needs_scratch ? 4 : 2);
  while (block_rows > 1 && block_rows * logits_stride * 4 > room) block_rows /= 2;
  float* logits = TakeFromEnd<float>(scratch, block_rows * logits_stride);
  std::byte* prepared = TakeFromEnd<std::byte>(scratch, block_rows * prepared_stride * size);
  for (int64_t first = 0; first < hidden.rows; first += block_rows) {
    const int rows = static_cast<int>(std::min<int64_t>(block_rows, hidden.rows - first));
    const void* states =
        static_cast<const std::byte*>(hidden.data) + first * hidden.row_stride * size;
    int64_t states_stride = hidden.row_stride;
    cudaError_t error = cudaSuccess;
    // Products always take prepared states: with another stride they might take another algorithm.
    if (head.norm != nullptr || route == Route::kProduct) {
      const int prepared_rows = route == Route::kProduct ? block_rows : rows;
      error = Prepare(states, states_stride, rows, prepared_rows, head, prepared, prepared_stride,
                      stream);
      if (error != cudaSuccess) return error;
      states = prepared;
      states_stride = prepared_stride;
    }
    if (route == Route::kHopper) {
      error = HopperLogits({states, dtype, rows, head.hidden(), states_stride}, head, logits,
                           logits_stride, scratch, stream);
    } else if (route == Route::kDecode) {
      error =
          DecodeLogits(states, states_stride, rows, head, logits, logits_stride, scratch, stream);
    } else {
      error = products.Enqueue({.inputs = dtype,
                                .output = DType::kF32,
                                .transpose_a = true,
                                .transpose_b = false,
                                .bias = head.bias != nullptr,
                                .m = head.vocab(),
                                .n = block_rows,
                                .k = head.hidden(),
                                .a_stride = head.weight.row_stride,
                                .b_stride = states_stride,
                                .out_stride = logits_stride},
                               {.a = head.weight.data,
                                .b = states,
                                .out = logits,
                                .bias = head.bias,
                                .alpha = head.scale,
                                .beta = 0.0f,
                                .workspace = workspace},
                               stream);
      if (error == cudaSuccess && head.softcap > 0) {
        const dim3 grid(std::min<unsigned>(64, static_cast<unsigned>((head.vocab() + 255) / 256)),
                        static_cast<unsigned>(rows));
        SoftcapKernel<<<grid, 256, 0, stream>>>(logits, logits_stride,
                                                static_cast<int>(head.vocab()), head.softcap);
        error = cudaGetLastError();
      }
    }
    if (error != cudaSuccess) return error;
    error = op(first, TensorView{logits, DType::kF32, rows, head.vocab(), logits_stride}, scratch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// linear_cross_entropy by blocks of logits.
cudaError_t LossOfBlocks(const LinearCrossEntropyArgs& args, Products& products,
                         const Scratch& scratch, cudaStream_t stream) {
  return ForEachBlock(args.hidden, args.head, Route::kProduct, products, scratch, stream,
                      [&](int64_t first, const TensorView& logits, const Scratch& rest) {
                        CrossEntropyArgs block = RowsFrom(args.cross_entropy, first);
                        block.logits = logits;
                        return CrossEntropy(block, rest, stream);
                      });
}

}  // namespace

cudaError_t LinearTopK(const LinearTopKArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream) {
  return ForEachBlock(args.hidden, args.head, Route::kDecode, products, scratch, stream,
                      [&](int64_t first, const TensorView& logits, const Scratch& rest) {
                        SoftmaxTopKArgs block = args.topk;
                        block.logits = logits;
                        block.rows += first;
                        block.logsumexp += first;
                        block.status += first;
                        return SoftmaxTopK(block, rest, stream);
                      });
}

cudaError_t LinearSample(const LinearSampleArgs& args, Products& products, const Scratch& scratch,
                         cudaStream_t stream) {
  return ForEachBlock(args.hidden, args.head, Route::kDecode, products, scratch, stream,
                      [&](int64_t first, const TensorView& logits, const Scratch& rest) {
                        SampleArgs block = args.sample;
                        block.logits = logits;
                        block.rows += first;
                        block.tokens += first;
                        block.logprobs += first;
                        block.ranks += first;
                        block.logsumexp += first;
                        block.status += first;
                        return Sample(block, rest, stream);
                      });
}

cudaError_t LinearCrossEntropy(const LinearCrossEntropyArgs& args, Products& products,
                               const Scratch& scratch, cudaStream_t stream) {
  if (!HopperLossServes(args.head, scratch)) return LossOfBlocks(args, products, scratch, stream);
  // Which kernel takes a row is for the row and the head to say, not for its company.
  const int64_t hidden = args.head.hidden();
  const int64_t size = static_cast<int64_t>(SizeOf(args.head.weight.dtype));
  const int64_t states_stride = (hidden + 63) / 64 * 64;
  constexpr int64_t kGroup = kLossGroupRows;
  const CrossEntropyArgs& asked = args.cross_entropy;
  const bool mixed = asked.want != 0 || asked.max_top_logprobs > 0;
  // Rows whose states and lists scratch holds, where it must.
  int64_t turn = 16384;
  if (mixed || args.head.norm != nullptr) {
    turn = std::clamp<int64_t>(
        static_cast<int64_t>(scratch.bytes) / 4 / (states_stride * size) / kGroup * kGroup, kGroup,
        turn);
  }
  for (int64_t first = 0; first < args.hidden.rows; first += turn) {
    const int64_t rows = std::min(turn, args.hidden.rows - first);
    Scratch rest = scratch;
    LinearCrossEntropyArgs plain = args;
    plain.cross_entropy = RowsFrom(asked, first);
    plain.hidden.data =
        static_cast<const std::byte*>(args.hidden.data) + first * args.hidden.row_stride * size;
    plain.hidden.rows = rows;
    LinearCrossEntropyArgs more = plain;
    cudaError_t error = cudaSuccess;
    int32_t* plain_groups = nullptr;
    if (mixed) {
      const int64_t groups = (rows + kGroup - 1) / kGroup;
      CrossEntropyRow* plain_rows = TakeFromEnd<CrossEntropyRow>(rest, rows);
      CrossEntropyRow* more_rows = TakeFromEnd<CrossEntropyRow>(rest, rows);
      plain_groups = TakeFromEnd<int32_t>(rest, groups);
      SplitRowsKernel<<<static_cast<unsigned>(groups), kLossGroupRows, 0, stream>>>(
          plain.cross_entropy.rows, rows, plain_rows, more_rows, plain_groups);
      error = cudaGetLastError();
      if (error != cudaSuccess) return error;
      plain.cross_entropy.rows = plain_rows;
      more.cross_entropy.rows = more_rows;
      error = LossOfBlocks(more, products, rest, stream);
      if (error != cudaSuccess) return error;
    }
    if (args.head.norm != nullptr) {
      std::byte* states = TakeFromEnd<std::byte>(rest, rows * states_stride * size);
      error = Prepare(plain.hidden.data, plain.hidden.row_stride, static_cast<int>(rows),
                      static_cast<int>(rows), args.head, states, states_stride, stream);
      if (error != cudaSuccess) return error;
      plain.hidden.data = states;
      plain.hidden.row_stride = states_stride;
    }
    error = HopperLoss(plain, plain_groups, rest, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda
