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
};

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
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LAUNCH_CUH_
