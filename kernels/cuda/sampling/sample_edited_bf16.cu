// sample and verify of bf16 rows with bias, penalties or a mask.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template cudaError_t LaunchPass<__nv_bfloat16, false, true>(const SampleParams&, const LaunchShape&,
                                                            cudaStream_t);
template cudaError_t LaunchPass<__nv_bfloat16, true, true>(const SampleParams&, const LaunchShape&,
                                                           cudaStream_t);

}  // namespace logitd::cuda
