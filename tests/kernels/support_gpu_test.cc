// cross_entropy of rows with supports on the CUDA backend: the checks of the CPU backend.
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/support_cases.h"

namespace logitd::testing {
namespace {

class SupportGpuTest : public CudaTest {};
const bool kRegistered = RegisterChecks<SupportGpuTest>("SupportGpuTest", SupportChecks());

}  // namespace
}  // namespace logitd::testing
