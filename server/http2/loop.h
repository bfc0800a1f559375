// An event loop: one thread that waits for descriptors, timers and tasks of other threads.
//
// A turn: epoll_wait, then the descriptors that are ready, tasks, timers that are due, and last the
// sources that asked for the turn's end. So a connection writes once a turn, however many calls it
// answered.
#ifndef LOGITD_SERVER_HTTP2_LOOP_H_
#define LOGITD_SERVER_HTTP2_LOOP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "server/base/clock.h"

namespace logitd::http2 {

// Work for a loop. The poster keeps it alive until Run, which may delete it.
class Task {
 public:
  virtual ~Task() = default;
  virtual void Run() = 0;

 private:
  friend class Loop;
  Task* next_ = nullptr;
};

// Timers, to a millisecond, never early. Set and Cancel cost O(1). Not thread-safe.
class Timers {
  struct Link {
    Link* previous = nullptr;
    Link* next = nullptr;
  };

 public:
  // One time to call back at. Cancels itself when destroyed.
  class Timer : Link {
   public:
    explicit Timer(absl::AnyInvocable<void()> fire) : fire_(std::move(fire)) {}
    ~Timer() { Cancel(); }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

    bool set() const { return next != nullptr; }
    void Cancel();

   private:
    friend class Timers;
    absl::AnyInvocable<void()> fire_;
    int64_t due_ns_ = 0;
  };

  explicit Timers(int64_t now_ns);
  Timers(const Timers&) = delete;
  Timers& operator=(const Timers&) = delete;

  // Calls back in the first Advance at or after `due_ns`; replaces an earlier time.
  void Set(Timer* timer, int64_t due_ns);
  // Calls back what is due, which may set and cancel timers.
  void Advance(int64_t now_ns);
  // Milliseconds until Advance may have work; -1: no timer is set.
  int WaitMs(int64_t now_ns) const;

 private:
  static constexpr int64_t kSlotNs = 1'000'000;
  static constexpr int64_t kSlots = 4096;  // a later timer is looked at once a round

  static void Insert(Link* slot, Timer* timer);
  Link* SlotOf(int64_t tick) const { return &slots_[static_cast<size_t>(tick % kSlots)]; }
  // The first tick after `tick_` whose slot has a timer, at most a round away.
  void FindNext();

  const std::unique_ptr<Link[]> slots_;  // heads of rings
  int64_t tick_;                         // all slots up to this one were looked at
  int64_t next_tick_;                    // no slot before this one has a timer
};

using Timer = Timers::Timer;

// Something with a descriptor. Used on its loop only.
class Source {
 public:
  virtual ~Source() = default;
  // `events` of epoll.
  virtual void OnReady(uint32_t events) = 0;
  // See Loop::AtTurnEnd.
  virtual void OnTurnEnd() {}

 private:
  friend class Loop;
  bool at_turn_end_ = false;
};

// Post may be called by any thread, the other methods only by the loop's own thread, or before
// Start.
class Loop {
 public:
  using Clock = int64_t (*)();

  // `index`: among the loops of a server.
  explicit Loop(int index = 0, Clock clock = &MonotonicNanos);
  // Stops.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs until Stop, on a thread with this name (at most 15 letters).
  void Start(const char* name);
  // Tasks that come later run in the next Stop, on its thread.
  void Stop();
  // One turn, on this thread, which Start was not called for. `wait`: until there is something to
  // do.
  void Turn(bool wait);
  int index() const { return index_; }
  // Any thread: a turn has taken long, so what others have sent may wait unread.
  bool IsLate() const {
    const int64_t begun_ns = turn_ns_.load(std::memory_order_relaxed);
    return begun_ns != 0 && clock_() - begun_ns > kLateNs;
  }
  bool IsCurrent() const { return thread_.get_id() == std::this_thread::get_id(); }

  void Post(Task* task);
  void Post(absl::AnyInvocable<void()> work);

  void Watch(Source* source, int fd, uint32_t events);
  void Change(Source* source, int fd, uint32_t events);
  void Unwatch(int fd);
  // Runs OnTurnEnd of `source`, once, at the end of this turn.
  void AtTurnEnd(Source* source);
  // Keeps an object until the end of this turn, where events may still name it.
  void Retire(std::shared_ptr<void> object) { retired_.push_back(std::move(object)); }

  Timers& timers() { return timers_; }
  // The time at which this turn began.
  int64_t now_ns() const { return now_ns_; }

  // Memory for one read, and for the frames of one write. Nobody keeps anything in it.
  absl::Span<std::byte> read_scratch() { return {read_scratch_.get(), kScratchBytes}; }
  absl::Span<std::byte> write_scratch() { return {write_scratch_.get(), kScratchBytes}; }

  static constexpr size_t kScratchBytes = size_t{256} << 10;

 private:
  static constexpr int64_t kLateNs = 20'000'000;

  void Run();
  void RunTasks();
  void EndTurn();

  const int index_;
  const Clock clock_;
  const int epoll_;
  const int wake_;                       // an eventfd
  std::atomic<Task*> posted_ = nullptr;  // the newest first
  std::atomic<bool> asleep_ = false;     // the next Post must wake the thread
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> turn_ns_ = 0;  // when this turn began; 0: the thread sleeps
  int64_t now_ns_;
  Timers timers_;
  std::vector<Source*> turn_end_;
  std::vector<std::shared_ptr<void>> retired_;
  std::unique_ptr<std::byte[]> read_scratch_;
  std::unique_ptr<std::byte[]> write_scratch_;
  std::thread thread_;
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_LOOP_H_
