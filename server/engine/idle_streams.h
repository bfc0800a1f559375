// The streams that wait for work: which one is woken, and how they sleep.
#ifndef LOGITD_SERVER_ENGINE_IDLE_STREAMS_H_
#define LOGITD_SERVER_ENGINE_IDLE_STREAMS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "server/engine/sync.h"

namespace logitd::engine {

// Streams are counted over all devices, those of a device one after another.
//
// A change of the engine's state wakes at most one stream. A stream that takes work wakes the next
// one if there is more.
//
// Polling. The next request of a busy client comes within microseconds, and a sleeping thread takes
// 20 of them to wake. So one idle stream of all polls for EngineOptions::idle_spin before it
// sleeps. 3 rings make 1.17 times as many calls so, and one connection 1.27 times.
//
// Lending. A caller's thread may run a batch on a stream that waits. The stream's own thread takes
// nothing meanwhile. A lone ring makes 1.2 times as many calls so.
//
// Figures: bench/results/h200/scheduler.json.
//
// Guarded by the engine's lock: `mutex` is that lock, and is held.
class IdleStreams {
 public:
  static constexpr int kNone = -1;

  IdleStreams(int devices, int streams_of_each, absl::Duration spin);

  int DeviceOf(int stream) const { return stream / streams_of_each_; }

  // A stream's thread waits for work from Begin to End. It looks for work, then sleeps, and so on.
  void Begin(int stream);
  void Look(int stream) { OfStream(stream).called = false; }
  // `may_poll`: for the first time since Begin.
  void Sleep(Mutex& mutex, int stream, bool may_poll) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void End(int stream);

  // Wakes a stream that `has_work`: the one that polls, else one of the device with the most idle
  // streams. Does nothing where a stream that was woken has not looked yet, since it will call this
  // again. `except` is not woken.
  void WakeOne(absl::FunctionRef<bool(int device)> has_work, int except = kNone);
  void WakeAll();

  // A stream of `device`, or of the device with the most idle streams (kAnyDevice), that is lent
  // from now on. kNone: none is idle.
  int Lend(int device);
  void TakeBack(int stream);
  bool lent(int stream) const { return seats_[static_cast<size_t>(stream)].lent; }

 private:
  struct Device {
    int idle = 0;         // streams that wait and are not lent
    bool called = false;  // a stream was woken, and none has looked for work since
    CondVar wake;
  };
  struct Seat {
    bool waits = false;
    bool lent = false;
  };

  Device& OfStream(int stream) { return devices_[static_cast<size_t>(DeviceOf(stream))]; }

  const int streams_of_each_;
  const int64_t spin_ns_;
  std::deque<Device> devices_;
  std::vector<Seat> seats_;
  Device* spinner_ = nullptr;  // whose stream polls `wakes_`; null: none does
  std::atomic<uint32_t> wakes_ = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_IDLE_STREAMS_H_
