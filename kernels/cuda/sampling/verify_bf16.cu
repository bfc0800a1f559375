// verify's kernels for bf16 logits.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<__nv_bfloat16, false, false, true>(const SampleParams&,
                                                                   const Scratch&, cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, false, true, true>(const SampleParams&,
                                                                  const Scratch&, cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, true, false, true>(const SampleParams&,
                                                                  const Scratch&, cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, true, true, true>(const SampleParams&,
                                                                 const Scratch&, cudaStream_t);

}  // namespace logitd::cuda
