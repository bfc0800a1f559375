// How much time devices may spend on memory of leases.
#ifndef LOGITD_SERVER_ARENA_PIN_BUDGET_H_
#define LOGITD_SERVER_ARENA_PIN_BUDGET_H_

#include <algorithm>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logitd::arena {

// While the driver pins or unpins memory (64 MiB take 18 ms), or makes memory that is shared, the
// work of every stream waits. So a client that leases without pause could keep the device from all
// others. The budget allows one second of such time at once, and after that a fifth of all time.
// Times are those of SteadyNow. Thread-safe.
class PinBudget {
 public:
  static constexpr absl::Duration kMost = absl::Seconds(1);
  static constexpr double kShare = 0.2;

  explicit PinBudget(absl::Time now) : at_(now) {}

  // True: memory may be pinned, or made, now.
  bool Allows(absl::Time now) {
    absl::MutexLock lock(&mutex_);
    Refill(now);
    return left_ > absl::ZeroDuration();
  }

  // Pinning, unpinning or making memory took `time`, and ended at `now`.
  void Spend(absl::Duration time, absl::Time now) {
    absl::MutexLock lock(&mutex_);
    Refill(now);
    left_ -= time;
  }

 private:
  void Refill(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (now <= at_) return;
    left_ = std::min(kMost, left_ + kShare * (now - at_));
    at_ = now;
  }

  absl::Mutex mutex_;
  absl::Time at_ ABSL_GUARDED_BY(mutex_);
  absl::Duration left_ ABSL_GUARDED_BY(mutex_) = kMost;
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_PIN_BUDGET_H_
