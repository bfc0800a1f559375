// How CUDA devices can exchange the parts of a call on a sharded head.
#include <cuda_runtime.h>

#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "kernels/choose_exchange.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/sharded_stream.h"
#include "kernels/cuda/stream.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Whether the memory of the first device can be reached from all others.
absl::Status CheckPeers(absl::Span<Backend* const> backends) {
  const int first = backends.front()->device().number;
  for (const Backend* backend : backends) {
    const int number = backend->device().number;
    int can = 0;
    if (number == first) continue;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaDeviceCanAccessPeer(&can, number, first), "ask for peers"));
    if (can != 0) continue;
    return absl::FailedPreconditionError(
        absl::StrFormat("device %d cannot reach the memory of device %d", number, first));
  }
  return absl::OkStatus();
}

// Whether NCCL is there, and can join the devices.
absl::Status CheckNccl(absl::Span<Backend* const> backends) {
  std::set<int> numbers;
  for (const Backend* backend : backends) {
    if (numbers.insert(backend->device().number).second) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "NCCL joins no device with itself: device %d is named twice", backend->device().number));
  }
  return NcclGather::Check();
}

}  // namespace

absl::StatusOr<ShardExchange> ChooseExchange(absl::Span<Backend* const> backends,
                                             ShardExchange wanted) {
  return logitd::ChooseExchange(
      wanted, [&] { return CheckPeers(backends); }, [&] { return CheckNccl(backends); });
}

}  // namespace logitd::cuda
