// sample's kernels for bf16 logits.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<__nv_bfloat16, false, false, false>(const SampleParams&,
                                                                    const Scratch&, cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, false, true, false>(const SampleParams&,
                                                                   const Scratch&, cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, true, false, false>(const SampleParams&,
                                                                   const Scratch&, cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, true, true, false>(const SampleParams&,
                                                                  const Scratch&, cudaStream_t);
template int ClusterOf<__nv_bfloat16>(int64_t, int, const Scratch&);

}  // namespace logitd::cuda
