// The only gate. Decides from a call's headers whether it may send its message now, later or never.
#ifndef LOGITD_SERVER_ENGINE_ADMISSION_H_
#define LOGITD_SERVER_ENGINE_ADMISSION_H_

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace logitd::engine {

class Metrics;

struct AdmissionOptions {
  int64_t max_request_bytes = int64_t{64} << 20;  // largest message
  // Messages of all calls in host memory; >= max_request_bytes.
  int64_t max_held_bytes = int64_t{1} << 30;
  // Calls that wait with their headers read because there is no room for their message.
  int max_waiting_calls = 1024;
  absl::Duration retry_delay = absl::Milliseconds(50);  // a refused caller is told to wait it
};

// UNAVAILABLE: what a caller gets from the start of the drain.
absl::Status DrainingError();

// Thread-safe. A message's size is not known before it is received. So a call is charged
// max_request_bytes until its message has arrived, then the bytes that the message holds, until the
// payload is copied into a slab or the call ends. The sum of charges never exceeds max_held_bytes.
// Calls without room wait unread, in order: the transport's flow control holds their bytes at the
// peer. Calls beyond max_waiting_calls are refused.
class Admission {
 public:
  // The room a call holds. Gives it back when destroyed. Movable; used by one thread at a time.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept;
    Ticket& operator=(Ticket&& other) noexcept;
    ~Ticket();
    // The message has arrived and holds `bytes`, at most bytes(). Gives the rest back.
    void ShrinkTo(int64_t bytes);
    // Gives everything back. Waiting calls are let in on the admission's own thread: for callers
    // inside the transport, which must not run another call's code.
    void GiveBackLater();
    int64_t bytes() const { return bytes_; }

   private:
    friend class Admission;
    Ticket(Admission* admission, int64_t bytes) : admission_(admission), bytes_(bytes) {}
    Admission* admission_ = nullptr;
    int64_t bytes_ = 0;
  };

  using Ready = absl::AnyInvocable<void(absl::StatusOr<Ticket>)>;
  using WaiterId = uint64_t;

  // `metrics` may be null; otherwise it outlives this.
  explicit Admission(const AdmissionOptions& options, Metrics* metrics);
  // Answers the calls that still wait with UNAVAILABLE. Every ticket must be destroyed before.
  ~Admission();

  // Runs `ready` exactly once, unless Abandon comes first: at once on this thread if the answer is
  // known, else on the thread that makes room or on the timer's. No lock is held. `ready` may call
  // back and should be brief. Returns 0 if `ready` has run, else an id for Abandon.
  //
  // Errors: UNAVAILABLE (draining), DEADLINE_EXCEEDED (already passed, or passed while waiting),
  // RESOURCE_EXHAUSTED (the line is full; the text gives both limits and the retry delay).
  WaiterId Enter(absl::Time deadline, Ready ready);

  // The call is gone. True: `ready` will never run. False: it has run or is running.
  bool Abandon(WaiterId id);

  // From here on Enter answers UNAVAILABLE, and so do all waiting calls. Tickets stay valid.
  void BeginDrain();
  bool draining() const;
  int64_t held_bytes() const;
  const AdmissionOptions& options() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ADMISSION_H_
