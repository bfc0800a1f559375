#include "kernels/cpu/thread_pool.h"

#include <algorithm>

namespace logitd::cpu {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::RunItems(Loop& loop) {
  for (;;) {
    const int64_t i = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= loop.count) return;
    loop.body(i);
  }
}

void ThreadPool::Close(Loop* loop) {
  open_.erase(std::remove(open_.begin(), open_.end(), loop), open_.end());
}

void ThreadPool::ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  Loop loop{body, count};
  const bool shared = count > 1 && !workers_.empty();
  if (shared) {
    {
      std::lock_guard lock(mutex_);
      open_.push_back(&loop);
    }
    work_.notify_all();
  }
  RunItems(loop);
  if (!shared) return;
  std::unique_lock lock(mutex_);
  Close(&loop);
  done_.wait(lock, [&loop] { return loop.helpers == 0; });
}

void ThreadPool::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !open_.empty(); });
    if (open_.empty()) return;
    Loop* loop = open_.front();
    ++loop->helpers;
    lock.unlock();
    RunItems(*loop);
    lock.lock();
    // No item is left: other workers must not enter this loop. It lives until its helpers have
    // left.
    Close(loop);
    if (--loop->helpers == 0) done_.notify_all();
  }
}

}  // namespace logitd::cpu
