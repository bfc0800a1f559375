// Copies of rows from many places of a device's memory.
#ifndef LOGITD_KERNELS_CUDA_GATHER_H_
#define LOGITD_KERNELS_CUDA_GATHER_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/backend.h"

namespace logitd::cuda {

// What a stream's work tells the host about itself, in pinned host memory. Null: not wanted.
struct Marks {
  uint64_t* begun_ns = nullptr;  // the device's clock, which all its streams share
  uint64_t* ended_ns = nullptr;
  // Gets, last, how many times a launch has marked it: what the stream wrote before can then be read.
  // `count`, a word of device memory of the stream's own, holds that number.
  uint32_t* done = nullptr;
  uint32_t* count = nullptr;
};

// As Stream::Gather, of rows in device memory (RowsCopy::from_device) or in any other that kernels can
// read, to any that they can write. Enqueues and returns.
//
// `marks` costs no launch, and a host that polls `done` learns of the end some microseconds sooner
// than from an event. `blocks`: a word of device memory of the stream's own, which is 0 where nothing
// runs; null where there are no marks.
cudaError_t GatherRows(absl::Span<const RowsCopy> copies, cudaStream_t stream,
                       const Marks& marks = {}, uint32_t* blocks = nullptr);

// Enqueues the marks.
cudaError_t Mark(const Marks& marks, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_GATHER_H_
