// sample and verify of bf16 rows of any kind.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template PassLauncher LaunchPass<__nv_bfloat16, false, Serves::kAll>;
template PassLauncher LaunchPass<__nv_bfloat16, true, Serves::kAll>;

}  // namespace logitd::cuda
