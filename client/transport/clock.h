// The time of calls: of their deadlines, the waits between their attempts, and the throttle.
#ifndef LOGITD_CLIENT_TRANSPORT_CLOCK_H_
#define LOGITD_CLIENT_TRANSPORT_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace logitd::client {

// A clock that never goes back, unlike the time of day: compare its times only with each other. A
// test replaces it by one whose waits are over at once. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
  // How long a thread that waits until `time` may sleep before it looks at Now again.
  virtual absl::Duration SleepUntil(absl::Time time) { return time - Now(); }
};

inline Clock& SteadyClock() {
  static Clock clock;
  return clock;
}

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TRANSPORT_CLOCK_H_
