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

// The bytes of a lease, mapped to be read. A client writes them at any time, also while they are
// read: copy what you check, and check the copy. Constant in place and size; thread-safe.
using Memory = absl::Span<const std::byte>;

struct LeaseLimits {
  int64_t max_bytes = 0;  // of one arena, and of all together
  int max_leases = 0;
};

// The leases of a server. Thread-safe.
class Leases {
 public:
  explicit Leases(LeaseLimits limits);
  // No Arena may be left that Find returned.
  ~Leases();
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  struct Lease {
    LeaseId id;
    int64_t bytes;  // whole pages
    int fd;         // a sealed memfd for the client; the caller closes it
  };

  // Makes an arena of at least `bytes` bytes, all zero, whose pages are there. INVALID_ARGUMENT:
  // can never be had. RESOURCE_EXHAUSTED: not now. UNAVAILABLE: see BeginDrain.
  absl::StatusOr<Lease> Open(int64_t bytes);

  // Ends a lease: Find no longer knows it. Once. Its memory stays until FreeEnded finds it unused.
  void End(const LeaseId& id);

  // Frees the memory of ended leases that no call uses any more. True: some are still used. Freeing
  // a gigabyte takes a tenth of a second, so calls do not do it.
  bool FreeEnded();

  // The memory of a lease, for as long as the pointer lives. NOT_FOUND: there is no such lease, or
  // it has ended; what a stranger asks for is not repeated.
  absl::StatusOr<std::shared_ptr<const Memory>> Find(std::string_view id) const;

  // No more leases from here on. Those there are stay.
  void BeginDrain();

  // Memory that is not freed yet, also of ended leases that calls still use.
  int64_t bytes() const;
  int leases() const;  // that have not ended
  const LeaseLimits& limits() const { return limits_; }

 private:
  class Arena;

  absl::Status Reserve(int64_t bytes);
  void Release(int64_t bytes);

  const LeaseLimits limits_;
  mutable absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int opening_ ABSL_GUARDED_BY(mutex_) = 0;  // reserved, and not in leases_ yet
  absl::flat_hash_map<LeaseId, std::shared_ptr<const Arena>> leases_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const Arena>> ended_ ABSL_GUARDED_BY(mutex_);  // not freed yet
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_LEASES_H_
