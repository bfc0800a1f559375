#include "kernels/backend.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/usable_cores.h"

namespace logitd {
namespace {

#if LOGITD_WITH_CUDA
absl::StatusOr<std::unique_ptr<Backend>> MakeCuda(const BackendOptions& options) {
  return CreateCudaBackend(options);
}
int CudaDevices() { return CountCudaDevices(); }
#else
absl::StatusOr<std::unique_ptr<Backend>> MakeCuda(const BackendOptions&) {
  return absl::UnavailableError("backend cuda: this build has only the CPU backend");
}
int CudaDevices() { return 0; }
#endif

// Resolves "auto".
absl::StatusOr<bool> IsCuda(std::string_view kind) {
  if (kind == "auto") return CudaDevices() > 0;
  if (kind == "cpu" || kind == "cuda") return kind == "cuda";
  return absl::InvalidArgumentError(
      absl::StrFormat("backend: got \"%s\", allowed: auto, cpu, cuda", kind));
}

// Threads of device `index` of `count`.
int ShareOf(int threads, int index, int count) {
  return std::max(1, threads / count + (index < threads % count ? 1 : 0));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(std::string_view kind,
                                                       const BackendOptions& options) {
  const absl::StatusOr<bool> cuda = IsCuda(kind);
  if (!cuda.ok()) return cuda.status();
  return *cuda ? MakeCuda(options) : CreateCpuBackend(options);
}

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> CreateBackends(
    std::string_view kind, const BackendsOptions& options) {
  const absl::StatusOr<bool> cuda = IsCuda(kind);
  if (!cuda.ok()) return cuda.status();
  std::vector<int> devices = options.devices;
  if (devices.empty()) {
    devices.resize(static_cast<size_t>(*cuda ? std::max(1, CudaDevices()) : 1));
    std::iota(devices.begin(), devices.end(), 0);
  }
  const auto count = static_cast<int>(devices.size());
  const int threads = options.cpu_threads == 0 && count > 1 ? UsableCores() : options.cpu_threads;
  std::vector<std::unique_ptr<Backend>> backends;
  for (int i = 0; i < count; ++i) {
    const BackendOptions one = {.device = devices[static_cast<size_t>(i)],
                                .cpu_threads = threads <= 0 ? threads : ShareOf(threads, i, count)};
    absl::StatusOr<std::unique_ptr<Backend>> backend =
        *cuda ? MakeCuda(one) : CreateCpuBackend(one);
    if (!backend.ok()) return backend.status();
    backends.push_back(*std::move(backend));
    const DeviceInfo& first = backends.front()->device();
    const DeviceInfo& added = backends.back()->device();
    // Bits may depend on the model.
    if (*cuda && added.name != first.name) {
      return absl::InvalidArgumentError(
          absl::StrFormat("device: got %d, a %s, beside %d, a %s, allowed devices of one model",
                          added.number, added.name, first.number, first.name));
    }
  }
  return backends;
}

}  // namespace logitd
