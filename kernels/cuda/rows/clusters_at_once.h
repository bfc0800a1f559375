// How many clusters of a kernel a device runs at once.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CLUSTERS_AT_ONCE_H_
#define LOGITD_KERNELS_CUDA_ROWS_CLUSTERS_AT_ONCE_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// The clusters of a launch of `kernel` that run at once, or its blocks where it has no clusters;
// the grid does not matter. Asks the driver. Thread-safe; the current device is that of the launch.
cudaError_t ClustersAtOnce(const void* kernel, const LaunchShape& shape, const Scratch& scratch,
                           int* clusters);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CLUSTERS_AT_ONCE_H_
