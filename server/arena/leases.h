// Memory that clients on this machine lease to hand over rows without a socket.
#ifndef LOGITD_SERVER_ARENA_LEASES_H_
#define LOGITD_SERVER_ARENA_LEASES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "formats/arena_protocol.h"

namespace logitd::arena {

// The memory of a lease. A client may write it at any time, also while it is read.
//
// It is a file in memory, and this process never maps it: a page that the client has written is the
// client's, in the sense of a container's limit, and reading a page that nobody has written takes no
// memory and gives zeros. Nothing that the client does to the file makes Read wait or fault. A write
// is different: it takes a page where none is, and it takes the file's lock, which the client's own
// calls (fallocate) can hold for as long as they run. So only the Writer calls Write. Thread-safe.
class Arena {
 public:
  // Owns `fd`, a sealed memfd of `bytes` bytes.
  Arena(int fd, int64_t bytes) : fd_(fd), bytes_(bytes) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int64_t bytes() const { return bytes_; }

  // Copies what is at `offset`, one span after the other. [offset, offset + all sizes) must be in
  // the arena. What the system fails to read becomes bytes of 255, which are NaN in every dtype.
  void Read(int64_t offset, absl::Span<const absl::Span<std::byte>> to) const;

  // Writes `from` at `offset`, which must fit into the arena. RESOURCE_EXHAUSTED: the system has no
  // memory for it; then some of it may be written.
  absl::Status Write(int64_t offset, absl::Span<const std::byte> from) const;

 private:
  const int fd_;
  const int64_t bytes_;
};

struct LeaseLimits {
  int64_t max_bytes = 0;  // of one arena, and of all together
  int max_leases = 0;     // with ended ones that calls still use
};

// The leases of a server. Thread-safe.
class Leases {
 public:
  explicit Leases(LeaseLimits limits);

  struct Lease {
    LeaseId id;
    int64_t bytes;  // whole pages
    int fd;         // for the client; the caller closes it
  };

  // Makes an arena of at least `bytes` bytes, all zero, that nobody can shrink, grow or seal.
  // INVALID_ARGUMENT: can never be had. RESOURCE_EXHAUSTED: not now. UNAVAILABLE: see BeginDrain.
  absl::StatusOr<Lease> Open(int64_t bytes);

  // Ends a lease: Find no longer knows it. Once. Its memory stays until FreeEnded finds it unused.
  void End(const LeaseId& id);

  // Frees the memory of ended leases that no call uses any more. True: some are still used. Freeing
  // a gigabyte takes a tenth of a second, so calls do not do it.
  bool FreeEnded();

  // The memory of a lease, for as long as the pointer lives. NOT_FOUND: there is no such lease, or
  // it has ended; what a stranger asks for is not repeated.
  absl::StatusOr<std::shared_ptr<const Arena>> Find(std::string_view id) const;

  // No more leases from here on. Those there are stay.
  void BeginDrain();

  // Of arenas that are not freed yet, also of ended leases that calls still use.
  int64_t bytes() const;
  int leases() const;  // that have not ended
  const LeaseLimits& limits() const { return limits_; }

 private:
  absl::Status CheckRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LeaseLimits limits_;
  mutable absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<LeaseId, std::shared_ptr<const Arena>> leases_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const Arena>> ended_ ABSL_GUARDED_BY(mutex_);  // not freed yet
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_LEASES_H_
