#include "kernels/cuda/rows/cluster_blocks.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "kernels/cuda/rows/cluster.cuh"

namespace logitd::cuda {
namespace {

// [n]: clusters of n blocks that run at once.
using Fits = std::array<int, kMaxClusterBlocks + 1>;

__global__ void LargeBlock() {}

// Fewer than there may be where the driver does not tell.
Fits AskDriver(const Scratch& scratch) {
  Fits fits{};
  fits[1] = scratch.multiprocessors;
  const int shared_bytes = scratch.block_shared_bytes / 2 + 1;  // no room for two
  if (cudaFuncSetAttribute(LargeBlock, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) !=
      cudaSuccess) {
    cudaGetLastError();
    return fits;
  }
  for (int blocks = 2; blocks <= kMaxClusterBlocks; ++blocks) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks * scratch.multiprocessors));
    config.blockDim = dim3(512);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&fits[blocks], LargeBlock, &config) != cudaSuccess) {
      cudaGetLastError();
      fits[blocks] = 0;
    }
  }
  return fits;
}

}  // namespace

int32_t ClusterBlocksAtOnce(int64_t rows, const Scratch& scratch) {
  constexpr int kDevices = 64;
  static std::array<std::once_flag, kDevices> asked;
  static std::array<Fits, kDevices> fits_of_device;
  int device = 0;
  if (!scratch.clusters || cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 1;
  Fits& fits = fits_of_device[device];
  std::call_once(asked[device], [&] { fits = AskDriver(scratch); });
  int32_t blocks = kMaxClusterBlocks;
  while (blocks > 1 && fits[blocks] < rows) --blocks;
  return blocks;
}

}  // namespace logitd::cuda
