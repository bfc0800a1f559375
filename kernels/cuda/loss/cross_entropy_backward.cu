// cross_entropy_backward: one read, one write (GradientWriter, row_gradient.cuh). A block takes a
// chunk of a row, whose factors one thread makes, in double, while the first vectors are loaded. Of
// many short rows a warp takes several.
//
// Cost: 2 * rows * vocab * sizeof(T). Limited by: HBM; about 5 instructions and one ex2 an element,
// a second ex2 where rounding a temperature costs too much or factors are extreme; with a softcap
// about 20, one ex2 and one reciprocal (softcap.cuh). A softcap whose factors are extreme takes
// tanhf. Measured on an H200, bf16, as a share of the copy: 98 to 100%, rows off alignment 94%,
// softcap 90%, softcap off alignment 85%; 65536 x 1000 76% (a block for each row 27%).
#include <algorithm>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/row_gradient.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {
namespace {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardResident = 4;
constexpr int kShortVocab = 4096;
constexpr int kMostShortRows = 8;  // of a warp
constexpr int64_t kRowsOfAllWarps = 4096;
// From so many batches on, a chunk is several: what a chunk costs besides its elements then weighs
// less, and there are still chunks for many waves of blocks.
constexpr int64_t kManyBatches = 8192;
constexpr int64_t kMostBatches = 4;  // of a chunk

// Blocks take chunks of a row: blockIdx.x = row * chunks + chunk. A chunk is `batches` times as
// many vectors as a block loads at once.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardResident)
    BackwardKernel(const __grid_constant__ CrossEntropyBackwardArgs args, int chunks, int batches) {
  using Writer = GradientWriter<T, kBackwardThreads>;
  const int64_t r = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x - r * chunks);
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const T* from = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  T* to = static_cast<T*>(args.d_logits.data) + r * args.d_logits.row_stride;
  const CrossEntropyRow& ask = args.rows[r];
  __shared__ RowGradient<T> gradient;

  // Chunks begin where the output is aligned; the first also has the few elements before that.
  const int head = static_cast<int>((-reinterpret_cast<uintptr_t>(to) & 15) / sizeof(T));
  const int size = batches * Writer::kBatch;
  const int begin = chunk == 0 ? 0 : head + chunk * size;
  const int end = min(vocab, head + (chunk + 1) * size);
  Writer writer(from, to, begin, end);
  // In double, by one thread, while the vectors are loaded. The target's logit is read before the
  // barrier: after it a thread may write over it in place.
  const bool active = ask.active != 0;
  if (threadIdx.x == 0) {
    const bool has_target = ask.target >= begin && ask.target < end;
    gradient.Prepare(ask, args.upstream[r], has_target,
                     has_target ? ToFloat(from[ask.target]) : 0.0f, vocab);
    gradient.Finish(args.logsumexp[r]);
  }
  __syncthreads();
  writer.Write(active, gradient);
}

// Short rows: a warp takes rows_of_warp of them, one after the other. A lane for each makes its
// factors, once for all.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardResident)
    ShortBackwardKernel(const __grid_constant__ CrossEntropyBackwardArgs args, int rows_of_warp) {
  __shared__ RowGradient<T> gradients[kBackwardThreads / 32][kMostShortRows];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * (kBackwardThreads / 32) + warp) * rows_of_warp;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(rows_of_warp), args.logits.rows - first));
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const auto from = [&](int64_t r) {
    return static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  };
  if (lane < rows) {
    const int64_t r = first + lane;
    const CrossEntropyRow& ask = args.rows[r];
    const bool has_target = ask.active != 0 && ask.target >= 0;
    RowGradient<T>& gradient = gradients[warp][lane];
    gradient.Prepare(ask, args.upstream[r], has_target,
                     has_target ? ToFloat(from(r)[ask.target]) : 0.0f, vocab);
    gradient.Finish(args.logsumexp[r]);
  }
  __syncwarp();
#pragma unroll 1
  for (int k = 0; k < rows; ++k) {
    const int64_t r = first + k;
    T* to = static_cast<T*>(args.d_logits.data) + r * args.d_logits.row_stride;
    GradientWriter<T, 32>(from(r), to, 0, vocab)
        .Write(args.rows[r].active != 0, gradients[warp][k]);
  }
}

}  // namespace

cudaError_t CrossEntropyBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  return VisitDType(args.logits.dtype, [&]<class T>() {
    if (args.logits.cols <= kShortVocab && args.logits.rows >= kRowsOfAllWarps) {
      const int64_t of_warp = std::min<int64_t>(args.logits.rows / kRowsOfAllWarps, kMostShortRows);
      return LaunchKernel(&ShortBackwardKernel<T>,
                          {.grid = GridFor(args.logits.rows, of_warp * (kBackwardThreads / 32)),
                           .threads = kBackwardThreads},
                          stream, args, static_cast<int>(of_warp));
    }
    constexpr int64_t kBatch = GradientWriter<T, kBackwardThreads>::kBatch;
    const int64_t row_batches = CeilDiv(args.logits.cols, kBatch);
    const bool many = args.logits.rows * row_batches >= kManyBatches;
    const int64_t chunks = many ? CeilDiv(row_batches, kMostBatches) : row_batches;
    const int batches = static_cast<int>(CeilDiv(row_batches, chunks));
    return LaunchKernel(&BackwardKernel<T>,
                        {.grid = GridFor(args.logits.rows * chunks), .threads = kBackwardThreads},
                        stream, args, static_cast<int>(chunks), batches);
  });
}

}  // namespace logitd::cuda
