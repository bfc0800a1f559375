// Device memory that other processes can use, by a POSIX file descriptor.
#ifndef LOGITD_KERNELS_CUDA_SHARED_MEMORY_H_
#define LOGITD_KERNELS_CUDA_SHARED_MEMORY_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace logitd::cuda {

// As Backend, of `device`, which is the thread's current one; but what is in the memory is
// unspecified.
absl::StatusOr<SharedDeviceMemory> AllocateShared(int device, size_t bytes);
void FreeShared(const SharedDeviceMemory& memory);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARED_MEMORY_H_
