// sample and verify of f32 rows with bias, penalties or a mask.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template PassLauncher LaunchPass<float, false, Serves::kEdited>;
template PassLauncher LaunchPass<float, true, Serves::kEdited>;

}  // namespace logitd::cuda
