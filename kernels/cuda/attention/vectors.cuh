// Rows in memory as vectors of a few elements, loaded and stored at any alignment.
//
// A vector is 16 bytes of the wider of input and output. Vectors are counted from the row's start,
// never from an address. So which element a thread holds depends only on the element's index.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_VECTORS_CUH_
#define LOGITD_KERNELS_CUDA_ATTENTION_VECTORS_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/attention/rows.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/reductions.cuh"

namespace logitd::cuda::attention {

// Elements of a vector.
template <class In, class Out>
constexpr int kElements = 16 / static_cast<int>(std::max(sizeof(In), sizeof(Out)));

inline int ElementsOf(DType in, DType out) {
  return 16 / static_cast<int>(std::max(SizeOf(in), SizeOf(out)));
}

template <class T, int E>
constexpr int kWords = E* static_cast<int>(sizeof(T)) / 4;

// Shifts `shifted` down by `words` words, words < 2 * kStep. kStep is a power of two.
template <int kStep, int kCount>
__device__ inline void ShiftDown(uint32_t words, uint32_t (&shifted)[kCount]) {
  // A mask, not a choice of words: for choices the compiler makes a lookup in memory.
  const uint32_t by = (words & kStep) != 0 ? ~0u : 0u;
#pragma unroll
  for (int i = 0; i + kStep < kCount; ++i)
    shifted[i] = (shifted[i] & ~by) | (shifted[i + kStep] & by);
  if constexpr (kStep > 1) ShiftDown<kStep / 2>(words, shifted);
}

// The kCount words that begin `bytes` bytes into two blocks, bytes <= 4 * kCount.
template <int kCount>
__device__ inline void TakeFrom(const uint32_t (&two)[2 * kCount], uint32_t bytes,
                                uint32_t (&words)[kCount]) {
  uint32_t shifted[2 * kCount + 1];
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) shifted[i] = two[i];
  shifted[2 * kCount] = 0;
  ShiftDown<kCount>(bytes / 4, shifted);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    words[i] = __funnelshift_r(shifted[i], shifted[i + 1], bytes % 4 * 8);
}

// kStream: the words are read once, and need not stay in a cache.
template <bool kStream, int kCount>
__device__ inline void LoadAligned(const void* from, uint32_t (&words)[kCount]) {
  const auto load = [&](auto* vectors, int i) {
    return kStream ? __ldcs(vectors + i) : vectors[i];
  };
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const uint4 v = load(static_cast<const uint4*>(from), i);
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
  } else if constexpr (kCount == 2) {
    const uint2 v = load(static_cast<const uint2*>(from), 0);
    words[0] = v.x;
    words[1] = v.y;
  } else {
    static_assert(kCount == 1);
    words[0] = load(static_cast<const uint32_t*>(from), 0);
  }
}

// ---- shifts in shared memory -------------------------------------------------------------------

// A row of a warp that begins anywhere is shifted by way of shared memory, in which a vector is
// followed by a word that is not used. So lanes that each read a word of their vectors, from any word
// on, find them in different banks. The shift is in addresses, so that warps whose rows are shifted
// differently run the same instructions.
constexpr int kShiftVectors = 4;                               // of a lane, at a time
constexpr int kShiftWords = (kShiftVectors * 32 + 1) * 5 + 3;  // of a warp, for vectors of 4 words
constexpr int kShiftBytes = 4 * kShiftWords;

__device__ inline uint32_t* ShiftSpaceOfWarp() {
  extern __shared__ uint32_t shift_space[];
  return shift_space + threadIdx.x / 32 * kShiftWords;
}

// The lane's vector in a place of kWordsOfVector words, `bytes` after the begin of vector `lane`;
// the same for the vectors of the next turns of 32 lanes.
template <int kWordsOfVector>
class Shifted {
 public:
  // bytes <= 4 * kWordsOfVector
  __device__ explicit Shifted(const uint32_t* space, uint32_t bytes) : bits_(bytes % 4 * 8) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i <= kWordsOfVector; ++i) {
      const int word = static_cast<int>(bytes / 4) + i;
      from_[i] = space + lane * (kWordsOfVector + 1) + word + (word >= kWordsOfVector ? 1 : 0);
    }
  }

  template <bool kWholeWords>  // bytes is a multiple of 4
  __device__ void Take(int turn, uint32_t (&words)[kWordsOfVector]) const {
    const int step = turn * 32 * (kWordsOfVector + 1);
    uint32_t read[kWordsOfVector + 1];
#pragma unroll
    for (int i = 0; i < kWordsOfVector + (kWholeWords ? 0 : 1); ++i) read[i] = from_[i][step];
#pragma unroll
    for (int i = 0; i < kWordsOfVector; ++i)
      words[i] = kWholeWords ? read[i] : __funnelshift_r(read[i], read[i + 1], bits_);
  }

 private:
  const uint32_t* from_[kWordsOfVector + 1];
  uint32_t bits_;
};

