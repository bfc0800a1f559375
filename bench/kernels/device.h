// What the bench needs of a device: its own ceilings, and the median time of one op over inputs
// that defeat the caches.
#ifndef LOGITD_BENCH_KERNELS_DEVICE_H_
#define LOGITD_BENCH_KERNELS_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sample.h"
#include "kernels/types.h"

namespace logitd::bench {

struct TopKCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  int32_t k;
  int64_t row_stride;  // elements
};

// What a row of a sample entry has besides its parameters.
struct SampleLists {
  int32_t history = 0;  // tokens
  bool mask = false;    // half the tokens allowed
};

struct SampleCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  SampleRow row;  // of every row; seeds and positions differ
  SampleLists lists;
};

// Times are medians in microseconds; rates are bytes per second.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual absl::StatusOr<double> ReadCeiling() = 0;  // a read of far more than the caches hold
  virtual absl::StatusOr<double> CopyCeiling() = 0;  // bytes read plus bytes written, per second
  virtual absl::StatusOr<double> TimeTopK(const TopKCase& c) = 0;
  virtual absl::StatusOr<double> TimeSample(const SampleCase& c) = 0;
};

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice();
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice();  // in builds with CUDA

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_KERNELS_DEVICE_H_
