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

// Moves every word `by` words down, by < 2 * kStep; the first words come to the end. kCount is a
// power of two.
template <int kCount, int kStep = kCount / 2>
__device__ inline void RotateDown(uint32_t by, uint32_t (&words)[kCount]) {
  if constexpr (kStep > 0) {
    const bool move = (by & kStep) != 0;
    uint32_t old[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) old[i] = words[i];
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = move ? old[(i + kStep) % kCount] : old[i];
    RotateDown<kCount, kStep / 2>(by, words);
  }
}

// The kCount words that begin `bytes` bytes into two blocks, bytes <= 4 * kCount, of which both
// have been rotated by bytes / 4 words.
template <int kCount>
__device__ inline void TakeFrom(const uint32_t (&first)[kCount], const uint32_t (&second)[kCount],
                                uint32_t bytes, uint32_t (&taken)[kCount]) {
  const int skipped = static_cast<int>(bytes / 4);
  uint32_t words[kCount + 1];
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = i + skipped < kCount ? first[i] : second[i];
  words[kCount] = second[0];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    taken[i] = __funnelshift_r(words[i], words[i + 1], bytes % 4 * 8);
}

// Calls take.operator()<kWord>() with kWord = word, in [kFirst, kFirst + kCount) and the same in
// all lanes: a shift by whole words is then a choice of registers. kCount is a power of two.
template <int kCount, int kFirst = 0, class Take>
__device__ inline void WithWord(uint32_t word, const Take& take) {
  if constexpr (kCount == 1) {
    take.template operator()<kFirst>();
  } else if (word < kFirst + kCount / 2) {
    WithWord<kCount / 2, kFirst>(word, take);
  } else {
    WithWord<kCount / 2, kFirst + kCount / 2>(word, take);
  }
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

// The turns in which the lanes of a row hold its vectors: E elements a lane in each. What a warp
// can know of them without a look at its lanes, so that it goes one way. kOneWarp: a warp holds
// whole rows, and many of them have nothing in some turns. Most warps of a longer row see all of
// their turns or none; for them a look at each turn costs more than it saves.
template <int E, int kLanes, bool kOneWarp>
struct Turns {
  static constexpr int kHeld = kLanes * E;  // elements of a turn

  int base;  // the first turn's first element
  int keys;
  Seen seen;

  // False: nothing of turn v is seen.
  __device__ bool Some(int v) const {
    if constexpr (!kOneWarp) return true;
    const int begin = base + v * kHeld;
    if constexpr (kLanes == 32) return seen.Some<kHeld>(begin);
    return begin < keys;  // the lanes of a warp hold several rows
  }
  // False: nothing of the first kCount turns is seen.
  template <int kCount>
  __device__ bool SomeOf() const {
    return kOneWarp || seen.Some<kCount * kHeld>(base);
  }
  // True: the row has ended before turn v; a vector of it may begin less than E elements earlier.
  __device__ bool AreOver(int v) const {
    return kOneWarp && base + v * kHeld >= keys + (v == 0 ? 0 : E - 1);
  }
  __device__ Turns From(int v) const { return {base + v * kHeld, keys, seen}; }
};

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

  // Turns blocks into vectors, where something of them is seen.
  template <bool kOneWarp>
  __device__ void Align(const T* row, const Turns<E, kLanes, kOneWarp>& turns) {
    const uint32_t bytes = Offset(row) * static_cast<uint32_t>(sizeof(T));
    if constexpr (kLanes == 32) {
      if (bytes == 0) return;
      return WithWord<kBlockWords>(bytes / 4,
                                   [&]<int kWord>() { AlignBy<kWord>(bytes % 4 * 8, turns); });
    }
    const int lane = threadIdx.x % 32;
    const int place = lane % kLanes;
    const int next = place + 1 == kLanes ? lane + 1 - kLanes : lane + 1;
    RotateDown(bytes / 4, words[0]);
    if (turns.Some(kCount - 1)) RotateDown(bytes / 4, beyond);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!turns.Some(v)) break;
      if (v + 1 < kCount) RotateDown(bytes / 4, words[min(v + 1, kCount - 1)]);
      uint32_t rest[kBlockWords];
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) {
        const uint32_t given =
            v + 1 < kCount && place == 0 ? words[min(v + 1, kCount - 1)][w] : words[v][w];
        rest[w] = __shfl_sync(kFullWarp, given, next);
        if (v + 1 == kCount && place + 1 == kLanes) rest[w] = beyond[w];
      }
      TakeFrom(words[v], rest, bytes, words[v]);
    }
  }

 private:
  // Align() where all lanes hold one row: vectors begin `bits` after word kWord of their block.
  template <int kWord, bool kOneWarp>
  __device__ void AlignBy(uint32_t bits, const Turns<E, kLanes, kOneWarp>& turns) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!turns.Some(v)) continue;
      uint32_t two[kBlockWords + kWord + 1];
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) two[w] = words[v][w];
#pragma unroll
      for (int w = 0; w <= kWord; ++w) {
        const uint32_t given =
            v + 1 < kCount && lane == 0 ? words[min(v + 1, kCount - 1)][w] : words[v][w];
        uint32_t taken = __shfl_sync(kFullWarp, given, (lane + 1) % 32);
        if (v + 1 == kCount && lane == 31) taken = beyond[w];
        two[kBlockWords + w] = taken;
      }
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w)
        words[v][w] = __funnelshift_r(two[kWord + w], two[kWord + w + 1], bits);
    }
  }
};

