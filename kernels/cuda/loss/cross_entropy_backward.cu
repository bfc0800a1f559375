// cross_entropy_backward: one read, one write. Threads take vectors of 16 bytes, aligned as the
// output is. An input that is aligned differently is read by elements.
//
// Where there are many vectors, a block takes several rounds of them: a vector is loaded as soon as
// the one before it in its registers is used. The row's factors, in double by one thread, are then
// made once for all rounds.
//
// Cost: 2 * rows * vocab * sizeof(T). Limited by: HBM; about 5 instructions and one ex2 an element,
// a second ex2 where rounding a temperature costs too much or factors are extreme (quick_gradient.cuh);
// with a softcap about 20, one ex2 and one reciprocal (softcap.cuh). A softcap whose factors are
// extreme takes tanhf.
// Measured (bench/results/h200/losses.json), as a share of the copy: 101 to 102%, rows off alignment
// 96%, softcap 83%, softcap off alignment 76%.
#include "kernels/cross_entropy.h"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/quick_gradient.cuh"
#include "kernels/cuda/loss/softcap.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {
namespace {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardVectors = 4;  // of a thread, all loaded at once
constexpr int kBackwardResident = 4;
// From so many batches on, a chunk is several: what a chunk costs besides its elements then weighs
// less, and there are still chunks for many waves of blocks.
constexpr int64_t kManyBatches = 8192;
constexpr int64_t kMostBatches = 4;  // of a chunk

// Blocks take chunks of a row: blockIdx.x = row * chunks + chunk. A chunk is `batches` times as many
// vectors as a block loads at once.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardResident)
    BackwardKernel(const __grid_constant__ CrossEntropyBackwardArgs args, int chunks, int batches) {
  constexpr int kTake = kVector<T>;
  const int64_t r = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x - r * chunks);
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const T* from = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  T* to = static_cast<T*>(args.d_logits.data) + r * args.d_logits.row_stride;
  const CrossEntropyRow& ask = args.rows[r];
  __shared__ Gradient gradient_of_row;
  __shared__ PlainGradient plain_of_row;
  __shared__ CappedGradient capped_of_row;
  __shared__ MildTanh<T> tanh_of_row;

  // Vectors begin where the output is aligned. The first chunk takes the few elements before them.
  const int head =
      min(vocab, static_cast<int>((-reinterpret_cast<uintptr_t>(to) & 15) / sizeof(T)));
  const bool aligned = (reinterpret_cast<uintptr_t>(from + head) & 15) == 0;
  constexpr int kStep = kBackwardThreads * kTake;
  constexpr int kBatch = kBackwardVectors * kStep;
  int first = head + chunk * batches * kBatch + static_cast<int>(threadIdx.x) * kTake;
  uint4 vectors[kBackwardVectors];
  const auto load = [&](int at) {
    if (at + kTake > vocab) return uint4{};
    return aligned ? __ldcs(reinterpret_cast<const uint4*>(from + at))
                   : LoadVector(from + at, false, kTake);
  };
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) vectors[i] = load(first + i * kStep);
  // In double, by one thread, while the vectors are loaded.
  const int target = ask.target;
  const bool active = ask.active != 0;
  if (threadIdx.x == 0) {
    const Gradient row = Gradient::Of(ask, args.logsumexp[r], args.upstream[r], args.logits.cols);
    gradient_of_row = row;
    plain_of_row = PlainGradient::Of(row);
    capped_of_row = CappedGradient::Of(row, ask.softcap);
  } else if (threadIdx.x == 32 && ask.softcap > 0) {
    tanh_of_row = MildTanh<T>::Of(ask.softcap);
  }
  // Read before the barrier, as a thread may write over it in place after it.
  const int begin_of_chunk = head + chunk * batches * kBatch;
  const bool has_target =
      target >= 0 &&
      (target < head ? chunk == 0
                     : target >= begin_of_chunk && target < begin_of_chunk + batches * kBatch);
  const float target_logit = has_target ? ToFloat(from[target]) : 0.0f;
  __syncthreads();
  if (!active) return;
  const Gradient gradient = gradient_of_row;
  // at(logit, is_target) of words brought in order by prepare(word).
  const auto write_one = [&](int j, auto prepare, auto at) {
    const uint32_t word = prepare(WordOf(from[j]));
    to[j] = FromFloat<T>(at(WordElement<T>(&word, 0), j == target));
  };
  const auto write = [&](auto prepare, auto at) {
    if (chunk == 0 && static_cast<int>(threadIdx.x) < head)
      write_one(static_cast<int>(threadIdx.x), prepare, at);
#pragma unroll 1
    for (int left = batches;; first += kBatch) {
      --left;
#pragma unroll
      for (int i = 0; i < kBackwardVectors; ++i) {
        const int begin = first + i * kStep;
        if (begin >= vocab) return;
        if (begin + kTake > vocab) {  // the row's last elements
          for (int j = begin; j < vocab; ++j) write_one(j, prepare, at);
          return;
        }
        const uint32_t words[4] = {prepare(vectors[i].x), prepare(vectors[i].y),
                                   prepare(vectors[i].z), prepare(vectors[i].w)};
        if (left > 0) vectors[i] = load(begin + kBatch);
        const int place = target - begin;
        __stcs(reinterpret_cast<uint4*>(to + begin), GradientsOf<T>(words, place, at));
      }
      if (left == 0) return;
    }
  };
  const auto as_is = [](uint32_t word) { return word; };
  if (target < 0) {
    write(as_is, [](float, bool) { return 0.0f; });
  } else if (plain_of_row.serves) {
    const PlainGradient plain = plain_of_row;
    if (has_target) {
      const float of_target = gradient.At<false>(target_logit, true);
      write(as_is,
            [&](float logit, bool is_target) { return is_target ? of_target : plain.At(logit); });
    } else {
      write(as_is, [&](float logit, bool) { return plain.At(logit); });
    }
  } else if (gradient.cap.on() && capped_of_row.serves) {
    const CappedGradient capped = capped_of_row;
    const MildTanh<T> tanh = tanh_of_row;
    const auto bounded = [&](uint32_t word) { return tanh.Bounded(word); };
    if (has_target) {
      const float of_target = gradient.At<true>(target_logit, true);
      write(bounded, [&](float logit, bool is_target) {
        return is_target ? of_target : capped.At(tanh.OfBounded(logit));
      });
    } else {
      write(bounded, [&](float logit, bool) { return capped.At(tanh.OfBounded(logit)); });
    }
  } else if (gradient.cap.on()) {
    write(as_is, [&](float logit, bool is_target) { return gradient.At<true>(logit, is_target); });
  } else {
    write(as_is, [&](float logit, bool is_target) { return gradient.At<false>(logit, is_target); });
  }
}

}  // namespace

cudaError_t CrossEntropyBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  return VisitDType(args.logits.dtype, [&]<class T>() {
    constexpr int64_t kBatch = kBackwardThreads * kBackwardVectors * kVector<T>;
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
