// sample's kernels for f32 logits.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<float, false, false, false>(const SampleParams&, const Scratch&,
                                                            cudaStream_t);
template cudaError_t LaunchPass<float, false, true, false>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
template cudaError_t LaunchPass<float, true, false, false>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
template cudaError_t LaunchPass<float, true, true, false>(const SampleParams&, const Scratch&,
                                                          cudaStream_t);
template int ClusterOf<float>(int64_t, int, const Scratch&);

}  // namespace logitd::cuda
