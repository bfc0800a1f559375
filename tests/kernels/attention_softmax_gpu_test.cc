// attention_softmax on the CUDA backend: the checks of the CPU backend.
#include <gtest/gtest.h>

#include "tests/kernels/attention_softmax_cases.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class AttentionSoftmaxGpuTest : public CudaTest {};
const bool kRegistered =
    RegisterChecks<AttentionSoftmaxGpuTest>("AttentionSoftmaxGpuTest", AttentionSoftmaxChecks());

}  // namespace
}  // namespace logitd::testing
