// Memory of a GPU that another process shares by a file descriptor. Uses the CUDA driver of the
// machine if there is one; nothing here links it.
#ifndef LOGITD_CLIENT_CUDA_MEMORY_H_
#define LOGITD_CLIENT_CUDA_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logitd::client {

// A mapping of the memory in the device's primary context, which torch and the CUDA runtime use
// too. Thread-safe, as far as memory is.
class CudaMemory {
 public:
  // `fd`: as cuMemExportToShareableHandle gives it; the caller may close it afterwards. `uuid`: of
  // the device whose memory it is. UNAVAILABLE: there is no driver, or no such device, here.
  // INTERNAL: the driver refuses it.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Map(int fd,
                                                         const std::array<uint8_t, 16>& uuid,
                                                         size_t bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  char* data() const { return data_; }    // in device memory
  int device() const { return device_; }  // as this process counts devices
  // Copy to or from host memory, between `offset` and the end, and wait for it. INTERNAL: the
  // driver failed.
  absl::Status Write(size_t offset, absl::string_view from);
  absl::Status Read(size_t offset, absl::Span<char> to);

 private:
  CudaMemory(int device, size_t bytes) : device_(device), bytes_(bytes) {}

  const int device_;
  const size_t bytes_;
  void* context_ = nullptr;
  uint64_t handle_ = 0;
  char* data_ = nullptr;
  bool mapped_ = false;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_CUDA_MEMORY_H_
