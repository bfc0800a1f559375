// Keeps back calls that the server would refuse.
// Source: Beyer, Jones, Petoff, Murphy (editors), "Site Reliability Engineering" (2016), chapter
// 21, client-side throttling.
#ifndef LOGITD_CLIENT_TRANSPORT_THROTTLE_H_
#define LOGITD_CLIENT_TRANSPORT_THROTTLE_H_

#include <cstdint>
#include <optional>
#include <random>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logitd::client {

// The calls of one method. Thread-safe.
//
// A refused call costs both sides time that is lost for the calls that are done. So where the
// server refuses most calls, about kSent are sent for each one that it takes, and the others are
// refused here. Those that are sent show when it takes more again. Only the last calls count, each
// for about kMemory.
class Throttle {
 public:
  // More would make the server refuse more. With less, a server that takes more again gets more
  // later: what is sent grows by half in a second. Measured: bench/results/cpu/overload_turns.json.
  static constexpr double kSent = 1.5;
  static constexpr absl::Duration kMemory = absl::Seconds(1);
  // Up to this many refused calls, all calls are sent.
  static constexpr double kFree = 8;

  // OK: send the call. RESOURCE_EXHAUSTED: do not; the text has how many were refused.
  absl::Status Ask(absl::Time now);
  // A sent call has ended. RESOURCE_EXHAUSTED with the server's delay before another attempt: it
  // was refused, and may be sent again later. DEADLINE_EXCEEDED, CANCELLED and UNAVAILABLE count as
  // nothing: perhaps the server never saw the call. All else was taken.
  void Ended(const absl::Status& status, std::optional<int64_t> pushback_ms, absl::Time now);
  // The server's last delay before another attempt.
  std::optional<int64_t> pushback_ms() const;

 private:
  void Forget(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  double taken_ ABSL_GUARDED_BY(mutex_) = 0;    // calls, older ones count less
  double refused_ ABSL_GUARDED_BY(mutex_) = 0;  // by the server or here
  absl::Time counted_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // when they were right
  std::optional<int64_t> pushback_ms_ ABSL_GUARDED_BY(mutex_);
  std::minstd_rand random_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TRANSPORT_THROTTLE_H_
