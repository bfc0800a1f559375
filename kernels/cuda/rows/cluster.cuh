// Clusters: blocks that see each other's shared memory, on devices that have them.
#ifndef LOGITD_KERNELS_CUDA_ROWS_CLUSTER_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_CLUSTER_CUH_

namespace logitd::cuda {

constexpr int kMaxClusterBlocks = 8;  // what every device with clusters can schedule

// The two halves of a barrier of the cluster. Writes before the first half are seen after the
// second.
__device__ inline void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
}
// The first half where nothing was written that another block reads: it waits for no write. For a
// kernel's begin, so that the blocks' memory is there.
__device__ inline void ClusterArriveEmpty() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
// The cluster's place in the grid, and the block's in its cluster. A block launched without a
// cluster is one of its own.
__device__ inline int ClusterOfGrid() {
#if __CUDA_ARCH__ >= 900
  int cluster;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
  return cluster;
#else
  return blockIdx.x;
#endif
}
__device__ inline int BlockOfCluster() {
#if __CUDA_ARCH__ >= 900
  int block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
#else
  return 0;
#endif
}
// The same place in the shared memory of the cluster's block `rank`.
template <class U>
__device__ inline U* InBlock(U* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  U* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return there;
#else
  return shared;
#endif
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_CLUSTER_CUH_
