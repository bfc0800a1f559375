// The engine's mutex and condition variable (the standard ones with thread-safety annotations) and
// its clock.
#ifndef LOGITD_SERVER_ENGINE_SYNC_H_
#define LOGITD_SERVER_ENGINE_SYNC_H_

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logitd::engine {

using logitd::MonotonicNanos;

// For a loop that waits for another thread.
inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Not absl::Mutex: Debian's Abseil is built without ThreadSanitizer, which then does not see the
// order that its locks make and reports false races. It does see pthread locks.
class ABSL_LOCKABLE Mutex {
 public:
  // Most holders are done within a microsecond, and a thread that sleeps takes 3 to 50 to wake. So
  // it tries for a short while first.
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    for (int i = 0; i < kTries; ++i) {
      if (mutex_.try_lock()) return;
      Relax();
    }
    mutex_.lock();
  }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  static constexpr int kTries = 64;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// May wake without a signal: wait in a loop.
class CondVar {
 public:
  void Wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  void WaitUntil(Mutex& mutex, const Clock& clock, absl::Time time)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const absl::Duration most = clock.SleepUntil(absl::ToUnixNanos(time));
    if (most == absl::InfiniteDuration()) return Wait(mutex);
    WaitFor(mutex, most);
  }

  // At most so long, on the clock that never goes back.
  void WaitFor(Mutex& mutex, absl::Duration most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait_for(lock, absl::ToChronoNanoseconds(most));
    lock.release();
  }

  void Signal() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_SYNC_H_
