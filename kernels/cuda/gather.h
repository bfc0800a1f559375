// Copies of rows from many places of a device's memory.
#ifndef LOGITD_KERNELS_CUDA_GATHER_H_
#define LOGITD_KERNELS_CUDA_GATHER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/backend.h"

namespace logitd::cuda {

// One row of memory that kernels can read, also of the host.
inline RowsCopy OneRow(std::byte* to, const std::byte* from, size_t bytes) {
  return {.from = from,
          .from_stride = bytes,
          .to = to,
          .to_stride = bytes,
          .row_bytes = bytes,
          .rows = 1,
          .from_device = true};
}

// Messages of a stream's work to the host, in pinned host memory of the stream's own. Times
// are of the device's clock, which all its streams share.
struct HostMarks {
  uint64_t uploading_ns;  // when each phase began
  uint64_t computing_ns;
  uint64_t downloading_ns;
  uint64_t done_ns;
  // Written last: how many times the stream has come to an end. What it wrote before can then be
  // read.
  uint32_t done;
};

// The same stream's own, in device memory. Zero before the first launch.
struct DeviceMarks {
  uint64_t computing_ns;  // of this turn so far: the host gets it at the turn's end
  uint32_t done;
  uint32_t blocks;  // of a launch, that have ended
};

// What a launch marks.
struct Marks {
  HostMarks* host = nullptr;  // null, as the next: nothing
  DeviceMarks* device = nullptr;
  bool upload_begins = false;
  bool upload_ends = false;
  bool download_begins = false;
  bool download_ends = false;  // and so does the turn
};

// Gathers as Stream::Gather does, rows in device memory (RowsCopy::from_device) or in any other
// that kernels can read, to any that they can write. Enqueues and returns.
//
// `marks` costs no launch, and a host that polls HostMarks::done learns of the end some
// microseconds sooner than from an event.
cudaError_t GatherRows(absl::Span<const RowsCopy> copies, cudaStream_t stream,
                       const Marks& marks = {});

// Enqueues the marks.
cudaError_t Mark(const Marks& marks, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_GATHER_H_
