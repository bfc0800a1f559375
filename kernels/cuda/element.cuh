// The element types of tensors in kernels: float, __half and __nv_bfloat16.
//
// Everything here exists for these three types only. A kernel of a fourth type does not compile
// until its conversions are written.
#ifndef LOGITD_KERNELS_CUDA_ELEMENT_CUH_
#define LOGITD_KERNELS_CUDA_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace logitd::cuda {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A float as an unsigned integer of the same order; -0 as +0. A NaN gets some place in the order:
// callers detect it separately.
__device__ inline uint32_t OrderedBits(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ inline float FromOrderedBits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

template <class T>
constexpr int kVector = 16 / sizeof(T);  // elements of a 16-byte load

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest, ties to even.
template <class T>
__device__ inline T FromFloat(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    return __float2bfloat16_rn(x);
  }
}

// 16-bit types: two of them as the intrinsics take them, and the name in PTX, for the "C"
// constraint of an asm.
template <class T>
struct Traits16Bit;
template <>
struct Traits16Bit<__half> {
  using Pair = __half2;
  static constexpr char kPtxName[] = "f16";
};
template <>
struct Traits16Bit<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr char kPtxName[] = "bf16";
};
template <class T>
using PairOf = typename Traits16Bit<T>::Pair;

// Two 16-bit elements in a word, the first in its lower half.
template <class T>
__device__ inline uint32_t PackPair(float low, float high) {
  PairOf<T> pair;
  if constexpr (std::is_same_v<T, __half>) {
    pair = __floats2half2_rn(low, high);
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    pair = __floats2bfloat162_rn(low, high);
  }
  return reinterpret_cast<const uint32_t&>(pair);
}

// Element e of an array of T that is held as words. e must be a constant after unrolling.
template <class T>
__device__ inline float WordElement(const uint32_t* words, int e) {
  const uint32_t word = words[e * sizeof(T) / 4];
  if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(e % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    static_assert(std::is_same_v<T, __half>);
    return ToFloat(__ushort_as_half(static_cast<uint16_t>(e % 2 == 0 ? word : word >> 16)));
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ELEMENT_CUH_
