// The gate in front of memory. Decides when a call may send its message.
#ifndef LOGITD_SERVER_ENGINE_ADMISSION_H_
#define LOGITD_SERVER_ENGINE_ADMISSION_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/engine/caller.h"

namespace logitd::engine {

class Metrics;

struct AdmissionOptions {
  int64_t max_request_bytes = int64_t{64} << 20;  // largest message
  // Messages of all calls in host memory; >= max_request_bytes.
  int64_t max_held_bytes = int64_t{1} << 30;
  // Calls that wait because there is no room for their message.
  int max_waiting_calls = 1024;
  absl::Duration retry_delay = absl::Milliseconds(50);  // a refused caller is told to wait it
  // Bytes per second at which a message must come while other calls wait for room; 0: no limit.
  int64_t min_receive_rate = int64_t{1} << 20;
  // Bytes of messages that are received at the same time; 0: any. More at a time take longer: each
  // message comes later, and the socket's work for each byte grows.
  int64_t max_receiving_bytes = 0;
  // Messages that may always be received at the same time: one core brings about 2 GB/s from a
  // socket, so large messages need several cores to fill the way to a device.
  int min_receiving_calls = 2;
  Clock* clock = &SteadyClock();  // of deadlines and rates; outlives the admission
};

// UNAVAILABLE: what a caller gets from the start of the drain.
absl::Status DrainingError();

// A message that has not come yet, and the connection it comes on. Used on any thread.
class Sender {
 public:
  virtual ~Sender() = default;
  // The connection's id, never used again.
  virtual uint64_t connection_id() const = 0;
  // Bytes received on the connection so far. nullopt: this server is late to read them.
  virtual std::optional<int64_t> connection_bytes() const = 0;
  // The message comes too slowly, and its room should be given back. Called once, without a lock,
  // with RESOURCE_EXHAUSTED.
  virtual void OnTooSlow(const absl::Status& why) = 0;
};

// A call's request for room.
struct RoomAsk {
  Caller caller;
  absl::Time deadline = absl::InfiniteFuture();
  int64_t bytes = 0;               // at most max_request_bytes are charged
  std::shared_ptr<Sender> sender;  // null: the message is there
  // The call was let in for its message and asks again, for an answer that needs more. Neither a
  // drain nor a full line refuses it.
  bool again = false;
};

// Thread-safe. The sum of charges never exceeds max_held_bytes. Calls without room wait unread: the
// transport's flow control holds their bytes at the peer.
//
// Who gets room:
// - Each caller has its own line. The next call comes from the line that got the fewest bytes by
//   its weight; interactive calls come before batch calls. Calls of one line keep their order.
// - Room for one largest message is kept for callers that hold no room (if max_held_bytes is at
//   least four largest messages). So a light caller need not wait for the calls of others.
// - A 16th of all room, and at least 4 MiB, is kept for calls that ask for 1 MiB or less (if three
//   largest messages fit beside it).
// - A caller may take a place in the line while it waits with fewer calls than places are free. So
//   one caller takes half of the places at most, and some place stays free for others. Calls that
//   have room and only wait for their turn need no place.
//
// Calls also wait for their turn to be received: see max_receiving_bytes. A turn ends when the
// message is there, or after kTurn and a second for each 256 MiB: a slow peer does not keep others
// waiting. min_receiving_calls messages always have a turn, a message of 64 KiB or less needs none,
// nor does one of 1 MiB or less of a caller that holds nothing.
//
// While calls wait for room, messages must come. Each connection is looked at every kWindow. It
// must have received min_receive_rate for each message that it was sending all that time; where
// that suffices for some of them only, the others, the newest, are too slow. A connection whose
// bytes this server is late to read is looked at later.
//
// Cost: one lock and at most O(waiting callers) a step; O(calls with a ticket or in the line) every
// kTick while calls wait. A small call takes the lock twice: when it enters, and when its ticket
// ends.
class Admission {
  struct State;

 public:
  static constexpr absl::Duration kTick = absl::Milliseconds(50);
  static constexpr absl::Duration kWindow = absl::Milliseconds(500);
  static constexpr absl::Duration kTurn = absl::Milliseconds(50);

  // The room a call holds. Gives it back when destroyed. Movable; used by one thread at a time.
  class Ticket {
   public:
    // The message is there, and `bytes` suffice from here on. The rest is given back, unless it is
    // less than 64 KiB.
    void ShrinkTo(int64_t bytes);
    // The bytes that are charged. 0: a ticket without a call.
    int64_t bytes() const;

   private:
    friend class Admission;
    struct Charge;
    struct End {
      void operator()(Charge* charge) const;
    };
    std::unique_ptr<Charge, End> charge_;
  };

  using Ready = absl::AnyInvocable<void(absl::StatusOr<Ticket>)>;
  using WaiterId = uint64_t;

  // `metrics` may be null; otherwise it outlives this.
  explicit Admission(const AdmissionOptions& options, Metrics* metrics);
  // Answers the calls that still wait as BeginDrain does. Every ticket must be destroyed before.
  ~Admission();

  // The answer if it is known at once; `ready` is dropped then. Otherwise the call waits, and
  // `ready` runs exactly once, unless Abandon comes first: on the thread that makes room or on the
  // alarm's, perhaps before this returns. No lock of this is held, but the thread may be inside the
  // transport, where a ticket ends. `ready` may call back and should be brief.
  //
  // Errors: UNAVAILABLE (draining), DEADLINE_EXCEEDED (passed; while it waits, after a kTick at
  // most), RESOURCE_EXHAUSTED (no place in the line, or more than Caller::max_held_bytes; the text
  // gives the limits and the retry delay).
  struct Entry {
    std::optional<absl::StatusOr<Ticket>> answer;
    WaiterId waiter = 0;  // for Abandon; 0: it does not wait
  };
  Entry Enter(RoomAsk ask, Ready ready);

  // The call is gone. True: `ready` will never run. False: it has run or is running, or did not
  // wait.
  bool Abandon(WaiterId id);

  // From here on Enter answers UNAVAILABLE, and so do the waiting calls. Tickets stay valid.
  void BeginDrain();
  bool draining() const;
  int64_t held_bytes() const;
  // Callers that hold room or wait.
  int callers() const;
  const AdmissionOptions& options() const;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ADMISSION_H_