// Puts a vector in place `place` of the warp's shift space.
template <int kWordsOfVector>
__device__ inline void PutForShift(uint32_t* space, int place,
                                   const uint32_t (&words)[kWordsOfVector]) {
#pragma unroll
  for (int w = 0; w < kWordsOfVector; ++w) space[place * (kWordsOfVector + 1) + w] = words[w];
}

// kCount vectors of E elements of a row, loaded at any alignment by all lanes of a warp. The
// vectors of each kLanes lanes are neighbours. A lane loads the aligned block where its vector
// begins. The rest of the vector is in the block of the next lane; for the last lane, in the first
// lane's next block.
template <class T, int E, int kLanes, int kCount>
struct Blocks {
  static constexpr int kBlockWords = kWords<T, E>;
  uint32_t words[kCount][kBlockWords];
  uint32_t beyond[kBlockWords];  // only in the last lane: the block after its last one

  // Elements between the begin of a block and the row's first element in that block.
  __device__ static int Offset(const T* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % (4 * kBlockWords) / sizeof(T));
  }

  // Starts the loads of the blocks with an element that is seen. No other block is read, except the
  // first one of a row whose query sees nothing.
  __device__ void Load(const T* row, const Seen& seen, int first) {
    const int begin = first - Offset(row);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int index = begin + v * kLanes * E;
      if (seen.Some<E>(index)) LoadAligned<false>(row + index, words[v]);
    }
    const int index = begin + (kCount - 1) * kLanes * E + E;
    if (threadIdx.x % kLanes == kLanes - 1 && seen.Some<E>(index))
      LoadAligned<false>(row + index, beyond);
  }

  // Turns the blocks of a warp's row into vectors, where the query sees some of them.
  __device__ void AlignRow(const T* row, const Seen& seen, int first) {
    static_assert(kLanes == 32);
    constexpr int kTogether = std::min(kShiftVectors, kCount);
    static_assert(kCount % kTogether == 0);
    const uint32_t bytes = Offset(row) * static_cast<uint32_t>(sizeof(T));
    if (bytes == 0) return;
    uint32_t* space = ShiftSpaceOfWarp();
    const Shifted<kBlockWords> shifted(space, bytes);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kTogether) {
      if (!seen.Some<kTogether * 32 * E>(first + (begin * 32 - lane) * E)) continue;
      __syncwarp();
#pragma unroll
      for (int v = 0; v < kTogether; ++v) PutForShift(space, v * 32 + lane, words[begin + v]);
      if (begin + kTogether < kCount) {
        if (lane == 0)
          PutForShift(space, kTogether * 32, words[std::min(begin + kTogether, kCount - 1)]);
      } else if (lane == 31) {
        PutForShift(space, kTogether * 32, beyond);
      }
      __syncwarp();
#pragma unroll
      for (int v = 0; v < kTogether; ++v)
        shifted.template Take<sizeof(T) == 4>(v, words[begin + v]);
    }
  }

  // Turns blocks into vectors; the warp's rows may differ in their alignment.
  __device__ void Align(const T* row) {
    const uint32_t bytes = Offset(row) * static_cast<uint32_t>(sizeof(T));
    const int lane = threadIdx.x % 32;
    const int place = lane % kLanes;
    const int next = place + 1 == kLanes ? lane + 1 - kLanes : lane + 1;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      uint32_t two[2 * kBlockWords];
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) {
        two[w] = words[v][w];
        const uint32_t given =
            v + 1 < kCount && place == 0 ? words[min(v + 1, kCount - 1)][w] : words[v][w];
        two[kBlockWords + w] = __shfl_sync(kFullWarp, given, next);
        if (v + 1 == kCount && place + 1 == kLanes) two[kBlockWords + w] = beyond[w];
      }
      TakeFrom<kBlockWords>(two, bytes, words[v]);
    }
  }
};

template <int kCount>
__device__ inline void StoreAligned(void* to, const uint32_t (&words)[kCount]) {
  if constexpr (kCount == 4) {
    __stcs(static_cast<uint4*>(to), uint4{words[0], words[1], words[2], words[3]});
  } else {
    static_assert(kCount == 2);
    __stcs(static_cast<uint2*>(to), uint2{words[0], words[1]});
  }
}

