// The instructions of hopper/product.cuh: barriers, copies by the copy engine (TMA), and products
// of warpgroups (wgmma).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_INSTRUCTIONS_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_INSTRUCTIONS_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear/hopper/schedule.h"

namespace logitd::cuda::hopper {

constexpr int kGroupThreads = 128;         // threads of a warpgroup
constexpr int kCluster = 2;                // blocks
constexpr int kThreadSums = kTile / 2;     // sums of a thread: 2 rows, a quarter of the tokens
constexpr int kRowSums = kThreadSums / 2;  // sums of each of its rows

// Device code here, epilogues included, is called only from the kernel, whose body is only in code
// for sm_90a. It stays out of unnamed namespaces, where nvcc rejects functions that are not called.

// Lets the stream's next kernel begin where it is launched early (launch.cuh), once all blocks have
// called this, as soon as there is room for its blocks.
__device__ inline void LetNextKernelBegin() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void Expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the same barrier of the cluster's block `rank`. It orders reads by the tensor cores
// before writes by the copy engine, which needs no fence of the cluster's memory: a fence costs
// hundreds of clocks.
__device__ inline void ArriveAt(uint32_t barrier, int rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 there;\n\t"
      "mapa.shared::cluster.u32 there, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Waits until the phase of this parity has ended.
__device__ inline void WaitFor(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra ended;\n\t"
      "bra again;\n\t"
      "ended:\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The L2 policy of a copy: data that is read once is evicted first.
template <bool kOnce>
__device__ inline uint64_t CachePolicy() {
  uint64_t policy;
  if constexpr (kOnce) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}
__device__ inline void CopyTile(uint32_t to, const CUtensorMap& map, int element, int line,
                                uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier), "l"(policy)
      : "memory");
}
// As CopyTile, to the same place in both blocks of the cluster; arrives at the barriers of both.
__device__ inline void CopyTileToAll(uint32_t to, const CUtensorMap& map, int element, int line,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1))
      : "memory");
}

// The same, with a policy.
__device__ inline void CopyTileToAll(uint32_t to, const CUtensorMap& map, int element, int line,
                                     uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(element), "r"(line), "r"(barrier),
      "h"(static_cast<uint16_t>((1 << kCluster) - 1)), "l"(policy)
      : "memory");
}

// The descriptor of a matrix of 128-byte lines, swizzled as the copy engine leaves them, 8 lines
// every 1024 bytes.
__device__ inline uint64_t Descriptor(uint32_t shared) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightLines = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightLines | kUnused | (shared & 0x3ffff) >> 4;
}

// acc += a [64, 16] b [16, 256]; where `add` is 0, acc = that product.
template <class T>
__device__ inline void MultiplyAsync(float (&acc)[kThreadSums], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.b32 p, %130, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.%131.%131 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1, 0, 0;\n\t"
      "}\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]),
        "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]),
        "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]),
        "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),
        "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]),
        "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]),
        "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]),
        "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),
        "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]),
        "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]),
        "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]), "+f"(acc[64]), "+f"(acc[65]),
        "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]),
        "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]),
        "+f"(acc[78]), "+f"(acc[79]), "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]),
        "+f"(acc[84]), "+f"(acc[85]), "+f"(acc[86]), "+f"(acc[87]), "+f"(acc[88]), "+f"(acc[89]),
        "+f"(acc[90]), "+f"(acc[91]), "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95]),
        "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]), "+f"(acc[101]),
        "+f"(acc[102]), "+f"(acc[103]), "+f"(acc[104]), "+f"(acc[105]), "+f"(acc[106]),
        "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]), "+f"(acc[111]),
        "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]), "+f"(acc[116]),
        "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]), "+f"(acc[121]),
        "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]), "+f"(acc[126]),
        "+f"(acc[127])
      : "l"(a), "l"(b), "r"(add), "C"(Traits16Bit<T>::kPtxName));
}
__device__ inline void BeginMultiplying() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void CommitMultiplying() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WaitMultiplied() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler does not move reads or writes of acc across this.
__device__ inline void Pin(float (&acc)[kThreadSums]) {
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_INSTRUCTIONS_CUH_
