#include "server/rpc/transport/watchdog.h"

#include <algorithm>
#include <utility>

namespace logitd::rpc {

Watchdog::Watchdog(absl::Duration timeout) : timeout_(timeout), thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = changed_ = true;
  }
  thread_.join();
}

absl::Duration Watchdog::timeout() const {
  absl::MutexLock lock(&mutex_);
  return timeout_;
}

void Watchdog::Hurry(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  timeout_ = std::min(timeout_, timeout);
  const absl::Time due = absl::Now() + timeout_;
  for (Entry::Item& item : items_) item.due = std::min(item.due, due);
  changed_ = true;
}

void Watchdog::Watch(Entry* entry, Late late) {
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&mutex_);
  entry->item_ = items_.insert(items_.end(), {now + timeout_, std::move(late), entry});
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
  while (true) {
    Late late;
    {
      absl::MutexLock lock(&mutex_);
      const absl::Duration nap = std::clamp(timeout_ / 8, absl::Milliseconds(1), absl::Seconds(1));
      const bool head_is_late = !items_.empty() && items_.front().due <= absl::Now();
      if (!head_is_late) mutex_.AwaitWithTimeout(absl::Condition(&changed_), nap);
      if (stop_) return;
      changed_ = false;
      if (items_.empty() || items_.front().due > absl::Now()) continue;
      items_.front().entry->listed_ = false;
      late = std::move(items_.front().late);
      items_.pop_front();
    }
    std::move(late)();
  }
}

}  // namespace logitd::rpc
