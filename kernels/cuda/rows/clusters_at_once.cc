#include "kernels/cuda/rows/clusters_at_once.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace logitd::cuda {

cudaError_t ClustersAtOnce(const void* kernel, const LaunchShape& shape, const Scratch& scratch,
                           int* clusters) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           std::max(shape.shared_bytes, shape.most_shared_bytes));
  if (error != cudaSuccess) return error;
  if (shape.cluster == 1) {
    int blocks = 0;
    const cudaError_t asked = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, kernel, shape.threads, static_cast<size_t>(shape.shared_bytes));
    *clusters = blocks * scratch.multiprocessors;
    return asked;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.cluster * scratch.multiprocessors));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

}  // namespace logitd::cuda
