// Memory that clients on this machine lease to hand over rows without a socket.
#ifndef LOGITD_SERVER_ARENA_LEASES_H_
#define LOGITD_SERVER_ARENA_LEASES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "formats/arena_protocol.h"

namespace logitd::arena {

// Memory of a device that another process can use too. Freed with the object.
class DeviceArena {
 public:
  virtual ~DeviceArena() = default;
  virtual std::byte* data() const = 0;  // in device memory
  virtual int64_t bytes() const = 0;
  virtual int device() const = 0;  // as BatchKey::device counts
  virtual ArenaDevice description() const = 0;
  // A descriptor of the memory for one client; the caller closes it. Called once.
  virtual int TakeDescriptor() = 0;
  // As Arena::Write; UNAVAILABLE: the device failed. `from` is in memory that the device can read.
  virtual absl::Status Write(int64_t offset, absl::Span<const std::byte> from) const = 0;
};

// What the server's devices do for arenas. server/device_arenas.cc has it; outlives the arenas.
// Thread-safe.
class ArenaDevices {
 public:
  virtual ~ArenaDevices() = default;
  // As BatchKey::device counts them.
  virtual int count() const = 0;
  virtual bool lost(int device) const = 0;
  virtual uint32_t number(int device) const = 0;
  // At least `bytes` bytes, all zero. RESOURCE_EXHAUSTED: there is not enough. UNIMPLEMENTED: these
  // devices share no memory.
  virtual absl::StatusOr<std::unique_ptr<DeviceArena>> Make(int device, int64_t bytes) = 0;
  // Pins host memory, for copies by every device, until the result is destroyed. Null: it cannot be pinned.
  virtual std::shared_ptr<const void> Pin(std::byte* data, int64_t bytes) = 0;
  // Whether Pin can succeed.
  virtual bool pins() const = 0;
};

// The memory of a lease. A client may write it at any time, also while it is read.
//
// Host memory is a file in memory. No thread of this process ever touches it through a mapping: it
// reads and writes the file. A page that the client has written is the client's, in the sense of a
// container's limit, and reading a page that nobody has written takes no memory and gives zeros.
// Nothing that the client does to the file makes Read wait or fault. A write
// is different: it takes a page where none is, and it takes the file's lock, which the client's own
// calls (fallocate) can hold for as long as they run. So only the Writer calls Write.
//
// Where devices can copy from it, the file has all its pages from the start, and they are pinned: they
// belong to the server and are never replaced. If the client takes pages out of its file, devices
// still read the old ones, and only the client's own answers are wrong.
//
// Thread-safe.
class Arena {
 public:
  // Owns `fd`, a sealed memfd of `bytes` bytes.
  Arena(int fd, int64_t bytes) : fd_(fd), bytes_(bytes) {}
  // The same, mapped at `pages`, which devices can copy from for as long as `pin` lives.
  Arena(int fd, int64_t bytes, std::byte* pages, std::shared_ptr<const void> pin)
      : fd_(fd), bytes_(bytes), pages_(pages), pin_(std::move(pin)) {}
  explicit Arena(std::unique_ptr<DeviceArena> memory)
      : fd_(-1), bytes_(memory->bytes()), device_memory_(std::move(memory)) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int64_t bytes() const { return bytes_; }

  // Whether it is memory of a device, which Read does not read.
  bool on_device() const { return device_memory_ != nullptr; }
  int device() const { return on_device() ? device_memory_->device() : -1; }
  // The address that all devices copy from, or only device(). Null: none can.
  const std::byte* address() const { return on_device() ? device_memory_->data() : pages_; }

  // Copies what is at `offset`, one span after the other. [offset, offset + all sizes) must be in
  // the arena. What the system fails to read becomes bytes of 255, which are NaN in every dtype.
  void Read(int64_t offset, absl::Span<const absl::Span<std::byte>> to) const;

  // Writes `from` at `offset`, which must fit into the arena. RESOURCE_EXHAUSTED: the system has no
  // memory for it; then some of it may be written. UNAVAILABLE: the device failed.
  absl::Status Write(int64_t offset, absl::Span<const std::byte> from) const;

 private:
  const int fd_;  // -1: memory of a device
  const int64_t bytes_;
  std::byte* const pages_ = nullptr;
  std::shared_ptr<const void> pin_;
  const std::unique_ptr<DeviceArena> device_memory_;
};

struct LeaseLimits {
  int64_t max_bytes = 0;         // of the host: of one arena, and of all together
  int max_leases = 0;            // ended ones that calls still use count too
  int64_t max_device_bytes = 0;  // of each device: of one arena, and of all together
};

// The leases of a server. Thread-safe.
class Leases {
 public:
  // `devices` may be null: then arenas are host memory that no device reads.
  explicit Leases(LeaseLimits limits, ArenaDevices* devices = nullptr);

  struct Lease {
    LeaseId id;
    int64_t bytes;                           // whole pages
    int fd;                                  // for the client; the caller closes it
    std::optional<ArenaDevice> device = {};  // of a CUDA arena
  };

  // Makes an arena of at least `bytes` bytes of host memory, all zero, that nobody can shrink, grow
  // or seal. Pinning a gigabyte takes a third of a second. One thread at a time opens leases.
  // INVALID_ARGUMENT: never possible. RESOURCE_EXHAUSTED: not now. UNAVAILABLE: after BeginDrain.
  absl::StatusOr<Lease> Open(int64_t bytes);

  // The same, of a device's memory. `device`: 1 + its number; 0: the one with the fewest leased
  // bytes. UNIMPLEMENTED: the server has no device that shares memory.
  absl::StatusOr<Lease> OpenOnDevice(uint32_t device, int64_t bytes);

  // Ends a lease: Find no longer knows it. Called once. Its memory stays until FreeEnded finds it unused.
  void End(const LeaseId& id);

  // Frees the memory of ended leases that no call uses any more. True: some are still used. Freeing
  // a gigabyte takes a tenth of a second, so calls do not do it.
  bool FreeEnded();

  // The memory of a lease, for as long as the pointer lives. NOT_FOUND: there is no such lease, or
  // it has ended; the text does not repeat the name that was asked for.
  absl::StatusOr<std::shared_ptr<const Arena>> Find(std::string_view id) const;

  // Gives no lease from here on. Existing leases stay.
  void BeginDrain();

  // Bytes of arenas that are not freed yet, those of ended leases included.
  int64_t bytes() const;         // of the host
  int64_t device_bytes() const;  // of all devices
  int64_t pinned_bytes() const;  // of the host, that are resident in this process
  int leases() const;            // that have not ended
  const LeaseLimits& limits() const { return limits_; }

 private:
  absl::Status CheckDoor() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int> ChooseDevice(uint32_t asked) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Add(const LeaseId& id, std::shared_ptr<const Arena> arena)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds an arena to the counts; with `sign` -1 takes it out.
  void Count(const Arena& arena, int sign) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LeaseLimits limits_;
  ArenaDevices* const devices_;
  mutable absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t pinned_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<int64_t> device_bytes_ ABSL_GUARDED_BY(mutex_);  // of each device
  absl::flat_hash_map<LeaseId, std::shared_ptr<const Arena>> leases_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const Arena>> ended_ ABSL_GUARDED_BY(mutex_);  // not freed yet
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_LEASES_H_
