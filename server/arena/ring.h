// Rings: threads that take calls out of leased memory and put answers there.
#ifndef LOGITD_SERVER_ARENA_RING_H_
#define LOGITD_SERVER_ARENA_RING_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "formats/ring_protocol.h"
#include "server/arena/leases.h"
#include "server/arena/ring_pages.h"
#include "server/base/clock.h"

namespace logitd::arena {

class Ring;
class Rings;

// A call of a ring, as the ring sees it.
class RingWork {
 public:
  virtual ~RingWork() = default;
  // The peer is gone: the work may stop. Its reply is not needed, and may still come. Any thread.
  virtual void Drop() = 0;
};

// The eventfd on which a ring's thread sleeps. Thread-safe.
class WakeEvent {
 public:
  explicit WakeEvent(int fd) : fd_(fd) {}  // closes it
  ~WakeEvent();
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  int fd() const { return fd_; }
  void Raise() const;
  void Lower() const;

 private:
  const int fd_;
};

// Wakes the threads of rings, by threads that do nothing else. It holds only the rings' events, not
// the rings: the last owner of a ring may have to unpin its memory, which takes long. Thread-safe.
class WakeList {
 public:
  // Wake itself wakes the threads where at most `few` rings are open. `clock` outlives this.
  WakeList(int few, const Clock& clock) : few_(few), clock_(clock) {}

  void Count(int rings) { open_ += rings; }
  // Wakes the thread of a ring, now or soon.
  void Wake(std::shared_ptr<const WakeEvent> ring);
  // Wakes threads until End. Looks for the next for a while before it sleeps.
  void Run();
  // Ends Run. From now on Wake itself wakes every thread.
  void End();

 private:
  const int few_;
  const Clock& clock_;
  std::atomic<int> open_ = 0;
  std::atomic<size_t> size_ = 0;  // of rings_
  absl::Mutex mutex_;
  std::deque<std::shared_ptr<const WakeEvent>> rings_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> ended_ = false;
};

// An open ring. Only a thread of its own touches the shared memory. Thread-safe.
class Ring : public std::enable_shared_from_this<Ring> {
 public:
  // Use Rings::Open.
  Ring(Rings* rings, std::shared_ptr<WakeList> wakes, std::shared_ptr<const Arena> arena,
       const RingAsk& shape, int socket, std::shared_ptr<const WakeEvent> wake, ucred user);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Unique among the rings of the process. Never an id of a connection or an identity.
  uint64_t id() const { return id_; }
  const ucred& user() const { return user_; }
  // The largest reply. A longer one becomes an error.
  size_t max_message_bytes() const { return max_message_bytes_; }

  // Makes the message of a reply.
  using MakeMessage = absl::AnyInvocable<std::string()>;

  // The reply to work number `serial`. Once for each. `keep` is dropped when the reply is in the
  // ring, or the ring has ended. `make`, if there is one, runs on the ring's thread, unless the
  // ring has ended, so that whoever completes the calls of a batch need not make their messages one
  // after another.
  void Complete(uint64_t serial, RingReply reply, std::shared_ptr<const void> keep,
                MakeMessage make = nullptr);

  // True: this is the ring's thread.
  bool IsOwnThread() const { return thread_ == std::this_thread::get_id(); }

  // Posts the replies that wait. Only within ServeRing, on the ring's thread.
  void PostNow();

  // The ring ends soon: drops its work. Any thread, any number of times.
  void Stop();

 private:
  friend class Rings;
  struct Posting {
    RingReply reply;
    std::shared_ptr<const void> keep;
    MakeMessage make;
  };

  void Run();
  // Each does what there is to do. False: there was nothing.
  absl::StatusOr<bool> TakeAll();
  absl::StatusOr<bool> PostAll();
  bool MaySpin();
  absl::Status Sleep();
  // Tells the peer why its ring ends.
  void CutOff(const absl::Status& why);

  Rings* const rings_;
  const std::shared_ptr<WakeList> wakes_;
  const uint64_t id_;
  const ucred user_;
  const size_t max_message_bytes_;
  const int socket_;  // a copy of the lease's connection
  const std::shared_ptr<const WakeEvent> wake_;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> asleep_ = false;
  std::atomic<int64_t> replies_ = 0;  // that wait for the thread
  std::atomic<std::thread::id> thread_;

  // Used by the thread only.
  RingPages pages_;
  uint64_t next_serial_ = 0;
  int calls_ = 0;           // taken and not posted
  int64_t worked_ns_ = 0;   // when there was something to do
  bool spins_ = false;      // has one of the places of threads that spin
  int lone_calls_ = 0;      // in a row, that came when no other was open; see kLoneCalls
  bool one_waits_ = false;  // a submission was there before a reply of PostNow
  absl::Status posted_now_;

  absl::Mutex mutex_;
  // By serial; null while it is handed over.
  absl::flat_hash_map<uint64_t, std::shared_ptr<RingWork>> open_ ABSL_GUARDED_BY(mutex_);
  std::vector<Posting> postings_ ABSL_GUARDED_BY(mutex_);
};

// Serves a call: work that ends in ring->Complete(serial, ...), possibly before this returns. Runs
// on the ring's thread.
using ServeRing = std::function<std::shared_ptr<RingWork>(const std::shared_ptr<Ring>& ring,
                                                          uint64_t serial, RingRequest request)>;

// All rings of a server. Thread-safe.
//
// A ring's thread looks for work for a short while after the last work, then it sleeps. So an idle
// ring costs nothing, and a decode loop does not wait for a wake-up. The thread of a ring that has
// one call at a time may also run it (Engine::SubmitAlone). Few threads may look at the same time:
// one for every four cores, or one. None does while more calls than that are open: the others need
// the cores.
//
// To wake a thread takes 2 to 15 us. Where more rings are open than may look, the threads of the
// engine, which complete a batch's calls one after another, leave that to threads of this object.
// It goes on with fewer, or none, where the system gives no more threads.
class Rings {
 public:
  // `cores`: that the process may use. `clock`: of the time for which a thread looks for work;
  // outlives this.
  Rings(ServeRing serve, int cores, const Clock& clock = SteadyClock());
  // Stops every ring and waits for its thread.
  ~Rings();
  // Stops every ring, and waits for their threads, at most so long. False: one still runs.
  bool Stop(absl::Duration most);
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  // Opens a ring on `socket`, of which it keeps a copy; see CheckRing for `shape`.
  // RESOURCE_EXHAUSTED: no descriptor, or no thread.
  absl::StatusOr<std::shared_ptr<Ring>> Open(std::shared_ptr<const Arena> arena,
                                             const RingAsk& shape, int socket, ucred user);

  int open() const;  // whose threads run

 private:
  friend class Ring;
  bool TakeSpin();
  bool Crowded() const { return calls_.load(std::memory_order_relaxed) > max_spinning_; }
  void EndSpin() { spinning_.fetch_sub(1, std::memory_order_relaxed); }
  void Ended(Ring* ring);

  const ServeRing serve_;
  const Clock& clock_;
  const int max_spinning_;
  std::atomic<int> spinning_ = 0;
  std::atomic<int> calls_ = 0;  // open, of all rings
  mutable absl::Mutex mutex_;
  absl::flat_hash_set<Ring*> rings_ ABSL_GUARDED_BY(mutex_);
  const std::shared_ptr<WakeList> wakes_;
  std::vector<std::thread> wakers_;
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_RING_H_
