// Work that is due at times of a clock.
#ifndef LOGITD_SERVER_BASE_ALARM_H_
#define LOGITD_SERVER_BASE_ALARM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logitd {

// Runs a function when its time has come: on a thread of its own, and where time is moved by hand,
// in the call that moves it. Never twice at the same time. Thread-safe.
class Alarm {
 public:
  // `run` gets the time and returns when it is due again: InfiniteFuture where nothing is. It may
  // call RunBy, and must not destroy the alarm. `clock` outlives this.
  Alarm(Clock& clock, std::function<absl::Time(absl::Time now)> run);
  // Waits for a run that has begun. Nothing runs afterwards.
  ~Alarm();

  // `run` is due at `time`, or earlier. Takes no lock where it is due by then already.
  void RunBy(absl::Time time);

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  void Loop();
  void RunDue();

  Clock& clock_;
  const std::function<absl::Time(absl::Time)> run_;
  std::atomic<int64_t> due_ns_ = kNever;
  std::mutex running_;  // held while `run` runs
  std::mutex mutex_;    // of `stopping_`, and held by whoever writes `due_ns_`
  std::condition_variable wake_;
  bool stopping_ = false;
  std::shared_ptr<void> moved_;  // see Clock::WhenMoved
  std::thread thread_;
};

}  // namespace logitd

#endif  // LOGITD_SERVER_BASE_ALARM_H_
