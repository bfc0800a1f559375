// sample and verify of f16 rows with bias, penalties or a mask.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<__half, false, true>(const SampleParams&, const LaunchShape&,
                                                     cudaStream_t);
template cudaError_t LaunchPass<__half, true, true>(const SampleParams&, const LaunchShape&,
                                                    cudaStream_t);

}  // namespace logitd::cuda
