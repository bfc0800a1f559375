// The launches of sample's kernel, each compiled in the file of its dtype and op (sample_f32.cu,
// verify_f32.cu and so on).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_PASS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_PASS_CUH_

#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {

template <class T, bool kInCluster, bool kEditable>
int SharedBytes(const SampleParams& p) {
  const int part_cells = (p.cells + p.blocks - 1) / p.blocks;
  return static_cast<int>(
      sizeof(DrawMemory<T, kInCluster, kEditable>) + 2 * (p.cells + p.cells % 2) * sizeof(Stats) +
      part_cells * 32 * sizeof(SmallPool::Sketch) + (kEditable ? EditEnds::Bytes(part_cells) : 0));
}

// Enqueues sample, or verify, for all rows of p.args, p.blocks blocks a row.
template <class T, bool kInCluster, bool kEditable, bool kVerify>
cudaError_t LaunchPass(const SampleParams& p, const Scratch& scratch, cudaStream_t stream);

// The blocks of a row's cluster, up to `most`: as many as let the clusters of all rows be resident.
template <class T>
int ClusterOf(int64_t rows, int most, const Scratch& scratch);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_PASS_CUH_
