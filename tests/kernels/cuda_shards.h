// The CUDA devices of tests that cut heads over several. Where there are fewer devices than shards,
// a device has several shards.
#ifndef LOGITD_TESTS_KERNELS_CUDA_SHARDS_H_
#define LOGITD_TESTS_KERNELS_CUDA_SHARDS_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "kernels/sharded_stream.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {

// `shards` devices, the first one that of the tests. Those that cannot reach its memory are left
// out.
inline std::vector<std::unique_ptr<Backend>> DevicesOf(int shards) {
  std::vector<int> numbers;
  for (int i = 0; i < CountCudaDevices(); ++i) {
    const int number = (CudaTestDevice() + i) % CountCudaDevices();
    const auto device = CreateBackend("cuda", {.device = number}).value();
    const std::vector<Backend*> pair = {Cuda()->get(), device.get()};
    if (CheckCanShard(pair).ok()) numbers.push_back(number);
  }
  std::vector<std::unique_ptr<Backend>> devices;
  for (int i = 0; i < shards; ++i) {
    const int number = numbers[static_cast<size_t>(i) % numbers.size()];
    devices.push_back(CreateBackend("cuda", {.device = number}).value());
  }
  return devices;
}

// Why a test that makes the logits once cannot run; "": it can.
inline std::string WhyNoTraining() {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, CudaTestDevice());
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (properties.major == 9 && properties.minor == 0) return "";
  return absl::StrFormat("shards make the logits of training once on sm_90, the device is sm_%d%d",
                         properties.major, properties.minor);
}

class ShardsGpuTest : public CudaTest {};

// Skips, with the reason, on a machine with one GPU or without NCCL's library.
class ShardsByNcclGpuTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (CountCudaDevices() < 2) GTEST_SKIP() << "one GPU";
    const absl::Status status = CheckCanShard(Pointers(All()), kByNccl).status();
    if (absl::StrContains(status.message(), "NCCL cannot be loaded")) GTEST_SKIP() << status;
    ASSERT_TRUE(status.ok()) << status;
  }

  static std::vector<std::unique_ptr<Backend>> All() { return DevicesOf(CountCudaDevices()); }
  static std::vector<Backend*> Pointers(const std::vector<std::unique_ptr<Backend>>& devices) {
    std::vector<Backend*> pointers;
    for (const auto& device : devices) pointers.push_back(device.get());
    return pointers;
  }

  static constexpr ShardOptions kByNccl = {.exchange = ShardExchange::kNccl};
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CUDA_SHARDS_H_
