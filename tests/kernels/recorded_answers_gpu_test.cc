// Every op's answers on the CUDA backend are those recorded before on the same kind of device.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/recorded_answers.h"

namespace logitd::testing {
namespace {

class RecordedAnswersGpuTest : public CudaTest {};

TEST_F(RecordedAnswersGpuTest, EveryOpKeepsItsBits) {
  std::string name = "cuda-" + runner_->arena().device().name;
  std::replace(name.begin(), name.end(), ' ', '-');
  CompareWithRecording(name, *runner_, /*large=*/true);
}

}  // namespace
}  // namespace logitd::testing
