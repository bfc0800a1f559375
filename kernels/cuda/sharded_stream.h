// The sharded stream of CUDA devices: see kernels/sharded_stream.h.
#ifndef LOGITD_KERNELS_CUDA_SHARDED_STREAM_H_
#define LOGITD_KERNELS_CUDA_SHARDED_STREAM_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace logitd::cuda {

// Whether the memory of the first device can be reached from all others. FAILED_PRECONDITION: it
// cannot, and the text names the device.
absl::Status CheckPeers(absl::Span<Backend* const> backends);

// `backends` are CUDA's, and have passed CheckPeers. Several of them may be the same device.
absl::StatusOr<std::unique_ptr<Stream>> CreateShardedStream(absl::Span<Backend* const> backends);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARDED_STREAM_H_
