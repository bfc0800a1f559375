// Shared device memory by the driver's virtual memory functions. cudaIpcGetMemHandle would be
// simpler, but its handles are bytes: a client cannot be handed one that others cannot use too.
#include "kernels/cuda/shared_memory.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "kernels/cuda/stream.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
  bool complete = FindInDriver("cuMemGetAllocationGranularity", granularity) &&
                  FindInDriver("cuMemCreate", create) && FindInDriver("cuMemRelease", release) &&
                  FindInDriver("cuMemAddressReserve", reserve) &&
                  FindInDriver("cuMemAddressFree", free_address) && FindInDriver("cuMemMap", map) &&
                  FindInDriver("cuMemUnmap", unmap) && FindInDriver("cuMemSetAccess", set_access) &&
                  FindInDriver("cuMemExportToShareableHandle", export_handle) &&
                  FindInDriver("cuGetErrorString", error_string);
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

absl::Status ToStatus(CUresult result, const char* what, size_t bytes) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  TheDriver().error_string(result, &text);
  const std::string message =
      absl::StrFormat("shared device memory: got %d bytes to allocate: %s: %s", bytes, what,
                      text == nullptr ? "unknown error" : text);
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(message)
                                            : absl::UnavailableError(message);
}

// Maps `memory`, whose handle is there, and makes a descriptor of it.
absl::Status MapAndExport(const CUmemAllocationProp& how, SharedDeviceMemory& memory) {
  const Driver& driver = TheDriver();
  CUdeviceptr address = 0;
  LOGITD_RETURN_IF_ERROR(
      ToStatus(driver.reserve(&address, memory.bytes, 0, 0, 0), "no addresses", memory.bytes));
  if (absl::Status status = ToStatus(driver.map(address, memory.bytes, 0, memory.handle, 0),
                                     "cannot be mapped", memory.bytes);
      !status.ok()) {
    driver.free_address(address, memory.bytes);
    return status;
  }
  memory.data = reinterpret_cast<std::byte*>(address);
  CUmemAccessDesc access = {};
  access.location = how.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  LOGITD_RETURN_IF_ERROR(
      ToStatus(driver.set_access(address, memory.bytes, &access, 1), "no access", memory.bytes));
  return ToStatus(
      driver.export_handle(&memory.fd, memory.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "no descriptor", memory.bytes);
}

}  // namespace

absl::StatusOr<SharedDeviceMemory> AllocateShared(int device, size_t bytes) {
  const Driver& driver = TheDriver();
  if (!driver.complete) {
    return absl::UnimplementedError("shared device memory: the driver is too old");
  }
  CUmemAllocationProp how = {};
  how.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  how.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  how.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  how.location.id = device;
  size_t unit = 0;
  LOGITD_RETURN_IF_ERROR(ToStatus(driver.granularity(&unit, &how, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                                  "no unit", bytes));
  SharedDeviceMemory memory{.bytes = (bytes + unit - 1) / unit * unit};
  CUmemGenericAllocationHandle handle = 0;
  LOGITD_RETURN_IF_ERROR(
      ToStatus(driver.create(&handle, memory.bytes, &how, 0), "no memory", memory.bytes));
  memory.handle = handle;
  if (absl::Status status = MapAndExport(how, memory); !status.ok()) {
    FreeShared(memory);
    return status;
  }
  return memory;
}

void FreeShared(const SharedDeviceMemory& memory) {
  const Driver& driver = TheDriver();
  if (memory.data != nullptr) {
    const auto address = reinterpret_cast<CUdeviceptr>(memory.data);
    driver.unmap(address, memory.bytes);
    driver.free_address(address, memory.bytes);
  }
  driver.release(memory.handle);
}

}  // namespace logitd::cuda
