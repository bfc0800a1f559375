// How many blocks the clusters of a launch have.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CLUSTER_BLOCKS_H_
#define LOGITD_KERNELS_CUDA_ROWS_CLUSTER_BLOCKS_H_

#include <cstdint>

#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// The most blocks, 1 to kMaxClusterBlocks, that each of `rows` clusters can have while the device
// runs all of them at once, a block on a multiprocessor. The blocks of a cluster share a part of the
// device (a GPC), and what is left over in a part is idle: 15 clusters of 8 may not fit into 132
// multiprocessors. 1 where the device has no clusters. Asks the driver on the first call for a
// device. Thread-safe; the current device is that of the launch.
int32_t ClusterBlocksAtOnce(int64_t rows, const Scratch& scratch);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CLUSTER_BLOCKS_H_
