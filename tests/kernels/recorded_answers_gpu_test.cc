// Every op's answers on the CUDA backend are those recorded before on the same kind of device.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/recorded_answers.h"

namespace logitd::testing {
namespace {

class RecordedAnswersGpuTest : public CudaTest {};

TEST_F(RecordedAnswersGpuTest, EveryOpKeepsItsBits) {
  std::string name = "cuda-" + runner_->arena().device().name;
  std::replace(name.begin(), name.end(), ' ', '-');
  CompareWithRecording(name, absl::StrCat("CUDA ", CUDART_VERSION), *runner_, /*large=*/true);
}

}  // namespace
}  // namespace logitd::testing
