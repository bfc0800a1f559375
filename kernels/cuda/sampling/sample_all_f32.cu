// sample and verify of f32 rows of any kind.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template PassLauncher LaunchPass<float, false, Serves::kAll>;
template PassLauncher LaunchPass<float, true, Serves::kAll>;

}  // namespace logitd::cuda
