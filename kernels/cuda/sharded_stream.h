// The sharded stream of CUDA devices: see kernels/sharded_stream.h.
#ifndef LOGITD_KERNELS_CUDA_SHARDED_STREAM_H_
#define LOGITD_KERNELS_CUDA_SHARDED_STREAM_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/sharded_stream.h"

namespace logitd::cuda {

// The way of exchange that the devices have among those that `wanted` allows, never kAuto.
// FAILED_PRECONDITION: there is none, and the text says why. `backends` are CUDA's.
absl::StatusOr<ShardExchange> ChooseExchange(absl::Span<Backend* const> backends,
                                             ShardExchange wanted);

// Errors: those of ChooseExchange, and of the devices. By kPeers several of the backends may be the
// same device.
absl::StatusOr<std::unique_ptr<ShardedStream>> CreateShardedStream(
    absl::Span<Backend* const> backends, const ShardOptions& options);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARDED_STREAM_H_
