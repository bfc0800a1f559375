#include "kernels/cuda/rows/cluster_blocks.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/rows/clusters_at_once.h"

namespace logitd::cuda {
namespace {

// [n]: clusters of n blocks that run at once.
using Fits = std::array<int, kMaxClusterBlocks + 1>;

__global__ void LargeBlock() {}

// Fewer than there may be where the driver does not tell.
Fits AskDriver(const Scratch& scratch) {
  Fits fits{};
  fits[1] = scratch.multiprocessors;
  for (int blocks = 2; blocks <= kMaxClusterBlocks; ++blocks) {
    const LaunchShape shape{.threads = 512,
                            .cluster = blocks,
                            .shared_bytes = scratch.block_shared_bytes / 2 + 1};  // no room for two
    if (ClustersAtOnce(reinterpret_cast<const void*>(&LargeBlock), shape, scratch, &fits[blocks]) !=
        cudaSuccess) {
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
