// The launches of sample's kernel. Those of edited rows are compiled in files of their own
// (sample_edited_f32.cu and so on).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_PASS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_PASS_CUH_

#include "kernels/cuda/sampling/late_edits.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {

template <class T, bool kInCluster>
int SharedBytes(const SampleParams& p) {
  const int inbox_bytes = kInCluster && p.args.edited ? sizeof(LateInbox) : 0;
  const int part_cells = (p.cells + p.blocks - 1) / p.blocks;
  const size_t memory = p.args.edited ? sizeof(DrawMemory<T, kInCluster, true>)
                                      : sizeof(DrawMemory<T, kInCluster, false>);
  return static_cast<int>(memory + 2 * (p.cells + p.cells % 2) * sizeof(Stats) +
                          part_cells * 32 * sizeof(SmallPool::Sketch) + inbox_bytes);
}

// Enqueues sample, or verify, for all rows of p.args, p.blocks blocks a row.
template <class T, bool kInCluster, bool kEditable>
cudaError_t LaunchPass(const SampleParams& p, const Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_PASS_CUH_
