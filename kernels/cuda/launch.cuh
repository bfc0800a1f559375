// Launches of kernels: every launcher of kernels/cuda goes through LaunchKernel.
#ifndef LOGITD_KERNELS_CUDA_LAUNCH_CUH_
#define LOGITD_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace logitd::cuda {

constexpr int64_t CeilDiv(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t RoundUp(int64_t n, int64_t unit) { return CeilDiv(n, unit) * unit; }

// The grid of one dimension with a block for every `per_block` of `count` items.
inline dim3 GridFor(int64_t count, int64_t per_block = 1) {
  return dim3(static_cast<unsigned>(CeilDiv(count, per_block)));
}

struct LaunchShape {
  dim3 grid;  // blocks, those of clusters included
  int threads = 0;
  int cluster = 1;       // blocks of a cluster, neighbours in x; 1: no clusters
  int shared_bytes = 0;  // dynamic shared memory of a block
  // The most shared_bytes that any launch of this kernel asks for; 0: all ask for the same. The
  // limit belongs to the kernel: launches on other streams, at the same time, set it too, and must
  // set the same.
  int most_shared_bytes = 0;
  // The kernel may begin before the stream's earlier kernels have ended, on devices of compute
  // capability 9. It calls AwaitEarlierKernels() in every block before it touches device memory.
  // For kernels of few blocks, each of which fills a multiprocessor: others would find room on some
  // multiprocessors first, and stay unevenly spread. 300 to 512 rows took 10 to 50% longer.
  bool early = false;
};

// In a kernel that was launched early: waits until the stream's earlier kernels have ended and all
// they wrote is there. Lets the next kernel begin meanwhile, where it is launched early too and
// this one leaves it room. So a launch takes its time while the kernel before it still runs.
__device__ inline void AwaitEarlierKernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Enqueues kernel(args...). Does not wait for it. Thread-safe.
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                         Args&&... args) {
  if (shape.shared_bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             std::max(shape.shared_bytes, shape.most_shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LAUNCH_CUH_
