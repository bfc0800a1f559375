#include "client/cuda_memory.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::client {
namespace {

// The declarations of cuda.h that are used here, so that a build needs no toolkit. They are part of
// the driver's stable interface.
using Result = int;  // 0: success
using DevicePointer = unsigned long long;
struct Location {
  int type;
  int id;
};
struct AccessDescription {
  Location location;
  int flags;
};
constexpr int kPosixFileDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;             // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadAndWrite = 3;         // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

struct Driver {
  Result (*init)(unsigned) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*device_get)(int*, int) = nullptr;
  Result (*device_uuid)(void*, int) = nullptr;
  Result (*retain_context)(void**, int) = nullptr;
  Result (*release_context)(int) = nullptr;
  Result (*push_context)(void*) = nullptr;
  Result (*pop_context)(void**) = nullptr;
  Result (*synchronize)() = nullptr;
  Result (*import_handle)(unsigned long long*, void*, int) = nullptr;
  Result (*release_handle)(unsigned long long) = nullptr;
  Result (*reserve)(DevicePointer*, size_t, size_t, DevicePointer, unsigned long long) = nullptr;
  Result (*free_address)(DevicePointer, size_t) = nullptr;
  Result (*map)(DevicePointer, size_t, size_t, unsigned long long, unsigned long long) = nullptr;
  Result (*unmap)(DevicePointer, size_t) = nullptr;
  Result (*set_access)(DevicePointer, size_t, const AccessDescription*, size_t) = nullptr;
  Result (*copy_to_device)(DevicePointer, const void*, size_t) = nullptr;
  Result (*copy_to_host)(void*, DevicePointer, size_t) = nullptr;
  Result (*error_string)(Result, const char**) = nullptr;
  std::string missing;  // empty: it is usable

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = "there is no libcuda.so.1";
      return;
    }
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) missing = absl::StrCat("libcuda.so.1 has no ", name);
    };
    find("cuInit", init);
    find("cuDeviceGetCount", device_count);
    find("cuDeviceGet", device_get);
    find("cuDeviceGetUuid", device_uuid);
    find("cuDevicePrimaryCtxRetain", retain_context);
    find("cuDevicePrimaryCtxRelease_v2", release_context);
    find("cuCtxPushCurrent_v2", push_context);
    find("cuCtxPopCurrent_v2", pop_context);
    find("cuCtxSynchronize", synchronize);
    find("cuMemImportFromShareableHandle", import_handle);
    find("cuMemRelease", release_handle);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", free_address);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    find("cuMemcpyHtoD_v2", copy_to_device);
    find("cuMemcpyDtoH_v2", copy_to_host);
    find("cuGetErrorString", error_string);
    if (missing.empty() && init(0) != 0) missing = "the CUDA driver finds no device";
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

absl::Status ToStatus(Result result, const char* what) {
  if (result == 0) return absl::OkStatus();
  const char* text = nullptr;
  TheDriver().error_string(result, &text);
  return absl::InternalError(
      absl::StrFormat("arena: CUDA: %s: %s", what, text == nullptr ? "unknown error" : text));
}

absl::StatusOr<int> FindDevice(const std::array<uint8_t, 16>& uuid) {
  const Driver& driver = TheDriver();
  if (!driver.missing.empty()) {
    return absl::UnavailableError(
        absl::StrCat("arena: got memory of a GPU, which cannot be mapped: ", driver.missing));
  }
  int count = 0;
  if (absl::Status status = ToStatus(driver.device_count(&count), "count devices"); !status.ok()) {
    return status;
  }
  for (int i = 0; i < count; ++i) {
    int device = 0;
    std::array<uint8_t, 16> own = {};
    if (driver.device_get(&device, i) == 0 && driver.device_uuid(own.data(), device) == 0 &&
        own == uuid) {
      return device;
    }
  }
  return absl::UnavailableError(absl::StrFormat(
      "arena: got memory of a GPU that is none of the %d devices of this process", count));
}

// The device's context is the thread's current one for as long as this lives.
class ContextScope {
 public:
  explicit ContextScope(void* context) : pushed_(TheDriver().push_context(context) == 0) {}
  ~ContextScope() {
    void* popped = nullptr;
    if (pushed_) TheDriver().pop_context(&popped);
  }

 private:
  const bool pushed_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Map(int fd,
                                                            const std::array<uint8_t, 16>& uuid,
                                                            size_t bytes) {
  const absl::StatusOr<int> device = FindDevice(uuid);
  if (!device.ok()) return device.status();
  const Driver& driver = TheDriver();
  auto memory = std::unique_ptr<CudaMemory>(new CudaMemory(*device, bytes));  // cleans up
  absl::Status status = ToStatus(driver.retain_context(&memory->context_, *device), "open device");
  if (!status.ok()) return status;
  const ContextScope scope(memory->context_);
  unsigned long long handle = 0;
  void* const name = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  status = ToStatus(driver.import_handle(&handle, name, kPosixFileDescriptor), "import memory");
  if (!status.ok()) return status;
  memory->handle_ = handle;
  DevicePointer address = 0;
  status = ToStatus(driver.reserve(&address, bytes, 0, 0, 0), "reserve addresses");
  if (!status.ok()) return status;
  memory->data_ = reinterpret_cast<char*>(static_cast<uintptr_t>(address));
  status = ToStatus(driver.map(address, bytes, 0, handle, 0), "map memory");
  if (!status.ok()) return status;
  memory->mapped_ = true;
  const AccessDescription access = {.location = {.type = kOnDevice, .id = *device},
                                    .flags = kReadAndWrite};
  status = ToStatus(driver.set_access(address, bytes, &access, 1), "allow access");
  if (!status.ok()) return status;
  return memory;
}

CudaMemory::~CudaMemory() {
  if (context_ == nullptr) return;
  const Driver& driver = TheDriver();
  {
    const ContextScope scope(context_);
    const auto address = static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(data_));
    driver.synchronize();  // nothing of this process uses it any more
    if (mapped_) driver.unmap(address, bytes_);
    if (data_ != nullptr) driver.free_address(address, bytes_);
    if (handle_ != 0) driver.release_handle(handle_);
  }
  driver.release_context(device_);
}

// cuMemcpyHtoD may return before the last of it has arrived.
absl::Status CudaMemory::Write(size_t offset, absl::string_view from) {
  const ContextScope scope(context_);
  const auto to = static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(data_) + offset);
  absl::Status status = ToStatus(TheDriver().copy_to_device(to, from.data(), from.size()), "copy");
  if (!status.ok()) return status;
  return ToStatus(TheDriver().synchronize(), "copy");
}

absl::Status CudaMemory::Read(size_t offset, absl::Span<char> to) {
  const ContextScope scope(context_);
  const auto from = static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(data_) + offset);
  return ToStatus(TheDriver().copy_to_host(to.data(), from, to.size()), "copy");
}

}  // namespace logitd::client
