// Memory of training for what becomes the gradients G of the logits of all rows, until the products
// for d_hidden and d_weight have read them: chunk by chunk of the vocabulary, each [rows, chunk],
// the first ones in scratch, the others in the memory of d_weight. The products take the last chunk
// first, and the d_weight of a chunk is written over chunks that were taken.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_KEPT_CHUNKS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_KEPT_CHUNKS_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/head.h"
#include "kernels/types.h"

namespace logitd::cuda {

constexpr int kTrainingRows = 64;    // rows are padded to a multiple of it
constexpr int kTrainingTile = 256;   // a chunk has a multiple of so many tokens
constexpr int64_t kKeptElement = 2;  // bytes

// The memory of the chunks.
struct KeptMemory {
  std::byte* first;
  std::byte* others;
  int64_t in_first;     // chunks
  int64_t chunk;        // tokens, a multiple of kTrainingTile; also the stride between rows
  int64_t chunk_bytes;  // of all rows

  template <class T>
  __host__ __device__ T* At(int64_t row, int64_t token) const {
    const int64_t index = token / chunk;
    std::byte* at =
        index < in_first ? first + index * chunk_bytes : others + (index - in_first) * chunk_bytes;
    return reinterpret_cast<T*>(at) + row * chunk + (token - index * chunk);
  }
};

// How the vocabulary is cut. The head and the device fix it.
struct KeptChunks {
  int64_t chunk = 0;   // tokens
  int64_t chunks = 0;  // of the vocabulary
  int64_t hidden_stride = 0;
  int64_t weight_chunk_bytes = 0;  // of d_weight

  // The largest chunk with which as many rows as `hidden` fit: fits(KeptChunks, rows).
  template <class Fits>
  KeptChunks(const HeadView& head, DType d_weight, const Fits& fits) {
    constexpr int64_t kMostChunk = 16384;
    constexpr int64_t kLeastChunk = 2048;
    hidden_stride = RoundUp(head.hidden(), 64);
    const auto set_chunk = [&](int64_t tokens) {
      chunk = tokens;
      chunks = CeilDiv(head.vocab(), chunk);
      weight_chunk_bytes = chunk * head.hidden() * static_cast<int64_t>(SizeOf(d_weight));
    };
    set_chunk(std::min(kMostChunk, RoundUp(head.vocab(), kTrainingTile)));
    while (chunk > kLeastChunk && !fits(*this, head.hidden()))
      set_chunk(RoundUp(chunk / 2, kTrainingTile));
  }

  static int64_t Padded(int64_t rows) { return RoundUp(rows, kTrainingRows); }
  int64_t ChunkBytes(int64_t rows) const { return Padded(rows) * chunk * kKeptElement; }

  // Chunks that are in scratch. d_weight of a chunk, which is written while its G is read and after
  // all later ones, must not meet the G of it and the earlier ones.
  int64_t InFirst(int64_t rows) const {
    if (ChunkBytes(rows) <= weight_chunk_bytes) return 1;
    return chunks - (chunks - 1) * weight_chunk_bytes / ChunkBytes(rows);
  }

  // first: scratch of InFirst(rows) * ChunkBytes(rows) bytes.
  KeptMemory Memory(int64_t rows, std::byte* first, const MutableTensorView& d_weight) const {
    return {.first = first,
            .others = static_cast<std::byte*>(d_weight.data),
            .in_first = InFirst(rows),
            .chunk = chunk,
            .chunk_bytes = ChunkBytes(rows)};
  }
};

// True where a product can write d_weight, and its memory has no gaps that belong to others.
inline bool HoldsKeptChunks(const MutableTensorView& d_weight, int64_t hidden) {
  return d_weight.data != nullptr && reinterpret_cast<uintptr_t>(d_weight.data) % 16 == 0 &&
         hidden * static_cast<int64_t>(SizeOf(d_weight.dtype)) % 16 == 0 &&
         d_weight.row_stride == hidden;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_KEPT_CHUNKS_H_
