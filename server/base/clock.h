// The server's one clock for lengths of time.
#ifndef LOGITD_SERVER_BASE_CLOCK_H_
#define LOGITD_SERVER_BASE_CLOCK_H_

#include <chrono>
#include <cstdint>

#include "absl/time/time.h"

namespace logitd {

// Nanoseconds of a clock that never goes back.
inline int64_t MonotonicNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// MonotonicNanos as a time, for budgets, rates and waits. It is not the time of day: compare it only with
// other times of this clock.
inline absl::Time SteadyNow() { return absl::FromUnixNanos(MonotonicNanos()); }

}  // namespace logitd

#endif  // LOGITD_SERVER_BASE_CLOCK_H_
