// Copies of rows from many places of a device's memory.
#ifndef LOGITD_KERNELS_CUDA_GATHER_H_
#define LOGITD_KERNELS_CUDA_GATHER_H_

#include <cuda_runtime_api.h>

#include "absl/types/span.h"
#include "kernels/backend.h"

namespace logitd::cuda {

// As Stream::Gather, of rows in device memory (RowsCopy::from_device) or in any other that kernels can
// read, to any that they can write. Enqueues and returns.
cudaError_t GatherRows(absl::Span<const RowsCopy> copies, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_GATHER_H_
