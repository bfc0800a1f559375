// A device as a plan knows it: a column of numbers, measured by kernel_bench.
#ifndef LOGITD_KERNELS_CUDA_ROWS_DEVICES_H_
#define LOGITD_KERNELS_CUDA_ROWS_DEVICES_H_

#include <string_view>

namespace logitd::cuda {

// Rates are of one multiprocessor, so that a device with more of them needs no other column.
struct DeviceRates {
  std::string_view name = "";  // how the driver's name begins; empty: any other device
  float bytes_per_us = 23000;  // of device memory, at the read ceiling
  float l2_bytes = 100e3f;     // that L2 holds of rows until they are read again
  float work_speed = 1;        // instructions a second, beside an H200
  float launch_us = 2;         // from one launch of a stream to the next, and the first bytes
  float meeting_us = 0.3f;     // the blocks of a cluster wait for each other
};

inline constexpr DeviceRates kDevices[] = {
    {.name = "NVIDIA H200", .bytes_per_us = 34400, .l2_bytes = 128e3f},
    {.name = "NVIDIA H100", .bytes_per_us = 23000, .l2_bytes = 128e3f},
    {},
};

// The column of a device by the driver's name.
constexpr DeviceRates RatesOf(std::string_view name) {
  for (const DeviceRates& device : kDevices) {
    if (name.substr(0, device.name.size()) == device.name) return device;
  }
  return {};
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_DEVICES_H_
