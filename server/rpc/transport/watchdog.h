// Calls back for operations that take longer than a fixed time. One thread and one list are enough,
// because the time is the same for all, also after Hurry.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_WATCHDOG_H_
#define LOGITD_SERVER_RPC_TRANSPORT_WATCHDOG_H_

#include <list>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logitd::rpc {

// Thread-safe.
class Watchdog {
 public:
  using Late = absl::AnyInvocable<void() &&>;

  // One watched operation. Empty until Watch. Watch and Unwatch of one entry must not overlap.
  class Entry {
   private:
    friend class Watchdog;
    struct Item {
      absl::Time due;
      Late late;
      Entry* entry;
    };
    std::list<Item>::iterator item_;
    bool listed_ = false;
  };

  // With InfiniteDuration nothing is late before Hurry.
  explicit Watchdog(absl::Duration timeout);
  ~Watchdog();

  absl::Duration timeout() const;

  // From here on operations have at most `timeout`, those under way from now.
  void Hurry(absl::Duration timeout);

  // Runs `late` on the watchdog's thread, without a lock, unless Unwatch comes within the timeout.
  // `late` must keep the objects it uses alive.
  void Watch(Entry* entry, Late late);
  // Does nothing for an entry that is not watched. `late` may still be running.
  void Unwatch(Entry* entry);

 private:
  void Run();

  mutable absl::Mutex mutex_;
  absl::Duration timeout_ ABSL_GUARDED_BY(mutex_);
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;  // since Run last looked
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<Entry::Item> items_ ABSL_GUARDED_BY(mutex_);  // in order of `due`
  std::thread thread_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_WATCHDOG_H_
