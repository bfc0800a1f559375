// A cell: 1024 consecutive elements of a row in the registers of one warp, and their softmax
// statistics.
//
// Every op that sums over a row sums it by cells, and merges cells in one fixed order. Cells are
// counted from the row's start, never from an address, and the element a lane holds depends on the
// index alone. So a row's bits are the same whichever warp, block or grid shape reads it, at any
// alignment.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CELL_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_CELL_CUH_

#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/cuda/element.cuh"

namespace logitd::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kCell = 1024;
constexpr int kLaneElements = kCell / 32;
constexpr int kSums = 4;  // a lane adds its elements up in this many chains
constexpr int kSumElements = kLaneElements / kSums;

// A float as an unsigned integer of the same order; -0 as +0. NaN orders somewhere: callers flag it
// apart.
__device__ inline uint32_t OrderedBits(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ inline float FromOrderedBits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// Place in the cell of a lane's e-th element: 16-byte vectors, interleaved over the lanes.
template <class T>
__device__ constexpr int CellIndex(int lane, int e) {
  return (e / kVector<T>)*32 * kVector<T> + lane * kVector<T> + e % kVector<T>;
}

// A lane's elements of a cell, as they lie in memory.
template <class T>
struct LaneCell {
  static constexpr int kPerWord = 4 / sizeof(T);
  uint32_t words[kLaneElements / kPerWord];

  __device__ float operator[](int e) const { return WordElement<T>(words, e); }

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

// Copies 16 bytes into shared memory behind the thread's back; only the first `valid` are read, the
// rest become zero.
__device__ inline void CopyAsync16(void* shared, const void* global, int valid) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid)
               : "memory");
}
__device__ inline void CommitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void WaitAsync() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A lane's part of the cell at `cell` in shared memory.
__device__ inline void LoadCell(const float* cell, int lane, LaneCell<float>& x) {
  const float* part = cell + 4 * lane;
  if (reinterpret_cast<uintptr_t>(part) % 16 == 0) {
#pragma unroll
    for (int v = 0; v < kLaneElements / 4; ++v) {
      const uint4 block = reinterpret_cast<const uint4*>(part)[32 * v];
      x.words[4 * v] = block.x;
      x.words[4 * v + 1] = block.y;
      x.words[4 * v + 2] = block.z;
      x.words[4 * v + 3] = block.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) x.words[e] = __float_as_uint(part[e / 4 * 128 + e % 4]);
  }
}

// A warp's own queue of cells on their way from device to shared memory. Any alignment: whole lines
// of 128 bytes keep their place in the line, and the shift to the element's border happens on the
// way into registers. Every call is made by the whole warp, and there is one Pop for each Push.
template <class T, int kStages>
class CellRing {
 public:
  static constexpr int kBlocks = kCell / kVector<T>;  // of 16 bytes
  static constexpr int kLineBlocks = 8;               // of a line
  struct alignas(128) Storage {
    uint4 slots[kStages][kBlocks + kLineBlocks];  // a misaligned cell touches one line more
  };

  __device__ CellRing(Storage& storage, int lane) : slots_(storage.slots), lane_(lane) {}

  // Starts the copy of elements [0, count) from `first`, 1 <= count. Reads no block of 16 bytes in
  // which there is none of them, and no byte beyond the last.
  __device__ void Push(const T* first, int count) {
    uint4* slot = slots_[push_] + lane_;
    const int offset = InLine(first);
    const char* base = reinterpret_cast<const char*>(first) - offset + 16 * lane_;
    const int left =  // bytes from the lane's first block to the end of what is copied
        offset + min(count, kCell) * static_cast<int>(sizeof(T)) - 16 * lane_;
    if (count >= kCell) {
      constexpr int kWhole = kBlocks / 32;
      if (16 * lane_ + 15 >= offset) CopyAsync16(slot, base, 16);
#pragma unroll
      for (int v = 1; v < kWhole; ++v) CopyAsync16(slot + 32 * v, base + 512 * v, 16);
      if (left > 512 * kWhole)
        CopyAsync16(slot + 32 * kWhole, base + 512 * kWhole, min(16, left - 512 * kWhole));
    } else {
      if (16 * lane_ + 15 >= offset && left > 0) CopyAsync16(slot, base, min(16, left));
#pragma unroll
      for (int v = 1; v <= kBlocks / 32; ++v) {
        if (left > 512 * v) CopyAsync16(slot + 32 * v, base + 512 * v, min(16, left - 512 * v));
      }
    }
    PushNothing();
  }

