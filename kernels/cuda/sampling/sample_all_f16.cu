// sample and verify of f16 rows of any kind.
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

template PassLauncher LaunchPass<__half, false, Serves::kAll>;
template PassLauncher LaunchPass<__half, true, Serves::kAll>;

}  // namespace logitd::cuda
