// What the blocks of a cluster send each other, without a barrier: a block waits for the bytes it is
// to get. A barrier of the cluster that releases writes also waits for those to device memory.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CLUSTER_INBOX_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_CLUSTER_INBOX_CUH_

#include <cstdint>

namespace logitd::cuda {

// A block's count of the bytes it has got, in its shared memory. Rounds follow each other: what is
// sent for a round comes after every block's Wait for the round before it. On devices without
// clusters it does nothing.
struct alignas(8) ClusterInbox {
  uint64_t barrier;

  // By one thread; the others of the cluster see it after a barrier of the cluster.
  __device__ void Open() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Address(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  // By one thread, once a round: how many bytes the block will get, its own included.
  __device__ void Expect(int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Address(&barrier)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // Until the bytes of round 0, 1, 2, ... are there.
  __device__ void Wait(int round) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n"
        "}" ::"r"(Address(&barrier)),
        "r"(round & 1)
        : "memory");
#endif
  }
  // Sends words to where `here` is in the shared memory of the cluster's block `rank`, for which
  // `this` is the place too. `here` is aligned to 8 bytes where there is more than one word.
  template <int kWords>
  __device__ void Send(void* here, const uint32_t (&words)[kWords], int rank) {
#if __CUDA_ARCH__ >= 900
    const uint32_t to = InBlockOf(Address(here), rank);
    const uint32_t counter = InBlockOf(Address(&barrier), rank);
    if constexpr (kWords == 1) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
          "r"(words[0]), "r"(counter)
          : "memory");
    } else {
      static_assert(kWords % 2 == 0);
#pragma unroll
      for (int w = 0; w < kWords; w += 2)
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::
                "r"(to + 4 * w),
            "r"(words[w]), "r"(words[w + 1]), "r"(counter)
            : "memory");
    }
#endif
  }

 private:
  __device__ static uint32_t Address(void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  __device__ static uint32_t InBlockOf(uint32_t address, int rank) {
    uint32_t there = address;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
    return there;
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CLUSTER_INBOX_CUH_