  // Push, in fewer instructions where a cell ends anywhere.
  __device__ void PushShort(const T* first, int count) {
    const int offset = InLine(first);
    const char* base = reinterpret_cast<const char*>(first) - offset;
    const unsigned bytes = offset + min(count, kCell) * static_cast<unsigned>(sizeof(T));
    const int whole = static_cast<int>(bytes / 16) - lane_;  // blocks from the lane's first
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(slots_[push_])) + 16 * lane_;
    if (whole > 0 && 16 * lane_ + 15 >= offset) CopyBlock<0>(to, base + 16 * lane_);
    CopyBlocks(std::make_integer_sequence<int, kBlocks / 32>(), to, base + 16 * lane_, whole);
    const int tail = static_cast<int>(bytes % 16);
    if (tail != 0 && lane_ == 0)
      CopyAsync16(slots_[push_] + bytes / 16, base + (bytes - tail), tail);
    PushNothing();
  }

  // Takes a turn without copying.
  __device__ void PushNothing() {
    CommitAsync();
    push_ = push_ + 1 == kStages ? 0 : push_ + 1;
  }

  // Waits for the oldest of kStages cells and loads it; places from `count` on are -inf.
  __device__ void Pop(const T* first, int count, LaneCell<T>& x) {
    WaitAsync<kStages - 1>();
    char* cell = reinterpret_cast<char*>(slots_[pop_]) + InLine(first);
    if (count < kCell) {
      __syncwarp();
#pragma unroll 1
      for (int i = count + lane_; i < kCell; i += 32)
        reinterpret_cast<T*>(cell)[i] = static_cast<T>(-kInfinity);
    }
    __syncwarp();
    const int misaligned = InLine(first) % 16;
    const uint4* blocks = reinterpret_cast<const uint4*>(cell - misaligned) + lane_;
    if (misaligned == 0) {
#pragma unroll
      for (int v = 0; v < kBlocks / 32; ++v) {
        const uint4 block = blocks[32 * v];
        x.words[4 * v] = block.x;
        x.words[4 * v + 1] = block.y;
        x.words[4 * v + 2] = block.z;
        x.words[4 * v + 3] = block.w;
      }
    } else {
      switch (misaligned / 4) {
        case 0:
          ReadMisaligned<0>(blocks, misaligned, x);
          break;
        case 1:
          ReadMisaligned<1>(blocks, misaligned, x);
          break;
        case 2:
          ReadMisaligned<2>(blocks, misaligned, x);
          break;
        default:
          ReadMisaligned<3>(blocks, misaligned, x);
      }
    }
    pop_ = pop_ + 1 == kStages ? 0 : pop_ + 1;
    __syncwarp();  // the slot may be copied into again
  }

  // Pop with one way to read misaligned words, which leaves the aligned ones in the registers they
  // came to: fewer instructions and registers, more shared memory cycles where misaligned.
  __device__ void PopShort(const T* first, int count, LaneCell<T>& x) {
    if constexpr (sizeof(T) != 4) {
      Pop(first, count, x);
    } else {
      WaitAsync<kStages - 1>();
      char* cell = reinterpret_cast<char*>(slots_[pop_]) + InLine(first);
      __syncwarp();
      uint32_t* words = reinterpret_cast<uint32_t*>(cell);
#pragma unroll 1
      for (int i = count + lane_; i < kCell; i += 32) words[i] = __float_as_uint(-kInfinity);
      __syncwarp();
      LoadCell(reinterpret_cast<const float*>(words), lane_, x);
      pop_ = pop_ + 1 == kStages ? 0 : pop_ + 1;
      __syncwarp();  // the slot may be copied into again
    }
  }

  // The cell that the last Pop brought, which lies at `first`, in shared memory: of any alignment,
  // and the warp's until the next Push.
  __device__ T* Cell(const T* first) {
    char* slot = reinterpret_cast<char*>(slots_[pop_ == 0 ? kStages - 1 : pop_ - 1]);
    return reinterpret_cast<T*>(slot + InLine(first));
  }

  // Element i of the cell that the last Pop brought, which lies at `first`; until the next Push.
  __device__ float At(const T* first, int i) const {
    const char* slot = reinterpret_cast<const char*>(slots_[pop_ == 0 ? kStages - 1 : pop_ - 1]);
    return ToFloat(reinterpret_cast<const T*>(slot + InLine(first))[i]);
  }

 private:
  // Copies block v of the lane's; the address in shared memory is computed once whatever v.
  template <int v>
  __device__ static void CopyBlock(uint32_t to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(to), "l"(from),
                 "n"(512 * v)
                 : "memory");
  }
  template <int... v>
  __device__ static void CopyBlocks(std::integer_sequence<int, v...>, uint32_t to, const char* from,
                                    int whole) {
    ((whole > 32 * (v + 1) ? CopyBlock<v + 1>(to, from) : void()), ...);
  }

  // Elements that begin in word kWord of a block: its words from there on, and of the next block
  // those before. Loads are as wide as stays within a block.
  template <int kWord>
  __device__ static void ReadMisaligned(const uint4* blocks, int misaligned, LaneCell<T>& x) {
    constexpr int kNeeded = sizeof(T) == 4 ? 4 : 5;
#pragma unroll
    for (int v = 0; v < kBlocks / 32; ++v) {
      uint32_t words[8];
#pragma unroll
      for (int w = kWord; w < kWord + kNeeded; ++w) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(blocks + 32 * v) + w;
        if (w % 2 == 0 && w + 1 < kWord + kNeeded) {
          const uint2 two = *reinterpret_cast<const uint2*>(from);
          words[w] = two.x;
          words[w + 1] = two.y;
        } else if (w % 2 == 0 || w == kWord) {
          words[w] = *from;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.words[4 * v + i] = sizeof(T) == 4
                                 ? words[kWord + i]
                                 : __funnelshift_r(words[kWord + i], words[kWord + i + 1],
                                                   static_cast<uint32_t>(misaligned % 4 * 8));
      }
    }
  }

  // Place of an address in its line of 128 bytes.
  __device__ static int InLine(const T* p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 127);
  }

  uint4 (&slots_)[kStages][kBlocks + kLineBlocks];
  const int lane_;
  int push_ = 0;
  int pop_ = 0;
};

