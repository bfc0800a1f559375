// A cell: 1024 consecutive elements of a row in the registers of one warp, and their softmax
// statistics.
//
// Every op that sums over a row sums it by cells, and merges cells in one fixed order. Cells are
// counted from the row's start, never from an address, and which element a lane holds depends only
// on the index. So a row's bits are the same whichever warp, block or grid shape reads it, at any
// alignment.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CELL_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_CELL_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/exponential.cuh"
#include "kernels/cuda/rows/reductions.cuh"

namespace logitd::cuda {

constexpr int kCell = 1024;
constexpr int kLaneElements = kCell / 32;
constexpr int kSums = 4;  // a lane adds its elements up in this many chains
constexpr int kSumElements = kLaneElements / kSums;
// A quarter of a cell: what the lanes add up in one of their chains.
constexpr int kQuarter = kCell / kSums;

constexpr int CellsOf(int elements) { return (elements + kCell - 1) / kCell; }

// Place in the cell of a lane's e-th element: 16-byte vectors, interleaved over the lanes.
template <class T>
__device__ constexpr int CellIndex(int lane, int e) {
  return (e / kVector<T>)*32 * kVector<T> + lane * kVector<T> + e % kVector<T>;
}

// A word of elements that are -inf.
template <class T>
constexpr uint32_t kMinusInfinities = sizeof(T) == 4                     ? 0xff800000u
                                      : std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u
                                                                         : 0xfc00fc00u;

// A lane's elements of a cell, as they are in memory.
template <class T>
struct LaneCell {
  static constexpr int kPerWord = 4 / sizeof(T);
  uint32_t words[kLaneElements / kPerWord];

  __device__ float operator[](int e) const { return WordElement<T>(words, e); }

  __device__ void SetVector(int v, uint4 vector) {
    words[4 * v] = vector.x;
    words[4 * v + 1] = vector.y;
    words[4 * v + 2] = vector.z;
    words[4 * v + 3] = vector.w;
  }
  __device__ uint4 Vector(int v) const {
    return {words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]};
  }
  // Reads the lane's vectors of a whole, aligned cell; `vectors` is the lane's first.
  __device__ void Read(const uint4* vectors) {
#pragma unroll
    for (int v = 0; v < kLaneElements / kVector<T>; ++v) SetVector(v, vectors[32 * v]);
  }

  // The largest of `count` elements from `first` on; -inf where all are NaN.
  __device__ float Max(int first, int count) const {
    if constexpr (sizeof(T) == 4) {
      float max = (*this)[first];
#pragma unroll
      for (int e = 1; e < count; ++e) max = fmaxf(max, (*this)[first + e]);
      return fmaxf(max, -kInfinity);
    } else {
      using Pair = PairOf<T>;
      Pair max = reinterpret_cast<const Pair&>(words[first / 2]);
#pragma unroll
      for (int e = 2; e < count; e += 2)
        max = __hmax2(max, reinterpret_cast<const Pair&>(words[(first + e) / 2]));
      return fmaxf(fmaxf(ToFloat(max.x), ToFloat(max.y)), -kInfinity);
    }
  }
};

// The largest element of a vector, then of several: as it is in memory, 16-bit types as two.
template <class T>
class LargestOf {
 public:
  LargestOf() = default;
  __device__ LargestOf(const LaneCell<T>& x, int vector) {
    word_ = x.words[4 * vector];
#pragma unroll
    for (int w = 1; w < 4; ++w) Raise(x.words[4 * vector + w]);
  }
  __device__ void Merge(const LargestOf& other) { Raise(other.word_); }
  // That of the lane `distance` away.
  __device__ LargestOf Swapped(int distance) const {
    LargestOf there;
    there.word_ = __shfl_xor_sync(kFullWarp, word_, distance);
    return there;
  }
  // -inf where all elements are NaN.
  __device__ float ToFloat() const {
    if constexpr (sizeof(T) == 4) {
      return fmaxf(__uint_as_float(word_), -kInfinity);
    } else {
      return fmaxf(fmaxf(WordElement<T>(&word_, 0), WordElement<T>(&word_, 1)), -kInfinity);
    }
  }

 private:
  __device__ void Raise(uint32_t to) {
    if constexpr (sizeof(T) == 4) {
      word_ = __float_as_uint(fmaxf(__uint_as_float(word_), __uint_as_float(to)));
    } else {
      using Pair = PairOf<T>;
      const Pair larger =
          __hmax2(reinterpret_cast<const Pair&>(word_), reinterpret_cast<const Pair&>(to));
      word_ = reinterpret_cast<const uint32_t&>(larger);
    }
  }

  uint32_t word_;
};

