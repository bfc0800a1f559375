// verify's kernels for f16 logits.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<__half, false, false, true>(const SampleParams&, const Scratch&,
                                                            cudaStream_t);
template cudaError_t LaunchPass<__half, false, true, true>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
template cudaError_t LaunchPass<__half, true, false, true>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
template cudaError_t LaunchPass<__half, true, true, true>(const SampleParams&, const Scratch&,
                                                          cudaStream_t);

}  // namespace logitd::cuda
