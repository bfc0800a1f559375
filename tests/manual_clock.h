// A clock that a test moves by hand.
#ifndef LOGITD_TESTS_MANUAL_CLOCK_H_
#define LOGITD_TESTS_MANUAL_CLOCK_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logitd {

// Stands still until Advance. Thread-safe.
class ManualClock final : public Clock {
 public:
  int64_t Nanos() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return now_ns_;
  }
  absl::Duration SleepUntil(int64_t time_ns) const override {
    return time_ns <= Nanos() ? absl::ZeroDuration() : absl::InfiniteDuration();
  }
  std::shared_ptr<void> WhenMoved(std::function<void()> wake) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = wakes_.insert(wakes_.end(), std::move(wake));
    return {this, [at](ManualClock* clock) {
              std::lock_guard<std::mutex> lock(clock->mutex_);
              clock->wakes_.erase(at);
            }};
  }

  // Returns when whoever waits for a time has been woken.
  void Advance(absl::Duration by) {
    std::list<std::function<void()>> wakes;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      now_ns_ += absl::ToInt64Nanoseconds(by);
      wakes = wakes_;
    }
    for (const auto& wake : wakes) wake();
  }

 private:
  mutable std::mutex mutex_;
  int64_t now_ns_ = absl::ToInt64Nanoseconds(absl::Hours(1));
  std::list<std::function<void()>> wakes_;
};

}  // namespace logitd

#endif  // LOGITD_TESTS_MANUAL_CLOCK_H_
