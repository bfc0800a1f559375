// How streams of several devices wait for each other, so that the host can end the wait.
#ifndef LOGITD_KERNELS_CUDA_SIGNALS_H_
#define LOGITD_KERNELS_CUDA_SIGNALS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

namespace logitd::cuda {

// Numbers in pinned host memory. A stream raises one when it has come so far, others wait for it,
// and the host reads it: a look costs no call of the driver. An event would do the same, but a wait
// for an event of a device that hangs never ends, and holds up what waits for the stream, a
// cudaFree for instance. Used by one thread at a time.
class Signals {
 public:
  // Errors of CUDA.
  static absl::StatusOr<std::unique_ptr<Signals>> Create(int count);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Enqueues that the signal rises, after what the stream has so far; what that wrote can be seen
  // by all devices before. The stream's device is the thread's.
  cudaError_t Raise(int signal, cudaStream_t stream);
  // Enqueues that the stream waits for the last Raise of the signal. Its device is the thread's.
  cudaError_t Await(int signal, cudaStream_t stream);

  // Whether the last Raise of the signal has happened.
  bool Raised(int signal) const;
  // Changes whenever a signal has risen.
  uint32_t Risen() const;
  // Ends every wait that was enqueued. To be repeated while streams work that may raise a signal:
  // that can undo it.
  void RaiseAll();

 private:
  struct alignas(64) Number {
    uint32_t value;
  };

  Signals() = default;

  Number* numbers_ = nullptr;    // [count]
  std::vector<uint32_t> asked_;  // by Raise
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SIGNALS_H_
