// A device as the C interface uses it: rows are made in its memory, then an op runs on them.
#ifndef LOGITD_KERNELS_C_API_DEVICE_H_
#define LOGITD_KERNELS_C_API_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/c_api.h"
#include "kernels/c_api/rows.h"
#include "kernels/ops.h"

namespace logitd::c_api {

// Memory that a call takes for its rows and for answers that its caller does not want.
constexpr size_t CallBytes(int64_t rows) {
  return (size_t{16} << 10) + static_cast<size_t>(rows) * 256;
}

// Losses of rows in one number: the sum of losses, or their mean over the rows that count.
struct Reduction {
  int64_t rows = 0;
  const int64_t* targets = nullptr;  // [rows]
  int64_t ignored = 0;               // the target of a row that does not count
  bool mean = false;
  float* weights = nullptr;       // [rows + 1]: of each row, and last of a row that counts
  const float* losses = nullptr;  // [rows]
  float* total = nullptr;
};

// Used by one thread at a time. A call is Begin, then Take and Fill in any order, then Run, and End
// however it went.
class Device {
 public:
  virtual ~Device() = default;

  // Bytes of workspace that a call with so many rows needs.
  virtual size_t WorkspaceBytes(int64_t rows) const = 0;
  virtual absl::Status Prepare(const logitd_call& call) = 0;

  virtual absl::Status Begin(const logitd_call& call, int64_t rows) = 0;
  // The thread's current device is the caller's again.
  virtual void End() {}
  // Memory for `count` elements, aligned to 256 bytes, until the next Begin. There is always room
  // for what CallBytes covers.
  template <class T>
  T* Take(int64_t count) {
    return reinterpret_cast<T*>(TakeBytes(static_cast<size_t>(count) * sizeof(T)));
  }
  virtual absl::Status Fill(const RowFill& fill) = 0;
  // Writes the weights; and, when the losses are there, the total.
  virtual absl::Status Weigh(const Reduction& of) = 0;
  virtual absl::Status Total(const Reduction& of) = 0;
  virtual absl::Status Run(const Op& op) = 0;

 protected:
  virtual std::byte* TakeBytes(size_t bytes) = 0;
};

absl::StatusOr<std::unique_ptr<Device>> OpenCpu(int threads);
// Only in builds with CUDA.
absl::StatusOr<std::unique_ptr<Device>> OpenCuda(int device, size_t scratch_bytes);

}  // namespace logitd::c_api

#endif  // LOGITD_KERNELS_C_API_DEVICE_H_
