// cross_entropy and its backward on the CUDA backend: the checks of the CPU backend.
#include <gtest/gtest.h>

#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class CrossEntropyGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<CrossEntropyGpuTest>("CrossEntropyGpuTest", CrossEntropyChecks());

}  // namespace
}  // namespace logitd::testing
