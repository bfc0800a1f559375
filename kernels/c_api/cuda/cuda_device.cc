// A CUDA device of the C interface: calls are enqueued on the caller's stream.
#include <cuda_runtime.h>

#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "kernels/c_api/cuda/fill_rows.h"
#include "kernels/c_api/device.h"
#include "kernels/cuda/launchers.h"
#include "kernels/status_macros.h"

namespace logitd::c_api {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kDefaultScratchBytes = size_t{256} << 20;

// Workspace is scratch memory, the same for every call so that bits do not depend on the rows, and
// then the memory of a call.
class CudaDevice final : public Device {
 public:
  static absl::StatusOr<std::unique_ptr<Device>> Open(int number, size_t scratch_bytes) {
    auto device = std::unique_ptr<CudaDevice>(new CudaDevice(number));
    const absl::Status status = device->Init(scratch_bytes);
    device->End();
    if (!status.ok()) return status;
    return device;
  }

  size_t WorkspaceBytes(int64_t rows) const override { return scratch_.bytes + CallBytes(rows); }

  absl::Status Prepare(const logitd_call& call) override {
    LOGITD_RETURN_IF_ERROR(Begin(call, 0));
    return cuda::ToStatus(cudaMemsetAsync(scratch_.data, 0, cuda::Scratch::kCounterBytes, stream_),
                          "prepare workspace");
  }

  absl::Status Begin(const logitd_call& call, int64_t rows) override {
    LOGITD_RETURN_IF_ERROR(SelectDevice());
    const size_t need = WorkspaceBytes(rows);
    if (call.workspace_bytes < need) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("workspace_bytes: got %d, allowed %d or more for %d rows",
                          call.workspace_bytes, need, rows));
    }
    const auto at = reinterpret_cast<uintptr_t>(call.workspace);
    if (at == 0 || at % kAlignment != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("workspace: got address %p, allowed a multiple of 256", call.workspace));
    }
    stream_ = static_cast<cudaStream_t>(call.stream);
    scratch_.data = static_cast<std::byte*>(call.workspace);
    used_ = scratch_.bytes;
    return absl::OkStatus();
  }

  void End() override {
    if (callers_ != number_) cudaSetDevice(callers_);
    callers_ = number_;
  }

  absl::Status Fill(const RowFill& fill) override {
    return cuda::ToStatus(FillRows(fill, stream_), "rows");
  }

  absl::Status Weigh(const Reduction& of) override {
    return cuda::ToStatus(WeighRows(of, stream_), "weights of rows");
  }

  absl::Status Total(const Reduction& of) override {
    return cuda::ToStatus(TotalRows(of, stream_), "total of losses");
  }

  absl::Status Run(const Op& op) override {
    return std::visit(
        [&, name = NameOf(op)](const auto* args) {
          const auto& [launch, linear_op] = cuda::kLaunchers(*args);
          return cuda::Enqueue(
              name, launch, *args, linear_op,
              {.products = products_, .products_status = products_status_, .scratch = scratch_},
              stream_);
        },
        op);
  }

 private:
  explicit CudaDevice(int number) : number_(number), callers_(number) {}

  // The caller's runtime may be another copy, but both set the driver's current context.
  absl::Status SelectDevice() {
    LOGITD_RETURN_IF_ERROR(cuda::ToStatus(cudaGetDevice(&callers_), "ask for the current device"));
    if (callers_ == number_) return absl::OkStatus();
    return cuda::ToStatus(cudaSetDevice(number_), "select device");
  }

  absl::Status Init(size_t scratch_bytes) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || number_ < 0 || number_ >= count) {
      cudaGetLastError();
      return absl::UnavailableError(
          absl::StrFormat("device: got %d, allowed one of %d CUDA devices", number_, count));
    }
    if (scratch_bytes == 0) scratch_bytes = kDefaultScratchBytes;
    if (scratch_bytes < cuda::Scratch::kMinBytes) {
      return absl::InvalidArgumentError(absl::StrFormat("scratch_bytes: got %d, allowed %d or more",
                                                        scratch_bytes, cuda::Scratch::kMinBytes));
    }
    scratch_.bytes = scratch_bytes / kAlignment * kAlignment;
    LOGITD_RETURN_IF_ERROR(SelectDevice());
    cudaDeviceProp properties;
    LOGITD_RETURN_IF_ERROR(
        cuda::ToStatus(cudaGetDeviceProperties(&properties, number_), "read properties"));
    LOGITD_RETURN_IF_ERROR(cuda::DescribeDevice(properties, scratch_));
    products_status_ = products_.Init(cuda::ProductWorkspaceBytes(scratch_));
    return absl::OkStatus();
  }

  std::byte* TakeBytes(size_t bytes) override {
    std::byte* const taken = scratch_.data + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return taken;
  }

  const int number_;
  cuda::Scratch scratch_;
  cuda::Products products_;
  absl::Status products_status_;
  // The call's.
  int callers_;  // the device that was current before it
  cudaStream_t stream_ = nullptr;
  size_t used_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCuda(int device, size_t scratch_bytes) {
  return CudaDevice::Open(device, scratch_bytes);
}

}  // namespace logitd::c_api
