// Events that the main thread waits for.
#ifndef LOGITD_SERVER_EVENTS_H_
#define LOGITD_SERVER_EVENTS_H_

#include <spdlog/spdlog.h>

#include "absl/time/time.h"

namespace logitd {

// Signals, and the loss of the last device. Created before any other thread, so that all threads
// inherit the blocked signals.
class Events {
 public:
  enum Kind { kNothing, kSignal, kLost };

  Events();
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  // Any thread.
  void DeviceLost();

  // SIGUSR1 and SIGUSR2 change the level of the log here, and are nothing to the caller.
  Kind Wait(absl::Duration timeout);

 private:
  const spdlog::level::level_enum usual_level_ = spdlog::get_level();
  int signal_;
  int lost_;
};

}  // namespace logitd

#endif  // LOGITD_SERVER_EVENTS_H_
