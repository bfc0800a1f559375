// NCCL's collectives over devices of this process.
#ifndef LOGITD_KERNELS_CUDA_NCCL_H_
#define LOGITD_KERNELS_CUDA_NCCL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace logitd::cuda {

// A communicator for each of several devices. Used by one thread at a time.
//
// The library is loaded at run time, once a process: libnccl.so.2 is looked for where the loader
// looks, then in /usr/local/cuda/lib64. Multicast over NVLink (NVLS) is switched off by NCCL's
// environment variable before the library is loaded.
class NcclGather {
 public:
  // OK, or FAILED_PRECONDITION and why NCCL cannot be used: there is no library, or it lacks a
  // function.
  static absl::Status Check();

  // `devices`: numbers of CUDA devices, each once. Takes about a second. Errors: Check's, and
  // UNAVAILABLE: NCCL gives no communicators, the text has its reason; or it has given none for
  // `limit`. Then a thread waits for them on its own, and ends them; until it has, the answer for
  // the same devices is UNAVAILABLE at once.
  static absl::StatusOr<std::unique_ptr<NcclGather>> Create(absl::Span<const int> devices,
                                                            absl::Duration limit);

  // True while a thread still makes communicators for these devices that Create gave up: it may use
  // them, and one of them may hang. Thread-safe.
  static bool StillJoins(absl::Span<const int> devices);

  // Waits for what was enqueued, except after Abort.
  ~NcclGather();
  NcclGather(const NcclGather&) = delete;
  NcclGather& operator=(const NcclGather&) = delete;

  // Where a device has the blocks of all devices, one after another, and its stream. Its own block
  // is in its place already.
  struct Place {
    std::byte* blocks;
    cudaStream_t stream;
  };
  // Enqueues one all-gather of blocks of `bytes` bytes; `places` are in the order of the devices.
  // UNAVAILABLE: NCCL refused it; nothing is certain about the blocks, and Abort comes next.
  absl::Status Enqueue(absl::Span<const Place> places, size_t bytes);

  // Enqueues the sum of arrays of `count` floats, one on each device, into the first one's.
  // `places` have the arrays in place of blocks. Sums have bits of their own, the same from run to
  // run. Errors as above.
  absl::Status EnqueueSum(absl::Span<const Place> places, size_t count);

  // Ends collectives that wait for a device, on all devices that still work, soon after it returns.
  // Nothing can be enqueued any more.
  void Abort();

 private:
  NcclGather() = default;

  // Calls enqueue(device), which returns a result of NCCL, for all devices as one group.
  absl::Status OnAll(std::string_view what, absl::FunctionRef<int(size_t)> enqueue);

  std::vector<void*> communicators_;  // ncclComm_t, by device; empty after Abort
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_NCCL_H_