// Vectors, each loaded as the words that hold it. A lane needs nothing of other lanes. A part
// of memory that several loads touch is read once, and then it is in the L1 cache.
template <class T, int E, int kLanes, int kCount>
struct Words {
  static constexpr int kBlockWords = kWords<T, E>;
  static constexpr int kOfWord = 4 / static_cast<int>(sizeof(T));
  uint32_t words[kCount][kBlockWords];
  uint32_t after[kCount];  // the word after them, where vectors do not begin with a word

  // Starts the loads of the words with an element that is seen.
  __device__ void Load(const T* row, const Seen& seen, int first) {
    const int skipped = ElementsBefore(row);
    const auto* from = reinterpret_cast<const uint32_t*>(row - skipped) + first / kOfWord;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int index = first + v * kLanes * E;
      const uint32_t* at = from + v * kLanes * kBlockWords;
      if (seen.All<E>(index)) {
#pragma unroll
        for (int w = 0; w < kBlockWords; ++w) words[v][w] = at[w];
        if (skipped != 0) after[v] = at[kBlockWords];
      } else if (seen.Some<E>(index)) {
#pragma unroll
        for (int w = 0; w <= kBlockWords; ++w) {
          if (!seen.Some<kOfWord>(index - skipped + w * kOfWord)) continue;
          (w < kBlockWords ? words[v][min(w, kBlockWords - 1)] : after[v]) = at[w];
        }
      }
    }
  }

  // Turns words into vectors, where something of them is seen.
  template <bool kOneWarp>
  __device__ void Align(const T* row, const Turns<E, kLanes, kOneWarp>& turns) {
    if constexpr (kOfWord == 1) return;
    const uint32_t bits = ElementsBefore(row) * 8 * static_cast<uint32_t>(sizeof(T));
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!turns.Some(v)) continue;
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) {
        const uint32_t next =
            w + 1 < kBlockWords ? words[v][min(w + 1, kBlockWords - 1)] : after[v];
        words[v][w] = __funnelshift_r(words[v][w], next, bits);
      }
    }
  }

  // Elements between the begin of a word and the row's first element in that word.
  __device__ static int ElementsBefore(const T* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 4 / sizeof(T));
  }
};

// How the vectors of rows at any alignment are loaded and stored.
enum class Access {
  kBlocks,     // blocks of 16 bytes; lanes exchange the ends of their vectors
  kLoadWords,  // loaded as Words, stored as blocks
  kWords,      // both by words
};

// A warp whose rows have few lanes each touches many parts of memory with one load of words, and
// writes each of them in parts. Blocks of f32, 4 elements, also cost little to exchange.
constexpr Access AccessOf(int elements, int lanes) {
  if (elements < 8) return Access::kBlocks;
  return lanes >= 16 ? Access::kWords : lanes >= 8 ? Access::kLoadWords : Access::kBlocks;
}

// What holds vectors that are loaded so.
template <class T, int E, Access kAccess, int kLanes, int kCount>
using Loaded = std::conditional_t<kAccess == Access::kBlocks, Blocks<T, E, kLanes, kCount>,
                                  Words<T, E, kLanes, kCount>>;

