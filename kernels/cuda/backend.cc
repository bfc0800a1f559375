// The CUDA backend: pinned slabs with device mirrors, device memory, and memory shared with
// clients.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/pin_pieces.h"
#include "kernels/cuda/shared_memory.h"
#include "kernels/cuda/stream.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

using cuda::LeftOfPiece;
using cuda::ToStatus;

constexpr absl::Duration kPinPause = absl::Milliseconds(1);  // between pieces, for other work

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const cudaDeviceProp& properties)
      : device_(device), properties_(properties) {
    info_.backend = "cuda";
    info_.number = device;
    info_.name = properties.name;
    info_.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    info_.pci_bus_id = absl::StrFormat("%08x:%02x:%02x.0", properties.pciDomainID,
                                       properties.pciBusID, properties.pciDeviceID);
    static_assert(sizeof(properties.uuid) == sizeof(info_.uuid));
    std::memcpy(info_.uuid.data(), &properties.uuid, sizeof(info_.uuid));
  }

  const DeviceInfo& device() const override { return info_; }

  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    Slab slab{.bytes = bytes};
    // Portable: streams of other devices copy from it and to it too.
    if (cudaHostAlloc(&slab.host, bytes, cudaHostAllocPortable) != cudaSuccess ||
        cudaMalloc(&slab.device, bytes) != cudaSuccess) {
      cudaGetLastError();
      FreeSlab(slab);
      return absl::ResourceExhaustedError(
          absl::StrFormat("CUDA: no memory for a slab of %d bytes", bytes));
    }
    return slab;
  }

  void FreeSlab(const Slab& slab) override {
    if (cuda::IsHung(device_)) return;
    cudaSetDevice(device_);
    if (slab.host != nullptr) cudaFreeHost(slab.host);
    if (slab.device != nullptr) cudaFree(slab.device);
  }

  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    DeviceMemory memory{.bytes = bytes};
    const cudaError_t error = cudaMalloc(&memory.data, bytes);
    if (error != cudaErrorMemoryAllocation) {
      LOGITD_RETURN_IF_ERROR(ToStatus(error, "allocate"));
      return memory;
    }
    cudaGetLastError();
    size_t free = 0;
    size_t total = 0;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free, &total), "read free memory"));
    return absl::ResourceExhaustedError(absl::StrFormat(
        "device memory: no room for %d bytes; %d of %d are free", bytes, free, total));
  }

  void FreeDevice(const DeviceMemory& memory) override {
    if (cuda::IsHung(device_)) return;
    cudaSetDevice(device_);
    cudaFree(memory.data);
  }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    return cuda::CudaStream::Create(device_, properties_, use);
  }

  absl::StatusOr<SharedDeviceMemory> AllocateShared(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    absl::StatusOr<SharedDeviceMemory> memory = cuda::AllocateShared(device_, bytes);
    if (!memory.ok()) return memory.status();
    if (absl::Status status = Clear(*memory); !status.ok()) {
      close(memory->fd);
      cuda::FreeShared(*memory);
      return status;
    }
    return memory;
  }

  void FreeShared(const SharedDeviceMemory& memory) override {
    if (cuda::IsHung(device_)) return;
    cudaSetDevice(device_);
    cuda::FreeShared(memory);
  }

  absl::Status WriteShared(std::byte* to, absl::Span<const std::byte> from) override {
    return OnOwnStream([&](cudaStream_t stream) {
      cudaError_t error = cudaSuccess;
      while (!from.empty() && error == cudaSuccess) {
        const size_t now = std::min(from.size(), LeftOfPiece(from.data()));
        error = cudaMemcpyAsync(to, from.data(), now, cudaMemcpyHostToDevice, stream);
        to += now;
        from.remove_prefix(now);
      }
      return error;
    });
  }

  absl::Status PinHost(std::byte* data, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    for (size_t done = 0; done < bytes;) {
      const size_t now = std::min(bytes - done, LeftOfPiece(data + done));
      const cudaError_t error = cudaHostRegister(data + done, now, cudaHostRegisterPortable);
      if (error != cudaSuccess) {
        cudaGetLastError();
        Unpin(data, done);
        return absl::UnavailableError(absl::StrFormat(
            "CUDA: %d bytes of host memory are not pinned: %s", bytes, cudaGetErrorString(error)));
      }
      done += now;
      if (done < bytes) absl::SleepFor(kPinPause);
    }
    std::lock_guard lock(mutex_);
    pinned_[data] = bytes;
    return absl::OkStatus();
  }

  void UnpinHost(std::byte* data) override {
    size_t bytes = 0;
    {
      std::lock_guard lock(mutex_);
      bytes = pinned_[data];
      pinned_.erase(data);
    }
    if (cuda::IsHung(device_)) return;  // the driver may wait for the device
    cudaSetDevice(device_);
    Unpin(data, bytes);
  }

 private:
  static void Unpin(std::byte* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      if (done > 0) absl::SleepFor(kPinPause);
      cudaHostUnregister(data + done);
      done += std::min(bytes - done, LeftOfPiece(data + done));
    }
    cudaGetLastError();
  }

  absl::Status RefuseIfHung() const {
    if (!cuda::IsHung(device_)) return absl::OkStatus();
    return absl::UnavailableError(absl::StrFormat("CUDA: device %d hangs", device_));
  }

  // What the driver hands out again may hold what another client wrote.
  absl::Status Clear(const SharedDeviceMemory& memory) {
    return OnOwnStream(
        [&](cudaStream_t stream) { return cudaMemsetAsync(memory.data, 0, memory.bytes, stream); });
  }

  // Enqueues on a stream of its own, and waits.
  template <class Enqueue>
  absl::Status OnOwnStream(const Enqueue& enqueue) {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    cudaStream_t stream = nullptr;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create stream"));
    cudaError_t error = enqueue(stream);
    const cudaError_t ended = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = ended;
    cudaStreamDestroy(stream);
    return ToStatus(error, "shared memory");
  }

  const int device_;
  const cudaDeviceProp properties_;
  DeviceInfo info_;
  std::mutex mutex_;
  std::map<std::byte*, size_t> pinned_ ABSL_GUARDED_BY(mutex_);  // bytes of what PinHost has pinned
};

}  // namespace

int CountCudaDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const BackendOptions& options) {
  const int count = CountCudaDevices();
  if (count == 0) return absl::UnavailableError("backend cuda: no CUDA device answers");
  if (options.device < 0 || options.device >= count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("device: got %d, allowed 0..%d", options.device, count - 1));
  }
  cudaDeviceProp properties;
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, options.device), "read device properties"));
  return std::make_unique<CudaBackend>(options.device, properties);
}

}  // namespace logitd
