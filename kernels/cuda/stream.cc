// Errors of the driver as statuses, its functions, and which devices hang.
#include "kernels/cuda/stream.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <string>

#include "absl/strings/str_format.h"

namespace logitd::cuda {
namespace {

// Errors after which the context still works: the call was refused, and nothing ran.
bool Recoverable(cudaError_t error) {
  return error == cudaErrorMemoryAllocation || error == cudaErrorInvalidValue ||
         error == cudaErrorInvalidConfiguration || error == cudaErrorLaunchOutOfResources ||
         error == cudaErrorNotSupported;
}

constexpr int kMostDevices = 64;
std::array<std::atomic<bool>, kMostDevices> hung;

}  // namespace

void SetHung(int device) {
  if (device < kMostDevices) hung[static_cast<size_t>(device)] = true;
}
bool IsHung(int device) { return device < kMostDevices && hung[static_cast<size_t>(device)]; }

bool FindInDriver(const char* name, void** function) {
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &result);
  cudaGetLastError();
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return true;
  *function = nullptr;
  return false;
}

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string text = absl::StrFormat("CUDA: %s: %s (%s)", what, cudaGetErrorString(error),
                                           cudaGetErrorName(error));
  return Recoverable(error) ? absl::UnavailableError(text) : absl::InternalError(text);
}

}  // namespace logitd::cuda