// The aligned block that holds the rest of the vector before `words` and the begin of that one,
// where all lanes hold one row: a lane's vectors begin `bits` after word kWord of the block before.
// The vector before is in the lane before; for the first lane it is the last lane's `previous`.
template <int kWord, int kCount>
__device__ inline void TakeBlock(const uint32_t (&words)[kCount],
                                 const uint32_t (&previous)[kCount], uint32_t bits,
                                 uint32_t (&block)[kCount]) {
  const int lane = threadIdx.x % 32;
  uint32_t two[kCount + kWord + 1];
#pragma unroll
  for (int w = kWord; w < kCount; ++w)
    two[w] = __shfl_sync(kFullWarp, lane == 31 ? previous[w] : words[w], (lane + 31) % 32);
#pragma unroll
  for (int w = 0; w <= kWord; ++w) two[kCount + w] = words[w];
#pragma unroll
  for (int w = 0; w < kCount; ++w)
    block[w] = __funnelshift_r(two[kWord + w], two[kWord + w + 1], bits);
}

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
// lane's v-th vector, where something of its turn is seen; all else is 0.
template <class T, int E, int kLanes, int kCount, bool kOneWarp, class Vector>
__device__ inline void StoreBlocks(T* row, bool active, int first,
                                   const Turns<E, kLanes, kOneWarp>& turns, Vector vector) {
  constexpr int kBlockWords = kWords<T, E>;
  const int lane = threadIdx.x % 32;
  const int place = lane % kLanes;
  const int before = place == 0 ? lane + kLanes - 1 : lane - 1;
  const uint32_t bytes = reinterpret_cast<uintptr_t>(row) % (4 * kBlockWords);
  const uint32_t shift = 4 * kBlockWords - bytes;
  const int offset = static_cast<int>(bytes / sizeof(T));
  const auto write = [&](int v, const uint32_t(&block)[kBlockWords]) {
    const int index = first + v * turns.kHeld;
    const int begin = v == 0 && place == 0 ? index : index - offset;
    const int end = min(v < kCount ? index - offset + E : place == 0 ? index : 0, turns.keys);
    if (!active || begin >= end) return;
    T* to = row + (index - offset);
    if (end - begin == E) {
      StoreAligned(to, block);
    } else {
      const uint32_t from = begin - (index - offset);
      const uint32_t written = (1u << (end - (index - offset))) - (1u << from);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if ((written >> e & 1) != 0) StoreElement(to + e, block, e);
      }
    }
  };
  if (!turns.template SomeOf<kCount>()) {
#pragma unroll
    for (int v = 0; v <= kCount; ++v) write(v, {});
    return;
  }
  uint32_t previous[kBlockWords] = {};
#pragma unroll
  for (int v = 0; v <= kCount; ++v) {  // the last turn: the rest of the last lane's last vector
    if (turns.AreOver(v)) break;
    uint32_t block[kBlockWords] = {};
    const bool makes = v < kCount && turns.Some(v);
    if (makes || (v > 0 && turns.Some(v - 1))) {
      uint32_t words[kBlockWords] = {};
      if (makes) vector(v, words);
      if constexpr (kLanes == 32) {
        if (bytes == 0) {
#pragma unroll
          for (int w = 0; w < kBlockWords; ++w) block[w] = words[w];
        } else {
          WithWord<kBlockWords>(shift / 4, [&]<int kWord>() {
            TakeBlock<kWord>(words, previous, shift % 4 * 8, block);
          });
        }
      } else {
        RotateDown(shift / 4 % kBlockWords, words);
        uint32_t rest[kBlockWords];
#pragma unroll
        for (int w = 0; w < kBlockWords; ++w)
          rest[w] = __shfl_sync(kFullWarp, place + 1 == kLanes ? previous[w] : words[w], before);
        TakeFrom(rest, words, shift, block);
      }
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) previous[w] = words[w];
    }
    write(v, block);
  }
}

