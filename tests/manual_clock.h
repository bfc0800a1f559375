// A clock that a test moves by hand.
#ifndef LOGITD_TESTS_MANUAL_CLOCK_H_
#define LOGITD_TESTS_MANUAL_CLOCK_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>

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
    std::lock_guard<std::mutex> lock(mutex_);
    if (time_ns <= now_ns_) return absl::ZeroDuration();
    sleep_until_.insert(time_ns);
    slept_.notify_all();
    return absl::InfiniteDuration();
  }
  std::shared_ptr<void> WhenMoved(std::function<void()> wake) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = wakes_.insert(wakes_.end(), std::move(wake));
    return {this, [at](ManualClock* clock) {
              std::lock_guard<std::mutex> lock(clock->mutex_);
              clock->wakes_.erase(at);
            }};
  }

  // Waits until a thread has begun to sleep until `ahead` from now.
  void WaitForSleeper(absl::Duration ahead) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t until_ns = now_ns_ + absl::ToInt64Nanoseconds(ahead);
    slept_.wait(lock, [&] { return sleep_until_.contains(until_ns); });
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
  mutable std::set<int64_t> sleep_until_;
  mutable std::condition_variable slept_;
};

}  // namespace logitd

#endif  // LOGITD_TESTS_MANUAL_CLOCK_H_
