// A device as the engine sees it: slabs, which are host and device memory, and streams, which run
// ops. A process may use several devices, each with its own backend.
#ifndef LOGITD_KERNELS_BACKEND_H_
#define LOGITD_KERNELS_BACKEND_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/ops.h"

namespace logitd {

struct DeviceInfo {
  std::string backend;  // "cpu" or "cuda"
  int number = 0;       // BackendOptions::device
  std::string name;     // "NVIDIA H200", or the CPU's SIMD target and thread count
  int64_t memory_bytes = 0;
  std::string pci_bus_id;  // "00000000:1b:00.0"; empty: not a PCI device
  // Rows of a linear op that share one read of the head. Fewer rows in a call cost more each.
  int64_t linear_rows = 64;
  // Device memory is host memory: Slab::device is Slab::host.
  bool is_host = false;
  std::array<uint8_t, 16> uuid = {};  // of a CUDA device, as its driver tells it; else 0
};

// A piece of host memory and its counterpart on the device. On CUDA `host` is pinned, for all
// devices of the process; on the CPU both are the same address. Streams also take a slab that pairs
// the `host` of one slab with the `device` of another one, as long as `device` is their own
// device's.
struct Slab {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  size_t bytes = 0;
};

// Device memory without a host counterpart, for heads. 256-byte aligned.
struct DeviceMemory {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Device memory that other processes can use too, with their own addresses for it.
struct SharedDeviceMemory {
  std::byte* data = nullptr;
  size_t bytes = 0;  // whole units of the device
  int fd = -1;       // names it to the CUDA driver of another process; its receiver closes it
  uint64_t handle = 0;
};

// Rows that lie outside of a slab: row r at `from` + r * `from_stride`.
struct RowsCopy {
  const std::byte* from = nullptr;  // aligned to 2 bytes, and so are all of these
  size_t from_stride = 0;
  std::byte* to = nullptr;  // device memory
  size_t to_stride = 0;
  size_t row_bytes = 0;
  int64_t rows = 0;
  // `from` is device memory; else host memory: any on the CPU backend, pinned by PinHost on others.
  bool from_device = false;
};

// What a stream is for. A stream for copies runs no ops and has no scratch memory.
enum class StreamUse : uint8_t { kOps, kCopies };

// How long the work since the last Wait took, by the device's own clock.
struct StreamTimes {
  int64_t h2d_ns = 0;
  int64_t kernel_ns = 0;
  int64_t d2h_ns = 0;
};

// An in-order queue of copies and ops with its own scratch memory. Used by one thread at a time,
// which may use streams of other devices in between.
//
// Calls return before their work ends, and some work begins in Wait (the CPU backend computes
// before it returns). Order of use between two Waits: Upload*, ops, Download*. In another order
// each call still comes after those before it, but it costs more, and the times are not those of
// the phases. Errors: INTERNAL, the device is lost and the process must end; UNAVAILABLE, this work
// failed and later work may succeed.
class Stream {
 public:
  virtual ~Stream() = default;

  // Copies slab bytes [offset, offset + bytes) from host to device, or back.
  virtual absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) = 0;
  virtual absl::Status Download(const Slab& slab, size_t offset, size_t bytes) = 0;

  // Copies slab bytes [offset, offset + bytes) from the host to `to`, anywhere in device memory. In
  // the order of use it counts as an Upload.
  virtual absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) = 0;

  // Copies rows that others may write at the same time: each byte is read once. In the order of use
  // it counts as an Upload. UNIMPLEMENTED: this backend copies from slabs only.
  virtual absl::Status Gather(absl::Span<const RowsCopy> copies) {
    return absl::UnimplementedError("gather: this backend has no such op");
  }

