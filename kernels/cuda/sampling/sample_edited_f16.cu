// sample and verify of f16 rows with bias, penalties or a mask.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template PassLauncher LaunchPass<__half, false, Serves::kEdited>;
template PassLauncher LaunchPass<__half, true, Serves::kEdited>;

}  // namespace logitd::cuda