// The same, a word at a time: a lane needs only the last word of the lane before.
template <class T, int E, int kLanes, int kCount, bool kOneWarp, class Vector>
__device__ inline void StoreWords(T* row, bool active, int first,
                                  const Turns<E, kLanes, kOneWarp>& turns, Vector vector) {
  constexpr int kBlockWords = kWords<T, E>;
  constexpr int kOfWord = 4 / static_cast<int>(sizeof(T));
  constexpr int kTurns = kOfWord == 1 ? kCount : kCount + 1;
  const int lane = threadIdx.x % 32;
  const int place = lane % kLanes;
  const int before = place == 0 ? lane + kLanes - 1 : lane - 1;
  const int skipped = Words<T, E, kLanes, kCount>::ElementsBefore(row);
  const uint32_t bits = skipped * 8 * static_cast<uint32_t>(sizeof(T));
  auto* const to = reinterpret_cast<uint32_t*>(row - skipped) + first / kOfWord;
  uint32_t previous = 0;
#pragma unroll
  for (int v = 0; v < kTurns; ++v) {  // the last turn: the rest of the last lane's last vector
    if (turns.AreOver(v)) break;
    uint32_t words[kBlockWords] = {};
    if (v < kCount && turns.Some(v)) vector(v, words);
    if constexpr (kOfWord > 1) {
      const uint32_t last = words[kBlockWords - 1];
      const uint32_t lead = __shfl_sync(kFullWarp, place + 1 == kLanes ? previous : last, before);
#pragma unroll
      for (int w = kBlockWords - 1; w >= 0; --w)
        words[w] = __funnelshift_l(w == 0 ? lead : words[max(w - 1, 0)], words[w], bits);
      previous = last;
    }
    const int index = first + v * turns.kHeld;
    const int begin = v == 0 && place == 0 ? index : index - skipped;
    const int end = min(v < kCount ? index - skipped + E : place == 0 ? index : 0, turns.keys);
    if (!active || begin >= end) continue;
    uint32_t* const at = to + v * kLanes * kBlockWords;
    if (end - begin == E) {
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) at[w] = words[w];
    } else {
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) {
        const int element = index - skipped + w * kOfWord;
        if (element >= begin && element + kOfWord <= end) {
          at[w] = words[w];
        } else if constexpr (kOfWord == 2) {
          auto* const halves = reinterpret_cast<uint16_t*>(at + w);
          if (element >= begin && element < end) halves[0] = static_cast<uint16_t>(words[w]);
          if (element + 1 >= begin && element + 1 < end)
            halves[1] = static_cast<uint16_t>(words[w] >> 16);
        }
      }
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

// A lane's kCount vectors of a row: those of kLanes lanes are neighbours, and the first lane's
// first one begins at element `base`. kAligned: every vector of every row is whole and aligned.
// kAccess: of other rows. kOneWarp: see Turns.
template <class In, class Out, bool kAligned, Access kAccess, int kLanes, int kCount, bool kOneWarp>
struct LaneVectors {
  static constexpr int E = kElements<In, Out>;
  using Raw = Loaded<In, E, kAligned ? Access::kBlocks : kAccess, kLanes, kCount>;

  int base;   // the same in a warp
  int first;  // of this lane

  // `base` of the lanes' first vectors.
  __device__ explicit LaneVectors(int warp_base)
      : base(warp_base), first(warp_base + static_cast<int>(threadIdx.x % kLanes) * E) {}

  __device__ Turns<E, kLanes, kOneWarp> TurnsOf(const PassRows& rows, const Row& row) const {
    return {base, rows.keys, row.seen};
  }
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

  // Writes vectors to `out` that the row's query sees a part of, and zeros where WriteUnseen() has
  // not. vector(v, values) makes the lane's v-th vector. By whole warps.
  template <class Vector>
  __device__ void Store(const PassRows& rows, const Row& row, Out* out, Vector vector) const {
    const auto packed = [&](int v, uint32_t(&words)[kWords<Out, E>]) {
      if (!row.seen.Some<E>(Index(v))) return;
      float values[E];
      vector(v, values);
      Pack<Out, E>(values, words);
    };
    if constexpr (kAligned) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        uint32_t words[kWords<Out, E>];
        packed(v, words);
        if (row.seen.Some<E>(Index(v))) StoreAligned(out + Index(v), words);
      }
    } else if constexpr (kAccess == Access::kWords) {
      StoreWords<Out, E, kLanes, kCount>(out, row.in_pass, first, TurnsOf(rows, row), packed);
    } else {
      StoreBlocks<Out, E, kLanes, kCount>(out, row.in_pass, first, TurnsOf(rows, row), packed);
    }
  }
};

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_VECTORS_CUH_