  // Copies `bytes` bytes of device memory to `to`, which is memory of the device too, or host
  // memory that PinHost has pinned. In the order of use it counts as a Download. UNIMPLEMENTED: as
  // Gather.
  virtual absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) {
    return absl::UnimplementedError("deliver: this backend has no such op");
  }

  // Runs the op of these arguments, which are read before it returns. UNIMPLEMENTED: this backend
  // has no such op.
  template <class Args>
  absl::Status Run(const Args& args) {
    return RunOp(&args);
  }
  virtual absl::Status RunOp(const Op& op) { return NoSuchOp(op); }

  // Blocks until all enqueued work is done.
  virtual absl::StatusOr<StreamTimes> Wait() = 0;

  // When `*abandoned` becomes true, nobody wants the work until the next Wait: the stream may leave
  // some of it out, and its results are then unspecified. The flag stays true until that Wait has
  // returned. It is read until the next call of this; null: none.
  void Watch(const std::atomic<bool>* abandoned) { abandoned_ = abandoned; }

 protected:
  const std::atomic<bool>* abandoned() const { return abandoned_; }

 private:
  const std::atomic<bool>* abandoned_ = nullptr;
};

// Thread-safe. Outlives its streams and slabs.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const DeviceInfo& device() const = 0;

  // RESOURCE_EXHAUSTED when there is not enough memory.
  virtual absl::StatusOr<Slab> AllocateSlab(size_t bytes) = 0;
  virtual void FreeSlab(const Slab& slab) = 0;
  virtual absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) = 0;
  virtual void FreeDevice(const DeviceMemory& memory) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use = StreamUse::kOps) = 0;

  // Device memory of at least `bytes` bytes, all zero, that other processes can use. The device
  // gets it back when it is freed here and every other process has let go of it.
  // RESOURCE_EXHAUSTED: there is not enough. UNIMPLEMENTED: this device shares no memory.
  virtual absl::StatusOr<SharedDeviceMemory> AllocateShared(size_t bytes) {
    return absl::UnimplementedError("this device shares no memory");
  }
  // No stream uses it any more.
  virtual void FreeShared(const SharedDeviceMemory& memory) {}
  // Writes to shared memory from pinned host memory, and waits for it.
  virtual absl::Status WriteShared(std::byte* to, absl::Span<const std::byte> from) {
    return absl::UnimplementedError("this device shares no memory");
  }

  // Pins host memory, whole pages, so that streams of all devices of the process copy from it with
  // Gather. What else happens to the mapping does not matter to them. UNAVAILABLE: it cannot be
  // pinned. UNIMPLEMENTED: streams of this device copy from slabs only.
  virtual absl::Status PinHost(std::byte* data, size_t bytes) {
    return absl::UnimplementedError("this device pins no memory");
  }
  // No stream uses it any more.
  virtual void UnpinHost(std::byte* data) {}
};

struct BackendOptions {
  int device = 0;  // CUDA device ordinal; on the CPU only a name
  // Threads of the CPU backend, shared by its streams; 0 = all that the process may use.
  int cpu_threads = 0;
};

struct BackendsOptions {
  // As BackendOptions::device, each once. Empty: on CUDA all devices that answer; on the CPU one.
  std::vector<int> devices = {0};
  int cpu_threads = 0;  // of all devices together, and at least one of each; 0: as above
};

// kind: "cpu", "cuda", or "auto" (CUDA where there is a working device, else the CPU).
// INVALID_ARGUMENT: unknown kind. UNAVAILABLE: the backend is not in this build, or there is no
// working device.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(std::string_view kind,
                                                       const BackendOptions& options);

// One backend for each device, in the order of `devices`; all compute the same bits. On the CPU the
// devices are simulated: each has its own memory for heads, its own streams and its own threads.
// Errors: those of CreateBackend. INVALID_ARGUMENT: the CUDA devices are of several models.
absl::StatusOr<std::vector<std::unique_ptr<Backend>>> CreateBackends(
    std::string_view kind, const BackendsOptions& options);

// The backends of CreateBackend. The CUDA one exists only in builds with CUDA.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const BackendOptions& options);
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const BackendOptions& options);
// How many CUDA devices answer; 0 if none does.
int CountCudaDevices();

}  // namespace logitd

#endif  // LOGITD_KERNELS_BACKEND_H_
