#include "kernels/cuda/signals.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <new>

#include "kernels/cuda/stream.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

struct Driver {
  decltype(&cuStreamWriteValue32) write = nullptr;
  decltype(&cuStreamWaitValue32) wait = nullptr;
  bool complete =
      FindInDriver("cuStreamWriteValue32", write) && FindInDriver("cuStreamWaitValue32", wait);
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

// The codes of both are the same numbers.
cudaError_t ToCuda(CUresult result) { return static_cast<cudaError_t>(result); }

}  // namespace

absl::StatusOr<std::unique_ptr<Signals>> Signals::Create(int count) {
  if (!TheDriver().complete) return ToStatus(cudaErrorNotSupported, "find the driver's signals");
  auto signals = std::unique_ptr<Signals>(new Signals);
  const size_t bytes = static_cast<size_t>(count) * sizeof(Number);
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&signals->numbers_, bytes, cudaHostAllocPortable),
                                  "allocate signals"));
  for (int i = 0; i < count; ++i) new (&signals->numbers_[i]) Number{};
  signals->asked_.resize(static_cast<size_t>(count));
  return signals;
}

Signals::~Signals() { cudaFreeHost(numbers_); }

cudaError_t Signals::Raise(int signal, cudaStream_t stream) {
  const uint32_t value = ++asked_[static_cast<size_t>(signal)];
  const auto at = reinterpret_cast<CUdeviceptr>(&numbers_[signal].value);
  return ToCuda(TheDriver().write(stream, at, value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

cudaError_t Signals::Await(int signal, cudaStream_t stream) {
  const auto at = reinterpret_cast<CUdeviceptr>(&numbers_[signal].value);
  // As numbers that wrap around.
  return ToCuda(
      TheDriver().wait(stream, at, asked_[static_cast<size_t>(signal)], CU_STREAM_WAIT_VALUE_GEQ));
}

bool Signals::Raised(int signal) const {
  return __atomic_load_n(&numbers_[signal].value, __ATOMIC_ACQUIRE) ==
         asked_[static_cast<size_t>(signal)];
}

uint32_t Signals::Risen() const {
  uint32_t sum = 0;
  for (size_t i = 0; i < asked_.size(); ++i)
    sum += __atomic_load_n(&numbers_[i].value, __ATOMIC_ACQUIRE);
  return sum;
}

void Signals::RaiseAll() {
  for (size_t i = 0; i < asked_.size(); ++i)
    __atomic_store_n(&numbers_[i].value, asked_[i], __ATOMIC_RELEASE);
}

}  // namespace logitd::cuda
