// The memory of a ring, from the server's side. formats/ring_protocol.h has the protocol.
#ifndef LOGITD_SERVER_ARENA_RING_PAGES_H_
#define LOGITD_SERVER_ARENA_RING_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "formats/ring_protocol.h"
#include "server/arena/leases.h"

namespace logitd::arena {

// A submission, copied out of the ring and its head checked.
struct RingRequest {
  RingMethod method = RingMethod::kTopK;
  bool is_batch = false;  // its priority
  bool alone = false;     // its ring will probably get no other call before this one has ended
  uint64_t tag = 0;
  absl::Duration timeout = absl::InfiniteDuration();
  std::string message;
};

struct RingReply {
  uint64_t tag = 0;
  absl::Status status;
  absl::Duration retry_after = absl::ZeroDuration();  // with RESOURCE_EXHAUSTED
  std::string message;                                // if the status is OK
};

// INVALID_ARGUMENT, UNIMPLEMENTED: a lease of `arena_bytes` cannot have such a ring. `bytes`: the
// size of the packet that `ask` was read from.
absl::Status CheckRing(const RingAsk& ask, size_t bytes, int64_t arena_bytes);

// Reads each byte that the peer may write once, into memory of its own, by reads of the file: a
// peer that changes it, or takes its pages away, changes only what is read. Nothing here waits for
// the peer (see Arena). Not thread-safe.
class RingPages {
 public:
  // `shape` has passed CheckRing.
  RingPages(std::shared_ptr<const Arena> arena, const RingAsk& shape)
      : arena_(std::move(arena)), shape_(shape) {}

  // The next submission. False: there is none. INVALID_ARGUMENT: its head breaks the protocol.
  absl::StatusOr<bool> Take(RingRequest* request);
  // True: Take would find one.
  bool Ready() const;

  // Writes the next completion. A message longer than max_message_bytes() becomes the error
  // INTERNAL. An error: the system could not write it.
  absl::Status Post(const RingReply& reply);

  // The most bytes of a reply's message.
  size_t max_message_bytes() const { return shape_.answer_bytes - sizeof(RingCompletion); }
  uint32_t slots() const { return shape_.slots; }

  absl::Status SetAsleep(bool asleep);
  bool client_asleep() const { return ByteAt(kClientAsleepAt) != 0; }

 private:
  uint8_t ByteAt(uint64_t offset) const;
  void Read(uint64_t offset, void* to, size_t bytes) const;
  absl::Status Write(uint64_t offset, const void* from, size_t bytes) const;
  uint64_t SubmissionAt() const;

  const std::shared_ptr<const Arena> arena_;
  const RingAsk shape_;
  uint64_t taken_ = 0;   // submissions
  uint64_t posted_ = 0;  // completions
  std::string slot_;     // a completion, as it is written
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_RING_PAGES_H_
