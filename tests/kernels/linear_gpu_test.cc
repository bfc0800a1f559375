// The linear_* ops on the CUDA backend: the checks of the CPU backend.
#include <gtest/gtest.h>

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/linear_gradient_cases.h"

namespace logitd::testing {
namespace {

class LinearGpuTest : public CudaTest {};
const bool kRegistered = RegisterChecks<LinearGpuTest>("LinearGpuTest", LinearChecks()) &&
                         RegisterChecks<LinearGpuTest>("LinearGpuTest", LinearGradientChecks());

}  // namespace
}  // namespace logitd::testing
