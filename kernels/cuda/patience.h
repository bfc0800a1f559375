// Waiting for a device, but not for ever.
#ifndef LOGITD_KERNELS_CUDA_PATIENCE_H_
#define LOGITD_KERNELS_CUDA_PATIENCE_H_

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/time/time.h"

namespace logitd::cuda {

// For loops that look whether something has happened. They sleep in between, at most about 1/32 of
// what they have waited. The clock is one that is never set.
class Patience {
 public:
  explicit Patience(absl::Duration limit) : limit_(absl::ToChronoNanoseconds(limit)) {}

  // False, at once: the limit has passed.
  bool Sleep() {
    const Clock::time_point now = Clock::now();
    if (now - moved_ >= limit_) return false;
    std::this_thread::sleep_for(std::clamp((now - begun_) / 32, kLeast, kMost));
    return true;
  }
  // The limit counts again from now on.
  void Renew() { moved_ = Clock::now(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::duration kLeast = std::chrono::microseconds(20);
  static constexpr Clock::duration kMost = std::chrono::milliseconds(1);

  const std::chrono::nanoseconds limit_;
  const Clock::time_point begun_ = Clock::now();
  Clock::time_point moved_ = begun_;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_PATIENCE_H_
