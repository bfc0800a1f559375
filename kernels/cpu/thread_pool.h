// Threads shared by the CPU backend's streams.
#ifndef LOGITD_KERNELS_CPU_THREAD_POOL_H_
#define LOGITD_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"

namespace logitd::cpu {

// Runs loops on `threads` threads: the caller and threads - 1 of its own. Thread-safe: loops of
// several callers share the threads in order of arrival. Each caller works on its own loop, so no
// loop waits for another.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();  // no loop may be running
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(i) once for every i in [0, count), in any order, on any of the threads; returns when
  // all calls have returned. What body wrote is visible to the caller. Allocates nothing once warm;
  // `body` must not throw and must not call back into the pool.
  void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body);

 private:
  struct Loop {
    absl::FunctionRef<void(int64_t)> body;
    int64_t count;
    std::atomic<int64_t> next{0};
    int helpers = 0;  // workers inside; guarded by mutex_, which a nested type cannot name
  };

  static void RunItems(Loop& loop);
  void Close(Loop* loop);  // mutex_ is held
  void Work();

  // std::mutex and not absl::Mutex: ThreadSanitizer sees through it even where Abseil was built
  // without it.
  std::mutex mutex_;
  std::condition_variable work_;                     // open_ or stopping_ changed
  std::condition_variable done_;                     // a loop lost its last helper
  std::vector<Loop*> open_ ABSL_GUARDED_BY(mutex_);  // loops that may have items left, oldest first
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_THREAD_POOL_H_
