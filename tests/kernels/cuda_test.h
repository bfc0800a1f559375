// The fixture of tests that need a GPU: skipped without one.
#ifndef LOGITD_TESTS_KERNELS_CUDA_TEST_H_
#define LOGITD_TESTS_KERNELS_CUDA_TEST_H_

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {

// The device that the tests use: the first one, or that of the environment variable
// LOGITD_TEST_DEVICE.
inline int CudaTestDevice() {
  const char* const device = std::getenv("LOGITD_TEST_DEVICE");
  return device == nullptr ? 0 : std::atoi(device);
}

// The backend, or why there is none. Made once: a context is slow to make.
inline const absl::StatusOr<std::unique_ptr<Backend>>& Cuda() {
  static const auto& cuda = *new auto(CreateBackend("cuda", {.device = CudaTestDevice()}));
  return cuda;
}

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (absl::IsUnavailable(Cuda().status())) GTEST_SKIP() << Cuda().status();
    ASSERT_TRUE(Cuda().ok()) << Cuda().status();
    runner_ = OpRunner::Create(Cuda()->get()).value();
  }

  static void SetUpTestSuite() {
    if (absl::IsUnavailable(Cuda().status())) std::printf("no CUDA device: every test skipped\n");
  }

  std::unique_ptr<OpRunner> runner_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CUDA_TEST_H_
