// verify's kernels for f32 logits.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<float, false, false, true>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
template cudaError_t LaunchPass<float, false, true, true>(const SampleParams&, const Scratch&,
                                                          cudaStream_t);
template cudaError_t LaunchPass<float, true, false, true>(const SampleParams&, const Scratch&,
                                                          cudaStream_t);
template cudaError_t LaunchPass<float, true, true, true>(const SampleParams&, const Scratch&,
                                                         cudaStream_t);

}  // namespace logitd::cuda
