// A cell: 1024 consecutive elements of a row in the registers of one warp, and their softmax
// statistics.
//
// Every op that sums over a row sums it by cells, and merges cells in one fixed order. Cells are
// counted from the row's start, never from an address, and the element a lane holds depends on the
// index alone. So a row's bits are the same whichever warp, block or grid shape reads it, at any
// alignment.
#ifndef LOGITD_KERNELS_CUDA_CELL_CUH_
#define LOGITD_KERNELS_CUDA_CELL_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>

namespace logitd::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kCell = 1024;
constexpr int kLaneElements = kCell / 32;
constexpr int kGroups = 4;  // a lane's elements in groups, each with its own maximum
constexpr int kGroupElements = kLaneElements / kGroups;

template <class T>
constexpr int kVector = 16 / sizeof(T);  // elements of a 16-byte load

// Place in the cell of a lane's e-th element: 16-byte vectors, interleaved over the lanes.
template <class T>
__device__ constexpr int CellIndex(int lane, int e) {
  return (e / kVector<T>)*32 * kVector<T> + lane * kVector<T> + e % kVector<T>;
}

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline void Unpack(uint4 v, float* x);

template <>
__device__ inline void Unpack<float>(uint4 v, float* x) {
  x[0] = __uint_as_float(v.x);
  x[1] = __uint_as_float(v.y);
  x[2] = __uint_as_float(v.z);
  x[3] = __uint_as_float(v.w);
}

template <>
__device__ inline void Unpack<__nv_bfloat16>(uint4 v, float* x) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <>
__device__ inline void Unpack<__half>(uint4 v, float* x) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

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

// A warp's own queue of cells on their way from device to shared memory. Any alignment: whole
// 16-byte blocks are copied, and the shift to the element's border happens on the way into
// registers. Every call is made by the whole warp, and there is one Pop for each Push.
template <class T, int kStages>
class CellRing {
 public:
  static constexpr int kBlocks = kCell / kVector<T>;  // of 16 bytes
  static constexpr int kSlotBlocks =
      kBlocks + 2;  // a misaligned cell touches one more, and is read past by a word
  using Storage = uint4[kStages][kSlotBlocks];

  __device__ CellRing(Storage& slots, int lane) : slots_(slots), lane_(lane) {}

  // Starts the copy of elements [0, count) from `first`, 1 <= count.
  __device__ void Push(const T* first, int count) {
    uint4* slot = slots_[push_] + lane_;
    const int misaligned = Misaligned(first);
    const char* base = reinterpret_cast<const char*>(first) - misaligned + 16 * lane_;
    if (misaligned == 0 && count >= kCell) {
#pragma unroll
      for (int v = 0; v < kBlocks / 32; ++v) CopyAsync16(slot + 32 * v, base + 512 * v, 16);
    } else {
      const int left = misaligned + min(count, kCell) * static_cast<int>(sizeof(T)) - 16 * lane_;
#pragma unroll
      for (int v = 0; v < kBlocks / 32; ++v) {
        if (left > 512 * v) CopyAsync16(slot + 32 * v, base + 512 * v, min(16, left - 512 * v));
      }
      if (lane_ == 0 && left > kBlocks * 16) {
        CopyAsync16(slot + kBlocks, base + 16 * kBlocks, left - kBlocks * 16);
      }
    }
    PushNothing();
  }

  // Takes a turn without copying.
  __device__ void PushNothing() {
    CommitAsync();
    push_ = push_ + 1 == kStages ? 0 : push_ + 1;
  }

  // Waits for the oldest of kStages cells and loads it; places from `count` on are -inf.
  __device__ void Pop(const T* first, int count, float (&x)[kLaneElements]) {
    WaitAsync<kStages - 1>();
    const uint4* slot = slots_[pop_] + lane_;
    const int misaligned = Misaligned(first);
    if (count < kCell) {
      T* cell = reinterpret_cast<T*>(reinterpret_cast<char*>(slots_[pop_]) + misaligned);
      __syncwarp();
#pragma unroll 1
      for (int i = count + lane_; i < kCell; i += 32) cell[i] = static_cast<T>(-kInfinity);
    }
    __syncwarp();
    if (misaligned == 0) {
#pragma unroll
      for (int v = 0; v < kBlocks / 32; ++v) Unpack<T>(slot[32 * v], x + v * kVector<T>);
    } else {
      ReadMisaligned(misaligned, x);
    }
    pop_ = pop_ + 1 == kStages ? 0 : pop_ + 1;
    __syncwarp();  // the slot may be copied into again
  }