template <class T>
__device__ inline void StoreElement(T* to, const uint32_t* words, int e) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint32_t*>(to) = words[e];
  } else {
    static_assert(sizeof(T) == 2);
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
  }
}

// Writes kCount vectors of E elements of a row at any alignment, by all lanes of a warp, dealt out
// as in Blocks: a lane writes the aligned block where its vector begins. vector(v, words) makes the
// lane's v-th vector.
template <class T, int E, int kLanes, int kCount, class Vector>
__device__ inline void StoreBlocks(T* row, bool active, int first, int length, Vector vector) {
  constexpr int kBlockWords = kWords<T, E>;
  const int lane = threadIdx.x % 32;
  const int place = lane % kLanes;
  const int before = place == 0 ? lane + kLanes - 1 : lane - 1;
  const uint32_t bytes = reinterpret_cast<uintptr_t>(row) % (4 * kBlockWords);
  const int offset = static_cast<int>(bytes / sizeof(T));
  uint32_t previous[kBlockWords] = {};
#pragma unroll
  for (int v = 0; v <= kCount; ++v) {  // the last turn: the rest of the last lane's last vector
    uint32_t words[kBlockWords] = {};
    if (v < kCount) vector(v, words);
    uint32_t two[2 * kBlockWords];
#pragma unroll
    for (int w = 0; w < kBlockWords; ++w) {
      two[w] = __shfl_sync(kFullWarp, place + 1 == kLanes ? previous[w] : words[w], before);
      two[kBlockWords + w] = words[w];
      previous[w] = words[w];
    }
    const int index = first + v * kLanes * E;
    const int begin = v == 0 && place == 0 ? index : index - offset;
    const int end = min(v < kCount ? index - offset + E : place == 0 ? index : 0, length);
    if (!active || begin >= end) continue;
    uint32_t block[kBlockWords];
    TakeFrom<kBlockWords>(two, 4 * kBlockWords - bytes, block);
    T* to = row + (index - offset);
    if (end - begin == E) {
      StoreAligned(to, block);
    } else {
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int key = index - offset + e;
        if (key >= begin && key < end) StoreElement(to + e, block, e);
      }
    }
  }
}

// As StoreBlocks, of a row of a whole warp, whose query sees `seen`. Where it sees nothing, zeros are
// written, and vector() is not called.
template <class T, int E, int kCount, class AnySeen, class Vector>
__device__ inline void StoreRow(T* row, const AnySeen& seen, int first, int length, Vector vector) {
  constexpr int kBlockWords = kWords<T, E>;
  constexpr int kTogether = std::min(kShiftVectors, kCount);
  static_assert(kCount % kTogether == 0);
  const int lane = threadIdx.x % 32;
  const uint32_t bytes = reinterpret_cast<uintptr_t>(row) % (4 * kBlockWords);
  const int offset = static_cast<int>(bytes / sizeof(T));
  const int row_tail = (length + offset) / E * E - offset;  // the row's last block, if not whole
  uint32_t* space = ShiftSpaceOfWarp();
  const Shifted<kBlockWords> shifted(space, 4 * kBlockWords - bytes);
  uint32_t last[kBlockWords] = {};
#pragma unroll
  for (int turn = 0; turn < kCount; turn += kTogether) {
    // The vectors of this turn are [begin, end). Written are blocks that begin before end - offset.
    const int begin = first + (turn * 32 - lane) * E;
    const int end = begin + kTogether * 32 * E;
    if (begin - offset >= length) continue;
    const bool zeros = !seen.template Some<(kTogether * 32 + 1) * E>(begin - E);
    if (!zeros) {
      __syncwarp();
      // In place 0 the vector before this turn's.
      if (turn > 0 && lane == 31) PutForShift(space, 0, last);
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        uint32_t words[kBlockWords] = {};
        vector(turn + v, words);
        PutForShift(space, v * 32 + lane + 1, words);
        if (v + 1 < kTogether) continue;
#pragma unroll
        for (int w = 0; w < kBlockWords; ++w) last[w] = words[w];
      }
      __syncwarp();
    }
#pragma unroll
    for (int v = 0; v < kTogether; ++v) {
      const int index = begin - offset + (v * 32 + lane) * E;
      uint32_t words[kBlockWords] = {};
      if (!zeros) shifted.template Take<sizeof(T) == 4>(v, words);
      if (index + E <= length && (turn > 0 || index >= begin)) StoreAligned(row + index, words);
    }
    // The elements of blocks that are not whole: the first of the warp's, the row's last, and the
    // one after the warp's last whole block. Eight lanes each.
    int from = begin, to = begin;
    if (lane < 8) {
      if (turn == 0 && offset > 0) to = min(begin + E - offset, length);
    } else if (lane < 16) {
      from = row_tail;
      to = row_tail < end - offset && row_tail >= (turn == 0 ? begin : begin - offset) ? length : 0;
    } else if (lane < 24 && turn + kTogether == kCount) {
      from = end - offset;
      to = min(end, length);
    }
    from += lane % 8;
    if (from < to) {
      const int place = from - begin + E;
      const T* vectors = reinterpret_cast<const T*>(space + place / E * (kBlockWords + 1));
      row[from] = zeros ? static_cast<T>(0.0f) : vectors[place % E];
    }
  }
}

