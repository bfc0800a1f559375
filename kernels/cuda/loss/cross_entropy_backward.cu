// cross_entropy_backward: one read, one write. Threads take vectors of 16 bytes, aligned as the
// output is. An input that is aligned differently is read by elements.
//
// Cost: 2 * rows * vocab * sizeof(T). Limited by: HBM; about 6 instructions and two ex2 an element.
// Measured (bench/results/h200/kernels.json), as a share of the copy: 96 to 99%, rows off
// alignment 91%, softcap 69%.
#include <type_traits>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {
namespace {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardVectors = 4;  // of a thread, all loaded at once
constexpr int kBackwardResident = 4;

// Blocks take chunks of a row: blockIdx.x = row * chunks + chunk.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardResident)
    BackwardKernel(const __grid_constant__ CrossEntropyBackwardArgs args, int chunks) {
  constexpr int kTake = kVector<T>;
  const int64_t r = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x - r * chunks);
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const T* from = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  T* to = static_cast<T*>(args.d_logits.data) + r * args.d_logits.row_stride;
  const CrossEntropyRow& ask = args.rows[r];
  __shared__ Gradient gradient_of_row;

  // Vectors begin where the output is aligned. The first chunk takes the few elements before them.
  const int head =
      min(vocab, static_cast<int>((-reinterpret_cast<uintptr_t>(to) & 15) / sizeof(T)));
  const bool aligned = (reinterpret_cast<uintptr_t>(from + head) & 15) == 0;
  const int first =
      head + (chunk * kBackwardVectors * kBackwardThreads + static_cast<int>(threadIdx.x)) * kTake;
  constexpr int kStep = kBackwardThreads * kTake;
  uint4 vectors[kBackwardVectors];
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) {
    const int at = first + i * kStep;
    vectors[i] = {};
    if (at + kTake > vocab) continue;
    if (aligned) {
      vectors[i] = __ldcs(reinterpret_cast<const uint4*>(from + at));
    } else {
      vectors[i] = LoadVector(from + at, false, kTake);
    }
  }
  // In double, by one thread, while the vectors are loaded.
  const int target = ask.target;
  const bool active = ask.active != 0;
  if (threadIdx.x == 0)
    gradient_of_row = Gradient::Of(ask, args.logsumexp[r], args.upstream[r], args.logits.cols);
  __syncthreads();
  if (!active) return;
  const Gradient gradient = gradient_of_row;
  const auto write = [&](auto at) {
#pragma unroll
    for (int i = 0; i < kBackwardVectors; ++i) {
      const int begin = first + i * kStep;
      if (begin >= vocab) break;
      if (begin + kTake > vocab) {  // the row's last elements
        for (int j = begin; j < vocab; ++j) to[j] = FromFloat<T>(at(ToFloat(from[j]), j == target));
        break;
      }
      const uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
      const int place = target - begin;
      uint32_t out[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (std::is_same_v<T, float>) {
          out[w] = __float_as_uint(at(WordElement<T>(words, w), w == place));
        } else {
          out[w] = PackPair<T>(at(WordElement<T>(words, 2 * w), 2 * w == place),
                               at(WordElement<T>(words, 2 * w + 1), 2 * w + 1 == place));
        }
      }
      __stcs(reinterpret_cast<uint4*>(to + begin), uint4{out[0], out[1], out[2], out[3]});
    }
    if (chunk == 0 && static_cast<int>(threadIdx.x) < head) {
      const int j = threadIdx.x;
      to[j] = FromFloat<T>(at(ToFloat(from[j]), j == target));
    }
  };
  if (target < 0) {
    write([](float, bool) { return 0.0f; });
  } else if (gradient.cap.on()) {
    write([&](float logit, bool is_target) { return gradient.At<true>(logit, is_target); });
  } else {
    write([&](float logit, bool is_target) { return gradient.At<false>(logit, is_target); });
  }
}

}  // namespace

cudaError_t CrossEntropyBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  return VisitDType(args.logits.dtype, [&]<class T>() {
    const int64_t chunks =
        CeilDiv(args.logits.cols, kBackwardThreads * kBackwardVectors * kVector<T>);
    return LaunchKernel(&BackwardKernel<T>,
                        {.grid = GridFor(args.logits.rows * chunks), .threads = kBackwardThreads},
                        stream, args, static_cast<int>(chunks));
  });
}

}  // namespace logitd::cuda
