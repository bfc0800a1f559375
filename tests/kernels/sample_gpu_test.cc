// sample on the CUDA backend: the CPU's cases.
#include <gtest/gtest.h>

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/sample_heavy_cases.h"

namespace logitd::testing {
namespace {

class SampleGpuTest : public CudaTest {};

const bool kRegistered = RegisterChecks<SampleGpuTest>("SampleGpuTest", SampleChecks());
const bool kHeavyRegistered = RegisterChecks<SampleGpuTest>("SampleGpuTest", HeavySampleChecks());

}  // namespace
}  // namespace logitd::testing
