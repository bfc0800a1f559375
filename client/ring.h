// A ring: TopK and Sample through leased memory, for decode loops that must not wait for a socket.
// formats/ring_protocol.h has the protocol, docs/operations.md what each side may rely on.
#ifndef LOGITD_CLIENT_RING_H_
#define LOGITD_CLIENT_RING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/options.h"

namespace logitd {
enum class RingMethod : uint8_t;
}  // namespace logitd

namespace logitd::client {

struct RingOptions {
  uint32_t slots = 64;            // calls in flight, 1..256
  uint32_t entry_bytes = 4096;    // room for a request without its rows, a multiple of 64
  uint32_t answer_bytes = 16384;  // room for an answer, a multiple of 64
  // How long Wait looks for an answer before it sleeps. A thread that sleeps takes 5 to 50 us to
  // wake; one that looks uses a core.
  absl::Duration spin = absl::Microseconds(100);
  Priority priority = Priority::kInteractive;
};

// A completed call. One of the two results is there, the one that was asked for.
struct RingResult {
  uint64_t tag = 0;
  std::optional<TopKResult> topk;
  std::optional<SampleResult> sample;
};

// The ring of an arena; an arena has one at most, for as long as its lease. Calls have the
// parameters, answers and errors of Client::TopK and Client::Sample; no call is tried again. Their
// rows should lie in the arena: what a request holds must fit into a slot. Used by one thread at a
// time.
class Ring {
 public:
  // Bytes that a ring takes in the arena.
  static int64_t Bytes(const RingOptions& options);

  // Opens the arena's ring at `offset` of it, a multiple of 64; those bytes are the ring's from
  // here on. The arena outlives the ring. INVALID_ARGUMENT: it does not lie there.
  // FAILED_PRECONDITION: the arena has a ring already. UNAVAILABLE: the lease has ended, or the
  // server knows no rings. Otherwise the server's error, and the arena has no ring.
  static absl::StatusOr<std::unique_ptr<Ring>> Open(Arena* arena, int64_t offset,
                                                    const RingOptions& options = {});

  // Begins a call. `timeout`: until the server gives it up; infinite: never. INVALID_ARGUMENT: the
  // request cannot be named or does not fit into a slot. RESOURCE_EXHAUSTED: `slots` calls are in
  // flight; Wait makes room. UNAVAILABLE: the ring has ended.
  absl::Status Submit(const TopKRequest& request, uint64_t tag,
                      absl::Duration timeout = absl::InfiniteDuration());
  absl::Status Submit(const SampleRequest& request, uint64_t tag,
                      absl::Duration timeout = absl::InfiniteDuration());

  // The next answer, of any call in flight. `tag` is set for the call's own error too.
  // DEADLINE_EXCEEDED: none came in time, and the calls stay in flight. UNAVAILABLE: the ring has
  // ended, with all calls in flight; the text says why, where the server said so.
  // FAILED_PRECONDITION: no call is in flight. These three leave `tag` as it was.
  absl::StatusOr<RingResult> Wait(uint64_t* tag, absl::Duration timeout = absl::InfiniteDuration());

  // One call from Submit to its answer. FAILED_PRECONDITION: others are in flight.
  absl::StatusOr<TopKResult> TopK(const TopKRequest& request,
                                  absl::Duration timeout = absl::InfiniteDuration());
  absl::StatusOr<SampleResult> Sample(const SampleRequest& request,
                                      absl::Duration timeout = absl::InfiniteDuration());

  int64_t in_flight() const { return static_cast<int64_t>(submitted_ - completed_); }

 private:
  struct Flight {
    RingMethod method;
    absl::Time begun;
  };

  Ring(Arena* arena, char* memory, const RingOptions& options);

  template <typename Request>
  absl::Status Submit(RingMethod method, const Request& request, uint64_t tag,
                      absl::Duration timeout);
  template <typename Result, typename Request>
  absl::StatusOr<Result> Call(const Request& request, std::optional<Result> RingResult::*result,
                              absl::Duration timeout);
  bool Ready() const;
  // Until Ready, or the end of the ring, or `end`.
  absl::Status WaitReady(absl::Time end);
  // Reads doorbells. UNAVAILABLE: the ring has ended.
  absl::Status Hear();
  char* completion() const;

  Arena* const arena_;
  char* const memory_;
  const RingOptions options_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  absl::Status ended_;                                // OK: it has not
  std::vector<std::pair<uint64_t, Flight>> flights_;  // by tag, in the order of Submit
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_RING_H_
