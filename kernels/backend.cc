#include "kernels/backend.h"

#include "absl/strings/str_format.h"

namespace logitd {

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(std::string_view kind,
                                                       const BackendOptions& options) {
  if (kind == "cpu") return CreateCpuBackend(options);
#if LOGITD_WITH_CUDA
  if (kind == "cuda") return CreateCudaBackend(options);
  if (kind == "auto") {
    auto cuda = CreateCudaBackend(options);
    return cuda.ok() ? std::move(cuda) : CreateCpuBackend(options);
  }
#else
  if (kind == "cuda")
    return absl::UnavailableError("backend cuda: this build has only the CPU backend");
  if (kind == "auto") return CreateCpuBackend(options);
#endif
  return absl::InvalidArgumentError(
      absl::StrFormat("backend: got \"%s\", allowed: auto, cpu, cuda", kind));
}

}  // namespace logitd
