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
#include "server/arena/page_remover.h"

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

// The work of the server's devices for arenas. server/device_arenas.cc has it; outlives the arenas.
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
  // Pins host memory, for copies by every device, until the result is destroyed. Null: it cannot be
  // pinned.
  virtual std::shared_ptr<const void> Pin(std::byte* data, int64_t bytes) = 0;
  // True: Pin can succeed.
  virtual bool pins() const = 0;
};

// The memory of a lease. A client may write it at any time, also while it is read.
//
// Host memory is a file in memory. This process reads it by reads of the file: reading a page that
// nobody has written takes no memory and gives zeros. It writes it through a mapping, by a system
// call, never by a write to the file: a write needs the file's lock, and whoever has the file can
// hold that for as long as it likes. A write through the mapping needs no lock, and a page that the
// kernel cannot give is an error of the call, where a store of this process's own would be a
// signal. So nothing that the client does to the file makes Read or Write wait or fault. A page
// that the client has written is the client's, in the sense of a container's limit; Write takes a
// page where none is.
//
// Where devices can copy from it, the file has all its pages from the start, and they are pinned:
// they belong to the server and are never replaced. If the client takes pages out of its file,
// devices still read the old ones, and only the client's own answers are wrong.
//
// Thread-safe.
class Arena {
 public:
  // Maps `fd`, a sealed memfd of `bytes` bytes, and owns it, also after an error.
  static absl::StatusOr<std::shared_ptr<Arena>> Map(int fd, int64_t bytes);
  explicit Arena(std::unique_ptr<DeviceArena> memory)
      : fd_(-1), bytes_(memory->bytes()), device_memory_(std::move(memory)) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int64_t bytes() const { return bytes_; }

  // Lets devices copy from host memory, if they can. Before others know the arena.
  void Pin(ArenaDevices* devices) { pin_ = devices->Pin(pages_, bytes_); }

  // True: it is memory of a device, which Read does not read.
  bool on_device() const { return device_memory_ != nullptr; }
  int device() const { return on_device() ? device_memory_->device() : -1; }
  // The address that all devices copy from, or only device(). Null: none can.
  const std::byte* address() const {
    if (on_device()) return device_memory_->data();
    return pin_ == nullptr ? nullptr : pages_;
  }
  // The file of host memory, which from now on is the caller's. Only at the arena's end.
  int TakeFile() { return std::exchange(fd_, -1); }

  // Copies what is at `offset`, one span after the other. [offset, offset + all sizes) must be in
  // the arena. What the system fails to read becomes bytes of 255, which are NaN in every dtype.
  void Read(int64_t offset, absl::Span<const absl::Span<std::byte>> to) const;

  // Writes `from` at `offset`, which must fit into the arena. RESOURCE_EXHAUSTED: the system has no
  // memory for it; then some of it may be written. UNAVAILABLE: the device failed.
  absl::Status Write(int64_t offset, absl::Span<const std::byte> from) const;

 private:
  Arena(int fd, int64_t bytes, std::byte* pages) : fd_(fd), bytes_(bytes), pages_(pages) {}

  int fd_;  // -1: memory of a device
  const int64_t bytes_;
  std::byte* const pages_ = nullptr;
  std::shared_ptr<const void> pin_;
  const std::unique_ptr<DeviceArena> device_memory_;
};

// OK: this process may write through its mappings as Arena::Write does, which takes a file of
// /proc. UNAVAILABLE: it may not.
absl::Status CheckMappedWrites();

struct LeaseLimits {
  int64_t max_bytes = 0;         // of the host: of one arena, and of all together
  int max_leases = 0;            // ended ones that are not freed yet count too
  int64_t max_device_bytes = 0;  // of each device: of one arena, and of all together
};

// The leases of a server. Thread-safe.
class Leases {
 public:
  // `devices` may be null: then arenas are host memory that no device reads. `remover` may be null:
  // then an ended lease's pages stay until its client has let go of them. Both outlive the leases.
  explicit Leases(LeaseLimits limits, ArenaDevices* devices = nullptr,
                  PageRemover* remover = nullptr);
  // Ended leases that no call uses lose their pages.
  ~Leases();

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

  // Ends a lease: Find no longer knows it. Called once. Its memory stays until FreeEnded finds it
  // unused.
  void End(const LeaseId& id);

  // Frees the memory of ended leases that no call uses any more: the pages of a file leave it, also
  // while the client has it, and then read as zeros. They count until they have left. True: some
  // are still used. Unpinning a gigabyte takes a tenth of a second, so calls do not do it.
  bool FreeEnded();
  // Readable when FreeEnded has something to do. -1: never.
  int freed_fd() const { return remover_ == nullptr ? -1 : remover_->ended_fd(); }

  // The memory of a lease, for as long as the pointer lives. NOT_FOUND: there is no such lease, or
  // it has ended; the text does not repeat the name that was asked for.
  absl::StatusOr<std::shared_ptr<const Arena>> Find(std::string_view id) const;

  // Gives no lease from here on. Existing leases stay.
  void BeginDrain();

  // Bytes of arenas that are not freed yet, those of ended leases included.
  int64_t bytes() const;          // of the host
  int64_t leaving_bytes() const;  // of them, those that no call uses and that have not left yet
  int64_t device_bytes() const;   // of all devices
  int leases() const;             // that have not ended
  const LeaseLimits& limits() const { return limits_; }

 private:
  absl::Status CheckDoor() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int> ChooseDevice(uint32_t asked) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Add(const LeaseId& id, std::shared_ptr<Arena> arena)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds an arena to the counts; with `sign` -1 takes it out.
  void Count(const Arena& arena, int sign) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ended arenas that no call uses, which `ended_` forgets.
  std::vector<std::shared_ptr<Arena>> TakeUnused() ABSL_LOCKS_EXCLUDED(mutex_);
  // An arena that no call uses: its memory is free, or leaves.
  void Free(std::shared_ptr<Arena> arena) ABSL_LOCKS_EXCLUDED(mutex_);
  void ForgetRemoved() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // A file whose pages are on their way out.
  struct Leaving {
    int fd;
    int64_t bytes;
    bool asked;  // the remover has it
  };

  const LeaseLimits limits_;
  ArenaDevices* const devices_;
  PageRemover* const remover_;
  mutable absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t leaving_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<int64_t> device_bytes_ ABSL_GUARDED_BY(mutex_);  // of each device
  absl::flat_hash_map<LeaseId, std::shared_ptr<Arena>> leases_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Arena>> ended_ ABSL_GUARDED_BY(mutex_);       // that calls may use
  absl::flat_hash_map<uint64_t, Leaving> leaving_ ABSL_GUARDED_BY(mutex_);  // by a number
  uint64_t next_leaving_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_LEASES_H_
