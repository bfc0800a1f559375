// Masks of attention scores: their element types, and what they do to a lane's logits.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_MASK_CUH_
#define LOGITD_KERNELS_CUDA_ATTENTION_MASK_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/attention_softmax.h"
#include "kernels/cuda/attention/rows.cuh"
#include "kernels/cuda/attention/vectors.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace logitd::cuda::attention {

// Calls visit.operator()<M>() with the element type of a mask: uint8_t for kBool. There is a mask.
template <class Visit>
constexpr auto VisitMask(const AttentionMask& mask, const Visit& visit) {
  if (mask.kind == MaskKind::kBool) return visit.template operator()<uint8_t>();
  return VisitDType(mask.dtype, visit);
}

// Bytes of a mask's element.
constexpr int64_t MaskBytes(const AttentionMask& mask) {
  return mask.kind == MaskKind::kBool ? 1 : static_cast<int64_t>(SizeOf(mask.dtype));
}

// Whether element `key` of a row of the mask hides its key.
__device__ inline bool Hides(const AttentionMask& mask, const std::byte* row, int key) {
  return VisitMask(mask, [&]<class M>() {
    const M element = reinterpret_cast<const M*>(row)[key];
    if constexpr (std::is_same_v<M, uint8_t>) {
      return element != 0;
    } else {
      return ToFloat(element) == -kInfinity;
    }
  });
}

// kCount of a lane's vectors of a row of the mask. kAligned: each is whole and aligned.
template <class M, int E, bool kAligned, int kLanes, int kCount>
struct MaskVectors {
  Loaded < M, E, E<8 ? Access::kBlocks : Access::kWords, kLanes, kCount> blocks;

  template <bool kOneWarp>
  __device__ void Load(const M* row, const Turns<E, kLanes, kOneWarp>& turns, int first) {
    if constexpr (kAligned) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        const int index = first + v * kLanes * E;
        if (turns.seen.template Some<E>(index)) LoadAligned<false>(row + index, blocks.words[v]);
      }
    } else {
      blocks.Load(row, turns.seen, first);
      blocks.Align(row, turns);
    }
  }

  // Masks the E logits `x` of the v-th vector.
  __device__ void Apply(int v, float* x) const {
#pragma unroll
    for (int e = 0; e < E; ++e) {
      if constexpr (std::is_same_v<M, uint8_t>) {
        if ((blocks.words[v][e / 4] & 0xffu << (e % 4 * 8)) != 0) x[e] = -kInfinity;
      } else {
        const float added = WordElement<M>(blocks.words[v], e);
        x[e] = added == -kInfinity ? -kInfinity : __fadd_rn(x[e], added);
      }
    }
  }
};

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_MASK_CUH_
