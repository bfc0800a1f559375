// sample's kernels for f16 logits.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<__half, false, false, false>(const SampleParams&, const Scratch&,
                                                             cudaStream_t);
template cudaError_t LaunchPass<__half, false, true, false>(const SampleParams&, const Scratch&,
                                                            cudaStream_t);
template cudaError_t LaunchPass<__half, true, false, false>(const SampleParams&, const Scratch&,
                                                            cudaStream_t);
template cudaError_t LaunchPass<__half, true, true, false>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
template int ClusterOf<__half>(int64_t, int, const Scratch&);

}  // namespace logitd::cuda
