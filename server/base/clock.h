// The server's one clock for lengths of time.
#ifndef LOGITD_SERVER_BASE_CLOCK_H_
#define LOGITD_SERVER_BASE_CLOCK_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/time/time.h"

namespace logitd {

// Nanoseconds of a clock that never goes back.
inline int64_t MonotonicNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// MonotonicNanos as a time, for budgets, rates and waits. It is not the time of day: compare it
// only with other times of this clock.
inline absl::Time SteadyNow() { return absl::FromUnixNanos(MonotonicNanos()); }

// A clock that a test can replace by one that it moves by hand. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t Nanos() const = 0;
  absl::Time Now() const { return absl::FromUnixNanos(Nanos()); }

  // How long a thread may sleep that has to look again at `time_ns`. Where time is moved by hand,
  // it is woken by WhenMoved instead.
  virtual absl::Duration SleepUntil(int64_t time_ns) const = 0;
  // Runs `wake` whenever time was moved by hand, until the returned object is gone.
  virtual std::shared_ptr<void> WhenMoved(std::function<void()> wake) = 0;
};

// MonotonicNanos.
inline Clock& SteadyClock() {
  class Steady final : public Clock {
    int64_t Nanos() const override { return MonotonicNanos(); }
    absl::Duration SleepUntil(int64_t time_ns) const override {
      // A far time overflows clocks of the system. An early wake is allowed.
      constexpr int64_t kMost = int64_t{3600} * 1'000'000'000;
      const int64_t now_ns = Nanos();
      return absl::Nanoseconds(time_ns <= now_ns ? 0 : std::min(time_ns - now_ns, kMost));
    }
    std::shared_ptr<void> WhenMoved(std::function<void()>) override { return nullptr; }
  };
  static Steady clock;
  return clock;
}

}  // namespace logitd

#endif  // LOGITD_SERVER_BASE_CLOCK_H_