template <class T, int E>
__device__ inline void Pack(const float* x, uint32_t (&words)[kWords<T, E>]) {
#pragma unroll
  for (int i = 0; i < kWords<T, E>; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = PackPair<T>(x[2 * i], x[2 * i + 1]);
    }
  }
}

// A tensor's rows in memory.
struct Matrix {
  std::byte* data;
  int64_t row_bytes;
  bool whole;  // its rows are whole vectors, each aligned

  template <class T>
  __device__ T* Row(uint32_t row) const {
    return reinterpret_cast<T*>(data + row * row_bytes);
  }
  void Skip(int64_t rows) { data += rows * row_bytes; }
};

// `view` is a TensorView or a MutableTensorView; `elements` those of a vector.
template <class View>
Matrix MatrixOf(const View& view, int64_t keys, int elements) {
  const int64_t size = static_cast<int64_t>(SizeOf(view.dtype));
  const int64_t row_bytes = view.row_stride * size;
  const int64_t bytes = elements * size;  // of a vector
  return {static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data))),
          row_bytes,
          keys % elements == 0 && row_bytes % bytes == 0 &&
              reinterpret_cast<uintptr_t>(view.data) % bytes == 0};
}

// A lane's kCount vectors of a row: the first begins at element `first`, and those of kLanes lanes
// are neighbours. kAligned: every vector of every row is whole and aligned. kShift: else vectors are
// shifted in shared memory, those of a whole warp, for which its launch has kShiftBytes.
template <class In, class Out, bool kAligned, bool kShift, int kLanes, int kCount>
struct LaneVectors {
  static constexpr int E = kElements<In, Out>;

  int first;

  __device__ int Index(int v) const { return first + v * kLanes * E; }

  // Writes zeros to the vectors of `out` that the row's query does not see, while loads are under
  // way. Without kAligned, Store() writes these zeros.
  __device__ void WriteUnseen(const PassRows& rows, const Row& row, Out* out) const {
    if constexpr (kAligned) {
      if (!rows.windowed || !row.in_pass) return;
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        constexpr uint32_t kZeros[kWords<Out, E>] = {};
        if (Index(v) < rows.keys && !row.seen.Some<E>(Index(v)))
          StoreAligned(out + Index(v), kZeros);
      }
    }
  }

  // Writes zeros where WriteUnseen() has not, of a row whose query sees nothing of the warp's part.
  __device__ void StoreNothing(const PassRows& rows, const Row& row, Out* out) const {
    if constexpr (!kAligned) {
      StoreRow<Out, E, kCount>(out, NoneSeen(), first, row.in_pass ? rows.keys : 0,
                               [](int, uint32_t(&)[kWords<Out, E>]) {});
    }
  }

  // Writes vectors to `out` that the row's query sees a part of, and zeros where WriteUnseen() has
  // not. vector(v, values) makes the lane's v-th vector. By whole warps.
  template <class AnyRow, class Vector>
  __device__ void Store(const PassRows& rows, const AnyRow& row, Out* out, Vector vector) const {
    const auto packed = [&](int v, uint32_t(&words)[kWords<Out, E>]) {
      if (!row.seen.template Some<E>(Index(v))) return;
      float values[E];
      vector(v, values);
      Pack<Out, E>(values, words);
    };
    if constexpr (kAligned) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        uint32_t words[kWords<Out, E>];
        packed(v, words);
        if (row.seen.template Some<E>(Index(v))) StoreAligned(out + Index(v), words);
      }
    } else {
      if constexpr (kShift) {
        StoreRow<Out, E, kCount>(out, row.seen, first, row.in_pass ? rows.keys : 0, packed);
      } else {
        StoreBlocks<Out, E, kLanes, kCount>(out, row.in_pass, first, rows.keys, packed);
      }
    }
  }
};

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_VECTORS_CUH_
