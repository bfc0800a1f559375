#include "server/rpc/transport/watchdog.h"

#include <algorithm>
#include <utility>

namespace logitd::rpc {

Watchdog::Watchdog(absl::Duration timeout) : timeout_(timeout), thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Watchdog::Watch(Entry* entry, Late late) {
  if (timeout_ == absl::InfiniteDuration()) return;
  const absl::Time due = absl::Now() + timeout_;
  absl::MutexLock lock(&mutex_);
  entry->item_ = items_.insert(items_.end(), {due, std::move(late), entry});
  entry->listed_ = true;
}

void Watchdog::Unwatch(Entry* entry) {
  Late late;  // destroyed after the lock
  absl::MutexLock lock(&mutex_);
  if (!entry->listed_) return;
  entry->listed_ = false;
  late = std::move(entry->item_->late);
  items_.erase(entry->item_);
}

void Watchdog::Run() {
  // No entry is late before a whole timeout has passed. So a look at the list now and then costs
  // less than a wake for every first entry.
  const absl::Duration nap = std::min(timeout_ / 8, absl::Seconds(1));
  while (true) {
    Late late;
    {
      absl::MutexLock lock(&mutex_);
      const bool head_is_late = !items_.empty() && items_.front().due <= absl::Now();
      if (!head_is_late) mutex_.AwaitWithTimeout(absl::Condition(&stop_), nap);
      if (stop_) return;
      if (items_.empty() || items_.front().due > absl::Now()) continue;
      items_.front().entry->listed_ = false;
      late = std::move(items_.front().late);
      items_.pop_front();
    }
    std::move(late)();
  }
}

}  // namespace logitd::rpc