__device__ inline float WarpMax(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

// Places for `mine` items of every lane behind `counter` in shared memory: the lane's first. One
// atomic a warp.
__device__ inline int WarpReserve(int* counter, int mine, int lane) {
  int inclusive = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  int base = 0;
  if (lane == 31 && inclusive > 0) base = atomicAdd(counter, inclusive);
  return __shfl_sync(kFullWarp, base, 31) + inclusive - mine;
}

// Every lane gets the same bits: the butterfly adds the same pairs everywhere.
__device__ inline float WarpSum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}

// 2^v, relative error under 2^-22; results below 2^-126 are 0.
__device__ inline float Exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// exp((x - max) / temperature) by powers of two, for any max, huge and infinite ones too. c =
// log2(e) / temperature.
struct Exponential {
  float max;
  float c;
  float shift;  // -max * c, rounded: plain sums are relative to 2^-shift, not quite to the maximum
  bool plain;   // one multiply-add per element is exact enough, and 2^-shift near the maximum

  __device__ Exponential(float row_max, float scale) {
    max = row_max;
    c = scale;
    shift = -__fmul_rn(row_max, scale);
    plain = fabsf(shift) < 0x1p24f;  // rounded by at most a half
  }

  __device__ float Plain(float x) const { return Exp2(fmaf(x, c, shift)); }
  __device__ float Careful(float x) const {
    if (x == max) return max == -kInfinity ? 0.0f : 1.0f;
    return Exp2((x - max) * c);
  }
  __device__ float operator()(float x) const { return plain ? Plain(x) : Careful(x); }

  // What turns a sum relative to another maximum, <= this one, into a sum relative to this one.
  __device__ float Factor(float other_max) const {
    if (plain) return Exp2(__fmul_rn(other_max, c) + shift);
    const Exponential other(other_max, c);
    return Careful(other_max) * (other.plain ? Exp2(-fmaf(other_max, c, other.shift)) : 1.0f);
  }
  // Natural logarithm of a sum relative to this maximum.
  __device__ float LogSum(float sum, float temperature) const {
    return plain ? (log2f(sum) - shift) * kLn2 : max / temperature + logf(sum);
  }
};

// The warp's values in descending order over its lanes.
__device__ inline float WarpSortDescending(float v, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const float other = __shfl_xor_sync(kFullWarp, v, stride);
      v = ((lane & size) == 0) == ((lane & stride) == 0) ? fmaxf(v, other) : fminf(v, other);
    }
  }
  return v;
}

// Statistics of a cell, a row or anything between: sum of exp((x - max) / temperature). NaN in, NaN
// sum.
struct Stats {
  float max;
  float sum;
};

// A lane's share of a cell: its sum relative to its own maximum, which is given. No lane waits for
// another here.
template <class T>
__device__ inline Stats LaneStats(const LaneCell<T>& x, float max, float c) {
  // Relative to 0 where all is -inf: the sum is 0 either way, and masked rows stay on the plain
  // path.
  const Exponential exponential(max == -kInfinity ? 0.0f : max, c);
  float sums[kSums];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) sums[e / kSumElements] += exponential.Plain(x[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) sums[e / kSumElements] += exponential(x[e]);
  }
  return {max, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// The whole cell's statistics from its lanes', the same in every lane.
__device__ inline Stats MergeLanes(Stats lane, float c) {
  const float max = FromOrderedBits(__reduce_max_sync(kFullWarp, OrderedBits(lane.max)));
  return {max, WarpSum(lane.sum * Exponential(max, c).Factor(lane.max))};
}

// Merges a row's cells, by one warp, in the order that depends on their number alone. cells[i] is
// read through `load`.
template <class Load>
__device__ inline Stats MergeCells(int cells, float c, int lane, Load load) {
  float max = -kInfinity;
  for (int i = lane; i < cells; i += 32) max = fmaxf(max, load(i).max);
  max = WarpMax(max);
  const Exponential exponential(max, c);
  float sum = 0.0f;
  for (int i = lane; i < cells; i += 32) {
    const Stats cell = load(i);
    // A cell of -inf alone adds its sum (0, or NaN when a NaN hid in it) whatever the factor.
    sum += cell.max == -kInfinity ? cell.sum : cell.sum * exponential.Factor(cell.max);
  }
  return {max, WarpSum(sum)};
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CELL_CUH_
