// Waiting for what another thread or process does.
#ifndef LOGITD_TESTS_BECOMES_H_
#define LOGITD_TESTS_BECOMES_H_

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logitd::testing {

// False: the condition has not become true in time, which only a defect or a very busy machine
// explains.
inline bool Becomes(const std::function<bool()>& condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_BECOMES_H_
