// The gate in front of memory. Decides from a call's headers when it may send its message.
#ifndef LOGITD_SERVER_ENGINE_ADMISSION_H_
#define LOGITD_SERVER_ENGINE_ADMISSION_H_

#include <cstdint>
#include <functional>
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
  // Calls that wait with their headers read because there is no room for their message.
  int max_waiting_calls = 1024;
  absl::Duration retry_delay = absl::Milliseconds(50);  // a refused caller is told to wait it
  // Bytes per second at which a message must come while other calls wait for room; 0: no limit.
  int64_t min_receive_rate = int64_t{1} << 20;
  // Bytes of messages that are received at the same time, where their size is known; 0: any. More
  // at a time take longer: each message comes later, and the socket's work for each byte grows.
  int64_t max_receiving_bytes = 0;
  // Messages that may always be received at the same time: one core brings about 2 GB/s from a
  // socket, so large messages need several cores to fill the way to a device.
  int min_receiving_calls = 2;
  Clock* clock = &SteadyClock();  // of deadlines and rates; outlives the admission
};

// UNAVAILABLE: what a caller gets from the start of the drain.
absl::Status DrainingError();

// A call's request for room.
struct RoomAsk {
  Caller caller;
  absl::Time deadline = absl::InfiniteFuture();
  // 0: not known. At most max_request_bytes are charged.
  int64_t bytes = 0;
  // Bytes that will be received, exactly or by estimate; 0: not known. See max_receiving_bytes.
  int64_t receiving_bytes = 0;
  // The message has been received already. Such a call is not refused by a drain or a full line.
  bool received = false;
  // For the next message of a stream, which may never come. See Admission.
  bool between_messages = false;
  // Bytes received so far on the connection of the call; nullopt: more have come, and this server has
  // not read them yet. Null: not known.
  std::function<std::optional<int64_t>()> received_bytes;
  // Runs on the admission's thread, without a lock, when the message comes too slowly: with
  // RESOURCE_EXHAUSTED. Runs again every kAgain until the room is given back. Must keep the
  // objects that it uses alive. Null: never.
  std::function<void(const absl::Status&)> too_slow;
};

// Thread-safe. A call is charged the bytes that it asks for, or max_request_bytes where they are
// not known, until its message has arrived. Then it is charged the bytes that it needs, until the
// payload is copied into a slab or the call ends. The sum of charges never exceeds max_held_bytes.
// Calls without room wait unread: the transport's flow control holds their bytes at the peer.
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
// waiting. min_receiving_calls messages always have a turn, a message of 64 KiB or less needs none, nor
// does one of 1 MiB or less of a caller that holds nothing.
//
// While calls wait for room, a message must make progress. A call is told that it is too slow where its
// connection receives less than min_receive_rate for each message that it sends, over
// kReceiveWindow; not while bytes of it wait unread, since then this server is what is slow. Where
// the bytes of the connection are not known, its time counts: kReceiveWindow and a second for each
// 64 MiB. A stream that waits for its next message is not told; its room is taken back, and the
// message has to ask again when it is there.
//
// Cost: one lock, O(log waiting callers) for each step; O(tickets) every kReceiveTick while calls wait
// for room.
class Admission {
 public:
  static constexpr absl::Duration kReceiveWindow = absl::Milliseconds(500);
  static constexpr absl::Duration kAgain = absl::Seconds(2);
  static constexpr absl::Duration kTurn = absl::Milliseconds(50);
  static constexpr absl::Duration kReceiveTick = absl::Milliseconds(100);

  // The room a call holds. Gives it back when destroyed. Movable; used by one thread at a time.
  class Ticket {
   public:
    Ticket();
    Ticket(Ticket&& other) noexcept;
    Ticket& operator=(Ticket&& other) noexcept;
    ~Ticket();
    // The message begins to come and needs the room of `ask`. True: the call keeps its room, and unless
    // the message is there (RoomAsk::received) it must make progress. False: the room was taken back or
    // is too small; all of it was given back, and the call must ask again. Once, before Received.
    bool Comes(RoomAsk ask);
    // The message has arrived, and the call needs `bytes` from here on. True: they are charged, or
    // more by at most a 1024th of the largest message, or 64 KiB. False: the ticket held less, and
    // everything was given back; the call must ask again. Once.
    bool Received(int64_t bytes);
    // Gives all but `bytes` back, or nothing if it is less than that. After Received.
    void ShrinkTo(int64_t bytes);
    // Gives everything back. Waiting calls are let in on the admission's own thread: for callers
    // inside the transport, which must not run another call's code.
    void GiveBackLater();
    // After Received.
    int64_t bytes() const;

   private:
    friend class Admission;
    struct Charge;
    Ticket(Admission* admission, std::unique_ptr<Charge> charge);
    Admission* admission_ = nullptr;
    std::unique_ptr<Charge> charge_;
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
  // RESOURCE_EXHAUSTED (no place in the line, or more than Caller::max_held_bytes; the text gives the
  // limits and the retry delay).
  WaiterId Enter(RoomAsk ask, Ready ready);

  // The answer of Enter if it is known at once; `ask` is then moved from. nullopt: Enter would wait.
  std::optional<absl::StatusOr<Ticket>> TryEnter(RoomAsk& ask);

  // The call is gone. True: `ready` will never run. False: it has run or is running.
  bool Abandon(WaiterId id);

  // From here on Enter answers UNAVAILABLE, and so do the waiting calls. Tickets stay valid.
  void BeginDrain();
  bool draining() const;
  int64_t held_bytes() const;
  // Callers that hold room or wait.
  int callers() const;
  const AdmissionOptions& options() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ADMISSION_H_
