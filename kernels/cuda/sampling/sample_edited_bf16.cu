// sample and verify of bf16 rows with bias, penalties or a mask.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template PassLauncher LaunchPass<__nv_bfloat16, false, Serves::kEdited>;
template PassLauncher LaunchPass<__nv_bfloat16, true, Serves::kEdited>;

}  // namespace logitd::cuda