  // Element i of the cell that the last Pop brought, which lies at `first`; until the next Push.
  __device__ float At(const T* first, int i) const {
    const char* slot = reinterpret_cast<const char*>(slots_[pop_ == 0 ? kStages - 1 : pop_ - 1]);
    return ToFloat(reinterpret_cast<const T*>(slot + Misaligned(first))[i]);
  }

 private:
  __device__ void ReadMisaligned(int misaligned, float (&x)[kLaneElements]) {
    if constexpr (sizeof(T) == 4) {
      const T* cell =
          reinterpret_cast<const T*>(reinterpret_cast<const char*>(slots_[pop_]) + misaligned);
      // Neighbouring lanes are 16 bytes apart, so a word at a time meets each bank four times;
      // still far from the limit.
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e) x[e] = cell[CellIndex<T>(lane_, e)];
    } else {
      const uint32_t shift = misaligned % 4 * 8;
      const uint32_t* words =
          reinterpret_cast<const uint32_t*>(slots_[pop_] + lane_) + misaligned / 4;
#pragma unroll
      for (int v = 0; v < kBlocks / 32; ++v) {
        uint32_t w[5];
#pragma unroll
        for (int i = 0; i < 5; ++i) w[i] = words[128 * v + i];
        Unpack<T>({__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                   __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift)},
                  x + v * kVector<T>);
      }
    }
  }

  __device__ static int Misaligned(const T* p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15);
  }

  Storage& slots_;
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
  float
      shift;  // -max * c, rounded: plain sums are relative to 2^-shift, whatever max * c is exactly
  bool
      plain;  // max * c is far from overflow: one multiply-add per element is exact enough and safe

  __device__ Exponential(float row_max, float scale) {
    max = row_max;
    c = scale;
    shift = -__fmul_rn(row_max, scale);
    plain = fabsf(shift) < 1e30f;
  }

  __device__ float Plain(float x) const { return Exp2(fmaf(x, c, shift)); }
  __device__ float Careful(float x) const {
    if (x == max) return max == -kInfinity ? 0.0f : 1.0f;
    return Exp2((x - max) * c);
  }
  __device__ float operator()(float x) const { return plain ? Plain(x) : Careful(x); }

  // What turns a sum relative to another maximum, <= this one, into a sum relative to this one.
  __device__ float Factor(float other_max) const {
    return plain ? Exp2(__fmul_rn(other_max, c) + shift) : Careful(other_max);
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

// A lane's share of a cell: its own maximum and its sum relative to that. No lane waits for another
// here.
__device__ inline Stats LaneStats(const float (&x)[kLaneElements], float c,
                                  float (&group_max)[kGroups]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    group_max[g] = x[g * kGroupElements];
#pragma unroll
    for (int e = 1; e < kGroupElements; ++e)
      group_max[g] = fmaxf(group_max[g], x[g * kGroupElements + e]);
    group_max[g] = fmaxf(group_max[g], -kInfinity);  // a group of NaN alone has no maximum
  }
  const float max = fmaxf(fmaxf(group_max[0], group_max[1]), fmaxf(group_max[2], group_max[3]));
  // Relative to 0 where all is -inf: the sum is 0 either way, and masked rows stay on the plain
  // path.
  const Exponential exponential(max == -kInfinity ? 0.0f : max, c);
  float sums[kGroups];
  if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      sums[g] = exponential.Plain(x[g * kGroupElements]);
#pragma unroll
      for (int e = 1; e < kGroupElements; ++e)
        sums[g] += exponential.Plain(x[g * kGroupElements + e]);
    }
  } else {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      sums[g] = 0.0f;
#pragma unroll
      for (int e = 0; e < kGroupElements; ++e) sums[g] += exponential(x[g * kGroupElements + e]);
    }
  }
  return {max, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// The whole cell's statistics from its lanes', the same in every lane.
__device__ inline Stats MergeLanes(Stats lane, float c) {
  const float max = WarpMax(lane.max);
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

#endif  // LOGITD_KERNELS_CUDA_CELL_CUH_