// 16 bytes from `first`, of which only the first `valid` elements may be read; the others are those
// of the word `rest`.
template <class T>
__device__ inline uint4 LoadVector(const T* first, bool aligned, int valid, uint32_t rest = 0) {
  if (aligned && valid >= kVector<T>) return *reinterpret_cast<const uint4*>(first);
  uint32_t words[4] = {rest, rest, rest, rest};
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) {
    if (e >= valid) continue;
    if constexpr (sizeof(T) == 4) {
      words[e] = __float_as_uint(first[e]);
    } else {
      const uint32_t bits = reinterpret_cast<const uint16_t*>(first)[e];
      words[e / 2] = __byte_perm(words[e / 2], bits, e % 2 == 0 ? 0x3254 : 0x5410);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// A lane's part of the cell at `cell` in shared memory, of any alignment.
__device__ inline void LoadCell(const float* cell, int lane, LaneCell<float>& x) {
  const float* part = cell + 4 * lane;
  if (reinterpret_cast<uintptr_t>(part) % 16 == 0) {
    x.Read(reinterpret_cast<const uint4*>(part));
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) x.words[e] = __float_as_uint(part[e / 4 * 128 + e % 4]);
  }
}

// Calls visit(e) for a lane's elements of a cell, or only of its first quarter where the cell's
// first `count` are in that. What it leaves out is -inf: a sum that takes those as 0 has the same
// bits without them.
template <class Visit>
__device__ inline void EachOfFirst(int count, Visit visit) {
  if (count > kQuarter) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) visit(e);
  } else {
    asm volatile("");  // or the compiler takes the quarter out of both, and the chains one by one
#pragma unroll
    for (int e = 0; e < kSumElements; ++e) visit(e);
  }
}

// Statistics of a cell, a row or anything between: sum of exp((x - max) / temperature). A NaN among
// the elements makes the sum NaN.
struct Stats {
  float max;
  float sum;
};

// A lane's share of a cell: its sum relative to its own maximum, which is given. Elements after the
// cell's first `count` are -inf. No lane waits for another here.
template <class T>
__device__ inline Stats LaneStats(const LaneCell<T>& x, float max, float log2e_over_temperature,
                                  int count = kCell) {
  // Relative to 0 where all elements are -inf: the sum is 0 either way, and masked rows stay on the
  // plain path.
  const Exponential exponential(max == -kInfinity ? 0.0f : max, log2e_over_temperature);
  float sums[kSums];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  if (__all_sync(kFullWarp, exponential.plain)) {
    EachOfFirst(count, [&](int e) { sums[e / kSumElements] += exponential.Plain(x[e]); });
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) sums[e / kSumElements] += exponential(x[e]);
  }
  return {max, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// The same where only the cell's first quarter is in the row.
template <class T>
__device__ inline Stats LaneStatsOfQuarter(const LaneCell<T>& x, float max,
                                           float log2e_over_temperature) {
  const Exponential exponential(max == -kInfinity ? 0.0f : max, log2e_over_temperature);
  float sum = 0.0f;
  if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
    for (int e = 0; e < kSumElements; ++e) sum += exponential.Plain(x[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kSumElements; ++e) sum += exponential(x[e]);
  }
  return {max, sum};
}

// The whole cell's statistics from its lanes', the same in every lane.
__device__ inline Stats MergeLanes(Stats lane, float log2e_over_temperature) {
  const float max = FromOrderedBits(WarpMax(OrderedBits(lane.max)));
  return {max, WarpSum(lane.sum * Exponential(max, log2e_over_temperature).Factor(lane.max))};
}

// Merges a row's cells, by one warp, in an order that depends only on their number. cells[i] is
// read through `load`.
template <class Load>
__device__ inline Stats MergeCells(int cells, float log2e_over_temperature, int lane, Load load) {
  float max = -kInfinity;
#pragma unroll 1
  for (int i = lane; i < cells; i += 32) max = fmaxf(max, load(i).max);
  max = WarpMax(max);
  const Exponential exponential(max, log2e_over_temperature);
  float sum = 0.0f;
#pragma unroll 1
  for (int i = lane; i < cells; i += 32) {
    const Stats cell = load(i);
    // A cell of only -inf adds its sum (0, or NaN where it holds a NaN) whatever the factor.
    sum += cell.max == -kInfinity ? cell.sum : cell.sum * exponential.Factor(cell.max);
  }
  return {max, WarpSum(sum)};
}
__device__ inline Stats MergeCells(const Stats* cells, int count, float log2e_over_temperature) {
  return MergeCells(count, log2e_over_temperature, static_cast<int>(threadIdx.x % 32),
                    [=](int i) { return cells[i]; });
}

// The lowest index whose logit is NaN, by one warp, of the cell that begins at `first`; `vocab`
// where it has none.
template <class T>
__device__ __noinline__ int FindNan(const T* row, int first, int vocab, int lane) {
  int position = vocab;
  for (int i = first + lane; i < min(first + kCell, vocab); i += 32) {
    if (isnan(ToFloat(row[i]))) position = min(position, i);
  }
  return __reduce_min_sync(kFullWarp, position);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CELL_CUH_
