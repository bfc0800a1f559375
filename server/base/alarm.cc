#include "server/base/alarm.h"

#include <utility>

namespace logitd {

Alarm::Alarm(Clock& clock, std::function<absl::Time(absl::Time)> run)
    : clock_(clock), run_(std::move(run)), moved_(clock.WhenMoved([this] { RunDue(); })) {
  thread_ = std::thread([this] { Loop(); });
}

Alarm::~Alarm() {
  moved_ = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Alarm::RunBy(absl::Time time) {
  const int64_t time_ns = absl::ToUnixNanos(time);
  if (time_ns >= due_ns_.load(std::memory_order_relaxed)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (time_ns >= due_ns_.load(std::memory_order_relaxed)) return;
    due_ns_.store(time_ns, std::memory_order_relaxed);
  }
  wake_.notify_one();
}

void Alarm::RunDue() {
  std::lock_guard<std::mutex> lock(running_);
  while (true) {
    const int64_t now_ns = clock_.Nanos();
    {
      std::lock_guard<std::mutex> due(mutex_);
      if (stopping_ || due_ns_.load(std::memory_order_relaxed) > now_ns) return;
      due_ns_.store(kNever, std::memory_order_relaxed);
    }
    RunBy(run_(absl::FromUnixNanos(now_ns)));
  }
}

void Alarm::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const absl::Duration left = clock_.SleepUntil(due_ns_.load(std::memory_order_relaxed));
    if (left == absl::InfiniteDuration()) {
      wake_.wait(lock);
    } else if (left > absl::ZeroDuration()) {
      wake_.wait_for(lock, absl::ToChronoNanoseconds(left));
    } else {
      lock.unlock();
      RunDue();
      lock.lock();
    }
  }
}

}  // namespace logitd
